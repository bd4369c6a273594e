"""What alpha is chosen for, and the choice: a metric on the data, or on clean and shifted data by a rule."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from betternorm.weighing.evaluation import Column, Evaluations, Key, Setting
from betternorm.weighing.folds import Folds
from betternorm.weighing.metrics import CALIBRATED, METRICS, SHARES, Metric, weighted_mean
from betternorm.weighing.shifts import Rule, Shift, corruptions

# Names of corruptions; or a dict from names to functions of the input, or to loaders of shifted data.
Shifts = str | Iterable[str] | Mapping[str, Shift | Iterable[Any]]


class Objective:
    """A metric, and the sets it is measured on: the clean data, and every shift.

    Attributes:
        guide: the metric that ranks layers: a smooth one if the objective is not.
        functions: shifts that are functions of the input.
        loaders: shifts that are separate datasets.
    """

    def __init__(
        self, metric: Metric, shifts: Shifts | None, max_clean_drop: float | None, by_layer: str | None, curves: bool
    ) -> None:
        """``by_layer``: the option that optimizes layers one by one, if any; ``curves``: whether there are logits."""
        options = {} if shifts is None else shifts if isinstance(shifts, Mapping) else corruptions(shifts)
        if shifts is None and max_clean_drop is not None:
            raise ValueError(f"max_clean_drop={max_clean_drop} is a rule for shifted data; pass shifts=... too")
        if shifts is not None:
            _check(options, metric, max_clean_drop)
        self.metric, self.max_clean_drop = metric, max_clean_drop
        self.functions = {name: shift for name, shift in options.items() if callable(shift)}
        self.loaders: dict[str, Any] = {name: data for name, data in options.items() if name not in self.functions}
        if self.loaders and by_layer:
            raise ValueError(
                f"{by_layer} optimizes alphas on shifts that are functions; {next(iter(self.loaders))!r} is a loader"
            )
        self.guide = metric
        if by_layer and metric.name in SHARES and (shifts is not None or curves):
            self.guide = METRICS[CALIBRATED if shifts is None else "cross_entropy"]
        share = 100 if metric.name in SHARES else 1
        self.rule = Rule(metric.higher_is_better, None if max_clean_drop is None else max_clean_drop / share)

    @property
    def shifted(self) -> bool:
        return bool(self.functions or self.loaders)

    def metrics_under_shifts(self) -> dict[Key, Metric]:
        pairs = [(metric, shift) for shift in self.functions for metric in (self.metric, self.guide)]
        return {(metric.name, shift): metric for metric, shift in pairs}


def _check(shifts: Mapping[str, Any], metric: Metric, max_clean_drop: float | None) -> None:
    if not shifts:
        raise ValueError("shifts is empty; pass names of corruptions, or a dict of functions or loaders")
    if "clean" in shifts:
        raise ValueError("shifts contains the name 'clean', which is reserved for the data without a shift")
    if metric.average is not weighted_mean:
        raise ValueError(f"objective {metric.name!r} is not a mean over examples, as shifts require; try 'top1'")
    if max_clean_drop is not None and not max_clean_drop >= 0:
        raise ValueError(f"max_clean_drop={max_clean_drop} must be 0 or more")


class Sets:
    """The evaluations of the clean data, on which shifts that are functions are evaluated too, and of other loaders."""

    def __init__(self, objective: Objective, clean: Evaluations, resume: str | os.PathLike[str] | None) -> None:
        self.objective, self.clean = objective, clean
        metric = objective.metric
        self.loaders = {
            name: Evaluations(
                clean.model,
                clean.layers,
                loader,
                {metric.name: metric},
                clean.forward,
                clean.max_examples,
                None if resume is None else Path(f"{os.fspath(resume)}-{number}"),
                clean.progress,
                clean.baseline,
            )
            for number, (name, loader) in enumerate(objective.loaders.items())
        }

    def evaluate(self, settings: Iterable[Setting]) -> None:
        """Run the model with these settings, and with the baseline, on every set."""
        settings = list(settings)
        self.clean.evaluate(settings)
        for evaluations in self.loaders.values():
            evaluations.evaluate([self.clean.baseline, *settings])

    def columns(self, folds: Folds | None = None) -> dict[str, Column]:
        """The objective on every set, "clean" first; with folds as many as those of the clean data."""
        metric = self.objective.metric
        keys: dict[str, tuple[Evaluations, Key]] = {"clean": (self.clean, metric.name)}
        keys |= {name: (self.clean, (metric.name, name)) for name in self.objective.functions}
        keys |= {name: (evaluations, metric.name) for name, evaluations in self.loaders.items()}
        columns = {}
        for name, (evaluations, key) in keys.items():
            own = folds if folds is None or evaluations is self.clean else Folds(evaluations, folds.count, folds.seed)
            columns[name] = evaluations.column(key, None if own is None else own.of(key))
        return columns

    def usable(self) -> list[Setting]:
        """The settings evaluated, except those for which an output was not finite. The baseline is always included."""
        non_finite = self.non_finite()
        return [s for s in self.clean.settings() if s == self.clean.baseline or s not in non_finite]

    def usable_alphas(self) -> list[float]:
        """Those with one alpha for all layers, from the one nearest to the baseline."""
        usable = set(self.usable())
        return [alpha for alpha in self.clean.single_alphas() if alpha in usable]

    def non_finite(self) -> dict[Setting, int]:
        """The number of outputs that are NaN or infinite, by setting, over all sets."""
        total = dict(self.clean.non_finite)
        for evaluations in self.loaders.values():
            for setting, count in evaluations.non_finite.items():
                total[setting] = total.get(setting, 0) + count
        return {setting: count for setting, count in total.items() if count}


def choose(
    columns: Mapping[str, Column], rule: Rule, settings: Iterable[Setting], baseline: float, fold: int | None = None
) -> Any:
    """The best setting by a rule over the sets, on all examples or on those outside a fold."""
    settings = list(dict.fromkeys([baseline, *settings]))
    scores = {name: {s: column.average(s, fold) for s in settings} for name, column in columns.items()}
    clean = scores.pop("clean")
    return rule.choose(clean, list(scores.values()), baseline)


def best_for(column: Column, settings: Iterable[Setting], baseline: float, fold: int | None = None) -> Any:
    """The best setting for one metric; of equals the one nearest to the baseline."""
    return choose({"clean": column}, Rule(column.metric.higher_is_better), settings, baseline, fold)
