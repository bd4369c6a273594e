"""Whether a gain is real: the paired bootstrap and McNemar's test, on numbers kept for every example."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from betternorm.weighing.metrics import Metric

Average = Callable[[Tensor, Tensor], Tensor]  # of values and counts, over the last dimension

RESAMPLES = 2000
_NUMBERS_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Gain:
    """A metric on data that did not choose alpha: without, with, and an interval for the difference."""

    before: float
    after: float
    low: float
    high: float
    p_value: float | None = None  # of McNemar's test, for top1

    @property
    def difference(self) -> float:
        return self.after - self.before

    def is_certain(self, metric: Metric) -> bool:
        """Whether the interval leaves out zero, on the good side."""
        return self.low > 0 if metric.higher_is_better else self.high < 0


def gain_between(
    metric: Metric, before: Tensor, after: Tensor, counts: Tensor, confidence: float = 0.95, seed: int = 0
) -> Gain:
    """What a metric gains, from its numbers for every example before and after."""
    low, high = paired_bootstrap(before, after, counts, metric.average, confidence, seed=seed)
    return Gain(
        before=float(metric.average(before, counts)),
        after=float(metric.average(after, counts)),
        low=low,
        high=high,
        p_value=mcnemar(before, after) if metric.name == "top1" else None,
    )


def paired_bootstrap(
    before: Tensor,
    after: Tensor,
    counts: Tensor,
    average: Average,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[float, float]:
    """An interval for ``average(after) - average(before)``: percentiles over examples drawn with replacement.

    An example that is drawn counts in both, which takes out what makes examples easy or hard.
    """
    generator = torch.Generator().manual_seed(seed)
    units = len(counts)
    at_once = max(1, _NUMBERS_AT_ONCE // units)
    differences = []
    for start in range(0, resamples, at_once):
        drawn = torch.randint(units, (min(at_once, resamples - start), units), generator=generator)
        differences.append(average(after[drawn], counts[drawn]) - average(before[drawn], counts[drawn]))
    tail = (1 - confidence) / 2
    low, high = torch.cat(differences).quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high


def mcnemar(before: Tensor, after: Tensor) -> float:
    """The exact two-sided p-value of McNemar's test on answers that are right (true) or wrong.

    Only examples on which the two differ speak: were neither better, each would be a toss of a coin.
    """
    gained = int((after.bool() & ~before.bool()).sum())
    lost = int((before.bool() & ~after.bool()).sum())
    tosses = gained + lost
    logs = [
        math.lgamma(tosses + 1) - math.lgamma(k + 1) - math.lgamma(tosses - k + 1) - tosses * math.log(2)
        for k in range(min(gained, lost) + 1)
    ]
    return min(1.0, 2 * math.fsum(map(math.exp, logs)))
