"""Folds: every example is judged with an alpha that was chosen on the other folds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from betternorm.weighing.evaluation import Evaluations, Setting


class Folds:
    """Which fold every example is in. Where a metric has only one number per batch, a batch is in one fold."""

    def __init__(self, evaluations: Evaluations, count: int, seed: int) -> None:
        self.count, self._evaluations = count, evaluations
        self._of_example = assign_folds(
            evaluations.batch_of_example if evaluations.by_batch() else evaluations.keys, count, seed
        )
        self._of_batch = (
            assign_folds(evaluations.batch_keys, count, seed) if evaluations.by_batch() else self._of_example
        )

    def of(self, metric: str) -> Tensor:
        """The fold of every number of a metric."""
        per_example = len(self._evaluations.counts[metric]) == len(self._evaluations.keys)
        return self._of_example if per_example else self._of_batch

    def of_rows(self, keys: Tensor) -> Tensor:
        """The fold of every row of a batch, given the keys of its rows."""
        if self._evaluations.by_batch():
            return self._of_batch[torch.searchsorted(self._evaluations.batch_keys, keys.sum())].expand(len(keys))
        return self._of_example[torch.searchsorted(self._evaluations.keys, keys)]

    def single(self, objective: str, metric: str) -> Tensor:
        """The numbers of a metric, each at the one alpha that is best for the objective on the other folds."""
        return self.held_out(metric, lambda fold: self._evaluations.best(objective, self.of(objective) != fold))

    def as_trained(self, metric: str) -> Tensor:
        return self.held_out(metric, lambda fold: self._evaluations.baseline)

    def held_out(self, metric: str, alpha_for: Callable[[int], Setting]) -> Tensor:
        """The numbers of a metric, those of each fold at an alpha that is taken without it.

        A temperature too is fitted on the other folds.
        """
        evaluations, folds = self._evaluations, self.of(metric)
        found = torch.empty(len(folds), dtype=torch.float64)
        for fold in range(self.count):
            values = evaluations.values[metric][alpha_for(fold)]
            numbers = evaluations.metrics[metric].numbers(values, evaluations.counts[metric], folds != fold)
            found[folds == fold] = numbers[folds == fold]
        return found


def assign_folds(keys: Tensor, folds: int, seed: int = 0) -> Tensor:
    """A fold for every row, at random, in equal parts; rows with equal keys (an image twice) share a fold.

    It follows from the keys and the seed alone, not from the order of the rows.
    """
    distinct, row_of = torch.unique(keys, return_inverse=True)
    if not 2 <= folds <= len(distinct):
        raise ValueError(f"folds={folds} must lie between 2 and the {len(distinct)} different examples")
    order = torch.randperm(len(distinct), generator=torch.Generator().manual_seed(seed))
    return (order % folds)[row_of]
