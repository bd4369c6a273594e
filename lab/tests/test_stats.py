"""Statistics against closed forms and the numbers of textbooks."""

import math

import numpy as np
import pytest
import scipy.stats
from betternorm_lab import stats

from betternorm.errors import UserError

# Student's sleep data (1908): extra hours of sleep of ten patients under two drugs.
FIRST = (0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0)
SECOND = (1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4)


def test_summary_of_the_sleep_data():
    found = stats.summary(SECOND)
    assert found.n == 10
    assert found.mean == pytest.approx(2.33)
    assert found.std == pytest.approx(2.002249, abs=1e-6)
    half = 2.262157 * 2.002249 / math.sqrt(10)  # the t table at nine degrees of freedom
    assert found.t_interval == pytest.approx((2.33 - half, 2.33 + half), abs=1e-5)
    assert str(found) == f"{found}" == "2.33 ± 2.00 (n = 10)"
    assert f"{found:.4f}" == "2.3300 ± 2.0022 (n = 10)"


def test_tests_of_the_sleep_data_give_the_published_p_values():
    assert stats.welch(FIRST, SECOND).p == pytest.approx(0.07939, abs=1e-5)
    assert stats.welch(FIRST, SECOND).degrees == pytest.approx(17.776, abs=1e-3)
    found = stats.paired(FIRST, SECOND)
    assert found.p == pytest.approx(0.002833, abs=1e-6)
    assert found.difference == pytest.approx(-1.58)
    assert found.interval == pytest.approx((-2.4598858, -0.7001142), abs=1e-6)
    assert str(found) == f"{found}" == "-1.58 [-2.46, -0.70], P = 0.00283"
    assert f"{found:.1f}" == "-1.6 [-2.5, -0.7]"


def test_bootstrap_covers_the_mean_about_as_often_as_it_says():
    random = np.random.RandomState(0)
    inside = []
    for _ in range(200):
        low, high = stats.summary(random.randn(30)).bootstrap_interval
        inside.append(low <= 0 <= high)
    assert 0.88 <= np.mean(inside) <= 0.99


def test_bootstrap_is_the_same_each_time():
    assert stats.summary(FIRST) == stats.summary(FIRST)


@pytest.mark.parametrize(("test", "degrees"), [(stats.welch, 4), (stats.paired, 2)])
def test_runs_without_spread_that_are_the_same(test, degrees):
    same = test((1.0, 1.0, 1.0), (1.0, 1.0, 1.0))
    assert (same.difference, same.interval, same.p, same.degrees) == (0.0, (0.0, 0.0), 1.0, degrees)


@pytest.mark.parametrize(("test", "few", "many"), [(stats.welch, 2 / 20, 2 / 252), (stats.paired, 2 / 8, 2 / 64)])
def test_runs_without_spread_that_differ_are_judged_by_the_exact_test(test, few, many):
    """Three runs that agree are no proof: the t-test would say P = 0."""
    found = test([2.0] * 3, [1.0] * 3)
    assert (found.difference, found.p, found.interval) == (1.0, few, (-math.inf, math.inf))
    assert f"{found:.2f}" == "+1.00"  # no interval to be read
    n = 5 if test is stats.welch else 6
    found = test([2.0] * n, [1.0] * n)
    assert (found.difference, found.p, found.interval) == (1.0, many, (1.0, 1.0))


def test_pairs_that_differ_by_rounding_alone_have_no_spread():
    first = (0.15, 0.16, 0.14)
    found = stats.paired([value - 0.01 for value in first], first)
    assert found.difference == pytest.approx(-0.01)
    assert (found.p, found.statistic) == (2 / 8, -math.inf)


def test_one_run_has_a_mean_and_no_spread():
    found = stats.summary((5.0,))
    assert found.mean == 5.0
    assert math.isnan(found.std)
    assert str(found) == "5.00 (n = 1)"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: stats.summary(()), "values has 0 runs; this needs at least 1"),
        (lambda: stats.welch((1.0,), (1.0, 2.0)), "first has 1 runs; this needs at least 2"),
        (lambda: stats.paired((1.0, 2.0), (1.0, 2.0, 3.0)), "first has 2 runs and second 3"),
    ],
)
def test_too_few_runs(call, words):
    with pytest.raises(UserError, match=words):
        call()


@pytest.mark.parametrize(("n", "paired"), [(3, False), (5, False), (10, False), (3, True), (10, True)])
def test_what_can_be_detected_is_detected_four_times_in_five(n, paired):
    """By simulation: so many runs whose means differ by just this much."""
    generator = np.random.default_rng(0)
    difference = stats.detectable(0.5, n, paired=paired)
    first, second = generator.normal(0, 0.5, (2, 4000, n))
    if paired:
        p = scipy.stats.ttest_1samp(first + difference, 0, axis=1).pvalue
    else:
        p = scipy.stats.ttest_ind(first + difference, second, axis=1).pvalue
    assert np.mean(p < 0.05) == pytest.approx(0.8, abs=0.02)


def test_one_run_detects_nothing():
    assert stats.detectable(0.5, 1) == math.inf
    assert stats.detectable(0.0, 3) == 0.0


def test_holm_multiplies_the_smallest_by_all_the_next_by_one_less_and_never_decreases():
    assert stats.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert stats.holm([0.5, 0.9]) == [1.0, 1.0]
    assert stats.holm([]) == []
