"""Gains with confidence intervals, from one number per example, corrected for the choice of alpha."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from betternorm.weighing.metrics import Metric, weighted_mean

Average = Callable[[Tensor, Tensor], Tensor]  # of values and counts, over the last dimension

RESAMPLES = 1000
ENOUGH_TO_JUDGE = 50  # distinct examples, or batches if a metric has one number per batch
_NUMBERS_AT_ONCE = 1 << 23


@dataclass(frozen=True)
class Gain:
    """A metric on held-out data, before and after, with a confidence interval for the difference."""

    before: float
    after: float
    low: float
    high: float
    p_value: float | None = None  # of McNemar's test, for top1 at alphas that were not chosen on this data

    @property
    def difference(self) -> float:
        return self.after - self.before

    def is_certain(self, metric: Metric) -> bool:
        """Whether the interval excludes zero, on the side of an improvement."""
        return self.low > 0 if metric.higher_is_better else self.high < 0

    def is_certain_loss(self, metric: Metric) -> bool:
        """Whether the interval excludes zero, on the side of a loss."""
        return self.high < 0 if metric.higher_is_better else self.low > 0


def gain_between(
    metric: Metric,
    before: Tensor,
    after: Tensor,
    counts: Tensor,
    units: Tensor | None = None,
    tried: Sequence[Tensor] = (),
    confidence: float = 0.95,
    seed: int = 0,
) -> Gain:
    """The gain in a metric, from one number per example before and after.

    Args:
        units: the example each number belongs to: copies of an example are resampled together, because they are no
            additional evidence. None if all are different.
        tried: the numbers at all alphas that were compared by this metric to choose this one. The interval is corrected
            for the choice.
    """
    units = torch.arange(len(counts)) if units is None else torch.unique(units, return_inverse=True)[1]
    alone = bool(len(units) == int(units.max()) + 1)
    sign = 1 if metric.higher_is_better else -1
    interval = _of_means if metric.average is weighted_mean else _of_any
    below, above = interval(
        metric.average, before, torch.stack([after, *tried]), counts, units, sign, (1 + confidence) / 2, seed
    )
    difference = float(metric.average(after, counts) - metric.average(before, counts))
    low, high = (difference - below, difference + above) if sign > 0 else (difference - above, difference + below)
    return Gain(
        before=float(metric.average(before, counts)),
        after=float(metric.average(after, counts)),
        low=low,
        high=high,
        p_value=mcnemar(before, after) if metric.name == "top1" and alone and not tried else None,
    )


def _of_means(
    average: Average, before: Tensor, after: Tensor, counts: Tensor, units: Tensor, sign: int, level: float, seed: int
) -> tuple[float, float]:
    """The two half-widths of the interval for a difference of means: on the side of a loss, and of a gain.

    The larger of two critical values of Student's t is used. Flipping the signs of examples at random is exact when few
    predictions change; resampling examples with replacement (the bootstrap-t) accounts for skewed losses. On the side
    of a loss, the critical value is that of the maximum t over all alphas tried (Westfall and Young).
    """
    total = int(units.max()) + 1
    weights = torch.zeros(total, dtype=torch.float64).index_add_(0, units, counts)
    sums = torch.zeros(total, len(after), dtype=torch.float64)
    sums.index_add_(0, units, (sign * (after - before) * counts).nan_to_num(0, 0, 0).T)
    centered = sums - weights[:, None] * (sums.sum(0) / weights.sum())
    if total < 2:
        return math.inf, math.inf
    flipped, drawn = [], []
    generator = torch.Generator().manual_seed(seed)
    at_once = max(1, _NUMBERS_AT_ONCE // total)
    for start in range(0, RESAMPLES, at_once):
        size = (min(at_once, RESAMPLES - start), total)
        signs = torch.randint(2, size, generator=generator, dtype=torch.float64).mul_(2).sub_(1)
        flipped.append(_student(signs @ sums, sums.square().sum(0).expand(size[0], -1), total))
        times = torch.zeros(size, dtype=torch.float64)
        rows = torch.randint(total, size, generator=generator)
        times.scatter_add_(1, rows, torch.ones(size, dtype=torch.float64))
        drawn.append(_student(times @ centered, times @ centered.square(), total))
    turned, resampled = torch.cat(flipped), torch.cat(drawn)
    of_loss = max(_quantile(t.amax(1), level) for t in (turned, resampled))
    of_gain = max(_quantile(-t[:, 0], level) for t in (turned, resampled))
    error = float((centered[:, 0].square().sum() * total / (total - 1)).sqrt() / weights.sum())
    return of_loss * error, of_gain * error


def _student(sums: Tensor, squares: Tensor, count: int) -> Tensor:
    """Student's t of samples with these sums and sums of squares; 0 for constant samples."""
    variance = (squares - sums.square() / count) * count / (count - 1)
    return torch.where(variance > 1e-12 * squares, sums / variance.clamp(min=1e-300).sqrt(), 0.0)


def _of_any(
    average: Average, before: Tensor, after: Tensor, counts: Tensor, units: Tensor, sign: int, level: float, seed: int
) -> tuple[float, float]:
    """The same for metrics that are not means, by the bootstrap over examples."""
    total = int(units.max()) + 1
    if total < 2:
        return math.inf, math.inf
    generator = torch.Generator().manual_seed(seed)
    at_once = max(1, _NUMBERS_AT_ONCE // len(units))
    samples = []
    for start in range(0, RESAMPLES, at_once):
        size = (min(at_once, RESAMPLES - start), total)
        times = torch.zeros(size, dtype=torch.float64)
        rows = torch.randint(total, size, generator=generator)
        times.scatter_add_(1, rows, torch.ones(size, dtype=torch.float64))
        drawn = times[:, units] * counts
        was = average(before.expand(size[0], -1), drawn)
        samples.append(torch.stack([sign * (average(now.expand(size[0], -1), drawn) - was) for now in after], 1))
    differences = torch.cat(samples)
    spread = differences.std(0) * math.sqrt(total / (total - 1))
    apart = torch.where(spread > 0, (differences - differences.mean(0)) / spread, 0.0)
    error = float(spread[0])
    return _quantile(apart.amax(1), level) * error, _quantile(-apart[:, 0], level) * error


def _quantile(values: Tensor, level: float) -> float:
    return float(values.quantile(level, interpolation="higher"))


def mcnemar(before: Tensor, after: Tensor) -> float:
    """The exact two-sided p-value of McNemar's test on predictions that are correct or not.

    Only examples on which the two differ count: under the null hypothesis each of them is a fair coin toss.
    """
    gained = int((after.bool() & ~before.bool()).sum())
    lost = int((before.bool() & ~after.bool()).sum())
    tosses = gained + lost
    logs = [
        math.lgamma(tosses + 1) - math.lgamma(k + 1) - math.lgamma(tosses - k + 1) - tosses * math.log(2)
        for k in range(min(gained, lost) + 1)
    ]
    return min(1.0, 2 * math.fsum(map(math.exp, logs)))
