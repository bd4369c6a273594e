"""How a figure is drawn, on the page and in files alike: colours, dashes, positions, where bars begin."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from betternorm_lab.results import Figure, Table

# Of the series of a figure, in order: on a light and on a dark ground, with a contrast of at least 4.5 on each.
COLOURS = (
    ("#1f62a8", "#7db3f0"),
    ("#b34e00", "#f5a65b"),
    ("#1f7a4d", "#6fca98"),
    ("#a12d78", "#ec8cc6"),
    ("#6248b5", "#b8a3f5"),
    ("#0b7480", "#5cc9d4"),
    ("#7b5130", "#d6ab84"),
    ("#56606b", "#b0bac5"),
)
# A second sign besides the colour; with eight colours and five dashes, forty series before two look alike.
DASHES = ("", "6 3", "2 3", "9 3 2 3", "12 4")


def categorical(figure: Figure) -> bool:
    """Whether x names things rather than measures them."""
    return figure.kind in ("bar", "point") or any(isinstance(x, str) for series in figure.series for x in series.x)


def positions(figures: Iterable[Figure]) -> list[Any]:
    """Every x that occurs: in order where they are numbers, as they come where they are names."""
    figures = list(figures)
    found = dict.fromkeys(x for figure in figures for series in figure.series for x in series.x)
    return list(map(str, found)) if any(map(categorical, figures)) else sorted(map(float, found))


def starts_at_zero(figure: Figure) -> bool:
    """Whether a categorical figure is drawn with bars from zero, or with points and intervals on a cut axis.

    A bar says its value by its length, so it has to start at zero; where all values lie close together far from zero,
    as accuracies do, bars would look alike and points show the difference without lying.
    """
    if figure.kind == "point":
        return False
    values = [*figure.levels.values(), *(value for series in figure.series for value in series.y)]
    finite = [value for value in values if math.isfinite(value)]
    return not finite or min(finite) <= 0.5 * max(finite)


def numbers(figure: Figure) -> Table:
    """What a figure shows, as a table: a row for every point."""
    bounded = any(series.low is not None for series in figure.series)
    rows = []
    for series in figure.series:
        unknown: list[float | None] = [None] * len(series.x)
        low, high = series.low or unknown, series.high or unknown
        for x, y, *interval in zip(series.x, series.y, low, high, strict=True):
            rows.append([series.name, x, y, *(interval if bounded else ())])
    return Table(figure.title, ["series", figure.x_label, figure.y_label, *(["low", "high"] if bounded else [])], rows)
