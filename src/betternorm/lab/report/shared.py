"""What the page and the files have in common: names, colours, how a figure is drawn, where the numbers came from."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from betternorm.display.progress import clock
from betternorm.display.tables import shown
from betternorm.lab.results import Figure, Outcome, Result, Table, Verdict
from betternorm.lab.store import Row

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


def names(results: Sequence[Result]) -> list[str]:
    """One for each result, fit for a file and an anchor: its name, with the scale where a name comes twice."""
    return [f"{result.name}-{result.scale}" if twice else result.name for result, twice in _repeated(results)]


def titles(results: Sequence[Result]) -> list[str]:
    """One for each result, with the scale where an experiment comes twice."""
    return [f"{result.title} ({result.scale})" if twice else result.title for result, twice in _repeated(results)]


def _repeated(results: Sequence[Result]) -> list[tuple[Result, bool]]:
    often = Counter(result.name for result in results)
    return [(result, often[result.name] > 1) for result in results]


def subtitle(result: Result) -> str:
    """Where in the paper, at which scale, from how many trials."""
    count = f"{len(result.rows)} trial{'' if len(result.rows) == 1 else 's'}"
    return " · ".join(part for part in (result.place, f"scale {result.scale}" if result.scale else "", count) if part)


def counts(verdicts: Iterable[Verdict]) -> dict[Outcome, int]:
    """How many claims came to what, in the order of the outcomes."""
    found = Counter(verdict.outcome for verdict in verdicts)
    return {outcome: found[outcome] for outcome in Outcome}


def tally(verdicts: Iterable[Verdict]) -> str:
    """The same in words, ``3 seen, 1 not seen``; empty without claims."""
    return ", ".join(f"{count} {outcome.value}" for outcome, count in counts(verdicts).items() if count)


def categorical(figure: Figure) -> bool:
    """Whether x names things rather than measures them."""
    return figure.kind == "bar" or any(isinstance(x, str) for series in figure.series for x in series.x)


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
    values = [*figure.levels.values(), *(value for series in figure.series for value in series.y)]
    finite = [value for value in values if math.isfinite(value)]
    return not finite or min(finite) <= 0.5 * max(finite)


def numbers(figure: Figure) -> Table:
    """What a figure shows, as a table: a row for every point."""
    bounded = any(series.low is not None for series in figure.series)
    rows = []
    for series in figure.series:
        low, high = series.low or [None] * len(series.x), series.high or [None] * len(series.x)
        for x, y, *interval in zip(series.x, series.y, low, high, strict=True):
            rows.append([series.name, x, y, *(interval if bounded else ())])
    return Table(figure.title, ["series", figure.x_label, figure.y_label, *(["low", "high"] if bounded else [])], rows)


def provenance(rows: Sequence[Row]) -> tuple[dict[str, str], Table]:
    """Where the numbers came from: what is the same for all trials, and a row for each with what is not.

    Configuration, seed, versions, commit, machine, duration and command are told for every trial, and its numbers.
    """
    told = [_settings(row) for row in rows]
    columns = list(dict.fromkeys(name for settings in told for name in settings))
    same = {
        name: told[0][name]
        for name in columns
        if len(rows) > 1 and all(settings.get(name) == told[0].get(name) for settings in told)
    }
    different = [name for name in columns if name not in same]
    results = list(dict.fromkeys(name for row in rows for name, value in row.result.items() if _is_scalar(value)))
    table = Table(
        "Trials",
        ["trial", *different, *results],
        [
            [row.key, *(settings.get(name) for name in different), *(row.result.get(name) for name in results)]
            for row, settings in zip(rows, told, strict=True)
        ],
    )
    return same, table


def _settings(row: Row) -> dict[str, str]:
    source = row.provenance
    machine = dict(source.get("machine") or {})
    versions = source.get("versions") or {}
    command = [str(word) for word in source.get("command") or ()]
    told = {name: _value(value) for name, value in row.config.items()}
    told |= {
        "commit": (source.get("commit") or "")[:12],
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "machine": ", ".join(f"{name} {_value(value)}" for name, value in machine.items() if value),
        "duration": clock(source["duration"]) if "duration" in source else "",
        "run by": shlex.join([Path(command[0]).name, *command[1:]]) if command else "",
    }
    return {name: text for name, text in told.items() if text}


def _value(value: Any) -> str:
    """A setting as one word or a few: ``ghost_size=8`` for a frozen dict, ``1, 1, 1`` for a list."""
    if isinstance(value, list | tuple):
        pairs = all(isinstance(item, list | tuple) and len(item) == 2 for item in value)
        return ", ".join(f"{item[0]}={_value(item[1])}" if pairs else _value(item) for item in value)
    return str(value) if isinstance(value, bool) else shown(value)


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
