"""Rows of batches."""

from __future__ import annotations

import itertools

import torch


def test_keys_of_rows_do_not_depend_on_the_batch() -> None:
    from betternorm.weighing.batches import example_keys

    x = torch.randn(40, 3, 40, 40)
    keys = example_keys((x, torch.arange(40)))
    assert len(set(keys.tolist())) == 40
    for part, expected in zip(x.split(7), keys.split(7), strict=True):
        assert torch.equal(example_keys({"image": part, "label": torch.zeros(len(part))}), expected)
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(keys))
