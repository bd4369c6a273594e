"""Evaluation: run a model with many alphas over the same data, and keep one number per example and metric."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
    non_finite_rows,
    with_input_changed,
)
from betternorm.weighing.metrics import Metric
from betternorm.weighing.resume import REFERENCE_VALUES, SAVE_EVERY, ResumeFile, same_values, signature
from betternorm.weighing.shifts import Shift

# One alpha for all layers, or one for each, which may be a tuple with one value per channel.
Setting = float | tuple[Any, ...]
# The name of a metric; or a pair of metric and shift, for a metric on shifted data.
Key = str | tuple[str, str]


def shift_of(key: Key) -> str:
    """The shift that a metric is measured under; empty for the data as they are."""
    return key[1] if isinstance(key, tuple) else ""


@dataclass(frozen=True)
class Column:
    """The numbers of one metric on one set of examples, for every setting of alpha that was evaluated.

    Attributes:
        values: a row per example (or per batch, if the metric returns one number per batch).
        counts: the weight of each row.
        units: the example or batch each row belongs to. Copies of an example share a unit.
        folds: the fold of each row, once folds have been assigned.
    """

    metric: Metric
    values: Mapping[Setting, Tensor]
    counts: Tensor
    units: Tensor
    folds: Tensor | None = None

    def numbers(self, setting: Setting) -> Tensor:
        """A number per row, with a temperature fitted on all of them if the metric has one."""
        return self.metric.numbers(self.values[setting], self.counts)

    def average(self, setting: Setting, without_fold: int | None = None) -> float:
        """The metric over all rows, or over those outside a fold."""
        chosen = slice(None) if without_fold is None else self.folds != without_fold
        counts = self.counts[chosen]
        return float(self.metric.average(self.metric.numbers(self.values[setting][chosen], counts), counts))

    def held_out(self, settings: Sequence[Setting]) -> Tensor:
        """A number per row, each at the setting of its fold, with a temperature fitted on the other folds."""
        assert self.folds is not None
        result = torch.empty(len(self.folds), dtype=torch.float64)
        for fold, setting in enumerate(settings):
            numbers = self.metric.numbers(self.values[setting], self.counts, self.folds != fold)
            result[self.folds == fold] = numbers[self.folds == fold]
        return result


class Evaluations:
    """The numbers of every example for every setting, in an order that does not depend on the loader's.

    Args:
        metrics: by name, and for shifted data by a pair of the metric's name and the shift's.
        shifts: functions of the input, by name.
        resume: a file for intermediate results.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, GroupedBatchNorm],
        loader: Iterable[Any],
        metrics: Mapping[Any, Metric],
        forward: Forward,
        max_examples: int | None,
        resume: str | os.PathLike[str] | None,
        progress: bool | None,
        baseline: float,
        shifts: Mapping[str, Shift] | None = None,
    ) -> None:
        self.model, self.layers, self.loader, self.metrics = model, layers, loader, dict(metrics)
        self.forward, self.max_examples, self.progress = forward, max_examples, progress
        self.baseline, self.shifts = baseline, dict(shifts or {})
        self.values: dict[Key, dict[Setting, Tensor]] = {key: {} for key in self.metrics}
        self.counts: dict[Key, Tensor] = {}
        self.keys = torch.empty(0, dtype=torch.int64)  # of every example, sorted
        self.batch_keys = torch.empty(0, dtype=torch.int64)
        self.batch_of_example = torch.empty(0, dtype=torch.int64)  # the key of its batch
        self.non_finite: dict[Setting, int] = {}  # outputs that are NaN or infinite
        self.passes = 0
        self.fit: dict[str, Any] = {}  # the state of an optimization of alphas
        self.reference: dict[str, Any] = {}  # the first batch at the baseline
        self._unfinished: _Pass | None = None
        self._file = ResumeFile(resume, self._signature)
        self._recognized = True
        if (state := self._file.load()) is not None:
            self._recognized = False
            for name in self._STATE:
                setattr(self, name, state[name])
            if state["unfinished"] is not None:
                self._unfinished = _Pass(**state["unfinished"])

    def evaluate(self, settings: Iterable[Setting]) -> None:
        """One pass over the data for all settings that have not been evaluated yet."""
        self._recognize()
        new = [setting for setting in dict.fromkeys(settings) if setting not in self.settings()]
        if not new:
            return
        current = self._unfinished
        if current is None or current.alphas != new:
            current = _Pass(new)
        self._unfinished = current
        try:
            self._run(current)
        except BaseException:
            self.save()
            raise
        self._close(current)
        self._unfinished = None
        self.passes += 1
        self.save()

    def settings(self) -> list[Setting]:
        """Everything that has been evaluated."""
        return list(next(iter(self.values.values())))

    def single_alphas(self) -> list[float]:
        """The settings with one alpha for all layers, from the one nearest to the baseline."""
        singles = [setting for setting in self.settings() if not isinstance(setting, tuple)]
        return sorted(singles, key=lambda alpha: abs(alpha - self.baseline))

    def column(self, key: Key, folds: Tensor | None = None) -> Column:
        per_example = len(self.counts[key]) == len(self.keys)
        units = self.keys if per_example else self.batch_keys
        return Column(self.metrics[key], self.values[key], self.counts[key], units, folds)

    def by_batch(self) -> bool:
        """Whether a metric has only one number per batch, so that batches cannot be split between folds."""
        return any(len(counts) != len(self.keys) for counts in self.counts.values())

    def batches(self) -> Iterator[Any]:
        return iterate(self.loader, self.max_examples, device_of(self.model))

    def length(self) -> int | None:
        return length_of(self.loader, self.max_examples)

    def with_shifts(self, batch: Any) -> dict[str, Any]:
        """The batch as it is, under an empty name, and under every shift."""
        return {"": batch} | {name: with_input_changed(batch, shift) for name, shift in self.shifts.items()}

    def measure(self, batches: Mapping[str, Any]) -> tuple[dict[Key, tuple[Tensor, Tensor]], int, Any]:
        """Every metric of the model as it is now, the number of non-finite outputs, and the output without a shift."""
        measured: dict[Key, tuple[Tensor, Tensor]] = {}
        non_finite, clean_output = 0, None
        for shift, batch in batches.items():
            output, target = self.forward(self.model, batch)
            non_finite += non_finite_rows(output)
            clean_output = clean_output if shift else output
            for key, metric in self.metrics.items():
                if shift_of(key) == shift:
                    measured[key] = metric.measure(output, target)
        return measured, non_finite, clean_output

    def _set(self, setting: Setting) -> None:
        alphas = setting if isinstance(setting, tuple) else (setting,) * len(self.layers)
        for layer, alpha in zip(self.layers.values(), alphas, strict=True):
            layer.alpha = alpha

    def _run(self, current: _Pass) -> None:
        done = len(current.keys)
        label = f"pass {self.passes + 1}: {len(current.alphas)} alphas"
        with evaluating(self.model), torch.inference_mode(), Bar(label, self.length(), self.progress) as bar:
            for number, batch in enumerate(self.batches()):
                keys = example_keys(batch)
                if number < done:  # evaluated before an interruption
                    if torch.equal(keys, current.keys[number]):
                        bar.advance()
                        continue
                    current.clear()  # the loader yields other batches now
                    return self._run(current)
                batches = self.with_shifts(batch)
                results = []
                for setting in current.alphas:
                    self._set(setting)
                    results.append(self.measure(batches))
                    if setting == self.baseline and not self.reference:
                        self.reference = self._reference(keys, *results[-1])
                for setting, (measured, non_finite, _) in zip(current.alphas, results, strict=True):
                    for key, (values, _) in measured.items():
                        current.values.setdefault(key, {}).setdefault(setting, []).append(values)
                    current.non_finite[setting] = current.non_finite.get(setting, 0) + non_finite
                for key, (_, counts) in results[0][0].items():
                    current.counts.setdefault(key, []).append(counts)
                current.keys.append(keys)  # last: a batch counts once all of it is there
                bar.advance()
                self.save(SAVE_EVERY)
        if not current.keys:
            raise ValueError("the loader yields no batches: nothing to evaluate")

    def _close(self, current: _Pass) -> None:
        """Sort the numbers of a finished pass, after checking that it had the same examples as the others."""
        keys = torch.cat(current.keys)
        batch_keys = torch.stack([part.sum() for part in current.keys])
        of_example = torch.repeat_interleave(batch_keys, torch.tensor([len(part) for part in current.keys]))
        by_example, by_batch = keys.argsort(stable=True), batch_keys.argsort(stable=True)
        if len(self.keys) and not torch.equal(keys[by_example], self.keys):
            raise _other_examples("other examples")
        for key in self.metrics:
            counts = torch.cat(current.counts[key])
            if len(counts) == len(keys) and len(keys) > len(batch_keys):
                order = by_example
            elif len(counts) == len(batch_keys):
                order = by_batch
                if len(self.batch_keys) and not torch.equal(batch_keys[order], self.batch_keys):
                    raise _other_examples(f"other batches, and {self.metrics[key].name!r} is one number per batch,")
            else:
                raise ValueError(
                    f"metric {self.metrics[key].name!r} returned {len(counts)} numbers for {len(keys)} examples in "
                    f"{len(batch_keys)} batches; it must return one per example or one per batch"
                )
            self.counts[key] = counts[order]
            for setting, parts in current.values[key].items():
                self.values[key][setting] = torch.cat(parts)[order]
        self.non_finite |= current.non_finite
        self.keys, self.batch_keys, self.batch_of_example = (
            keys[by_example],
            batch_keys[by_batch],
            of_example[by_example],
        )

    # -- interruptions --

    _STATE = ("values", "counts", "keys", "batch_keys", "batch_of_example", "non_finite", "passes", "fit", "reference")

    def save(self, every: float = 0.0) -> None:
        """Write the intermediate results, at most once in ``every`` seconds."""
        unfinished = self._unfinished
        self._file.save(
            lambda: (
                {name: getattr(self, name) for name in self._STATE}
                | {"unfinished": None if unfinished is None else asdict(unfinished)}
            ),
            every,
        )

    def _signature(self) -> str:
        """What the numbers depend on, except for the data, whose keys are compared."""
        self._set(self.baseline)
        parts = [list(self.layers), self.baseline, self.metrics, self.shifts, self.forward, self.max_examples]
        return signature(self.model, *parts)

    def _reference(self, keys: Tensor, measured: Mapping[Key, Any], _: int, output: Any) -> dict[str, Any]:
        rows = {}
        if isinstance(output, Tensor) and output.dim() and len(output) == len(keys):
            flat = output.detach().reshape(len(output), -1).cpu()
            rows = {"output": flat[:, :: max(1, flat.numel() // REFERENCE_VALUES)].clone()}
        return {"keys": keys, **rows, "values": {key: values for key, (values, _) in measured.items()}}

    def _recognize(self) -> None:
        """Check that data and model are those of the resumed file, before its numbers are used.

        The data are compared by their keys. The model is run at the baseline on one batch with examples of the first
        batch of the file, and its outputs are compared.
        """
        if self._recognized:
            return
        self._recognized = True
        keys, compared = [], not self.reference
        for batch in self.batches():
            keys.append(example_keys(batch))
            if not compared and bool(torch.isin(keys[-1], self.reference["keys"]).any()):
                compared = True
                self._compare_with_reference(batch, keys[-1])
            if compared and not len(self.keys):
                break
        if len(self.keys) and not torch.equal(torch.cat(keys).sort().values, self.keys):
            raise self._file.error("belongs to other images or labels")

    def _compare_with_reference(self, batch: Any, keys: Tensor) -> None:
        self._set(self.baseline)
        with evaluating(self.model), torch.inference_mode():
            now = self._reference(keys, *self.measure(self.with_shifts(batch)))
        stored, place = self.reference, {key: row for row, key in enumerate(self.reference["keys"].tolist())}
        rows = [(row, place[key]) for row, key in enumerate(keys.tolist()) if key in place]
        new, old = (torch.tensor(part) for part in zip(*rows, strict=True))
        agree = (
            "output" not in now or "output" not in stored or same_values(now["output"][new], stored["output"][old], 1.0)
        )
        for key, values in now["values"].items():
            if len(values) == len(keys) and len(stored["values"][key]) == len(place):
                agree = agree and same_values(values[new], stored["values"][key][old], 0.9)
            elif torch.equal(keys, stored["keys"]):
                agree = agree and same_values(values, stored["values"][key], 1.0)
        if not agree:
            raise self._file.error("belongs to a model with other outputs, or to another metric or forward function")


@dataclass
class _Pass:
    """A pass over the data that is under way."""

    alphas: list[Setting]
    keys: list[Tensor] = field(default_factory=list)  # of every batch seen
    values: dict[Key, dict[Setting, list[Tensor]]] = field(default_factory=dict)
    counts: dict[Key, list[Tensor]] = field(default_factory=dict)
    non_finite: dict[Setting, int] = field(default_factory=dict)

    def clear(self) -> None:
        for part in (self.keys, self.values, self.counts, self.non_finite):
            part.clear()


def _other_examples(what: str) -> ValueError:
    return ValueError(
        f"the loader yields {what} than in the pass before; alphas are compared on the same examples, so switch random "
        "augmentation off, and shuffling if max_examples is used"
    )
