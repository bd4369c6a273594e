"""Cross-validation: every example is evaluated with an alpha that was chosen on the other folds."""

from __future__ import annotations

import torch
from torch import Tensor

from betternorm.weighing.evaluation import Evaluations, Key


class Folds:
    """The fold of every example. If a metric has one number per batch, a batch is not split between folds.

    Attributes:
        count: the number of folds, at most the number of distinct examples.
    """

    def __init__(self, evaluations: Evaluations, count: int, seed: int) -> None:
        self._keys, self._batch_keys = evaluations.keys, evaluations.batch_keys
        self._counts, self._by_batch = evaluations.counts, evaluations.by_batch()
        self.seed = seed
        self.count = min(count, len(torch.unique(self._batch_keys if self._by_batch else self._keys)))
        self._of_example = assign_folds(
            evaluations.batch_of_example if self._by_batch else self._keys, self.count, seed
        )
        self._of_batch = assign_folds(self._batch_keys, self.count, seed) if self._by_batch else self._of_example

    def of(self, key: Key) -> Tensor:
        """The fold of every row of a metric."""
        return self._of_example if len(self._counts[key]) == len(self._keys) else self._of_batch

    def of_rows(self, keys: Tensor) -> Tensor:
        """The fold of every example of a batch, given their keys."""
        if self._by_batch:
            return self._of_batch[torch.searchsorted(self._batch_keys, keys.sum())].expand(len(keys))
        return self._of_example[torch.searchsorted(self._keys, keys)]


def assign_folds(keys: Tensor, folds: int, seed: int = 0) -> Tensor:
    """A random fold for every row, in equal parts; rows with equal keys (copies of an image) share a fold.

    It depends only on the keys and the seed, not on the order of the rows.
    """
    distinct, row_of = torch.unique(keys, return_inverse=True)
    if not 2 <= folds <= len(distinct):
        raise ValueError(f"folds={folds} must lie between 2 and the number of distinct examples, {len(distinct)}")
    order = torch.randperm(len(distinct), generator=torch.Generator().manual_seed(seed))
    return (order % folds)[row_of]
