"""Batches of any make: their rows, the device they are wanted on, and what the model and the metrics take from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Forward = Callable[[nn.Module, Any], tuple[Any, Any]]

INPUT_KEYS = ("image", "images", "pixel_values", "input", "inputs", "x", "data")
TARGET_KEYS = ("label", "labels", "target", "targets", "y")


def iterate(loader: Iterable[Any], max_examples: int | None, device: torch.device) -> Iterator[Any]:
    """The batches of a loader on a device, up to so many examples."""
    if isinstance(loader, Iterator):
        raise TypeError(
            f"loader is a {type(loader).__name__}, which can be gone through only once; "
            "give a DataLoader or a list of batches"
        )
    seen = 0
    for batch in loader:
        size = max(_tensors(batch), key=Tensor.numel, default=torch.empty(0)).shape[0]
        if max_examples is not None and seen + size > max_examples:
            size = max_examples - seen
            batch = _mapped(batch, lambda t, size=size: t[:size] if t.dim() else t)  # type: ignore[misc]
        seen += size
        yield _mapped(batch, lambda t: t.to(device, non_blocking=True))
        if max_examples is not None and seen >= max_examples:
            return


def check_max_examples(max_examples: int | None) -> None:
    if max_examples is not None and max_examples < 1:
        raise ValueError(f"max_examples={max_examples} must be 1 or more examples, or None for all")


def length_of(loader: Iterable[Any], max_examples: int | None) -> int | None:
    """How many batches `iterate` will give, where that is known."""
    try:
        length = len(loader)  # type: ignore[arg-type]
    except TypeError:  # a DataLoader has a length by its looks, and over an IterableDataset it has none
        return None
    size = getattr(loader, "batch_size", None)
    return min(length, -(-max_examples // size)) if max_examples is not None and size else length


def output_and_target(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Output and targets of a batch (x, y) or a dict."""
    if isinstance(batch, Mapping):
        target = next((batch[key] for key in TARGET_KEYS if key in batch), None)
    else:
        target = batch[1] if isinstance(batch, (list, tuple)) and len(batch) == 2 else None
    if target is None:
        raise TypeError(
            f"a batch has to be a pair (x, y) or a dict with one of {', '.join(INPUT_KEYS)} and one of "
            f"{', '.join(TARGET_KEYS)}, got {_described(batch)}; otherwise give forward=function(model, batch) "
            "that returns output and targets"
        )
    output = output_of(model, batch)
    if isinstance(output, Mapping):
        output = next((output[key] for key in ("logits", "out") if key in output), output)
    elif hasattr(output, "logits"):
        output = output.logits
    elif isinstance(output, (list, tuple)):
        output = output[0]
    return output, target


def output_of(model: nn.Module, batch: Any) -> Any:
    """What the model makes of a batch: of x alone, of (x, ...) or of a dict."""
    if isinstance(batch, Mapping):
        key = next((key for key in INPUT_KEYS if key in batch), None)
        if key is None:
            raise TypeError(f"a batch that is a dict needs one of {', '.join(INPUT_KEYS)}, got {_described(batch)}")
        return model(batch[key])
    return model(batch[0] if isinstance(batch, (list, tuple)) else batch)


def example_keys(batch: Any) -> Tensor:
    """A number for every row of a batch that follows from its content, the same in whatever batch it comes.

    Exact integer arithmetic on the bits of (at most a thousand of) the values of each tensor: images and labels.
    """
    tensors = list(_tensors(batch))
    if not tensors:
        raise TypeError(f"a batch has to hold tensors, got a {type(batch).__name__}")
    examples = len(max(tensors, key=Tensor.numel))
    generator = torch.Generator().manual_seed(1)
    keys = torch.zeros(examples, dtype=torch.int64)
    for tensor in tensors:
        if len(tensor) == examples:
            rows = tensor.detach().flatten(1)
            rows = rows[:, :: max(1, rows.shape[1] // 1024)]
            bits = (rows.float().contiguous().view(torch.int32) if rows.is_floating_point() else rows).long().cpu()
            keys += (bits * torch.randint(1, 2**62, (rows.shape[1],), generator=generator)).sum(1)  # wraps around
    return keys


def with_input_changed(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch with what the model gets of it changed."""
    if isinstance(batch, Mapping):
        key = next((key for key in INPUT_KEYS if key in batch), None)
        if key is None:
            raise TypeError(
                f"shifts change the input of a batch: one of {', '.join(INPUT_KEYS)}, got {_described(batch)}"
            )
        return {**batch, key: change(batch[key])}
    if isinstance(batch, (list, tuple)):
        parts = [change(batch[0]), *batch[1:]]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return change(batch)


def select(batch: Any, rows: Tensor) -> Any | None:
    """The chosen rows of a batch, and None where there are none."""
    if bool(rows.all()):
        return batch
    if not bool(rows.any()):
        return None
    return _mapped(batch, lambda t: t[rows.to(t.device)] if t.dim() and len(t) == len(rows) else t)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and afterwards every module in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are, or else its buffers."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        if batch.dim():
            yield batch if batch.dim() > 1 else batch[:, None]
    elif isinstance(batch, (Mapping, list, tuple)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(part)


def _mapped(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch with every tensor changed."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: _mapped(part, change) for key, part in batch.items()}
    if isinstance(batch, (list, tuple)):
        parts = [_mapped(part, change) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def _described(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"a dict with {', '.join(map(str, batch)) or 'nothing'}"
    return f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, (list, tuple)) else "")
