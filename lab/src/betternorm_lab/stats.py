"""Mean, standard deviation and tests over the runs of an experiment, as in section 3.3 of the paper."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from betternorm.errors import UserError

CONFIDENCE = 0.95
POWER = 0.8
RESAMPLES = 9999
ROUNDING = 1e-14  # relative; smaller differences are rounding errors


@dataclass(frozen=True)
class Summary:
    """Summary of runs. ``std`` is the sample standard deviation (n - 1); for one run, it and the intervals are NaN."""

    mean: float
    std: float
    n: int
    t_interval: tuple[float, float]
    bootstrap_interval: tuple[float, float]

    def __str__(self) -> str:
        return f"{self:.2f}"

    def __format__(self, spec: str) -> str:
        """``f"{summary:.4f}"`` formats the numbers with four decimal places."""
        if not spec:
            return str(self)
        spread = f" ± {self.std:{spec}}" if self.n > 1 else ""
        return f"{self.mean:{spec}}{spread} (n = {self.n})"


@dataclass(frozen=True)
class Comparison:
    """A difference of means (first minus second), its interval, and the P value of no difference."""

    difference: float
    interval: tuple[float, float]
    statistic: float
    degrees: float
    p: float

    def __str__(self) -> str:
        return f"{self:.2f}, P = {self.p:.3g}"

    def __format__(self, spec: str) -> str:
        """``f"{comparison:.4f}"`` formats the difference and its interval, if any, with four decimal places."""
        if not spec:
            return str(self)
        if math.isinf(self.interval[0]):
            return f"{self.difference:+{spec}}"
        return f"{self.difference:+{spec}} [{self.interval[0]:{spec}}, {self.interval[1]:{spec}}]"


def summary(values: Sequence[float], confidence: float = CONFIDENCE) -> Summary:
    """Mean, standard deviation, n, and two intervals of the mean: Student's t and a seeded bootstrap."""
    sample = _sample("values", values, at_least=1)
    mean, n = float(sample.mean()), len(sample)
    if n == 1:
        return Summary(mean, math.nan, 1, (math.nan, math.nan), (math.nan, math.nan))
    std = float(sample.std(ddof=1))
    if std == 0:
        return Summary(mean, 0.0, n, (mean, mean), (mean, mean))
    t = stats.t.interval(confidence, n - 1, loc=mean, scale=std / math.sqrt(n))
    resampled = stats.bootstrap(
        (sample,),
        np.mean,
        confidence_level=confidence,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Summary(mean, std, n, (float(t[0]), float(t[1])), (float(resampled.low), float(resampled.high)))


def welch(first: Sequence[float], second: Sequence[float], confidence: float = CONFIDENCE) -> Comparison:
    """Two-sided test for independent runs, without assuming equal variances."""
    a, b = _sample("first", first, at_least=2), _sample("second", second, at_least=2)
    difference = float(a.mean() - b.mean())
    if max(np.ptp(a), np.ptp(b)) <= ROUNDING * max(np.abs(a).max(), np.abs(b).max()):
        return _without_spread(difference, len(a) + len(b) - 2, math.comb(len(a) + len(b), len(a)), confidence)
    with warnings.catch_warnings():  # one of the two may be constant
        warnings.filterwarnings("ignore", "Precision loss", RuntimeWarning)
        found = stats.ttest_ind(a, b, equal_var=False)
    return _comparison(difference, found, confidence)


def paired(first: Sequence[float], second: Sequence[float], confidence: float = CONFIDENCE) -> Comparison:
    """Two-sided test for paired runs, such as two evaluations of the same model."""
    a, b = _sample("first", first, at_least=2), _sample("second", second, at_least=2)
    if len(a) != len(b):
        raise UserError(f"first has {len(a)} runs and second {len(b)}; a paired test needs equal numbers")
    difference = float((a - b).mean())
    if np.ptp(a - b) <= ROUNDING * max(np.abs(a).max(), np.abs(b).max()):
        return _without_spread(difference, len(a) - 1, 2 ** len(a), confidence)
    return _comparison(difference, stats.ttest_rel(a, b), confidence)


def detectable(spread: float, n: int, *, paired: bool = False, power: float = POWER) -> float:
    """The minimum detectable effect of n runs per arm at this power and :data:`CONFIDENCE`, two-sided.

    ``spread`` is the standard deviation between the runs of an arm or, if ``paired``, of the differences.
    """
    if n < 2:
        return math.inf
    degrees, error = (n - 1, spread / math.sqrt(n)) if paired else (2 * n - 2, spread * math.sqrt(2 / n))
    critical = float(stats.t.ppf((1 + CONFIDENCE) / 2, degrees))

    def power_at(shift: float) -> float:
        """Without the other tail, which is negligible at high power."""
        return float(stats.nct.sf(critical, degrees, shift))

    low, high = 0.0, 4 * critical  # in standard errors
    while high - low > 1e-6 * critical:
        middle = (low + high) / 2
        low, high = (middle, high) if power_at(middle) < power else (low, middle)
    return high * error


def holm(p_values: Sequence[float]) -> list[float]:
    """P values with Holm's correction, in the same order."""
    order = sorted(range(len(p_values)), key=lambda k: p_values[k])
    corrected, worst = [0.0] * len(p_values), 0.0
    for rank, k in enumerate(order):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[k]))
        corrected[k] = worst
    return corrected


def _comparison(difference: float, found: Any, confidence: float) -> Comparison:
    interval = found.confidence_interval(confidence)
    bounds = float(interval.low), float(interval.high)
    return Comparison(difference, bounds, float(found.statistic), float(found.df), float(found.pvalue))


def _without_spread(difference: float, degrees: float, arrangements: int, confidence: float) -> Comparison:
    """An exact test if all runs agree, as on a coarse grid, where the t statistic is 0/0 or infinite.

    Of the ``arrangements`` of the runs, by arm or by sign, two have a difference as large.
    """
    if difference == 0:
        return Comparison(0.0, (0.0, 0.0), 0.0, degrees, 1.0)
    p = 2 / arrangements
    bounds = (difference, difference) if p <= 1 - confidence else (-math.inf, math.inf)
    return Comparison(difference, bounds, math.copysign(math.inf, difference), degrees, p)


def _sample(name: str, values: Sequence[float], at_least: int) -> np.ndarray:
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or len(sample) < at_least:
        raise UserError(f"{name} has {sample.size} runs; this needs at least {at_least}")
    return sample
