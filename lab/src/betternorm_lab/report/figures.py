"""Figures as small SVG files, drawn by matplotlib, with text as text."""

from __future__ import annotations

import io
import math
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from betternorm.display.tables import shown
from betternorm_lab.results import Figure
from betternorm_lab.store import write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

# By series, in order, with a contrast of at least 4.5 on white.
COLORS = ("#1f62a8", "#b34e00", "#1f7a4d", "#a12d78", "#6248b5", "#0b7480", "#7b5130", "#56606b")
DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1.3, 2)), (0, (6, 2, 1.3, 2)), (0, (8, 2.6)))
MARKERS = "osD^v"
INTERVAL: dict[str, Any] = {"fmt": "none", "capsize": 3, "elinewidth": 1.2}
GREY = "#444444"


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as SVG; the same figure gives the same bytes."""
    return write_text(path, svg(figure))


def svg(figure: Figure) -> str:
    """A figure as the text of an SVG file."""
    return to_svg(draw(figure))


def to_svg(canvas: Canvas) -> str:
    """A matplotlib figure as SVG: text as text, without metadata, coordinates to a tenth of a point."""
    from matplotlib import rc_context

    drawn = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "betternorm", "font.family": "sans-serif"}):
        canvas.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    text = re.sub(r"\s*<metadata>.*?</metadata>|\s*<!--.*?-->", "", drawn.getvalue(), flags=re.DOTALL)
    text = re.sub(r"'DejaVu Sans',[^;\"]*sans-serif", "sans-serif", text)
    generated = r"axes|figure|patch|line2d|text|xtick|ytick|legend|matplotlib|[A-Z]"  # ids that nothing refers to
    text = re.sub(rf' (?:id="(?:{generated})[^"]*"|transform="rotate\(-0 [^"]*")', "", text)
    coordinates = r' (?:d|x|y|points|transform)="[^"]*"'
    text = re.sub(coordinates, lambda attribute: _rounded(attribute[0]).replace("\n", ""), text)
    return re.sub(r"^ +", "", text, flags=re.MULTILINE)


def _rounded(text: str) -> str:
    return re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.1f}", text)


def draw(figure: Figure) -> Canvas:
    """A figure as a matplotlib figure."""
    from matplotlib.figure import Figure as Canvas

    rows = len(positions(figure)) * (1 if figure.kind == "point" else len(figure.series)) if categorical(figure) else 0
    height = max(2.4, 0.9 + 0.32 * rows) if categorical(figure) else 4.2
    canvas = Canvas(figsize=(7.2, height), layout="constrained")
    axes = canvas.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="x" if categorical(figure) else "y", color="#e3e3e3", linewidth=0.8)
    _draw_categories(axes, figure) if categorical(figure) else _draw_lines(axes, figure)
    axes.set_title(figure.title, loc="left", fontsize=11)
    if len(figure.series) + len(figure.levels) > 1:  # below the axes, where it hides no point
        canvas.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return canvas


def categorical(figure: Figure) -> bool:
    """Whether x is a category and not a number."""
    return figure.kind in ("bar", "point") or any(isinstance(x, str) for series in figure.series for x in series.x)


def positions(figure: Figure) -> list[Any]:
    """All x values: numbers in ascending order, categories in order of appearance."""
    values = dict.fromkeys(x for series in figure.series for x in series.x)
    return list(map(str, values)) if categorical(figure) else sorted(map(float, values))


def starts_at_zero(figure: Figure) -> bool:
    """Whether categories are drawn as bars from zero, or as points with intervals on a truncated axis.

    Accuracies that are close together would be bars of equal length; points show their differences.
    """
    if figure.kind == "point":
        return False
    values = [*figure.levels.values(), *(value for series in figure.series for value in series.y)]
    finite = [value for value in values if math.isfinite(value)]
    return not finite or min(finite) <= 0.5 * max(finite)


def _draw_lines(axes: Axes, figure: Figure) -> None:
    from matplotlib.ticker import NullLocator

    places = positions(figure)
    for number, series in enumerate(figure.series):
        style = {"color": COLORS[number % len(COLORS)], "linestyle": DASHES[number % len(DASHES)]}
        axes.plot(series.x, series.y, **style, marker="o", markersize=3.5, label=series.name)
        if series.low is not None and series.high is not None:
            axes.fill_between(series.x, series.low, series.high, color=style["color"], alpha=0.15, linewidth=0)
    for name, level in figure.levels.items():
        axes.axhline(level, color=GREY, linewidth=1, linestyle=":", label=name)
    if figure.log_x:
        positive = [x for x in places if x > 0]
        if len(positive) == len(places):
            axes.set_xscale("log")
        elif positive:  # alpha = 0 has no place on a logarithmic axis
            axes.set_xscale("symlog", linthresh=min(positive))
        if len(places) <= 9:
            axes.set_xticks(places, list(map(shown, places)))
            axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(figure.x_label)
    axes.set_ylabel(figure.y_label)


def _draw_categories(axes: Axes, figure: Figure) -> None:
    places = positions(figure)
    together = figure.kind == "point"
    thickness = 0.0 if together else 0.8 / max(1, len(figure.series))
    from_zero = starts_at_zero(figure)
    for number, series in enumerate(figure.series):
        color = COLORS[number % len(COLORS)]
        rows = [places.index(str(x)) + (number - (len(figure.series) - 1) / 2) * thickness for x in series.x]
        if from_zero:
            axes.barh(rows, series.y, height=0.9 * thickness, color=color, label=series.name)
        else:
            marker = MARKERS[number % len(MARKERS)] if together else "o"
            hollow: dict[str, Any] = {"fillstyle": "none", "markersize": 8} if together and series.low is None else {}
            axes.plot(series.y, rows, marker, color=color, label=series.name, **hollow)
        if series.low is not None and series.high is not None:
            below = [y - low for y, low in zip(series.y, series.low, strict=True)]
            above = [high - y for y, high in zip(series.y, series.high, strict=True)]
            axes.errorbar(series.y, rows, xerr=[below, above], ecolor="#222222" if from_zero else color, **INTERVAL)
    for name, level in figure.levels.items():
        axes.axvline(level, color=GREY, linewidth=1, linestyle=":", label=name)
    axes.set_yticks(range(len(places)), [textwrap.fill(place, 56) for place in places] if together else places)
    if together:  # category names are sentences
        axes.tick_params(axis="y", labelsize=8)
    axes.set_ylim(len(places) - 0.5, -0.5)  # the first one on top
    axes.set_xlabel(figure.y_label)
    axes.set_ylabel(figure.x_label)
