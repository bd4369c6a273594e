"""The statistics behind a gain, against scipy and closed forms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from betternorm.weighing.evidence import Gain, gain_between, mcnemar
from betternorm.weighing.metrics import Metric, weighted_mean

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


def means(differences: Tensor, **options: Any) -> Gain:
    """The gain in a mean that should rise."""
    metric = Metric("m", len, higher_is_better=True)
    return gain_between(metric, torch.zeros_like(differences), differences, torch.ones_like(differences), **options)


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("count", [12, 400])
def test_an_interval_of_normal_differences_is_students(count: int, confidence: float) -> None:
    differences = torch.randn(count).double()
    gain = means(differences, confidence=confidence)
    expected = stats.t.interval(confidence, count - 1, differences.mean(), stats.sem(differences))
    half = (expected[1] - expected[0]) / 2
    assert gain.low == pytest.approx(expected[0], abs=0.35 * half)
    assert gain.high == pytest.approx(expected[1], abs=0.35 * half)


def test_the_interval_is_of_the_pairs_and_not_of_the_groups() -> None:
    hard = torch.randn(500).double() * 100
    metric = Metric("m", len, higher_is_better=True)
    gain = gain_between(metric, hard, hard - 1, torch.ones(500).double())
    assert (gain.low, gain.high) == pytest.approx((-1, -1))


def test_copies_of_examples_are_no_further_evidence() -> None:
    differences, units = torch.randn(60).double(), torch.arange(60)
    once = means(differences, units=units)
    often = means(differences.repeat(20), units=units.repeat(20))
    assert (often.low, often.high) == pytest.approx((once.low, once.high), rel=1e-9)


def test_a_choice_among_many_widens_the_side_of_a_loss() -> None:
    tried = torch.randn(12, 300).double()
    alone, chosen = means(tried[0]), means(tried[0], tried=list(tried))
    # The largest of twelve independent t is beyond its 97.5 % point as often as one of them beyond its 99.79 %.
    error = float(tried[0].std() / math.sqrt(300))
    assert chosen.low == pytest.approx(
        float(tried[0].mean()) - stats.norm.ppf(0.975 ** (1 / 12)) * error, abs=0.4 * error
    )
    assert chosen.low < alone.low
    assert chosen.high == pytest.approx(alone.high)


def test_four_answers_that_change_are_not_enough() -> None:
    """All four for the better happens once in sixteen times; eight, once in 256."""
    for changed, certain in ((4, False), (5, False), (8, True)):
        differences = torch.zeros(1000).double()
        differences[:changed] = 1
        assert (means(differences).low > 0) is certain


def test_a_figure_that_is_no_mean_has_an_interval_too() -> None:
    values = torch.rand(400).double()
    largest = Metric("spread", len, True, lambda v, c: (v * v * c).sum(-1) / c.sum(-1))
    gain = gain_between(largest, values, values * 2, torch.ones(400).double())
    error = float((3 * values.square()).std() / 20)
    assert gain.difference == pytest.approx(float(3 * values.square().mean()))
    assert (gain.high - gain.low) / 2 == pytest.approx(1.96 * error, rel=0.15)


def test_counts_weigh() -> None:
    values = torch.tensor([1.0, 5.0]).double()
    assert weighted_mean(values, torch.tensor([3.0, 1.0]).double()).item() == 2.0


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_gains_and_losses_that_are_certain(higher_is_better: bool) -> None:
    metric = Metric("m", len, higher_is_better)
    up, down = Gain(0.0, 1.0, 0.5, 1.5), Gain(0.0, -1.0, -1.5, -0.5)
    assert up.is_certain(metric) is down.is_certain_loss(metric) is higher_is_better
    assert down.is_certain(metric) is up.is_certain_loss(metric) is not higher_is_better
