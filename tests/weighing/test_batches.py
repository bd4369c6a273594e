"""Rows of batches."""

from __future__ import annotations

import itertools

import torch

from betternorm.weighing.batches import example_keys


def test_keys_of_rows_do_not_depend_on_the_batch() -> None:
    x, y = torch.randn(40, 3, 40, 40), torch.arange(40)
    keys = example_keys((x, y))
    assert len(set(keys.tolist())) == 40
    for part, labels, expected in zip(x.split(7), y.split(7), keys.split(7), strict=True):
        assert torch.equal(example_keys({"image": part, "label": labels}), expected)
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(keys))


def test_another_label_makes_another_example() -> None:
    x, y = torch.randn(5, 3, 8, 8), torch.arange(5)
    corrected = y.clone()
    corrected[2] = 7
    assert (example_keys((x, y)) == example_keys((x, corrected))).tolist() == [True, True, False, True, True]
