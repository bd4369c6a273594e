"""Run what is missing of some experiments, and conclude from the rows in the store."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Sequence
from typing import Any

from betternorm.errors import UserError
from betternorm_lab import engines
from betternorm_lab.experiments.claims import RULE, corrected
from betternorm_lab.experiments.findings import FinishedRuns, Label, of_candidates
from betternorm_lab.experiments.registry import Arms, module, names_at, trials_of
from betternorm_lab.experiments.scales import SCALES, steps
from betternorm_lab.results import Result
from betternorm_lab.store import DONE, Row, Store
from betternorm_lab.training import Config
from betternorm_lab.trials import Runtime, Trial, code_version

CITED = ("medium", "paper")  # scales whose rows have to name the commit that they came from


def reproduce(
    names: Sequence[str],
    scale: str,
    folder: str | os.PathLike[str],
    *,
    seeds: int | None = None,
    own: Arms | None = None,
    only: Sequence[str] = (),
    runtime: Runtime | None = None,
    **how: Any,
) -> list[Result]:
    """Run what is missing of some experiments, and return what they come to.

    ``only`` runs the arms that have one of these words in their label, such as the ghost sizes 8 and 128; ``how`` goes
    to :func:`betternorm_lab.engines.run_trials`. An experiment's rows are found by the keys of its trials: those that
    experiments share are run once, and what was run before is not run again.
    """
    if scale in CITED and (code_version() or "").endswith("+"):
        raise UserError(f"the code has been changed since its last commit; rows of the {scale} scale name a commit")
    arms = [arm for name in names for arm in trials_of(name, scale, seeds, own).items()]
    wanted = [trial for label, arm in arms if not only or {*only} & {str(part) for part in label} for trial in arm]
    engines.run_trials(in_order(wanted), folder, runtime=runtime, **how)
    return [result(name, scale, Store(folder), seeds, own) for name in names]


def in_order(wanted: Sequence[Trial]) -> list[Trial]:
    """Short trials first; of about the same length all with the first seed, then all with the second.

    Interrupted early, most arms have something to show.
    """

    def length(trial: Trial) -> int:
        images = steps(trial) * trial.batch_size if isinstance(trial, Config) else 1
        return round(math.log2(images))

    return sorted(dict.fromkeys(wanted), key=lambda trial: (length(trial), trial.seed))


def results(folder: str | os.PathLike[str], scale: str, names: Sequence[str] | None = None) -> list[Result]:
    """What the rows in a store come to: a result for every experiment that has any."""
    store = Store(folder)
    return [found for name in names or names_at(scale) if (found := result(name, scale, store)).rows]


def result(name: str, scale: str, store: Store, seeds: int | None = None, own: Arms | None = None) -> Result:
    """What the rows in a store come to for one experiment; what is missing is said in its notes."""
    experiment = module(name)
    rows: dict[Label, list[Row]] = {}
    missing, failed = 0, []
    arms = trials_of(name, scale, seeds, own)
    candidates = not any(getattr(trial, "test", True) for arm in arms.values() for trial in arm)
    for label, arm in arms.items():
        stored = [store.get(trial.key) for trial in arm]
        rows[label] = [row for row in stored if row is not None and row.status == DONE]
        missing += len(arm) - len(rows[label])
        failed += [row for row in stored if row is not None and row.error]
    runs = FinishedRuns(scale, rows)
    findings = of_candidates(runs) if candidates else experiment.conclude(runs)
    command = f"betternorm reproduce {name} --scale {scale}{' --candidates' if candidates else ''}"
    _, _, claims = inspect.cleandoc(experiment.__doc__ or "").partition("\n\n")  # what the paper says
    notes = [" ".join(claims.split()), SCALES[scale], findings.notes, "" if scale == "smoke" else RULE]
    if candidates:
        notes.append("These are candidates: hyperparameters are chosen from them, with one seed, on validation data.")
    if missing:
        total = missing + sum(map(len, rows.values()))
        notes.append(f"{missing} of {total} trials have not been run yet; `{command}` runs those and no others.")
    found = [row for arm in rows.values() for row in arm]
    changed = sum(str(row.provenance.get("commit")).endswith("+") for row in found)
    if changed:
        notes.append(
            f"{changed} of {len(found)} rows name a commit whose code had been changed: a plus stands behind it."
        )
    notes += [f"Trial {row.key} failed: {row.reason}" for row in failed]
    return Result(
        name=name,
        title=experiment.TITLE,
        place=experiment.PLACE,
        scale=scale,
        command=command,
        tables=findings.tables,
        figures=[figure for figure in findings.figures if any(len(series.x) for series in figure.series)],
        # Networks of a second or two say nothing about the paper: a smoke run says that it ran, no more.
        verdicts=[] if scale == "smoke" else corrected(findings.verdicts),
        rows=list({row.key: row for row in found}.values()),
        notes="\n\n".join(note for note in notes if note),
    )
