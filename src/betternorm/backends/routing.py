"""Backend selection: which implementation serves a call. Nothing else looks at the mode that torch is in."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from betternorm.backends import cpu

FUSED_TYPES = (torch.float32, torch.bfloat16, torch.float16)

# empty: torch's batch norm, which has a rule for inputs without values
# plain: `plain.py`
# graph: torch's operators in the form for graphs (`graph.py`)
# kernels: C++ or Triton, called through an autograd function
# operator: the same kernels as one node of a compiled graph
Route = Literal["empty", "plain", "graph", "kernels", "operator"]


def route(x: Tensor, *, training: bool, channels_per_group: int, **vectors: Tensor | None) -> Route:
    """Select the implementation for an input and its parameters, and check the sizes that it would not check itself.

    Kernels need values to read. They cannot serve graphs recorded for use elsewhere, where this package may be missing,
    nor the tensors of torch.func and of forward-mode differentiation, which stand for several.
    """
    if tracing():
        return "graph"
    in_graph = compiling()
    if (training or not in_graph) and x.numel() == 0:
        return "empty"
    if in_graph:
        # In compiled models the compiler fuses the plain form with the activation that follows, which is faster than a
        # kernel (benchmark `forms`). Not so with channel groups, whose statistics it recomputes for every value.
        if training and channels_per_group > 1 and has_kernels(x) and not torch.compiler.is_exporting():
            return "operator"
        check_sizes(x, **vectors)
        return "graph"
    if has_kernels(x) and (training or vectors["alpha"] is not None) and not _transforming():
        device = x.device
        for vector in vectors.values():
            if vector is not None and vector.device != device:
                break
        else:
            return "kernels"
    check_sizes(x, **vectors)
    return "plain"


def check_sizes(x: Tensor, **vectors: Tensor | None) -> None:
    """Reject vectors that torch's operators would broadcast over the channels; kernels check by themselves."""
    for name, vector in vectors.items():
        if vector is None or (name == "alpha" and vector.numel() == 1):
            continue
        if vector.shape != x.shape[1:2]:
            raise ValueError(f"{name} has shape {tuple(vector.shape)} and the input has {x.shape[1]} channels")


def has_kernels(x: Tensor) -> bool:
    """Whether there are kernels for tensors of this type and on this device."""
    return x.dtype in FUSED_TYPES and (cpu.loaded if x.device.type == "cpu" else has_triton(x.device))


def has_triton(device: torch.device) -> bool:
    from importlib.util import find_spec

    return device.type == "cuda" and find_spec("triton") is not None


def compiling() -> bool:
    """Whether torch.compile or torch.export is recording."""
    return torch.compiler.is_compiling()


def tracing() -> bool:
    """Whether torch.jit.trace, or a tool that builds on it, is recording; sizes are tensors then."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined,no-untyped-call]


def exporting_to_onnx() -> bool:
    """Whether the exporter that builds on torch.export is recording."""
    return torch.onnx.is_in_onnx_export() and compiling()


def _transforming() -> bool:
    """Whether a transform of torch.func or a level of forward-mode differentiation is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
