"""Batches in the formats that loaders yield: examples, devices, and what the model and the metrics take from them."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Forward = Callable[[nn.Module, Any], tuple[Any, Any]]

INPUT_KEYS = ("image", "images", "pixel_values", "input", "inputs", "x", "data")
TARGET_KEYS = ("label", "labels", "target", "targets", "y")


def iterate(loader: Iterable[Any], max_examples: int | None, device: torch.device) -> Iterator[Any]:
    """The batches of a loader on a device, up to ``max_examples`` examples."""
    if isinstance(loader, Iterator):
        raise TypeError(
            f"loader is a {type(loader).__name__}, which can be iterated only once; pass a DataLoader or a list of "
            "batches"
        )
    seen = 0
    for batch in loader:
        size = number_of_examples(batch)
        if max_examples is not None and seen + size > max_examples:
            batch = _take(batch, range(max_examples - seen))
            size = max_examples - seen
        seen += size
        yield _mapped(batch, lambda t: t.to(device, non_blocking=True))
        if max_examples is not None and seen >= max_examples:
            return


def check_max_examples(max_examples: int | None) -> None:
    if max_examples is not None and max_examples < 1:
        raise ValueError(f"max_examples={max_examples} must be 1 or more, or None for all")


def length_of(loader: Iterable[Any], max_examples: int | None) -> int | None:
    """How many batches `iterate` will yield, if that is known."""
    try:
        length = len(loader)  # type: ignore[arg-type]
    except TypeError:  # a DataLoader over an IterableDataset has __len__ but no length
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
            f"a batch must be a pair (x, y) or a dict with one of {', '.join(INPUT_KEYS)} and one of "
            f"{', '.join(TARGET_KEYS)}, got {_described(batch)}; for other batches pass forward=function(model, batch) "
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
    """The model's output for a batch x, (x, ...) or a dict."""
    if isinstance(batch, Mapping):
        key = next((key for key in INPUT_KEYS if key in batch), None)
        if key is None:
            raise TypeError(f"a batch that is a dict needs one of {', '.join(INPUT_KEYS)}, got {_described(batch)}")
        return model(batch[key])
    return model(batch[0] if isinstance(batch, (list, tuple)) else batch)


def number_of_examples(batch: Any) -> int:
    """Images in a list count one each; otherwise the first dimension of the largest tensor counts."""
    listed = _listed(batch)
    if listed is not None:
        return len(listed)
    return int(max(_tensors(batch), key=Tensor.numel, default=torch.empty(0)).shape[0])


def example_keys(batch: Any) -> Tensor:
    """A number per example that depends only on its content, not on the batch it is in.

    Integer arithmetic on the bits of (at most a thousand of) the values of each tensor: images and labels.
    """
    if _listed(batch) is not None:
        examples = [_take(batch, [row]) for row in range(number_of_examples(batch))]
        return torch.cat([_keys([tensor[None] for tensor in _tensors(example)], 1) for example in examples])
    tensors = list(_tensors(batch))
    if not tensors:
        raise TypeError(f"a batch must contain tensors, got a {type(batch).__name__}")
    return _keys(tensors, len(max(tensors, key=Tensor.numel)))


def with_input_changed(batch: Any, change: Callable[[Any], Any]) -> Any:
    """The batch with a function applied to the model's input."""
    if isinstance(batch, Mapping):
        key = next((key for key in INPUT_KEYS if key in batch), None)
        if key is None:
            raise TypeError(
                f"shifts change the input of a batch: one of {', '.join(INPUT_KEYS)}, got {_described(batch)}"
            )
        return {**batch, key: change(batch[key])}
    if isinstance(batch, (list, tuple)):
        return _rebuilt(batch, [change(batch[0]), *batch[1:]])
    return change(batch)


def select(batch: Any, rows: Tensor) -> Any | None:
    """The examples chosen by a mask; None if there are none."""
    if bool(rows.all()):
        return batch
    return _take(batch, rows.nonzero()[:, 0].tolist()) if bool(rows.any()) else None


def non_finite_rows(output: Any) -> int:
    """How many examples have NaN or infinity in the output. A single -inf, as for a masked class, is allowed."""
    count = 0
    for tensor in _tensors(output):
        if tensor.is_floating_point() and tensor.numel():
            count = max(count, int((~tensor.flatten(1).amax(1).isfinite()).sum()))
    return count


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards every module is back in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def random_state_kept(*loaders: Any) -> Iterator[None]:
    """Afterwards all generators are as before, also those of the loaders: iterated again, they shuffle the same way."""
    numpy: Any = sys.modules.get("numpy")
    owners = [owner for loader in loaders for owner in (loader, getattr(loader, "sampler", None))]
    generators = {g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)}
    states = [(generator, generator.get_state()) for generator in generators]
    of_python, of_numpy = random.getstate(), numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(of_python)
            if numpy:
                numpy.random.set_state(of_numpy)
            for generator, state in states:
                generator.set_state(state)


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's first parameter or buffer."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def _listed(batch: Any) -> Sequence[Any] | None:
    """The input of a batch if it is a list of images that may differ in size, as detection models take it."""
    if isinstance(batch, Mapping):
        inputs = next((batch[key] for key in INPUT_KEYS if key in batch), None)
        target = next((batch[key] for key in TARGET_KEYS if key in batch), None)
    elif isinstance(batch, (list, tuple)) and len(batch) == 2:
        inputs, target = batch
    else:
        return None
    if not isinstance(inputs, (list, tuple)) or not inputs or not all(isinstance(x, Tensor) for x in inputs):
        return None
    if isinstance(target, Tensor):  # otherwise several inputs of one batch size, say
        one_each = target.dim() > 0 and len(target) == len(inputs) and any(len(x) != len(target) for x in inputs)
    else:
        one_each = isinstance(target, (list, tuple)) and len(target) == len(inputs)
    return inputs if one_each else None


def _take(batch: Any, rows: Sequence[int]) -> Any:
    """Some examples of a batch: rows of its tensors, or entries of its lists."""
    listed = _listed(batch)
    if listed is None:
        examples = number_of_examples(batch)
        return _mapped(batch, lambda t: t[list(rows)] if t.dim() and len(t) == examples else t)

    def chosen(part: Any) -> Any:
        return part[list(rows)] if isinstance(part, Tensor) else type(part)(part[row] for row in rows)

    if isinstance(batch, Mapping):
        sized = (Tensor, list, tuple)
        return {k: chosen(v) if isinstance(v, sized) and len(v) == len(listed) else v for k, v in batch.items()}
    return _rebuilt(batch, [chosen(part) for part in batch])


def _keys(tensors: Iterable[Tensor], examples: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    keys = torch.zeros(examples, dtype=torch.int64)
    for tensor in tensors:
        if len(tensor) == examples:
            rows = tensor.detach().flatten(1)
            rows = rows[:, :: max(1, rows.shape[1] // 1024)]
            bits = (rows.float().contiguous().view(torch.int32) if rows.is_floating_point() else rows).long().cpu()
            keys += (bits * torch.randint(1, 2**62, (rows.shape[1],), generator=generator)).sum(1)  # wraps around
    return keys


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        if batch.dim():
            yield batch if batch.dim() > 1 else batch[:, None]
    elif isinstance(batch, (Mapping, list, tuple)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(part)


def _mapped(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch with a function applied to every tensor."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: _mapped(part, change) for key, part in batch.items()}
    if isinstance(batch, (list, tuple)):
        return _rebuilt(batch, [_mapped(part, change) for part in batch])
    return batch


def _rebuilt(batch: Any, parts: list[Any]) -> Any:
    """A list, tuple or namedtuple like ``batch`` with other parts."""
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)


def _described(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"a dict with {', '.join(map(str, batch)) or 'no keys'}"
    return f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, (list, tuple)) else "")
