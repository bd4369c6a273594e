"""Calling a model with an example input: a tensor, a tuple of arguments or a dict of keyword arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def run(model: nn.Module, example_input: Any, grad: bool = False) -> Any:
    """One forward pass. Inputs are copied, and every call starts from the same random state."""
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with torch.set_grad_enabled(grad), _same_randomness(devices), _without_compiled_graphs():
        arguments, keywords = copied_arguments(example_input, grad)
        return model(*arguments, **keywords)


def copied_arguments(example_input: Any, grad: bool = False) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments, copied so that a model that works in place does not change the caller's."""

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if grad and value.is_floating_point():
            return value.detach().clone().requires_grad_().clone()  # not a leaf: may be changed in place
        return value.detach().clone()

    if isinstance(example_input, Mapping):
        return [], {key: copied(value) for key, value in example_input.items()}
    if isinstance(example_input, (tuple, list)):
        return [copied(value) for value in example_input], {}
    return [copied(example_input)], {}


def input_tensors(example_input: Any) -> list[Tensor]:
    arguments, keywords = copied_arguments(example_input)
    return [item for item in (*arguments, *keywords.values()) if isinstance(item, Tensor)]


def tensors_in(value: Any) -> list[Tensor]:
    """The floating-point tensors in whatever a model returns."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_in(item)]
    if dataclasses.is_dataclass(value):
        return [tensor for item in vars(value).values() for tensor in tensors_in(item)]
    return []


def _without_compiled_graphs() -> contextlib.AbstractContextManager[None]:
    """Run compiled parts eagerly: those such as torchvision's roi_align allow one backward pass only."""
    if not hasattr(torch.compiler, "set_stance"):  # torch before 2.6
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


@contextlib.contextmanager
def _same_randomness(devices: list[int]) -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)
