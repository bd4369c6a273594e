"""What an experiment comes to: tables, figures and a verdict on each claim, described once and drawn in many ways.

Experiments make these from rows; the report turns them into HTML, PNG, SVG, Markdown and CSV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from betternorm_lab.store import Row


class Outcome(str, Enum):
    """What a claim of the paper came to at the scale that was run."""

    SEEN = "seen"
    CONTRADICTED = "contradicted"
    NO_DIFFERENCE = "no difference beyond the margin"
    UNDERPOWERED = "underpowered"
    NOT_RUN = "not run yet"


@dataclass(frozen=True)
class Verdict:
    """A claim, what came of it, and the statistics that say so.

    ``p`` is the P value of there being no difference, where the claim is one of a difference; ``difference`` is its
    mean and the ends of its interval, ``measured`` the same in words with the number of runs, and ``detectable`` what
    so many runs would have shown.
    """

    claim: str
    outcome: Outcome
    evidence: str
    p: float | None = None
    measured: str = ""
    detectable: float | None = None
    difference: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class Table:
    """``rows`` hold text and numbers; a measured cell is text such as "45.2 ± 0.4 (n = 3)" or a number."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass(frozen=True)
class Series:
    """One curve or one set of bars. ``low`` and ``high`` bound an interval around y; ``x`` may be text for bars."""

    name: str
    x: Sequence[float | str]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclass(frozen=True)
class Figure:
    """A chart. ``levels`` are horizontal reference lines by name, such as the paper's bound.

    ``slider=True`` says that x is a setting, such as alpha, along which a reader may want to read off every series.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    kind: str = "line"  # or "bar", or "point": all series of a name on one line
    log_x: bool = False
    levels: dict[str, float] = field(default_factory=dict)
    slider: bool = False


@dataclass(frozen=True)
class Result:
    """All that one experiment shows at one scale."""

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
