"""How a claim of the paper is judged: by where the interval of a difference lies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from betternorm.lab import stats
from betternorm.lab.experiments.findings import FinishedRuns, Label
from betternorm.lab.results import Outcome, Verdict

RULE = (
    f"A claim says where a difference lies: above 0, say. It is *seen* where the {stats.CONFIDENCE:.0%} interval of "
    "the difference lies inside, *not seen* where it lies outside, and *not decided* where it does both. Different "
    "networks are compared by Welch's t-test, two readings of the same networks by the paired one; P values are "
    "two-sided and not corrected for the number of claims."
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


def judge(claim: str, interval: tuple[float, float], claimed: Region, evidence: str) -> Verdict:
    """The one rule of all experiments, see :data:`RULE`."""
    low, high = interval
    if low > claimed.low and high < claimed.high:
        outcome = Outcome.SEEN
    elif high <= claimed.low or low >= claimed.high:
        outcome = Outcome.NOT_SEEN
    else:
        outcome = Outcome.UNDECIDED
    return Verdict(claim, outcome, evidence)


def compare(
    claim: str,
    first: Sequence[float],
    second: Sequence[float],
    claimed: Region = MORE,
    *,
    paired: bool = False,
) -> Verdict:
    """A verdict on the difference of two arms, first less second."""
    if min(len(first), len(second)) < 2:
        return Verdict(claim, Outcome.UNDECIDED, f"there are {len(first)} and {len(second)} runs; it takes two of each")
    found = (stats.paired if paired else stats.welch)(first, second)
    test = "paired t-test" if paired else "Welch's t-test"
    means = f"{stats.summary(first)} against {stats.summary(second)}"
    return judge(claim, found.interval, claimed, f"{means}: difference {found}, {test}")


def gain(claim: str, runs: FinishedRuns, label: Label, metric: str, claimed: Region = MORE) -> Verdict:
    """A verdict on what tuning alpha did to a metric in the same networks."""
    return compare(claim, runs.numbers(label, f"{metric}_tuned"), runs.numbers(label, metric), claimed, paired=True)


def certain(claim: str, holds: bool, evidence: str) -> Verdict:
    """A verdict where nothing is random."""
    return Verdict(claim, Outcome.SEEN if holds else Outcome.NOT_SEEN, evidence)


def together(claim: str, parts: Sequence[Verdict]) -> Verdict:
    """A claim that holds where all its parts do."""
    outcomes = {part.outcome for part in parts}
    if outcomes == {Outcome.SEEN}:
        outcome = Outcome.SEEN
    else:
        outcome = Outcome.NOT_SEEN if Outcome.NOT_SEEN in outcomes else Outcome.UNDECIDED
    return Verdict(claim, outcome, "; ".join(part.evidence for part in parts))
