"""The statistics behind a gain, against scipy and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from betternorm.weighing.evidence import mcnemar, paired_bootstrap
from betternorm.weighing.metrics import weighted_mean

stats = pytest.importorskip("scipy.stats")


@pytest.mark.parametrize(
    ("gained", "lost"), [(0, 0), (1, 0), (5, 5), (10, 3), (3, 10), (0, 8), (120, 80), (900, 1100), (4000, 3000)]
)
def test_mcnemar_is_the_exact_binomial_test(gained: int, lost: int) -> None:
    agree = 50
    before = torch.tensor([False] * gained + [True] * lost + [True, False] * agree)
    after = torch.tensor([True] * gained + [False] * lost + [True, False] * agree)
    expected = stats.binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    assert mcnemar(before, after) == pytest.approx(expected, rel=1e-9)


def test_the_bootstrap_agrees_with_scipys() -> None:
    rng = np.random.default_rng(0)
    before, after = rng.exponential(size=300), rng.exponential(size=300)
    low, high = paired_bootstrap(*map(torch.from_numpy, (before, after)), torch.ones(300).double(), weighted_mean)
    expected = stats.bootstrap(
        (before, after), lambda b, a: a.mean() - b.mean(), paired=True, vectorized=False, method="percentile", rng=rng
    ).confidence_interval
    width = expected.high - expected.low
    assert (low, high) == pytest.approx(tuple(expected), abs=0.06 * width)


def test_the_interval_is_of_the_pairs_and_not_of_the_groups() -> None:
    hard = torch.randn(500).double() * 100
    low, high = paired_bootstrap(hard, hard - 1, torch.ones(500).double(), weighted_mean)
    assert (low, high) == pytest.approx((-1, -1))


def test_counts_weigh() -> None:
    values = torch.tensor([1.0, 5.0]).double()
    assert weighted_mean(values, torch.tensor([3.0, 1.0]).double()).item() == 2.0


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.99])
def test_a_confidence_is_kept(confidence: float) -> None:
    difference = torch.randn(400).double()
    low, high = paired_bootstrap(
        torch.zeros_like(difference), difference, torch.ones_like(difference), weighted_mean, confidence
    )
    half = stats.norm.ppf(0.5 + confidence / 2) * difference.std().item() / math.sqrt(400)
    assert (high - low) / 2 == pytest.approx(half, rel=0.1)
