"""``betternorm train``: train a model with any norm layer, tune alpha, and evaluate on the test set once."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from betternorm.cli import FINDING, OK
from betternorm.cli.parser import CommandParser
from betternorm.display.tables import table
from betternorm.display.terminal import show
from betternorm.errors import UserError
from betternorm_lab import engines, stats
from betternorm_lab.cli import run_options
from betternorm_lab.store import DONE, Row, Store
from betternorm_lab.team import team_of
from betternorm_lab.training import JUDGED_BY, Config
from betternorm_lab.trials import grid

EXAMPLES = """examples:
  betternorm train                                       digits, batch norm
  betternorm train --norm ghost --norm-option ghost_size=16 --seed 0 1 2
  betternorm train --dataset cifar100 --data-root ~/data --epochs 60
  betternorm train --config ghost.json --seed 0 1 2      as `report --config-of`
  torchrun --nproc-per-node 2 -m betternorm.cli train --norm weighed

An interrupted run continues when the command is repeated; a finished one only
prints its result."""

# The first field of each group of options, and the options that --help shows.
GROUPS = {"dataset": "data and network", "batch_size": "training", "validate_every": "evaluation"}
COMMON = ("dataset", "network", "norm", "batch_size", "epochs", "learning_rate", "weight_decay", "norm_decay")


def add_arguments(parser: CommandParser) -> None:
    parser.epilog = EXAMPLES
    group: Any = parser
    for item in fields(Config):
        if item.name in GROUPS:
            group = parser.add_argument_group(GROUPS[item.name])
        if item.name == "norm_options":
            group.add_argument(
                "--norm-option",
                action="append",
                default=[],
                metavar="K=VALUE",
                help="an option of --norm; may be repeated",
            )
        elif item.name != "seed":
            run_options.add_field(group, item, Config, item.metadata["help"], rare=item.name not in COMMON)
    how = parser.add_argument_group("execution")
    how.add_argument("--seed", type=int, nargs="+", metavar="N", default=[0], help="one run per seed (0)")
    how.add_argument("--output", default="runs", metavar="FOLDER", help="output folder (runs)")
    run_options.add_arguments(how, retry=True)
    how.add_argument("--export", metavar="FILE", rare=True, help="write all rows of the store to .csv or .parquet")
    how.add_argument("--json", action="store_true", help="print the rows as JSON")


def run(arguments: argparse.Namespace) -> int:
    values = {item.name: getattr(arguments, item.name) for item in fields(Config) if hasattr(arguments, item.name)}
    values |= {"seed": arguments.seed[0], "norm_options": dict(map(_option, arguments.norm_option))}
    how = run_options.engine_options(arguments)
    rows = engines.run_trials(grid(Config(**values), seed=arguments.seed), arguments.output, **how)
    if team_of(how["runtime"]).rank > 0:
        return OK
    if arguments.export:
        Store(arguments.output).export(arguments.export)
    done = [row for row in rows if row.status == DONE]
    failed = [row for row in rows if row.status != DONE]
    if failed and len(rows) == 1:
        raise UserError(failed[0].error if arguments.debug else failed[0].reason)
    if arguments.json:
        print(json.dumps([row.flat() for row in rows], indent=2))
    else:
        show(report(done))
        for row in failed:
            print(f"seed {row['seed']} failed: {row.reason}")
    return FINDING if failed else OK


def report(rows: Sequence[Row]) -> str:
    """A table of the finished runs: mean and standard deviation over seeds, before and after tuning alpha."""
    lines = []
    for split in ("validation", "test"):
        for suffix, words in (("", "baseline"), ("_tuned", "alpha tuned")):
            names = [f"{split}_{name}{suffix}" for name in JUDGED_BY]
            if rows and all(name in row.result for row in rows for name in names):
                lines.append([split, words, *(_figure(name, [row.result[name] for row in rows]) for name in names)])
    alphas = sorted({row.result["alpha"] for row in rows if "alpha" in row.result})
    tail = f"\nalpha {', '.join(f'{alpha:.4g}' for alpha in alphas)}" if alphas else ""
    where = "".join(f"\ntrial {row.key}" for row in rows)
    return table(["", "", "top-1 %", "top-5 %", "cross-entropy"], lines) + tail + where


def _figure(name: str, values: Sequence[float]) -> str:
    scale, places = (1, 4) if "cross_entropy" in name else (100, 2)
    found = stats.summary([value * scale for value in values])
    return f"{found.mean:.{places}f}" + (f" ± {found.std:.{places}f}" if found.n > 1 else "")


def _option(text: str) -> tuple[str, Any]:
    name, equals, word = text.partition("=")
    if not (name and equals and word):
        raise UserError(f"--norm-option is {text!r}; write it as NAME=VALUE, like ghost_size=16")
    return name, run_options.parse_value(word)
