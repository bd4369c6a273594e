"""The result of an experiment: tables, figures and a verdict on each claim, independent of how they are rendered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from betternorm_lab.store import Row


class Outcome(str, Enum):
    """The verdict on a claim; :data:`betternorm_lab.experiments.claims.RULE` defines the terms."""

    REPLICATED = "replicated"
    OPPOSITE = "opposite effect"
    NEGLIGIBLE = "significant but negligible"
    EQUIVALENT = "equivalent"
    INCONCLUSIVE = "inconclusive"
    NOT_TESTED = "not tested"


@dataclass(frozen=True)
class Verdict:
    """A claim, its outcome, and the statistics behind it.

    Args:
        claim: the claim in words.
        evidence: the statistics in words.
        id: the name of the claim within its experiment and scale; never shown, and never changed.
        p: the P value of no difference, for claims of a difference.
        measured: the difference with its interval and n, as text.
        detectable: the minimum detectable effect (80 % power).
        difference: the mean difference and the ends of its interval.
        sanity: whether the claim is expected to hold almost by construction.
    """

    claim: str
    outcome: Outcome
    evidence: str
    id: str = ""
    p: float | None = None
    measured: str = ""
    detectable: float | None = None
    difference: tuple[float, float, float] | None = None
    sanity: bool = False


@dataclass(frozen=True)
class Table:
    """``rows`` contain text and numbers; a measured cell is text such as "45.2 ± 0.4 (n = 3)" or a number."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass(frozen=True)
class Series:
    """A curve or a set of bars. ``low`` and ``high`` bound an interval around y; ``x`` may be text for bars."""

    name: str
    x: Sequence[float | str]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclass(frozen=True)
class Figure:
    """A chart. ``levels`` are reference lines by name, such as the paper's bound."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    kind: str = "line"  # or "bar", or "point": all series of a category on one line
    log_x: bool = False
    levels: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """The result of one experiment at one scale."""

    name: str
    title: str
    place: str  # in the paper, such as "Figure 3, section 3.2"
    scale: str
    command: str
    tables: Sequence[Table]
    figures: Sequence[Figure]
    verdicts: Sequence[Verdict]
    rows: Sequence[Row]
    notes: str = ""
