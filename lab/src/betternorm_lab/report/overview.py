"""The first pages of the results: the index, and the paper's statements with our verdicts over all scales."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from betternorm_lab.experiments import against_paper, saved_rows
from betternorm_lab.report import figures, markdown
from betternorm_lab.results import Outcome, Result
from betternorm_lab.store import make_folder, write_text

FOLDERS = {"small": "", "medium": "medium/"}  # of the pages of a scale, relative to the overview
COMPARISON = "paper-and-ours.svg"
STATEMENTS = "statements.md"
EVIDENCE = "evidence/index.md"  # whose first table is that of the primary claims
PRIMARY = "Primary claims"
TERMS = (
    "*Replicated*: the 95 % interval lies in the direction of the claim. *Opposite effect*: it lies in the other "
    "direction. *Equivalent*: it includes 0 and lies within the margin (±0.5 points of top-1 or ±0.02 nats; ±1 and "
    "±0.05 at small scale). *Significant but negligible*: it excludes 0 and lies within the margin. *Inconclusive*: "
    "everything else. *Not tested*: no runs, or models that were undertrained."
)
RECOMPUTE = "```sh\nbetternorm reproduce all --scale medium --pages docs/results --rows-only\n```"


def write_scale(results: Sequence[Result], scale: str, pages: str | os.PathLike[str]) -> list[Path]:
    """The pages of one scale."""
    folder = Path(pages) / FOLDERS.get(scale, "")
    table = ("../" if FOLDERS.get(scale) else "") + saved_rows.table_of(scale)
    return markdown.write(results, folder, table)


def write(results: Sequence[Result], pages: str | os.PathLike[str]) -> list[Path]:
    """``index.md`` and ``statements.md`` of the folder of all results, and their figure."""
    pages = Path(pages)
    make_folder(pages)
    comparison = against_paper.figure(results)
    drawn = [figures.save(comparison, pages / COMPARISON)] if comparison.series else []
    written = [write_text(pages / "index.md", index(results, _primary(pages / EVIDENCE)))]
    return [*written, write_text(pages / STATEMENTS, statements(results)), *drawn]


def index(results: Sequence[Result], primary: str = "") -> str:
    """One screen: the outcomes in one sentence, the paper's numbers and ours, the primary claims, and links."""
    tables = against_paper.tables(results)
    counts = Counter(str(row[-1]).strip("*") for table in tables for row in table.rows)
    outcomes = ", ".join(f"{counts[one.value]} {one.value}" for one in Outcome if counts[one.value])
    by_experiment: dict[str, list[Result]] = {}
    for one in results:
        by_experiment.setdefault(one.title, []).append(one)
    links = [
        f"{title} ({', '.join(f'[{one.scale}]({FOLDERS[one.scale]}{one.name}.md)' for one in at)})"
        for title, at in by_experiment.items()
    ]
    evidence = f"[primary experiments]({EVIDENCE}), " if primary else ""
    parts = [
        "# Results",
        f"Statements of the paper: {outcomes} ([all of them]({STATEMENTS}), [the terms]({STATEMENTS}#terms), [the "
        "protocol](protocol.md)).",
        f"![{against_paper.TITLE}]({COMPARISON})" if against_paper.figure(results).series else "",
        f"## {PRIMARY}\n\n{primary}" if primary else "",
        "## Pages",
        f"Experiments of the paper: {'; '.join(links)}." if links else "",
        f"Beyond the paper: {evidence}[robustness with alpha per channel](robustness.md), [shifted data with one "
        "alpha](shift.md), [false positives of `tune_alpha`](false-findings.md).",
        "All numbers are computed from the tables of trials in this folder. To recompute them without running trials:",
        RECOMPUTE,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def statements(results: Sequence[Result]) -> str:
    """Every statement of the paper with its verdict, the sanity checks, and the claims of every experiment."""
    parts = [
        "# The paper's statements",
        "One verdict per statement. *Ours* is the difference with its 95 % interval, the number of runs per arm and "
        "the scale, in points of top-1 unless it says otherwise. *Detectable* is the minimum detectable effect at a "
        "power of 80 %. The models are small residual networks, and CIFAR-100 with 10,000 images and 20 classes of "
        "Flowers-102 at 32x32 stand in for Caltech-256. These runs are exploratory; P values and Holm's correction "
        "are on the pages of the experiments.",
    ]
    for one in against_paper.tables(results):
        parts += [f"## {one.title}", markdown.table(one.headers, one.rows)]
    checks = against_paper.sanity_checks(results)
    if checks.rows:
        parts += [f"## {checks.title}", "Expected to hold almost by construction."]
        parts.append(markdown.table(checks.headers, checks.rows))
    parts += ["## Terms", TERMS]
    for scale, folder in FOLDERS.items():
        rows = [
            [
                markdown.Markdown(f"[{one.title}]({folder}{one.name}.md)"),
                one.place,
                len(one.rows),
                markdown.tally(one.verdicts),
            ]
            for one in results
            if one.scale == scale
        ]
        headers = ["experiment", "in the paper", "trials", "claims"]
        parts += [f"## Experiments, {scale} scale", markdown.table(headers, rows)] if rows else []
    return "\n\n".join(parts) + "\n"


def _primary(page: Path) -> str:
    """The first table of the evidence page, with its links made relative to the index."""
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    table = re.search(r"^\|.*?(?=\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
    return re.sub(r"\]\((?!\w+:|#|/)", f"]({Path(EVIDENCE).parent}/", table[0].strip()) if table else ""
