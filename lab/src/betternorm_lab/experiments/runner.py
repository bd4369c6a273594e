"""Run the missing trials of some experiments, and compute the results from the rows in the store."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Sequence
from typing import Any

from betternorm.errors import UserError
from betternorm_lab import engines
from betternorm_lab.experiments.arms import Arm
from betternorm_lab.experiments.claims import RULE, corrected
from betternorm_lab.experiments.findings import FinishedRuns, of_candidates
from betternorm_lab.experiments.registry import Arms, module, names_at, trials_of
from betternorm_lab.experiments.scales import SCALES, steps
from betternorm_lab.results import Result
from betternorm_lab.store import DONE, Row, Store
from betternorm_lab.training import METRICS_VERSION, Config
from betternorm_lab.trials import Runtime, Trial, code_version

OLD_METRICS = (
    "The cross-entropy after temperature scaling is version 1 of the metric: the temperature was one of 73 values from "
    "0.5 to 4. Rows of later versions have a column `metrics_version`."
)
CITED = ("medium", "paper")  # scales whose rows must name a commit


def reproduce(
    names: Sequence[str],
    scale: str,
    folder: str | os.PathLike[str],
    *,
    seeds: int | None = None,
    own: Arms | None = None,
    only: Sequence[str] = (),
    runtime: Runtime | None = None,
    **options: Any,
) -> list[Result]:
    """Run the missing trials of some experiments, and return the results.

    ``only`` restricts the run to arms with one of these labels, such as the ghost sizes 8 and 128; ``options`` are
    passed to :func:`betternorm_lab.engines.run_trials`. Rows are looked up by the keys of trials: trials that
    experiments share are run once, and finished trials are not run again.
    """
    if scale in CITED and (code_version() or "").endswith("+"):
        raise UserError(f"the code has uncommitted changes; rows of the {scale} scale must name a commit")
    arms = [arm for name in names for arm in trials_of(name, scale, seeds, own).items()]
    wanted = [trial for arm, trials in arms if not only or {*only} & {*arm.labels} for trial in trials]
    engines.run_trials(in_order(wanted), folder, runtime=runtime, **options)
    return [result(name, scale, Store(folder), seeds, own) for name in names]


def in_order(wanted: Sequence[Trial]) -> list[Trial]:
    """Short trials first; among trials of similar length, all with the first seed, then all with the second.

    After an early interruption, most arms have a result.
    """

    def length(trial: Trial) -> int:
        images = steps(trial) * trial.batch_size if isinstance(trial, Config) else 1
        return round(math.log2(images))

    return sorted(dict.fromkeys(wanted), key=lambda trial: (length(trial), trial.seed))


def results(folder: str | os.PathLike[str], scale: str, names: Sequence[str] | None = None) -> list[Result]:
    """The results of a store, one for every experiment that has rows."""
    store = Store(folder)
    return [one for name in names or names_at(scale) if (one := result(name, scale, store)).rows]


def result(name: str, scale: str, store: Store, seeds: int | None = None, own: Arms | None = None) -> Result:
    """The result of one experiment from the rows in a store; its notes list what is missing."""
    experiment = module(name)
    rows: dict[Arm, list[Row]] = {}
    missing, failed = 0, []
    arms = trials_of(name, scale, seeds, own)
    candidates = not any(getattr(trial, "test", True) for trials in arms.values() for trial in trials)
    for arm, trials in arms.items():
        stored = [store.get(trial.key) for trial in trials]
        rows[arm] = [row for row in stored if row is not None and row.status == DONE]
        missing += len(trials) - len(rows[arm])
        failed += [row for row in stored if row is not None and row.error]
    runs = FinishedRuns(scale, rows)
    findings = of_candidates(runs) if candidates else experiment.conclude(runs)
    command = f"betternorm reproduce {name} --scale {scale}{' --candidates' if candidates else ''}"
    _, _, paper = inspect.cleandoc(experiment.__doc__ or "").partition("\n\n")
    notes = [" ".join(paper.split()), SCALES[scale], findings.notes, "" if scale == "smoke" else RULE]
    if candidates:
        notes.append("These are hyperparameter candidates, with one seed, on validation data.")
    if missing:
        total = missing + sum(map(len, rows.values()))
        notes.append(f"{missing} of {total} trials have not been run; `{command}` runs those.")
    done = [row for of_arm in rows.values() for row in of_arm]
    changed = sum(str(row.provenance.get("commit")).endswith("+") for row in done)
    if changed:
        notes.append(
            f"{changed} of {len(done)} rows come from code with uncommitted changes (a plus after the commit)."
        )
    versions = {
        row.result.get("metrics_version", 1) for row in done if isinstance(row.config.get("alpha_grid"), (list, tuple))
    }
    if versions - {METRICS_VERSION}:
        notes.append(OLD_METRICS)
    notes += [f"Trial {row.key} failed: {row.reason}" for row in failed]
    return Result(
        name=name,
        title=experiment.TITLE,
        place=experiment.PLACE,
        scale=scale,
        command=command,
        tables=findings.tables,
        figures=[figure for figure in findings.figures if any(len(series.x) for series in figure.series)],
        # The models of a smoke run say nothing about the paper.
        verdicts=[] if scale == "smoke" else corrected(findings.verdicts),
        rows=list({row.key: row for row in done}.values()),
        notes="\n\n".join(note for note in notes if note),
    )
