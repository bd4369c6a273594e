"""The verdict on a claim: from where the interval of a difference lies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from betternorm_lab import stats
from betternorm_lab.experiments.arms import Arm
from betternorm_lab.experiments.findings import FinishedRuns
from betternorm_lab.results import Outcome, Verdict

RULE = (
    f"A claim states where a difference lies, for example above 0. It is *replicated* if the {stats.CONFIDENCE:.0%} "
    "interval of the difference lies in that range, and the *opposite effect* if it lies outside. If the interval lies "
    "within the margin of equivalence, the verdict is *equivalent* if it includes 0, and *significant but negligible* "
    "if not; a claim of equivalence is then replicated. Everything else is *inconclusive*, or "
    "*not tested* if there are no runs or the models are undertrained. Different models are "
    "compared by Welch's t-test, two readings of the same models by the paired t-test, and by an exact test if all "
    "runs agree. P values are two-sided, given with and without Holm's correction for the claims of the page. These "
    "runs are exploratory: the primary claims are on the evidence page. The "
    f"minimum detectable effect is for the measured spread and a power of {stats.POWER:.0%}."
)


@dataclass(frozen=True)
class Region:
    """The range in which a claim says that a difference lies."""

    low: float = -math.inf
    high: float = math.inf


MORE, LESS = Region(low=0.0), Region(high=0.0)


def within(margin: float) -> Region:
    """Equivalence: a difference within the margin."""
    return Region(-margin, margin)


def at_most(margin: float) -> Region:
    """No gain beyond the margin; a loss is allowed."""
    return Region(high=margin)


def judge(
    claim: str, interval: tuple[float, float], claimed: Region, evidence: str, margin: float = 0.0, *, id: str = ""
) -> Verdict:
    """The rule for all experiments, see :data:`RULE`."""
    low, high = interval
    if claimed in (MORE, LESS) and -margin < low and high < margin:
        outcome = Outcome.EQUIVALENT if low <= 0 <= high else Outcome.NEGLIGIBLE
    elif low > claimed.low and high < claimed.high:
        outcome = Outcome.REPLICATED
    elif high <= claimed.low or low >= claimed.high:
        outcome = Outcome.OPPOSITE
    else:
        outcome = Outcome.INCONCLUSIVE
    return Verdict(claim, outcome, evidence, id)


def compare(
    claim: str,
    first: Sequence[float],
    second: Sequence[float],
    claimed: Region = MORE,
    *,
    id: str = "",
    paired: bool = False,
    margin: float = 0.0,
) -> Verdict:
    """A verdict on the difference between two arms, first minus second."""
    if min(len(first), len(second)) < 2:
        return Verdict(claim, Outcome.NOT_TESTED, f"{len(first)} and {len(second)} runs; two of each are needed", id)
    result = (stats.paired if paired else stats.welch)(first, second)
    test = "paired t-test" if paired else "Welch's t-test"
    n = min(len(first), len(second))
    detectable = stats.detectable(_spread(first, second, paired), n, paired=paired)
    if math.isinf(result.statistic):
        test = "exact test, because all runs agree"
        detectable = detectable if math.isfinite(result.interval[0]) else math.inf
    form = f".{_places(result.interval)}f"
    effect = f"{detectable:.2g}" if math.isfinite(detectable) else "infinite with so few runs"
    evidence = (
        f"{stats.summary(first):{form}} against {stats.summary(second):{form}}: difference {result:{form}}, "
        f"P = {result.p:.3g}, {test}; minimum detectable effect {effect}"
    )
    return replace(
        judge(claim, result.interval, claimed, evidence, margin, id=id),
        p=result.p if claimed in (MORE, LESS) else None,  # the null hypothesis of the others is not "no difference"
        measured=f"{result:{form}} (n = {n})",
        detectable=detectable,
        difference=(result.difference, *result.interval),
    )


def differ(claim: str, first: Sequence[float], second: Sequence[float], **options: Any) -> Verdict:
    """A verdict on whether two arms differ, in either direction: the intervals are two-sided."""
    above = bool(first and second) and sum(first) / len(first) > sum(second) / len(second)
    return compare(claim, first, second, MORE if above else LESS, **options)


def _places(interval: tuple[float, float]) -> int:
    """Two decimal places, up to four for narrow intervals."""
    width = interval[1] - interval[0]
    return min(max(2, 1 - math.floor(math.log10(width / 2))), 4) if 0 < width < math.inf else 2


def _spread(first: Sequence[float], second: Sequence[float], paired: bool) -> float:
    """The standard deviation of the differences, or within the arms."""
    if paired:
        return stats.summary([a - b for a, b in zip(first, second, strict=True)]).std
    variances = [(stats.summary(arm).std ** 2, len(arm) - 1) for arm in (first, second)]
    return math.sqrt(sum(var * degrees for var, degrees in variances) / sum(degrees for _, degrees in variances))


def gain(claim: str, runs: FinishedRuns, arm: Arm, metric: str, claimed: Region = MORE, *, id: str = "") -> Verdict:
    """A verdict on what the best alpha for a metric changes in it, for the same models."""
    after, before = runs.by_seed((arm, f"{metric}_own"), (arm, metric))
    return compare(claim, after, before, claimed, id=id, paired=True, margin=runs.margin(metric))


def certain(claim: str, holds: bool, evidence: str, *, id: str = "", sanity: bool = False) -> Verdict:
    """A verdict on something without randomness."""
    return Verdict(claim, Outcome.REPLICATED if holds else Outcome.OPPOSITE, evidence, id, sanity=sanity)


def together(claim: str, parts: Sequence[Verdict], *, id: str = "") -> Verdict:
    """A claim that holds if all its parts do."""
    outcomes = {part.outcome for part in parts}
    worst = (
        Outcome.OPPOSITE,
        Outcome.EQUIVALENT,
        Outcome.NEGLIGIBLE,
        Outcome.INCONCLUSIVE,
        Outcome.NOT_TESTED,
        Outcome.REPLICATED,
    )
    outcome = next(one for one in worst if one in outcomes)
    weakest = max((part.detectable or 0.0 for part in parts), default=0.0)
    return Verdict(claim, outcome, "; ".join(part.evidence for part in parts), id, detectable=weakest)


def not_tested(verdicts: Sequence[Verdict], reason: str) -> list[Verdict]:
    """The same claims as not tested, such as those of a setting in which the models did not train."""
    return [
        replace(one, outcome=Outcome.NOT_TESTED, evidence=f"{reason}: {one.evidence}", p=None, difference=None)
        for one in verdicts
    ]


def corrected(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The same verdicts, with Holm's P value in the evidence of every claim that has a P value."""
    tested = [number for number, verdict in enumerate(verdicts) if verdict.p is not None]
    result = list(verdicts)
    for number, p in zip(tested, stats.holm([verdicts[number].p or 0.0 for number in tested]), strict=True):
        result[number] = replace(verdicts[number], evidence=f"{verdicts[number].evidence}; Holm's P = {p:.3g}")
    return result
