"""``betternorm report``: the results in a store as an HTML page, and as Markdown."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from betternorm.cli import OK
from betternorm.display.progress import track
from betternorm.display.tables import table
from betternorm.display.terminal import show
from betternorm.errors import UserError
from betternorm_lab import demo
from betternorm_lab.experiments import registry, runner
from betternorm_lab.experiments.scales import SCALES
from betternorm_lab.report import html, markdown
from betternorm_lab.results import Result, Verdict
from betternorm_lab.store import Store
from betternorm_lab.training import Config

EXAMPLES = """examples:
  betternorm report reproduction-smoke                its report.html
  betternorm report reproduction-small --output small.html
  betternorm report betternorm-demo --files results   Markdown and SVG
  betternorm report runs --config-of 0123456789abcdef   for `train --config`

The page is a single file. It shows the trials that have finished, and lists
what is missing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("folder", metavar="FOLDER", help="output folder of reproduce, train or demo")
    parser.add_argument("--output", "--out", dest="out", metavar="FILE", help="the page (FOLDER/report.html)")
    parser.add_argument("--files", metavar="FOLDER", help="also write Markdown pages and figures there")
    parser.add_argument(
        "--scale",
        nargs="+",
        choices=SCALES,
        metavar="NAME",
        help=f"only experiments at these scales: {', '.join(SCALES)}",
    )
    parser.add_argument(
        "--title", default="Improving batch normalization, reproduced", metavar="TEXT", help="of the page"
    )
    parser.add_argument(
        "--config-of", metavar="KEY", help="print the settings of a trial for `train --config`, and exit"
    )
    parser.add_argument("--json", action="store_true", help="print what was written and all verdicts as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.folder)
    if not (folder / "store.sqlite").is_file():
        raise UserError(
            f"FOLDER is {str(folder)!r}, which has no store.sqlite; use an output folder of reproduce, train or demo"
        )
    if arguments.config_of:
        print(json.dumps(config_of(Store(folder), arguments.config_of), indent=2))
        return OK
    results = collect(folder, arguments.scale, False if arguments.quiet else None)
    if not results:
        raise UserError(f"{folder} has no finished trial of an experiment; `betternorm reproduce` runs them")
    written = [html.write(results, arguments.out or folder / "report.html", arguments.title).resolve()]
    if arguments.files:
        written.append(markdown.write(results, arguments.files)[0].resolve())
    if arguments.json:
        told = [{"name": one.name, "scale": one.scale, "verdicts": one.verdicts} for one in results]
        print(json.dumps({"written": written, "experiments": told}, default=_plain, indent=2, ensure_ascii=False))
        return OK
    rows = [[one.name, one.scale, len(one.rows), markdown.tally(one.verdicts)] for one in results]
    show(table(["experiment", "scale", "trials", "claims"], rows))
    print("", *written, sep="\n")
    return OK


def config_of(store: Store, key: str) -> dict[str, Any]:
    """What a training changed of the defaults, in the form that ``train --config`` reads."""
    row = store.get(key)
    if row is None:
        raise UserError(f"--config-of is {key!r}; {store.path} has no such trial")
    if row.kind != Config.kind:
        raise UserError(f"--config-of is {key}, a trial of kind {row.kind!r}; `train` runs those of {Config.kind!r}")
    config = Config(**row.config)
    return config.changed | ({"norm_options": dict(config.norm_options)} if config.norm_options else {})


def collect(folder: Path, scales: list[str] | None = None, watched: bool | None = None) -> list[Result]:
    """All results that a store has rows for: the experiments at their scales, and the demo where none is asked for."""
    wanted = [(name, scale) for scale in scales or SCALES for name in registry.names_at(scale)]
    found = [runner.results(folder, scale, [name]) for name, scale in track(wanted, "reading", show=watched)]
    if not scales:
        found.append(demo.results(folder))
    results = [result for results in found for result in results]
    return results if scales else [one for one in results if not any(_holds_all(other, one) for other in results)]


def _holds_all(larger: Result, smaller: Result) -> bool:
    """Some trials are the same at every scale; they are no sign that the other scale was run."""
    return {row.key for row in smaller.rows} < {row.key for row in larger.rows} and larger.name == smaller.name


def _plain(value: Path | Verdict) -> str | dict[str, Any]:
    """What JSON has no word for."""
    return str(value) if isinstance(value, Path) else asdict(value)
