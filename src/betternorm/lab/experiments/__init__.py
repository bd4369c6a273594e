"""The paper's experiments, each a module: what the paper claims, the trials at three scales, and the verdicts.

A module has ``TITLE`` and ``PLACE``; ``arms(scale)``, the trials to run by label, each to be repeated with other seeds
(``SEEDS`` says how often, where it is not as usual); and ``conclude(runs)``, which makes tables, figures and verdicts
of their rows.
"""

from __future__ import annotations

import csv
import importlib
import inspect
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from betternorm.errors import UserError
from betternorm.lab import engines
from betternorm.lab.experiments.suite import RULE, Label, Runs
from betternorm.lab.results import Result
from betternorm.lab.store import DONE, Row, Store
from betternorm.lab.trials import Runtime, Trial

SCALES = {  # what a page has to say about them
    "smoke": "Smoke scale: a second or two of training on scikit-learn's digits. It shows that all runs, no more.",
    "small": "Small scale: small images, small residual networks and short trainings on a CPU. What it shows is the "
    "direction of an effect, not its size on the paper's data; the settings are at the end.",
    "paper": "Paper scale: the paper's data, networks and batch sizes. It gives no learning rates or training lengths.",
}
SEEDS = {"smoke": 2, "small": 5, "paper": 3}  # where a module does not say otherwise

NAMES = (  # in the order of the paper
    "alpha-imagenet",
    "alpha-groupnorm",
    "ghost-size",
    "alpha-ghost",
    "decay",
    "small-batch",
    "combined",
    "transfer",
    "non-iid",
    "output-range",
    "negative",
    "baselines",
)


Arms = Mapping[Label, Trial]


def chosen(words: Sequence[str]) -> list[str]:
    """The names of experiments that some words mean; "all" is every one."""
    for word in words:
        if word not in (*NAMES, "all"):
            raise UserError(f"there is no experiment {word!r}; there are all, {', '.join(NAMES)}")
    return [name for name in NAMES if "all" in words or name in words]


def module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{chosen([name])[0].replace('-', '_')}")


def trials(name: str, scale: str, seeds: int | None = None, own: Arms | None = None) -> dict[Label, list[Trial]]:
    """The trials of an experiment by the label of their arm, one for each seed; ``own`` arms stand in for its own."""
    if scale not in SCALES:
        raise UserError(f"scale is {scale!r}; it has to be one of {', '.join(SCALES)}")
    if seeds is not None and seeds < 1:
        raise UserError(f"seeds is {seeds}; it has to be 1 or more")
    experiment = module(name)
    count = seeds or getattr(experiment, "SEEDS", {}).get(scale, SEEDS[scale])
    return {  # a trial in which nothing is random is run once
        label: [replace(trial, seed=seed) for seed in range(count if getattr(trial, "random", True) else 1)]
        for label, trial in (own or experiment.arms(scale)).items()
    }


def run(
    names: Sequence[str],
    scale: str,
    folder: str | os.PathLike[str],
    *,
    seeds: int | None = None,
    own: Arms | None = None,
    runtime: Runtime | None = None,
    **how: Any,
) -> list[Result]:
    """Run what is missing of some experiments, and return what they come to.

    ``how`` goes to :func:`betternorm.lab.engines.run`. An experiment's rows are found by the keys of its trials, so
    those that experiments share are run once, and what was run before is not run again.
    """
    wanted = [trial for name in names for arm in trials(name, scale, seeds, own).values() for trial in arm]
    engines.run(seeds_first(wanted), folder, runtime=runtime, **how)
    return [result(name, scale, Store(folder), seeds, own) for name in names]


def seeds_first(wanted: Sequence[Trial]) -> list[Trial]:
    """All trials with the first seed, then all with the second: interrupted early, every arm has something to show."""
    return sorted(dict.fromkeys(wanted), key=lambda trial: trial.seed)


def results(folder: str | os.PathLike[str], scale: str, names: Sequence[str] = NAMES) -> list[Result]:
    """What the rows in a store come to: a result for every experiment that has any."""
    store = Store(folder)
    return [found for name in names if (found := result(name, scale, store)).rows]


def restore(pages: str | os.PathLike[str], scale: str, store: Store, names: Sequence[str] = NAMES) -> int:
    """Take finished rows from the pages of results (``NAME/rows.csv``) into a store, and return how many.

    A row is taken where its key is that of a trial: it says what was run, so the row is what running it would give.
    """
    taken = 0
    for name in names:
        saved = read_csv(Path(pages) / name / "rows.csv")
        for trial in (trial for arm in trials(name, scale).values() for trial in arm):
            if trial.key in saved and store.get(trial.key) is None:
                columns = saved[trial.key]
                prefix = "provenance_"
                provenance = {k.removeprefix(prefix): v for k, v in columns.items() if k.startswith(prefix)}
                known = {"key", "kind", "status", "attempts", "error", *trial.config}
                result = {k: v for k, v in columns.items() if k not in known and not k.startswith(prefix)}
                store.finish(trial.key, trial.kind, trial.config, result=result, provenance=provenance)
                taken += 1
    return taken


EMPTY = ("", "NaN")  # what a table says where a trial has no such column


def read_csv(path: Path) -> dict[str, dict[str, Any]]:
    """The finished rows of a file that :func:`betternorm.lab.store.export` wrote, by key, without empty cells."""
    if not path.is_file():
        return {}
    csv.field_size_limit(sys.maxsize)
    with open(path, newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["status"] == DONE]
    return {line["key"]: {name: _value(text) for name, text in line.items() if text not in EMPTY} for line in lines}


def _value(text: str) -> Any:
    """Numbers, truths, lists and dicts as what they were; everything else is text."""
    if text in ("True", "False"):
        return text == "True"
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def result(name: str, scale: str, store: Store, seeds: int | None = None, own: Arms | None = None) -> Result:
    """What the rows in a store come to for one experiment; what is missing is said in its notes."""
    experiment = module(name)
    rows: dict[Label, list[Row]] = {}
    missing, failed = 0, []
    for label, arm in trials(name, scale, seeds, own).items():
        found = [store.get(trial.key) for trial in arm]
        rows[label] = [row for row in found if row is not None and row.status == DONE]
        missing += len(arm) - len(rows[label])
        failed += [row for row in found if row is not None and row.error]
    findings = experiment.conclude(Runs(scale, rows))
    command = f"betternorm reproduce {name} --scale {scale}"
    _, _, claims = inspect.cleandoc(experiment.__doc__).partition("\n\n")  # what the paper says
    notes = [" ".join(claims.split()), SCALES[scale], findings.notes, RULE]
    if missing:
        total = missing + sum(map(len, rows.values()))
        notes.append(f"{missing} of {total} trials have not been run yet; `{command}` runs those and no others.")
    notes += [f"Trial {row.key} failed: {row.error.splitlines()[0]}" for row in failed]
    return Result(
        name=name,
        title=experiment.TITLE,
        place=experiment.PLACE,
        scale=scale,
        command=command,
        tables=findings.tables,
        figures=[figure for figure in findings.figures if any(len(series.x) for series in figure.series)],
        verdicts=findings.verdicts,
        rows=list({row.key: row for arm in rows.values() for row in arm}.values()),
        notes="\n\n".join(note for note in notes if note),
    )
