"""A copy of a model, run in several modes over the same examples: the measurements of `betternorm.diagnose`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from betternorm.conversion.convert import convert
from betternorm.display.progress import Bar
from betternorm.layers import GroupedBatchNorm
from betternorm.third_party import is_frozen
from betternorm.weighing.batches import (
    Forward,
    device_of,
    example_keys,
    iterate,
    number_of_examples,
    output_and_target,
    output_of,
    select,
)
from betternorm.weighing.evidence import Gain, gain_between
from betternorm.weighing.metrics import CALIBRATED, METRICS

MOST_BYTES = 2 << 30  # of examples kept in memory
CONFIDENCE = 0.99  # of all intervals, because several settings and two metrics are compared
RECALIBRATION_BATCH = 128  # examples per batch when averages are collected again

JUDGED = {"top1": METRICS["top1"], "loss": METRICS[CALIBRATED]}
Scores = dict[str, Tensor]  # by metric, one row per example
Averages = dict[str, tuple[Tensor, Tensor]]  # by layer, mean and variance


class Examples:
    """The first examples of a loader, kept in memory: every pass sees the same ones, in batches of any size."""

    def __init__(self, loader: Iterable[Any], max_examples: int, name: str = "loader") -> None:
        batches, self.sizes, size = [], [], 0
        for batch in iterate(loader, max_examples, torch.device("cpu")):
            batches.append(batch)
            self.sizes.append(number_of_examples(batch))
            size += sum(tensor.nbytes for tensor in _tensors(batch))
            if size > MOST_BYTES:
                break
        if not batches:
            raise ValueError(f"{name} gave no batches")
        self.count = sum(self.sizes)
        self.all = _joined(batches)
        if number_of_examples(self.all) != self.count:
            raise TypeError(f"{name} has batches that cannot be joined: stack images into tensors of one shape")
        self.keys = example_keys(self.all)
        total = _length(loader)
        self.complete = size <= MOST_BYTES and (self.count < max_examples if total is None else self.count >= total)
        self.batch_size: int = getattr(loader, "batch_size", None) or max(self.sizes)
        left = total % self.batch_size if total else self.sizes[-1] if self.complete else 0
        self.ends_with_one = left == 1 and self.batch_size > 1 and not getattr(loader, "drop_last", False)

    def natural(self) -> list[Tensor]:
        """The rows of each batch as the loader gave it."""
        return list(torch.arange(self.count).split(self.sizes))

    def shuffled(self, batch_size: int, seed: int, among: Tensor | None = None) -> list[Tensor]:
        """Rows in batches at random, of sizes that differ by at most one."""
        rows = torch.arange(self.count) if among is None else among
        order = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]
        return list(order.tensor_split(max(1, -(-len(rows) // max(batch_size, 2)))))

    def take(self, rows: Tensor) -> Any:
        chosen = torch.zeros(self.count, dtype=torch.bool)
        chosen[rows] = True
        return select(self.all, chosen)

    def sorted_by_class(self) -> bool:
        """Whether examples come in the order of their classes, or batches have far fewer classes than random ones."""
        try:
            labels = output_and_target(nn.Identity(), self.all)[1]
        except TypeError:
            return False
        if not isinstance(labels, Tensor) or labels.dim() != 1 or labels.is_floating_point():
            return False
        share = torch.unique(labels, return_counts=True)[1].double() / len(labels)
        expected = sum(float((1 - (1 - share) ** size).sum()) for size in self.sizes)
        classes = sum(len(torch.unique(part)) for part in labels.split(self.sizes))
        changes = float((labels[1:] != labels[:-1]).double().mean())
        return classes < 0.6 * expected or changes < 0.5 * float(1 - share.square().sum())


class Probe:
    """A copy of the model in evaluation mode, its batch norm layers converted so that all kinds work alike."""

    def __init__(self, model: nn.Module, examples: Examples, forward: Forward | None, seed: int, bar: Bar) -> None:
        self.examples, self.forward, self.seed, self.bar = examples, forward, seed, bar
        self.model = copy.deepcopy(model).eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of layers that cannot be converted; they are measured as they are
            self.model = convert(self.model, "weighed", where=lambda name, module: is_batch_norm(module))
        self.layers = {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(module, _BatchNorm) and module.running_mean is not None and not _is_alone(module)
        }
        for layer in self.layers.values():
            layer.process_group = None  # type: ignore[assignment]  # statistics of this process alone
        self.alphas = {layer: layer.alpha for layer in self.layers.values() if isinstance(layer, GroupedBatchNorm)}
        self.averages = self.read()
        self.passes = 0.0

    # -- moving averages --

    def read(self) -> Averages:
        return {name: _buffers(layer) for name, layer in self.layers.items()}

    def write(self, averages: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        for name, (mean, var) in averages.items():
            layer: Any = self.layers[name]
            layer.running_mean.copy_(mean)
            layer.running_var.copy_(var)

    def collect(self, examples: Examples, among: Tensor | None = None) -> Averages:
        """Averages as training collects them, over batches of random examples, weighed equally. One pass."""
        seen = 0
        for rows in examples.shuffled(RECALIBRATION_BATCH, self.seed, among):
            seen += len(rows)
            self._take_batch_statistics(True, momentum=len(rows) / seen)
            self._run(examples, rows, labeled=False)
        self._take_batch_statistics(False)
        collected = self.read()
        self.write(self.averages)
        self._count("recalibrating", examples, among)
        return collected

    # -- metrics --

    def evaluate(
        self, averages: Averages | None = None, alpha: float | None = None, among: Tensor | None = None, note: str = ""
    ) -> Scores:
        """With these moving averages, and this alpha in every layer that can have one. One pass over some or all."""
        self.write(averages or {})
        for layer in self.alphas if alpha is not None else ():
            layer.alpha = alpha  # type: ignore[assignment]
        batches = self.examples.shuffled(RECALIBRATION_BATCH, self.seed, among)
        scores = self._scores(batches, note or "evaluating", among)
        self.write(self.averages)
        for layer, before in self.alphas.items():
            layer.alpha = before
        return scores

    def with_batch_statistics(self, batches: list[Tensor], only: Iterable[str] | None = None) -> Scores:
        """With the statistics of each batch, in all layers or some. One pass."""
        self._take_batch_statistics(True, momentum=0.0, only=only)
        scores = self._scores(batches, "batch statistics")
        self._take_batch_statistics(False)
        self.write(self.averages)
        return scores

    def gain(self, before: Scores, after: Scores) -> dict[str, Gain]:
        """What each metric gains, with an interval. The loss is that at the temperature that fits best."""
        counts = torch.ones(self.examples.count, dtype=torch.float64)
        return {
            name: gain_between(
                metric,
                _numbers(name, before[name]),
                _numbers(name, after[name]),
                counts,
                self.examples.keys,
                confidence=CONFIDENCE,
            )
            for name, metric in JUDGED.items()
        }

    def summary(self, scores: Scores) -> dict[str, float]:
        return {name: float(_numbers(name, values).mean()) for name, values in scores.items()}

    # -- running --

    def _scores(self, batches: list[Tensor], note: str, among: Tensor | None = None) -> Scores:
        scores: Scores = {}
        for rows in batches:
            rows = rows.sort().values
            output, target = self._run(self.examples, rows, labeled=True)
            for name, metric in JUDGED.items():
                values = metric.measure(output, target)[0]
                if len(values) != len(rows):
                    raise ValueError(f"a batch of {len(rows)} examples gave {len(values)} outputs; one each is needed")
                if name not in scores:
                    scores[name] = values.new_zeros(self.examples.count, *values.shape[1:])
                scores[name][rows] = values
        self._count(note, self.examples, among)
        return scores

    def _run(self, examples: Examples, rows: Tensor, labeled: bool) -> Any:
        run = self.forward or (output_and_target if labeled else output_of)
        with torch.no_grad():
            return run(self.model, next(iterate([examples.take(rows)], None, device_of(self.model))))

    def _take_batch_statistics(self, active: bool, momentum: float = 0.0, only: Iterable[str] | None = None) -> None:
        for name in self.layers if only is None else only:
            layer = self.layers[name]
            layer.training = layer.track_running_stats = active  # past train(), which frozen layers ignore
            layer.momentum = momentum

    def _count(self, note: str, examples: Examples, among: Tensor | None) -> None:
        share = 1.0 if among is None else len(among) / examples.count
        self.passes += share
        self.bar.advance(note=note)


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a layer has statistics across examples, frozen or not."""
    return is_frozen(module) or (isinstance(module, _BatchNorm) and not _is_alone(module))


def _is_alone(layer: nn.Module) -> bool:
    """Whether statistics are of one example, as in Group Norm: those of a batch never matter."""
    return isinstance(layer, GroupedBatchNorm) and layer.examples_per_group == 1


def _buffers(layer: Any) -> tuple[Tensor, Tensor]:
    return layer.running_mean.detach().clone(), layer.running_var.detach().clone()


def _numbers(name: str, values: Tensor) -> Tensor:
    return JUDGED[name].numbers(values, torch.ones(len(values), dtype=torch.float64)).double()


def _length(loader: Iterable[Any]) -> int | None:
    """How many examples a loader has, where that is known."""
    try:
        return len(loader.sampler)  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        return None


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (Mapping, list, tuple)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(part)


def _joined(batches: list[Any]) -> Any:
    """One batch of all rows."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(batches) if first.dim() else first
    if isinstance(first, Mapping):
        return {key: _joined([batch[key] for batch in batches]) for key in first}
    if isinstance(first, (list, tuple)):
        parts = [_joined([batch[place] for batch in batches]) for place in range(len(first))]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return first
