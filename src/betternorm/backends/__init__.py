"""Where the arithmetic happens: one plain form in torch's operators, and compiled ones for CPUs and GPUs.

========================  ===================================================================================
`plain.py`                readable; any order of derivative, any device and dtype; the oracle of the others
`cpu/`                    C++ on torch's stable ABI, built with the package
`triton.py`               kernels for CUDA and ROCm, compiled by the Triton that comes with torch
`distributed.py`          statistics across processes
`operators.py`            the operators that `cpu/` and `triton.py` implement: schemas, shapes, gradients
========================  ===================================================================================
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.func import debug_unwrap

from betternorm.backends import cpu

FUSED_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def fused(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the compiled operators take this tensor and its parameters; otherwise the plain form does.

    They do not take what has no values to read: a graph that is recorded for others to load, who may not have this
    package, and the tensors of torch.func and of forward-mode differentiation, which stand for several.
    """
    if x.dtype not in FUSED_TYPES or not (cpu.loaded if x.device.type == "cpu" else _has_triton(x.device)):
        return False
    if tracing() or torch.compiler.is_exporting() or x.numel() == 0:
        return False
    if torch.compiler.is_compiling():
        return True
    device = x.device
    for t in (x, *others):
        if t is not None and (t.device != device or debug_unwrap(t) is not t or unpack_dual(t).tangent is not None):
            return False
    return True


def tracing() -> bool:
    """Whether torch.jit.trace, or what builds on it, is recording: sizes are tensors then."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined,no-untyped-call]


def status() -> str:
    """One line on which compiled kernels there are, and why not where there are none."""
    return f"CPU: {cpu.status}; GPU: {'Triton' if torch.cuda.is_available() and _triton_found() else _no_gpu()}"


def _has_triton(device: torch.device) -> bool:
    return device.type == "cuda" and _triton_found()


def _triton_found() -> bool:
    from importlib.util import find_spec

    return find_spec("triton") is not None


def _no_gpu() -> str:
    return "none found" if not torch.cuda.is_available() else "no Triton, torch's own operators are used"
