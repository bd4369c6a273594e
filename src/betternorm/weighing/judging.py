"""Judging a choice of alpha: gains on folds that the choice did not see, with confidence intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from betternorm.weighing.evaluation import Column, Setting
from betternorm.weighing.evidence import ENOUGH_TO_JUDGE, Gain, gain_between
from betternorm.weighing.objective import choose
from betternorm.weighing.result import ShiftEvidence
from betternorm.weighing.shifts import Rule


@dataclass(frozen=True)
class Judge:
    """Cross-validation of a choice.

    Attributes:
        columns: the objective on every set, with folds; "clean" first.
        metrics: every metric on the clean data, with folds.
        rule: by which a setting is chosen.
        folds: how many there are.
    """

    columns: Mapping[str, Column]
    metrics: Mapping[str, Column]
    rule: Rule
    baseline: float
    folds: int
    confidence: float
    seed: int
    reliable: bool = True  # False if outputs at the baseline are not finite

    def choose(self, settings: Iterable[Setting]) -> Any:
        """The best setting on all data."""
        return choose(self.columns, self.rule, settings, self.baseline)

    def by_fold(self, settings: Iterable[Setting], column: Column | None = None) -> list[Setting]:
        """For every fold the best setting on the others: by the rule, or for one metric on the clean data."""
        settings = list(settings)
        columns, rule = self.columns, self.rule
        if column is not None:
            columns, rule = {"clean": column}, Rule(column.metric.higher_is_better)
        return [choose(columns, rule, settings, self.baseline, fold) for fold in range(self.folds)]

    def gain(self, by_fold: Sequence[Setting], tried: Iterable[Setting] = ()) -> Gain:
        """The gain of one setting per fold in what the rule averages. Settings ``tried`` widen the interval."""
        after = {name: column.held_out(by_fold) for name, column in self.columns.items()}
        return self.gain_of_numbers(self.at_baseline(), after, tried)

    def gain_of_numbers(
        self, before: Mapping[str, Tensor], after: Mapping[str, Tensor], tried: Iterable[Setting] = ()
    ) -> Gain:
        """The gain between numbers by set. All sets have the same weight, and copies of an image count once."""
        averaged = {
            name: column for name, column in self.columns.items() if name != "clean" or self.rule.max_clean_drop is None
        }
        columns = averaged.values()
        weights = [c.counts / c.counts.sum() if len(averaged) > 1 else c.counts for c in columns]
        return gain_between(
            self.columns["clean"].metric,
            torch.cat([before[name] for name in averaged]),
            torch.cat([after[name] for name in averaged]),
            torch.cat(weights),
            torch.cat([column.units for column in columns]),
            [torch.cat([c.numbers(s) for c in columns]) for s in tried if s != self.baseline],
            self.confidence,
            self.seed,
        )

    def gains(self, by_fold: Sequence[Setting]) -> dict[str, Gain]:
        """The gain in every metric on the clean data."""
        return {name: self.column_gain(column, by_fold) for name, column in self.metrics.items()}

    def gains_by_set(self, by_fold: Sequence[Setting]) -> dict[str, Gain]:
        """The gain in the objective on every set."""
        return {name: self.column_gain(column, by_fold) for name, column in self.columns.items()}

    def column_gain(
        self,
        column: Column,
        by_fold: Sequence[Setting],
        before: Tensor | None = None,
        tried: Iterable[Setting] = (),
    ) -> Gain:
        if before is None:
            before = column.held_out([self.baseline] * self.folds)
        numbers = [column.numbers(setting) for setting in tried if setting != self.baseline]
        return gain_between(
            column.metric,
            before,
            column.held_out(by_fold),
            column.counts,
            column.units,
            numbers,
            self.confidence,
            self.seed,
        )

    def at_baseline(self) -> dict[str, Tensor]:
        return {name: column.held_out([self.baseline] * self.folds) for name, column in self.columns.items()}

    @property
    def judged_on(self) -> int:
        """Distinct examples, or batches if the objective has one number per batch."""
        return len(torch.unique(self.columns["clean"].units))

    def is_significant(self, gain: Gain) -> bool:
        certain = gain.is_certain(self.columns["clean"].metric)
        return self.reliable and certain and self.judged_on >= ENOUGH_TO_JUDGE


@dataclass(frozen=True)
class SingleAlpha:
    """One alpha for all layers: the best by the objective, its gains on held-out folds, and those under shifts."""

    alpha: float
    by_fold: list[Setting]
    gains: dict[str, Gain]
    gain: Gain
    significant: bool
    shifts: ShiftEvidence | None = None
