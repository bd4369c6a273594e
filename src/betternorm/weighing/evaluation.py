"""Running a network with many alphas over the same data, keeping the numbers of every example."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from betternorm.display.progress import Bar
from betternorm.layers import GroupedBatchNorm
from betternorm.weighing.batches import (
    Forward,
    device_of,
    evaluating,
    example_keys,
    iterate,
    length_of,
    with_input_changed,
)
from betternorm.weighing.evidence import Gain, gain_between
from betternorm.weighing.metrics import Metric
from betternorm.weighing.shifts import Shift

# One alpha for all layers, or one for each, which may be a tuple with one value per channel.
Setting = float | tuple[Any, ...]

_UNDER = " under shift "

SAVE_EVERY = 20.0  # seconds between writes of what has been evaluated


def under(metric: str, shift: str) -> str:
    """What a metric is called on shifted data."""
    return f"{metric}{_UNDER}{shift}"


def shift_of(metric: str) -> str:
    """The shift that a metric is measured under, and nothing for one of the data as they are."""
    return metric.partition(_UNDER)[2]


class Evaluations:
    """The numbers of every example for every alpha tried, in an order that does not depend on the loader's."""

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, GroupedBatchNorm],
        loader: Iterable[Any],
        metrics: dict[str, Metric],
        forward: Forward,
        max_examples: int | None,
        resume: str | os.PathLike[str] | None,
        progress: bool | None,
        baseline: float,
        shifts: Mapping[str, Shift] | None = None,
    ) -> None:
        """``shifts`` are functions of the input by name; what is shifted is measured by metrics called `under` it."""
        self.baseline = baseline
        self.shifts = dict(shifts or {})
        self.model, self.layers, self.loader, self.metrics = model, layers, loader, metrics
        self.forward, self.max_examples, self.progress = forward, max_examples, progress
        self.values: dict[str, dict[Setting, Tensor]] = {name: {} for name in metrics}
        self.counts: dict[str, Tensor] = {}
        self.keys = torch.empty(0, dtype=torch.int64)  # of every example, in order
        self.batch_keys = torch.empty(0, dtype=torch.int64)
        self.batch_of_example = torch.empty(0, dtype=torch.int64)  # the key of its batch
        self.passes = 0
        self.fit: dict[str, Any] = {}  # the state of fitting one alpha per layer
        self._unfinished: _Pass | None = None
        self._file = None if resume is None else Path(resume)
        self._saved = time.monotonic()
        self._known = True  # whether the data are those of the file
        if self._file is not None:
            self._signature = _signature(model, metrics, max_examples)
            self._restore()

    def evaluate(self, alphas: Sequence[Setting]) -> None:
        """One iteration of the loader for all of these that have not been tried."""
        self._recognise()
        tried = next(iter(self.values.values()))
        new: list[Setting] = [alpha for alpha in dict.fromkeys(alphas) if alpha not in tried]
        if not new:
            return
        current = self._unfinished
        if current is None or current.alphas != new:
            current = _Pass(new)
        self._unfinished = current
        label = f"pass {self.passes + 1}: {len(new)} alphas"
        try:
            self._iterate(current, label)
        except BaseException:
            self.save()
            raise
        self._close(current)
        self._unfinished = None
        self.passes += 1
        self.save()

    def batches(self) -> Iterator[Any]:
        return iterate(self.loader, self.max_examples, device_of(self.model))

    def _iterate(self, current: _Pass, label: str) -> None:
        done = len(current.keys)
        with evaluating(self.model), torch.inference_mode(), Bar(label, self.length(), self.progress) as bar:
            for number, batch in enumerate(self.batches()):
                keys = example_keys(batch)
                if number < done:  # evaluated before an interruption
                    if torch.equal(keys, current.keys[number]):
                        bar.advance()
                        continue
                    current.clear()  # cut into other batches now
                    return self._iterate(current, label)
                parts = self.parts(batch)
                measured = [self._measure(alpha, parts) for alpha in current.alphas]
                for name in self.metrics:
                    for alpha, found in zip(current.alphas, measured, strict=True):
                        current.values.setdefault(name, {}).setdefault(alpha, []).append(found[name][0])
                    current.counts.setdefault(name, []).append(measured[0][name][1])
                current.keys.append(keys)  # last: a batch counts once all of it is there
                bar.advance()
                self.save_now_and_then()
        if not current.keys:
            raise ValueError("the loader gave no batches: nothing to evaluate")

    def parts(self, batch: Any) -> dict[str, Any]:
        """The batch as it is, under no name, and under every shift."""
        return {"": batch} | {name: with_input_changed(batch, shift) for name, shift in self.shifts.items()}

    def _measure(self, alpha: Setting, parts: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
        alphas = alpha if isinstance(alpha, tuple) else (alpha,) * len(self.layers)
        for layer, value in zip(self.layers.values(), alphas, strict=True):
            layer.alpha = value
        return self.measured(parts)

    def measured(self, parts: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
        """Every metric of the network as it is now, on a batch and its shifts."""
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for shift, part in parts.items():
            output, target = self.forward(self.model, part)
            for name, metric in self.metrics.items():
                if shift_of(name) == shift:
                    found[name] = metric.measure(output, target)
        return found

    def length(self) -> int | None:
        return length_of(self.loader, self.max_examples)

    def _close(self, current: _Pass) -> None:
        """Bring a finished pass into order and check that it saw what the others saw."""
        keys = torch.cat(current.keys)
        batch_keys = torch.stack([part.sum() for part in current.keys])
        of_example = torch.repeat_interleave(batch_keys, torch.tensor([len(part) for part in current.keys]))
        by_example, by_batch = keys.argsort(stable=True), batch_keys.argsort(stable=True)
        if len(self.keys) and not torch.equal(keys[by_example], self.keys):
            raise _other_examples("than in the one before")
        for name in self.metrics:
            counts = torch.cat(current.counts[name])
            if len(counts) == len(keys) and len(keys) > len(batch_keys):
                order = by_example
            elif len(counts) == len(batch_keys):
                order = by_batch
                if len(self.batch_keys) and not torch.equal(batch_keys[order], self.batch_keys):
                    raise _other_examples(f"a batch, and {name!r} is one number per batch, than in the one before")
            else:
                raise ValueError(
                    f"metric {name!r} gave {len(counts)} numbers for {len(keys)} examples in {len(batch_keys)} "
                    "batches; it must give one per example or one per batch"
                )
            self.counts[name] = counts[order]
            for alpha, parts in current.values[name].items():
                self.values[name][alpha] = torch.cat(parts)[order]
        self.keys, self.batch_keys, self.batch_of_example = (
            keys[by_example],
            batch_keys[by_batch],
            of_example[by_example],
        )

    # -- what was found --

    def by_batch(self) -> bool:
        """Whether a metric has only one number per batch, so that batches cannot be split between folds."""
        return any(len(counts) != len(self.keys) for counts in self.counts.values())

    def groups(self) -> int:
        """How many parts could go into different folds."""
        return len(torch.unique(self.batch_keys if self.by_batch() else self.keys))

    def average(self, metric: str, values: Tensor, where: Tensor | None = None) -> float:
        chosen = slice(None) if where is None else where
        counts = self.counts[metric][chosen]
        return float(self.metrics[metric].average(self.metrics[metric].numbers(values[chosen], counts), counts))

    def numbers(self, metric: str, alpha: Setting) -> Tensor:
        """A number for every example, with a temperature fitted on all of them."""
        return self.metrics[metric].numbers(self.values[metric][alpha], self.counts[metric])

    def gain(
        self, metric: str, before: Tensor, after: Tensor, confidence: float, seed: int, chosen: bool = False
    ) -> Gain:
        """``chosen`` says that the alphas of ``after`` were chosen by this metric among all that were tried."""
        tried = [self.numbers(metric, alpha) for alpha in self.tried() if alpha != self.baseline] if chosen else []
        return gain_between(
            self.metrics[metric], before, after, self.counts[metric], self.units(metric), tried, confidence, seed
        )

    def units(self, metric: str) -> Tensor:
        """The example, or the batch, that every number of a metric is of."""
        return self.keys if len(self.counts[metric]) == len(self.keys) else self.batch_keys

    def tried(self) -> list[float]:
        """The single alphas, from the one nearest to the network as it was trained."""
        settings = next(iter(self.values.values()))
        return sorted((s for s in settings if not isinstance(s, tuple)), key=lambda alpha: abs(alpha - self.baseline))

    def best(self, metric: str, where: Tensor | None = None, among: Container[float] | None = None) -> float:
        """The best alpha tried; of equals the one nearest to the network as it was trained."""
        alphas = [alpha for alpha in self.tried() if among is None or alpha in among]
        found = alphas[0]
        best = self.average(metric, self.values[metric][found], where)
        for alpha in alphas[1:]:
            value = self.average(metric, self.values[metric][alpha], where)
            if math.isnan(best) or self.metrics[metric].is_better(value, best):
                found, best = alpha, value
        return found

    # -- interruptions --

    def _recognise(self) -> None:
        """See that the images and labels are those of the file, before its numbers are used. Runs no network."""
        if self._known:
            return
        self._known = True
        if len(self.keys) and not torch.equal(
            torch.cat([example_keys(batch) for batch in self.batches()]).sort().values, self.keys
        ):
            raise ValueError(
                f"resume={str(self._file)!r} belongs to other images or labels; remove the file or name another one"
            )

    def save_now_and_then(self) -> None:
        if time.monotonic() - self._saved > SAVE_EVERY:
            self.save()

    def save(self) -> None:
        self._saved = time.monotonic()
        if self._file is None:
            return
        state = {name: getattr(self, name) for name in self._STATE}
        state["unfinished"] = None if self._unfinished is None else asdict(self._unfinished)
        partial = self._file.with_name(self._file.name + ".partial")
        torch.save({"signature": self._signature, **state}, partial)
        partial.replace(self._file)  # atomic: an interruption here leaves the file before

    _STATE = ("values", "counts", "keys", "batch_keys", "batch_of_example", "passes", "fit")

    def _restore(self) -> None:
        assert self._file is not None
        try:
            state = torch.load(self._file, weights_only=True)
        except FileNotFoundError:
            return
        except Exception as error:
            raise ValueError(f"resume={str(self._file)!r} is not a file of a search; remove it ({error})") from error
        self._known = False
        if not isinstance(state, dict) or state.get("signature") != self._signature:
            raise ValueError(
                f"resume={str(self._file)!r} belongs to another model, other metrics or another max_examples; "
                "remove the file or name another one"
            )
        for name in self._STATE:
            setattr(self, name, state[name])
        if state["unfinished"] is not None:
            self._unfinished = _Pass(**state["unfinished"])


@dataclass
class _Pass:
    """An iteration of the loader under way."""

    alphas: list[Setting]
    keys: list[Tensor] = field(default_factory=list)  # of every batch seen
    values: dict[str, dict[Setting, list[Tensor]]] = field(default_factory=dict)
    counts: dict[str, list[Tensor]] = field(default_factory=dict)

    def clear(self) -> None:
        for part in (self.keys, self.values, self.counts):
            part.clear()


def _signature(model: nn.Module, metrics: Iterable[str], max_examples: int | None) -> str:
    """What the numbers of a file depend on, apart from the data, which has its keys."""
    digest = hashlib.sha256(repr((sorted(metrics), max_examples)).encode())
    for name, tensor in sorted(model.state_dict().items()):
        if name.rpartition(".")[2] not in ("alpha", "num_batches_tracked"):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _other_examples(than: str) -> ValueError:
    return ValueError(
        f"the loader gave other examples {than}; alphas are compared on the same examples, so switch random "
        "augmentation off, and shuffling where max_examples is used"
    )
