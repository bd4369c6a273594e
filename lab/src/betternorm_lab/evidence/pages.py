"""What the pages of Round 3 are made of: tables and SVG figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from betternorm_lab.report.figures import COLORS

RUN = "python -m betternorm_lab.evidence"
PLACES = "--data DATA --weights WEIGHTS --work RUNS"


@dataclass(frozen=True)
class Panel:
    """Points with intervals: ``series`` maps a name to (x, y, low, high) rows; x is a number or a category."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[Any, float, float, float]]]
    log_x: bool = False
    zero_line: bool = False


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]], left: int = 1) -> str:
    """Markdown; the first ``left`` columns are text."""
    rule = ["---"] * left + ["---:"] * (len(headers) - left)
    lines = [headers, rule, *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def draw(path: Path, panels: Sequence[Panel]) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "betternorm"  # the same file from the same numbers
    figure = Figure(figsize=(4.6 * len(panels), 3.4), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        categories = list(dict.fromkeys(row[0] for rows in panel.series.values() for row in rows))
        named = any(isinstance(x, str) for x in categories)
        count = len(panel.series)
        for number, (name, rows) in enumerate(panel.series.items()):
            offset = 0.14 * (number - (count - 1) / 2) if named else 0.0
            x = [categories.index(row[0]) + offset if named else row[0] for row in rows]
            y, low, high = ([row[k] for row in rows] for k in (1, 2, 3))
            errors = [[a - b for a, b in zip(y, low, strict=True)], [b - a for a, b in zip(y, high, strict=True)]]
            color = COLORS[number % len(COLORS)]
            line = "none" if named else "-"
            axis.errorbar(x, y, errors, fmt="o", ls=line, ms=4, lw=1.2, capsize=2, color=color, label=name)
        if named:
            axis.set_xticks(range(len(categories)), categories)
        if panel.log_x:
            axis.set_xscale("symlog", linthresh=0.01)
        if panel.zero_line:
            axis.axhline(0, color="#888888", lw=0.8)
        axis.set_title(panel.title, fontsize=10)
        axis.set_xlabel(panel.x_label)
        axis.set_ylabel(panel.y_label)
        axis.spines[["top", "right"]].set_visible(False)
        if count > 1:
            axis.legend(fontsize=8, frameon=False)
    figure.savefig(path, metadata={"Date": None})
