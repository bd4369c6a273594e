"""Alpha chosen on clean and on shifted data together: every alpha on every set, a rule, and the evidence held out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from betternorm.weighing.evaluation import Evaluations, Setting, under
from betternorm.weighing.evidence import ENOUGH_TO_JUDGE, Gain, gain_between
from betternorm.weighing.folds import Folds
from betternorm.weighing.metrics import METRICS, SHARES, Metric, weighted_mean
from betternorm.weighing.result import AlphaSearch, ShiftEvidence
from betternorm.weighing.shifts import Rule, Shift, corruptions

# Names of corruptions; or by name a function of the images, or a loader of shifted data.
Shifts = str | Iterable[str] | Mapping[str, Shift | Iterable[Any]]


class ShiftedSets:
    """The clean data and the shifted ones, each with its numbers and the folds it falls into."""

    def __init__(
        self, shifts: Shifts, metric: Metric, max_clean_drop: float | None, layer_by_layer: str | None = None
    ) -> None:
        """``layer_by_layer``: the option of the search, if any, that looks at every layer by itself."""
        given = shifts if isinstance(shifts, Mapping) else corruptions(shifts)
        if not given:
            raise ValueError("shifts is empty; give names of corruptions, or a dict of functions or loaders")
        if "clean" in given:
            raise ValueError("shifts has one called 'clean', which is what the data without a shift are called")
        if metric.average is not weighted_mean:
            raise ValueError(f"objective {metric.name!r} is no mean over examples, which shifts need; take 'top1'")
        if max_clean_drop is not None and not max_clean_drop >= 0:
            raise ValueError(f"max_clean_drop={max_clean_drop} must be 0 or more")
        self.functions = {name: shift for name, shift in given.items() if callable(shift)}
        self._loaders: dict[str, Any] = {name: data for name, data in given.items() if name not in self.functions}
        if self._loaders and layer_by_layer:
            raise ValueError(
                f"{layer_by_layer} fits alphas on shifts that are functions; {next(iter(self._loaders))!r} is a loader"
            )
        self.metric = metric
        # Which layer is good is seen by a smooth metric.
        self.guide = METRICS["cross_entropy"] if layer_by_layer and metric.name in SHARES else metric
        self.max_clean_drop = max_clean_drop
        share = 100 if metric.name in SHARES else 1
        self.rule = Rule(metric.higher_is_better, None if max_clean_drop is None else max_clean_drop / share)
        self._own: dict[str, Evaluations] = {}

    def metrics(self) -> dict[str, Metric]:
        """The objective, and the guide to layers, under every shift that is a function."""
        named = {under(metric.name, s): metric for s in self.functions for metric in (self.metric, self.guide)}
        return {name: replace(metric, name=name) for name, metric in named.items()}

    def attach(self, clean: Evaluations, resume: str | os.PathLike[str] | None) -> None:
        """Sets of the user's own are evaluated beside the clean data."""
        self._clean = clean
        for name, loader in self._loaders.items():
            beside = None if resume is None else Path(f"{os.fspath(resume)}-{len(self._own)}")
            self._own[name] = Evaluations(
                clean.model,
                clean.layers,
                loader,
                {self.metric.name: self.metric},
                clean.forward,
                clean.max_examples,
                beside,
                clean.progress,
                clean.baseline,
            )

    def evaluate(self, alphas: list[float]) -> None:
        for own in self._own.values():
            own.evaluate([self._clean.baseline, *alphas])

    def sets(self) -> dict[str, tuple[Evaluations, str]]:
        """By name, where the numbers are and under which metric."""
        found = {"clean": (self._clean, self.metric.name)}
        found |= {name: (self._clean, under(self.metric.name, name)) for name in self.functions}
        return found | {name: (own, self.metric.name) for name, own in self._own.items()}

    def choose(
        self, where: Callable[[str], Tensor | None] = lambda name: None, among: Iterable[Setting] | None = None
    ) -> Any:
        """The alpha that the rule takes, from the examples of each set that ``where`` leaves; a tuple where it chose
        among tuples.
        """
        tried = self._clean.tried() if among is None else among
        alphas = list(dict.fromkeys([self._clean.baseline, *tried]))
        scores = {
            name: {alpha: held.average(metric, held.values[metric][alpha], where(name)) for alpha in alphas}
            for name, (held, metric) in self.sets().items()
        }
        clean = scores.pop("clean")
        return self.rule.choose(clean, list(scores.values()), self._clean.baseline)

    def judge(self, result: AlphaSearch, split: Folds, seed: int) -> None:
        """What the rule's choice gains on every set, held out; written into the result."""
        self.chosen = self.choose()
        self._splits = {
            name: split if held is self._clean else Folds(held, min(split.count, held.groups()), seed)
            for name, (held, _) in self.sets().items()
        }
        sets = self.sets()

        def alpha_without(fold: int) -> float:
            def others(name: str) -> Tensor:
                folds = self._splits[name].of(sets[name][1])
                return folds != fold

            chosen: float = self.choose(others)
            return chosen

        alphas = [alpha_without(fold) for fold in range(split.count)]
        numbers = self._numbers = {
            name: self._splits[name].held_out(metric, lambda fold: alphas[fold]) for name, (_, metric) in sets.items()
        }
        # A set of the user's own is in folds of its own; the clean data's gains are at the rule's alphas now.
        for metric in result.gains:
            held = split.held_out(metric, lambda fold: alphas[fold])
            result.gains[metric] = self._clean.gain(metric, split.as_trained(metric), held, result.confidence, seed)
        gains = {
            name: held.gain(metric, self._splits[name].as_trained(metric), numbers[name], result.confidence, seed)
            for name, (held, metric) in sets.items()
        }
        mean = self.mean_gain(numbers, result.confidence, seed)
        result.shifts = ShiftEvidence(
            max_clean_drop=self.max_clean_drop,
            table=[
                {"alpha": alpha} | {n: held.average(m, held.values[m][alpha]) for n, (held, m) in sets.items()}
                for alpha in sorted(self._clean.tried())
            ],
            gains=gains,
            mean=mean,
        )
        result.significant = mean.is_certain(self.metric) and result.judged_on >= ENOUGH_TO_JUDGE

    def against_single(self, single: AlphaSearch, held_out: Mapping[str, Tensor], seed: int) -> Gain:
        """What numbers held out, by metric, gain over the rule's one alpha, or over the network as it was trained."""
        numbers = {name: held_out[metric] for name, (_, metric) in self.sets().items()}
        before = self._numbers
        if not single.significant:
            before = {name: self._splits[name].as_trained(metric) for name, (_, metric) in self.sets().items()}
        return self.mean_gain(numbers, single.confidence, seed, before)

    def allows(self, clean: Gain) -> bool:
        """Whether a cost on the clean data is within the rule."""
        loss = -clean.difference if self.metric.higher_is_better else clean.difference
        return self.rule.max_clean_drop is None or loss <= self.rule.max_clean_drop

    def mean_gain(
        self,
        numbers: Mapping[str, Tensor],
        confidence: float,
        seed: int,
        before: Mapping[str, Tensor] | None = None,
        tried: Iterable[Setting] | None = None,
    ) -> Gain:
        """The gain in what the rule weighs: the mean over the shifts, with the clean data where they have no bound.

        Every set counts the same, and an image counts once however many shifted copies of it there are. ``tried`` is
        what was chosen from; None is every single alpha.
        """
        names = [name for name in self.sets() if name != "clean" or self.max_clean_drop is None]
        sets = {name: self.sets()[name] for name in names}
        counts = torch.cat([held.counts[metric] / held.counts[metric].sum() for held, metric in sets.values()])
        units = torch.cat([held.units(metric) for held, metric in sets.values()])

        def joined(of: Callable[[str, Evaluations, str], Tensor]) -> Tensor:
            return torch.cat([of(name, held, metric) for name, (held, metric) in sets.items()])

        others = [
            joined(lambda name, held, metric, alpha=alpha: held.numbers(metric, alpha))  # type: ignore[misc]
            for alpha in (self._clean.tried() if tried is None else tried)
            if alpha != self._clean.baseline
        ]
        return gain_between(
            self.metric,
            joined(
                lambda name, held, metric: self._splits[name].as_trained(metric) if before is None else before[name]
            ),
            joined(lambda name, held, metric: numbers[name]),
            counts,
            units,
            others if before is None else (),
            confidence,
            seed,
        )
