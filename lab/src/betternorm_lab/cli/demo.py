"""``betternorm demo``: train small models with each technique on built-in data, in a minute or two."""

from __future__ import annotations

import argparse
import json
import textwrap
import webbrowser
from dataclasses import asdict
from pathlib import Path

from betternorm.cli import OK
from betternorm.display.tables import table
from betternorm.display.terminal import show
from betternorm_lab import demo
from betternorm_lab.report import html
from betternorm_lab.results import Outcome, Result, Verdict

EXAMPLES = """examples:
  betternorm demo                     a table here, a page in betternorm-demo/
  betternorm demo --seeds 10 --open   narrower intervals; a browser opens

An interrupted demo continues when the command is repeated; a finished one only
prints its results."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument(
        "--output",
        default="betternorm-demo",
        metavar="FOLDER",
        help="output folder (betternorm-demo)",
    )
    parser.add_argument(
        "--seeds", type=int, default=demo.SEEDS, metavar="N", help=f"seeds per configuration ({demo.SEEDS})"
    )
    parser.add_argument("--processes", type=int, metavar="N", help="parallel training runs (one per core)")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    parser.add_argument("--json", action="store_true", help="print tables and verdicts as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> int:
    result = demo.run_demo(arguments.output, arguments.seeds, arguments.processes, not arguments.quiet)
    written = html.write([result], Path(arguments.output) / "report.html", "betternorm: the demo").resolve()
    if arguments.json:
        found = {"page": str(written), "tables": result.tables, "verdicts": result.verdicts}
        print(json.dumps(found, default=asdict, indent=2, ensure_ascii=False))
    else:
        show(text(result))
        print(f"\nWith figures: {written}")
    if arguments.open:
        webbrowser.open(written.as_uri())
    return OK


def text(result: Result) -> str:
    """The notes, tables and verdicts of a result as plain text."""
    parts = [textwrap.fill(paragraph, 100) for paragraph in result.notes.split("\n\n")]
    parts += [f"{item.title}\n\n{table(item.headers, item.rows)}" for item in result.tables]
    parts.append("\n".join(_line(verdict) for verdict in result.verdicts))
    return "\n\n".join(parts)


def _line(verdict: Verdict) -> str:
    """Replicated claims are in the tables above; the others are followed by their numbers."""
    numbers = "" if verdict.outcome is Outcome.REPLICATED else f" ({verdict.evidence})"
    return textwrap.fill(f"{verdict.outcome.value}: {verdict.claim}{numbers}", 100, subsequent_indent="    ")
