"""Folds."""

from __future__ import annotations

import pytest
import torch

from betternorm.weighing.folds import assign_folds


def test_folds_are_equal_parts_that_follow_the_keys() -> None:
    keys = torch.randint(-(2**62), 2**62, (103,))
    folds = assign_folds(keys, 5)
    assert sorted(torch.bincount(folds).tolist()) == [20, 20, 21, 21, 21]
    order = torch.randperm(103)
    assert torch.equal(assign_folds(keys[order], 5), folds[order])


def test_an_image_that_comes_twice_is_in_one_fold() -> None:
    keys = torch.arange(40).repeat(2)
    folds = assign_folds(keys, 4)
    assert torch.equal(folds[:40], folds[40:])


@pytest.mark.parametrize("folds", [1, 11])
def test_impossible_numbers_of_folds_are_errors(folds: int) -> None:
    with pytest.raises(ValueError, match=f"folds={folds} must lie between 2 and the number of distinct examples, 10"):
        assign_folds(torch.arange(10), folds)
