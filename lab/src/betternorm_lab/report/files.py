"""Results as files: a Markdown page for each experiment with its figures as PNG and SVG, its tables and rows as CSV."""

from __future__ import annotations

import csv
import os
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from betternorm.display.tables import is_number, shown
from betternorm_lab.report import charts, labels, provenance
from betternorm_lab.results import Figure, Result, Table
from betternorm_lab.store import atomic, export, make_folder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

MARKS = "osD^v"  # of series on one line, which colour alone would not tell apart
INTERVAL: dict[str, Any] = {"fmt": "none", "capsize": 3, "elinewidth": 1.2}


def write(results: Sequence[Result], folder: str | os.PathLike[str]) -> list[Path]:
    """Write everything, and return the paths, ``index.md`` first.

    For an experiment NAME there are ``NAME.md`` and a folder ``NAME`` with ``figure-1.png``, ``figure-1.svg``,
    ``table-1.csv`` ... and ``rows.csv``, the raw rows. The same results give the same bytes.
    """
    folder = Path(folder)
    make_folder(folder)
    written = [_text(folder / "index.md", _index(results))]
    for name, title, result in zip(labels.names(results), labels.titles(results), results, strict=True):
        own = folder / name
        make_folder(own)
        written.append(_text(folder / f"{name}.md", markdown(replace(result, title=title), name)))
        for number, figure in enumerate(result.figures, 1):
            written += save(draw(figure), own / f"figure-{number}")
        for number, table in enumerate(result.tables, 1):
            written.append(_csv(own / f"table-{number}.csv", table))
        if result.rows:
            written.append(export(result.rows, own / "rows.csv"))
        for stale in {*own.glob("figure-*"), *own.glob("table-*"), *own.glob("rows.csv")} - set(written):
            stale.unlink()  # of an earlier writing, which had more
    return written


def markdown(result: Result, name: str) -> str:
    """The page of an experiment; ``name`` is that of the folder beside it."""
    notes = "\n\n".join(map(_no_markup, result.notes.split("\n\n")))
    parts = [f"# {_no_markup(result.title)}", f"*{labels.subtitle(result)}*", notes]
    if result.verdicts:
        claims = [[verdict.claim, f"**{verdict.outcome.value}**", verdict.evidence] for verdict in result.verdicts]
        parts += ["## Claims", markdown_table(["claim", "outcome", "evidence"], claims)]
    for number, figure in enumerate(result.figures, 1):
        path = f"{name}/figure-{number}"
        title = _no_markup(figure.title)
        parts += [f"## {title}", f"![{title}]({path}.png)", f"The same as [SVG]({path}.svg)."]
    for number, table in enumerate(result.tables, 1):
        parts += [f"## {_no_markup(table.title)}", markdown_table(table.headers, table.rows)]
        parts.append(f"The same as [CSV]({name}/table-{number}.csv).")
    parts += ["## Provenance", f"```sh\n{result.command}\n```"]
    if result.rows:
        same, _ = provenance.settings_of(result.rows)
        parts.append(f"Every trial, with its settings and all it measured: [rows]({name}/rows.csv).")
        if same:
            parts += ["The same for all trials:", markdown_table(["setting", "value"], same.items())]
    return "\n\n".join(part for part in parts if part) + "\n"


def draw(figure: Figure) -> Canvas:
    """A figure by matplotlib."""
    from matplotlib.figure import Figure as Canvas

    categorical = charts.categorical(figure)
    lines = 1 if figure.kind == "point" else len(figure.series)
    rows = len(charts.positions([figure])) * lines if categorical else 0
    canvas = Canvas(figsize=(7.2, max(2.4, 0.9 + 0.32 * rows) if categorical else 4.2), layout="constrained")
    axes = canvas.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="x" if categorical else "y", color="#e3e3e3", linewidth=0.8)
    _bars(axes, figure) if categorical else _lines(axes, figure)
    axes.set_title(figure.title, loc="left", fontsize=11)
    # Below the axes, so that it never hides a point.
    if len(figure.series) + len(figure.levels) > 1:
        canvas.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return canvas


def save(canvas: Canvas, stem: Path) -> list[Path]:
    """Write a drawing as ``stem.png`` and ``stem.svg``, the same bytes each time."""
    from matplotlib import rc_context

    paths = []
    with rc_context({"svg.hashsalt": stem.name}):
        for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
            paths.append(stem.with_suffix(f".{kind}"))
            with atomic(paths[-1]) as draft:
                canvas.savefig(draft, format=kind, dpi=150, metadata=metadata)
    return paths


def _lines(axes: Axes, figure: Figure) -> None:
    from matplotlib.ticker import NullLocator

    places = charts.positions([figure])
    for number, series in enumerate(figure.series):
        colour, dash = charts.COLOURS[number % len(charts.COLOURS)][0], charts.DASHES[number % len(charts.DASHES)]
        (line,) = axes.plot(series.x, series.y, color=colour, marker="o", markersize=3.5, label=series.name)
        if dash:
            line.set_linestyle((0, tuple(float(part) / 1.5 for part in dash.split())))
        if series.low is not None and series.high is not None:
            axes.fill_between(series.x, series.low, series.high, color=colour, alpha=0.15, linewidth=0)
    for name, level in figure.levels.items():
        axes.axhline(level, color="#444444", linewidth=1, linestyle=":", label=name)
    if figure.log_x:
        positive = [x for x in places if x > 0]
        if len(positive) == len(places):
            axes.set_xscale("log")
        elif positive:  # a logarithm has no place for zero, but alpha = 0 belongs into the picture
            axes.set_xscale("symlog", linthresh=min(positive))
        if len(places) <= 9:
            axes.set_xticks(places, list(map(shown, places)))
            axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(figure.x_label)
    axes.set_ylabel(figure.y_label)


def _bars(axes: Axes, figure: Figure) -> None:
    places = charts.positions([figure])
    together = figure.kind == "point"
    thick = 0.0 if together else 0.8 / max(1, len(figure.series))
    from_zero = charts.starts_at_zero(figure)
    for number, series in enumerate(figure.series):
        colour = charts.COLOURS[number % len(charts.COLOURS)][0]
        rows = [places.index(str(x)) + (number - (len(figure.series) - 1) / 2) * thick for x in series.x]
        if from_zero:
            axes.barh(rows, series.y, height=0.9 * thick, color=colour, label=series.name)
        else:
            mark = MARKS[number % len(MARKS)] if together else "o"
            hollow = together and series.low is None  # so that it hides nothing of the others
            shape: dict[str, Any] = {"fillstyle": "none", "markersize": 8} if hollow else {}
            axes.plot(series.y, rows, mark, color=colour, label=series.name, **shape)
        if series.low is not None and series.high is not None:
            below = [y - low for y, low in zip(series.y, series.low, strict=True)]
            above = [high - y for y, high in zip(series.y, series.high, strict=True)]
            axes.errorbar(series.y, rows, xerr=[below, above], ecolor="#222222" if from_zero else colour, **INTERVAL)
    for name, level in figure.levels.items():
        axes.axvline(level, color="#444444", linewidth=1, linestyle=":", label=name)
    axes.set_yticks(range(len(places)), [textwrap.fill(place, 56) for place in places] if together else places)
    if together:  # whose names are sentences
        axes.tick_params(axis="y", labelsize=8)
    axes.set_ylim(len(places) - 0.5, -0.5)  # the first on top
    axes.set_xlabel(figure.y_label)
    axes.set_ylabel(figure.x_label)


def _index(results: Sequence[Result]) -> str:
    """What there is, and then every claim, so that one sees at a glance what was seen and what was not."""
    rows, claims = [], []
    for name, result in zip(labels.names(results), results, strict=True):
        link = Markdown(f"[{_no_markup(result.title)}]({name}.md)")
        rows.append([link, result.place, result.scale, len(result.rows), labels.tally(result.verdicts)])
        claims += [[link, verdict.claim, f"**{verdict.outcome.value}**"] for verdict in result.verdicts]
    parts = ["# Results", markdown_table(["experiment", "in the paper", "scale", "trials", "claims"], rows)]
    if claims:
        parts += ["## Every claim", markdown_table(["experiment", "claim", "outcome"], claims)]
    return "\n\n".join(parts) + "\n"


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    body = [[value if isinstance(value, Markdown) else _no_markup(shown(value)) for value in row] for row in rows]
    right = [bool(body) and all(is_number(row[column]) for row in body) for column in range(len(headers))]
    rule = ["---:" if to_right else "---" for to_right in right]
    escaped = [[" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in [list(headers), *body]]
    return "\n".join(f"| {' | '.join(row)} |" for row in [escaped[0], rule, *escaped[1:]])


class Markdown(str):
    """What is meant as Markdown; everything else in a table is text."""


def _no_markup(text: str) -> str:
    """Text that may come from rows, so that it makes no HTML and no links. Marks of `code` and *stress* stay."""
    code = r"(?<!`)(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)"
    mark = r"(?P<mark>`|<(?=[A-Za-z/!?])|&(?=#?\w+;)|\](?=\())"
    escaped = {"<": "&lt;", "&": "&amp;", "`": "\\`", "]": "\\]"}
    return re.sub(f"{code}|{mark}", lambda found: escaped[found["mark"]] if found["mark"] else found[0], text)


def _csv(path: Path, table: Table) -> Path:
    with atomic(path) as draft, open(draft, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([table.headers, *table.rows])
    return path


def _text(path: Path, text: str) -> Path:
    with atomic(path) as draft:
        draft.write_text(text, encoding="utf-8")
    return path
