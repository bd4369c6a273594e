"""The head of the results: what the paper says and what came of it, over the scales that have been run."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from betternorm_lab.report import files, labels
from betternorm_lab.results import Figure, Outcome, Result, Table

FOLDERS = {"small": "", "medium": "medium/"}  # where the pages of a scale lie, from the overview
BESIDE = "paper-and-ours"  # the figure at its head
INTRODUCTION = (
    "# Results",
    "What the paper states, and what came of it here. *Ours* is a difference with its 95 % interval, the number of "
    "runs of each arm and the scale: points of top-1, or nats of cross-entropy. *Could have been seen* is the "
    "difference that as many runs with the same spread show with a power of 80 %. What was settled before the test set "
    "was read, and what was not: the [protocol](protocol.md).",
    "Every number follows from the rows beside the pages. This judges them anew, and runs nothing:",
    "```sh\nbetternorm reproduce all --scale medium --pages docs/results --rows-only\n```",
)


def write(
    results: Mapping[str, Sequence[Result]], statements: Sequence[Table], beside: Figure, folder: str | os.PathLike[str]
) -> Path:
    """``index.md`` of a folder of results, from those of each scale; ``beside`` has the paper's numbers and ours."""
    parts = [*INTRODUCTION, _tally(statements)]
    if beside.series:
        files.save(files.draw(beside), Path(folder) / BESIDE)
        parts.append(f"![{beside.title}]({BESIDE}.png)\n\nThe same as [SVG]({BESIDE}.svg).")
    for one in statements:
        parts += [f"## {one.title}", files.markdown_table(one.headers, one.rows)]
    for scale, found in results.items():
        rows = [
            [
                files.Markdown(f"[{result.title}]({FOLDERS[scale]}{result.name}.md)"),
                result.place,
                len(result.rows),
                labels.tally(result.verdicts),
            ]
            for result in found
        ]
        headers = ["experiment", "in the paper", "trials", "claims"]
        parts += [f"## {scale.capitalize()} scale", files.markdown_table(headers, rows)]
        parts += [
            f"![{result.figures[0].title}]({FOLDERS[scale]}{result.name}/figure-1.png)"
            for result in found
            if result.figures
        ]
    path = Path(folder) / "index.md"
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path


def _tally(statements: Sequence[Table]) -> str:
    """How many statements of each technique came to what."""
    counted = [Counter(str(row[-1]).strip("*").partition(":")[0] for row in one.rows) for one in statements]
    outcomes = [
        one for one in (*(outcome.value for outcome in Outcome), "not tested") if any(one in c for c in counted)
    ]
    names = [files.Markdown(f"[{one.title}](#{_anchor(one.title)})") for one in statements]
    rows = [[name, *(count[one] or "" for one in outcomes)] for name, count in zip(names, counted, strict=True)]
    return files.markdown_table(["what the paper says of", *outcomes], rows)


def _anchor(title: str) -> str:
    """As Markdown makes it of a heading."""
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")
