"""How a claim of the paper is judged: by where the interval of a difference lies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from betternorm_lab import stats
from betternorm_lab.experiments.findings import FinishedRuns, Label
from betternorm_lab.results import Outcome, Verdict

RULE = (
    f"A claim says where a difference lies: above 0, say. It is *seen* where the {stats.CONFIDENCE:.0%} interval of "
    "the difference lies inside, *contradicted* where it lies outside, *no difference beyond the margin* where it lies "
    "within the margin on both sides of 0, and otherwise *underpowered*: so many runs cannot tell. That there is no "
    "difference, or no gain, is claimed with the same margin. Different networks are compared by Welch's t-test, two "
    "readings of the same networks by the paired one, and by an exact test where all runs agree. P values are "
    "two-sided, and given as they are and with Holm's "
    f"correction for the claims of the page. What could have been seen is the difference that as many runs with the "
    f"same spread show with a power of {stats.POWER:.0%}."
)


@dataclass(frozen=True)
class Region:
    """Where a claim says that a difference lies."""

    low: float = -math.inf
    high: float = math.inf


MORE, LESS = Region(low=0.0), Region(high=0.0)


def within(margin: float) -> Region:
    """No difference that matters."""
    return Region(-margin, margin)


def at_most(margin: float) -> Region:
    """No gain that matters; a loss would do as well."""
    return Region(high=margin)


def judge(claim: str, interval: tuple[float, float], claimed: Region, evidence: str, margin: float = 0.0) -> Verdict:
    """The one rule of all experiments, see :data:`RULE`."""
    low, high = interval
    if low > claimed.low and high < claimed.high:
        outcome = Outcome.SEEN
    elif -margin < low <= 0 <= high < margin:
        outcome = Outcome.NO_DIFFERENCE
    elif high <= claimed.low or low >= claimed.high:
        outcome = Outcome.CONTRADICTED
    else:
        outcome = Outcome.UNDERPOWERED
    return Verdict(claim, outcome, evidence)


def compare(
    claim: str,
    first: Sequence[float],
    second: Sequence[float],
    claimed: Region = MORE,
    *,
    paired: bool = False,
    margin: float = 0.0,
) -> Verdict:
    """A verdict on the difference of two arms, first less second."""
    if min(len(first), len(second)) < 2:
        runs = f"there are {len(first)} and {len(second)} runs; it takes two of each"
        return Verdict(claim, Outcome.NOT_RUN, runs)
    found = (stats.paired if paired else stats.welch)(first, second)
    test = "paired t-test" if paired else "Welch's t-test"
    n = min(len(first), len(second))
    shown = stats.detectable(_spread(first, second, paired), n, paired=paired)
    if math.isinf(found.statistic):
        test = "exact test, for the runs agree"
        shown = shown if math.isfinite(found.interval[0]) else math.inf
    form = f".{_places(found.interval)}f"
    verdict = judge(
        claim,
        found.interval,
        claimed,
        f"{stats.summary(first):{form}} against {stats.summary(second):{form}}: difference {found:{form}}, "
        f"P = {found.p:.3g}, {test}; "
        + (f"{shown:.2g} could have been seen" if math.isfinite(shown) else "so few could not have shown any"),
        margin,
    )
    directed = claimed in (MORE, LESS)  # the P value is of no difference, which is what the others claim
    measured = f"{found:{form}} (n = {n})"
    return replace(
        verdict,
        p=found.p if directed else None,
        measured=measured,
        detectable=shown,
        difference=(found.difference, *found.interval),
    )


def differ(claim: str, first: Sequence[float], second: Sequence[float], **how: Any) -> Verdict:
    """A verdict on whether two arms differ, in whichever direction: the intervals are two-sided."""
    above = bool(first and second) and sum(first) / len(first) > sum(second) / len(second)
    return compare(claim, first, second, MORE if above else LESS, **how)


def _places(interval: tuple[float, float]) -> int:
    """Two decimal places, and up to four where the interval is so narrow that two would not show it."""
    width = interval[1] - interval[0]
    return min(max(2, 1 - math.floor(math.log10(width / 2))), 4) if 0 < width < math.inf else 2


def _spread(first: Sequence[float], second: Sequence[float], paired: bool) -> float:
    """The standard deviation of the differences, or within the arms."""
    if paired:
        return stats.summary([a - b for a, b in zip(first, second, strict=True)]).std
    variances = [(stats.summary(arm).std ** 2, len(arm) - 1) for arm in (first, second)]
    return math.sqrt(sum(var * degrees for var, degrees in variances) / sum(degrees for _, degrees in variances))


def gain(claim: str, runs: FinishedRuns, label: Label, metric: str, claimed: Region = MORE) -> Verdict:
    """A verdict on what the best alpha for a metric did to it, in the same networks."""
    after, before = runs.by_seed((label, f"{metric}_own"), (label, metric))
    return compare(claim, after, before, claimed, paired=True, margin=runs.margin(metric))


def certain(claim: str, holds: bool, evidence: str) -> Verdict:
    """A verdict where nothing is random."""
    return Verdict(claim, Outcome.SEEN if holds else Outcome.CONTRADICTED, evidence)


def together(claim: str, parts: Sequence[Verdict]) -> Verdict:
    """A claim that holds where all its parts do."""
    outcomes = {part.outcome for part in parts}
    worst = (Outcome.CONTRADICTED, Outcome.NO_DIFFERENCE, Outcome.UNDERPOWERED, Outcome.NOT_RUN, Outcome.SEEN)
    outcome = next(one for one in worst if one in outcomes)
    weakest = max((part.detectable or 0.0 for part in parts), default=0.0)
    return Verdict(claim, outcome, "; ".join(part.evidence for part in parts), detectable=weakest)


def corrected(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The same verdicts, with Holm's P value in the evidence of every claim that has a P value of its own."""
    tested = [number for number, verdict in enumerate(verdicts) if verdict.p is not None]
    found = list(verdicts)
    for number, p in zip(tested, stats.holm([verdicts[number].p or 0.0 for number in tested]), strict=True):
        found[number] = replace(verdicts[number], evidence=f"{verdicts[number].evidence}; Holm's P = {p:.3g}")
    return found
