"""``betternorm reproduce``: the paper's experiments, at four scales, each to tables, figures and verdicts."""

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
from betternorm_lab.experiments import against_paper, plan, registry, runner, saved_rows
from betternorm_lab.experiments.scales import SCALES
from betternorm_lab.report import files, overview
from betternorm_lab.results import Result
from betternorm_lab.store import FAILED, Store, export, make_folder
from betternorm_lab.team import team_of

EXAMPLES = f"""experiments:
  {", ".join(registry.NAMES[:6])},
  {", ".join(registry.NAMES[6:])}

examples:
  betternorm reproduce                  digits, in minutes: does everything run?
  betternorm reproduce ghost-size --scale small --engine processes
  betternorm reproduce all --scale small --pages docs/results
  betternorm reproduce alpha-imagenet --network timm:resnet50 --images val/
  betternorm reproduce all --scale paper --plan         trials, GPU hours, disk

A command that was stopped goes on when it is given again; a trial that is
finished is never run again."""


def add_arguments(parser: CommandParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("names", nargs="*", default=["all"], metavar="NAME", help="experiments (all)")
    parser.add_argument("--scale", choices=SCALES, default="smoke", metavar="NAME", help=f"{', '.join(SCALES)} (smoke)")
    parser.add_argument("--seeds", type=int, metavar="N", help="runs of every arm (each experiment's own number)")
    parser.add_argument("--rows-only", action="store_true", help="run nothing: judge the rows that there are")
    parser.add_argument("--only", nargs="+", default=(), metavar="WORD", rare=True, help="run arms labelled so: 8 128")
    parser.add_argument(
        "--candidates", action="store_true", rare=True, help="what hyperparameters were chosen from, on validation data"
    )
    parser.add_argument("--plan", action="store_true", help="say what it would take, and run nothing")
    parser.add_argument(
        "--output", "--folder", dest="folder", metavar="FOLDER", help="folder of the store (reproduction-SCALE)"
    )
    parser.add_argument(
        "--pages", metavar="FOLDER", help="take the finished rows in it, and write pages, figures and rows there"
    )
    own = parser.add_argument_group("alpha-imagenet on networks and images of your own")
    own.add_argument("--network", nargs="+", default=[], metavar="SPEC=WEIGHTS", help="timm:NAME alone fetches weights")
    own.add_argument("--images", metavar="DATA", help="a folder with one folder per class, or .npz")
    own.add_argument("--image-size", type=int, metavar="N", help="side that the networks see (224)")
    how = parser.add_argument_group("where and how")
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
        saved_rows.take(_candidates_of(names, arguments), (own or {}).values(), store)
    elif arguments.pages:
        saved_rows.restore(place_of(arguments.pages, arguments.scale), arguments.scale, store)
    how = run_options.engine_options(arguments)
    if arguments.rows_only:
        results = [runner.result(name, arguments.scale, store, seeds, own) for name in names]
    else:
        results = runner.reproduce(names, arguments.scale, folder, seeds=seeds, own=own, only=arguments.only, **how)
    if team_of(how["runtime"]).rank > 0:
        return OK
    if arguments.json:
        print(json.dumps([as_plain(result) for result in results], indent=2, ensure_ascii=False))
    else:
        for result in results:
            show(shown(result))
    if arguments.pages and arguments.candidates:
        path = _candidates_of(names, arguments)
        make_folder(path.parent)
        export((row for result in results for row in result.rows), path)
        print(f"the candidates are in {path}", file=sys.stderr)
    elif arguments.pages:
        write_pages(folder, arguments.scale, arguments.pages)
    return FINDING if any(row.status == FAILED for row in store.rows(status=FAILED)) else OK


def _done(folder: str, arguments: argparse.Namespace) -> set[str]:
    """The keys of what has been run, in the store if there is one, and in the pages."""
    with tempfile.TemporaryDirectory() as empty:
        store = Store(folder if (Path(folder) / "store.sqlite").is_file() else empty)
        found = {row.key for row in store.rows()}
        if arguments.pages:
            saved_rows.restore(place_of(arguments.pages, arguments.scale), arguments.scale, saved := Store(empty))
            found |= {row.key for row in saved.rows()}
    return found


def _candidates_of(names: list[str], arguments: argparse.Namespace) -> Path:
    """Where the rows are that a choice of hyperparameters rests on."""
    return Path(arguments.pages) / "protocol" / f"{names[0]}.csv"


def _own_arms(names: list[str], arguments: argparse.Namespace) -> registry.Arms | None:
    """Arms that stand in for those of the experiment, where an option asks for them."""
    from betternorm_lab.experiments.alpha_imagenet import own_arms

    if arguments.candidates:
        if len(names) > 1:
            raise UserError("--candidates takes one experiment at a time")
        return registry.candidates(names[0], arguments.scale)
    if not (arguments.network or arguments.images):
        return None
    if names != ["alpha-imagenet"] or not (arguments.network and arguments.images):
        raise UserError("--network and --images belong together, and to alpha-imagenet alone")
    return own_arms(arguments.network, arguments.images, arguments.image_size)


def place_of(pages: str, scale: str) -> Path:
    """The pages of a scale in a folder of results: those of the medium scale have a folder of their own."""
    return Path(pages) / overview.FOLDERS.get(scale, "")


def write_pages(folder: str, scale: str, pages: str) -> None:
    """A page for every experiment, not only for those just run: they share rows. What is missing, a page says.

    The overview is of every scale that has rows there.
    """
    store = Store(folder)
    results = {scale: [runner.result(name, scale, store) for name in registry.names_at(scale)]}
    written = files.write(results[scale], place_of(pages, scale))
    with tempfile.TemporaryDirectory() as other:
        for one in overview.FOLDERS:
            if one != scale and saved_rows.restore(place_of(pages, one), one, Store(other)):
                results[one] = runner.results(other, one)
        if scale in overview.FOLDERS:
            ordered = {
                scale: [one for one in results[scale] if one.rows] for scale in against_paper.ORDER if scale in results
            }
            found = [one for these in ordered.values() for one in these]
            overview.write(ordered, against_paper.tables(found), against_paper.figure(found), pages)
    print(f"{len(written)} files in {pages}, from {written[0]}", file=sys.stderr)


def as_plain(result: Result) -> dict[str, Any]:
    """A result as text and numbers, for machines."""
    told = {"name": result.name, "scale": result.scale, "trials": len(result.rows)}
    return told | {"tables": [asdict(one) for one in result.tables], "verdicts": [asdict(v) for v in result.verdicts]}


def shown(result: Result) -> str:
    """A result as text: tables, verdicts, and what else there is to say."""
    parts = [f"{result.title}\n{result.place}, {result.scale} scale"]
    parts += [f"{one.title}\n{table(one.headers, one.rows)}" for one in result.tables]
    parts += [f"{verdict.outcome.value.upper()}: {verdict.claim}\n  {verdict.evidence}" for verdict in result.verdicts]
    return "\n\n".join([*parts, result.notes]).strip() + "\n"
