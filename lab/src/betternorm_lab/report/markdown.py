"""Results as Markdown: one page per experiment with its figures as SVG, and an index."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from betternorm.display.tables import is_number, shown
from betternorm_lab.report import figures, provenance
from betternorm_lab.results import Outcome, Result, Verdict
from betternorm_lab.store import make_folder, write_text


class Markdown(str):
    """A table cell that is Markdown; all other cells are plain text."""


def write(results: Sequence[Result], folder: str | os.PathLike[str], data: str = "") -> list[Path]:
    """Write the index, then for each experiment ``NAME.md`` and ``NAME/figure-1.svg`` and so on; return the paths.

    ``data`` is the relative path of the table of trials. The same results give the same bytes.
    """
    folder = Path(folder)
    make_folder(folder)
    written = [write_text(folder / "index.md", index(results))]
    for name, result in named(results).items():
        written.append(write_text(folder / f"{name}.md", page(result, name, data)))
        if result.figures:
            make_folder(folder / name)
        for number, figure in enumerate(result.figures, 1):
            written.append(figures.save(figure, folder / name / f"figure-{number}.svg"))
        for stale in {*(folder / name).glob("figure-*")} - set(written):
            stale.unlink()
    return written


def named(results: Sequence[Result]) -> dict[str, Result]:
    """Results by a name for files and links. Name and title include the scale if an experiment occurs twice."""
    counts = Counter(result.name for result in results)
    unique = {}
    for result in results:
        twice = counts[result.name] > 1
        title = f"{result.title} ({result.scale})" if twice else result.title
        unique[f"{result.name}-{result.scale}" if twice else result.name] = replace(result, title=title)
    return unique


def subtitle(result: Result) -> str:
    count = f"{len(result.rows)} trial{'' if len(result.rows) == 1 else 's'}"
    return " · ".join(part for part in (result.place, f"{result.scale} scale" if result.scale else "", count) if part)


def tally(verdicts: Iterable[Verdict]) -> str:
    """How many claims have each outcome: ``3 replicated, 1 opposite effect``. Empty without claims."""
    counts = Counter(verdict.outcome for verdict in verdicts)
    return ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome if counts[outcome])


def page(result: Result, name: str, data: str = "") -> str:
    """The page of an experiment, whose figures are in the folder ``name``; ``data`` links to the table of trials."""
    parts = [f"# {_plain(result.title)}", f"*{subtitle(result)}*"]
    lead, *notes = map(_plain, result.notes.split("\n\n"))
    parts.append(lead)
    if result.verdicts:
        rows = [[verdict.claim, f"**{verdict.outcome.value}**", verdict.evidence] for verdict in result.verdicts]
        parts += ["## Claims", table(["claim", "outcome", "evidence"], rows)]
    for number, figure in enumerate(result.figures, 1):
        title = _plain(figure.title)
        parts += [f"## {title}", f"![{title}]({name}/figure-{number}.svg)"]
    for one in result.tables:
        parts += [f"## {_plain(one.title)}", table(one.headers, one.rows)]
    parts += ["## Notes", *notes] if notes else []
    parts += ["## Provenance", f"```sh\n{result.command}\n```"]
    if data:
        parts.append(f"The table of all trials, with their settings and measurements: [{Path(data).name}]({data}).")
    shared = provenance.shared_settings(result.rows)
    if shared:
        parts += ["Common to all trials:", table(["setting", "value"], shared.items())]
    return "\n\n".join(part for part in parts if part) + "\n"


def index(results: Sequence[Result]) -> str:
    """The experiments and all their claims."""
    rows, claims = [], []
    for name, result in named(results).items():
        link = Markdown(f"[{_plain(result.title)}]({name}.md)")
        rows.append([link, result.place, result.scale, len(result.rows), tally(result.verdicts)])
        claims += [[link, verdict.claim, f"**{verdict.outcome.value}**"] for verdict in result.verdicts]
    parts = ["# Results", table(["experiment", "in the paper", "scale", "trials", "claims"], rows)]
    if claims:
        parts += ["## All claims", table(["experiment", "claim", "outcome"], claims)]
    return "\n\n".join(parts) + "\n"


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; columns of numbers are aligned to the right."""
    body = [[value if isinstance(value, Markdown) else _plain(shown(value)) for value in row] for row in rows]
    right = [bool(body) and all(is_number(row[column]) for row in body) for column in range(len(headers))]
    rule = ["---:" if to_right else "---" for to_right in right]
    escaped = [[" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in [list(headers), *body]]
    return "\n".join(f"| {' | '.join(row)} |" for row in [escaped[0], rule, *escaped[1:]])


def _plain(text: str) -> str:
    """Text from rows must not become HTML or links. `code` and *emphasis* are kept."""
    code = r"(?<!`)(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)"
    mark = r"(?P<mark>`|<(?=[A-Za-z/!?])|&(?=#?\w+;)|\](?=\())"
    escaped = {"<": "&lt;", "&": "&amp;", "`": "\\`", "]": "\\]"}
    return re.sub(f"{code}|{mark}", lambda match: escaped[match["mark"]] if match["mark"] else match[0], text)
