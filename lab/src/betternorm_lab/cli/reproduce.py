"""``betternorm reproduce``: the experiments of the paper, at four scales: tables, figures and verdicts."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from betternorm.cli import FINDING, OK
from betternorm.cli.parser import CommandParser
from betternorm.display.tables import table
from betternorm.display.terminal import show
from betternorm.errors import UserError
from betternorm_lab.cli import run_options
from betternorm_lab.experiments import plan, registry, runner, saved_rows
from betternorm_lab.experiments.paper import SCALES as SCALES_OF_STATEMENTS
from betternorm_lab.experiments.scales import SCALES
from betternorm_lab.report import overview
from betternorm_lab.results import Result
from betternorm_lab.store import FAILED, Store, make_folder
from betternorm_lab.team import team_of

EXAMPLES = f"""experiments:
  {", ".join(registry.NAMES[:6])},
  {", ".join(registry.NAMES[6:])}

examples:
  betternorm reproduce                  every experiment on digits, in minutes
  betternorm reproduce ghost-size --scale small --engine processes
  betternorm reproduce all --scale small --pages docs/results
  betternorm reproduce alpha-pretrained --network timm:resnet50 --images val/
  betternorm reproduce all --scale paper --plan         trials, GPU hours, disk

An interrupted command continues when it is repeated; finished trials are not
run again."""


def add_arguments(parser: CommandParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("names", nargs="*", default=["all"], metavar="NAME", help="experiments (all)")
    parser.add_argument("--scale", choices=SCALES, default="smoke", metavar="NAME", help=f"{', '.join(SCALES)} (smoke)")
    parser.add_argument("--seeds", type=int, metavar="N", help="runs per arm (set by the experiment)")
    parser.add_argument(
        "--rows-only", action="store_true", help="run nothing; recompute the verdicts from existing rows"
    )
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="WORD", rare=True, help="run only arms with one of these labels: 8 128"
    )
    parser.add_argument(
        "--candidates", action="store_true", rare=True, help="the hyperparameter candidates, on validation data"
    )
    parser.add_argument("--plan", action="store_true", help="print the cost, and run nothing")
    parser.add_argument(
        "--output", "--folder", dest="folder", metavar="FOLDER", help="folder of the store (reproduction-SCALE)"
    )
    parser.add_argument(
        "--pages", metavar="FOLDER", help="read the table of trials there, and write pages, figures and the table"
    )
    own = parser.add_argument_group("alpha-pretrained on your own models and images")
    own.add_argument(
        "--network", nargs="+", default=[], metavar="SPEC=WEIGHTS", help="timm:NAME alone downloads weights"
    )
    own.add_argument("--images", metavar="DATA", help="a folder with one folder per class, or .npz")
    own.add_argument("--image-size", type=int, metavar="N", help="input size of the models (224)")
    how = parser.add_argument_group("execution")
    run_options.add_arguments(how, retry=False)
    how.add_argument("--json", action="store_true", help="print tables and verdicts as JSON")


def run(arguments: argparse.Namespace) -> int:
    names = registry.chosen(arguments.names, arguments.scale)
    folder = arguments.folder or f"reproduction-{arguments.scale}"
    if arguments.plan:
        bars = False if arguments.quiet else None
        print(plan.describe(names, arguments.scale, arguments.seeds, arguments.names, bars, _done(folder, arguments)))
        return OK
    own, seeds = _own_arms(names, arguments), 1 if arguments.candidates else arguments.seeds
    store = Store(folder)
    if arguments.pages and arguments.candidates:
        saved_rows.copy(_candidates_of(names, arguments), (own or {}).values(), store)
    elif arguments.pages:
        saved_rows.restore(arguments.pages, arguments.scale, store)
    options = run_options.engine_options(arguments)
    if arguments.rows_only:
        results = [runner.result(name, arguments.scale, store, seeds, own) for name in names]
    else:
        results = runner.reproduce(names, arguments.scale, folder, seeds=seeds, own=own, only=arguments.only, **options)
    if team_of(options["runtime"]).rank > 0:
        return OK
    if arguments.json:
        print(json.dumps([as_plain(result) for result in results], indent=2, ensure_ascii=False))
    else:
        for result in results:
            show(as_text(result))
    if arguments.pages and arguments.candidates:
        path = _candidates_of(names, arguments)
        make_folder(path.parent)
        saved_rows.save((row for result in results for row in result.rows), path)
        print(f"candidates written to {path}", file=sys.stderr)
    elif arguments.pages:
        write_pages(folder, arguments.scale, arguments.pages)
    return FINDING if any(row.status == FAILED for row in store.rows(status=FAILED)) else OK


def _done(folder: str, arguments: argparse.Namespace) -> set[str]:
    """The keys of finished trials, in the store and in the table of the pages."""
    with tempfile.TemporaryDirectory() as empty:
        store = Store(folder if (Path(folder) / "store.sqlite").is_file() else empty)
        keys = {row.key for row in store.rows()}
        if arguments.pages:
            saved_rows.restore(arguments.pages, arguments.scale, saved := Store(empty))
            keys |= {row.key for row in saved.rows()}
    return keys


def _candidates_of(names: list[str], arguments: argparse.Namespace) -> Path:
    """The table of the candidates that hyperparameters were chosen from."""
    return Path(arguments.pages) / "protocol" / f"{names[0]}.csv.gz"


def _own_arms(names: list[str], arguments: argparse.Namespace) -> registry.Arms | None:
    """Arms that replace those of the experiment, if an option asks for them."""
    from betternorm_lab.experiments.alpha_pretrained import own_arms

    if arguments.candidates:
        if len(names) > 1:
            raise UserError("--candidates takes one experiment at a time")
        return registry.candidates(names[0], arguments.scale)
    if not (arguments.network or arguments.images):
        return None
    if names != ["alpha-pretrained"] or not (arguments.network and arguments.images):
        raise UserError("--network and --images are used together, and only with alpha-pretrained")
    return own_arms(arguments.network, arguments.images, arguments.image_size)


def write_pages(folder: str, scale: str, pages: str) -> None:
    """The table of trials, a page for every experiment (they share trials), and the overview of all scales."""
    store = Store(folder)
    results = {scale: [runner.result(name, scale, store) for name in registry.names_at(scale)]}
    make_folder(Path(pages))
    saved_rows.save((row for result in results[scale] for row in result.rows), Path(pages) / saved_rows.table_of(scale))
    written = overview.write_scale(results[scale], scale, pages)
    with tempfile.TemporaryDirectory() as other:
        for one in overview.FOLDERS:
            if one != scale and saved_rows.restore(pages, one, Store(other)):
                results[one] = runner.results(other, one)
    if scale in overview.FOLDERS:
        finished = [one for name in SCALES_OF_STATEMENTS for one in results.get(name, []) if one.rows]
        written += overview.write(finished, pages)
    print(f"{len(written)} files in {pages}, starting with {written[0]}", file=sys.stderr)


def as_plain(result: Result) -> dict[str, Any]:
    """A result as text and numbers, for JSON."""
    summary = {"name": result.name, "scale": result.scale, "trials": len(result.rows)}
    return summary | {
        "tables": [asdict(one) for one in result.tables],
        "verdicts": [asdict(v) for v in result.verdicts],
    }


def as_text(result: Result) -> str:
    """A result as plain text: tables, verdicts and notes."""
    parts = [f"{result.title}\n{result.place}, {result.scale} scale"]
    parts += [f"{one.title}\n{table(one.headers, one.rows)}" for one in result.tables]
    parts += [f"{verdict.outcome.value.upper()}: {verdict.claim}\n  {verdict.evidence}" for verdict in result.verdicts]
    return "\n\n".join([*parts, result.notes]).strip() + "\n"
