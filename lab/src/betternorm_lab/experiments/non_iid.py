"""Batches that are not i.i.d.: a few classes in each (Table 1, section 4.4).

The paper, CIFAR-100 with four classes per batch of 128, top-1 with alpha off and on: batch norm 40.1 and 62.2; batch
renorm 69.0 and 69.0; ghost size 64 42.3 and 50.8, 32 57.8 and 70.9, 16 64.3 and 72.2, 8 68.7 and 72.0, 4
70.4 and 71.5, 2 68.4 and 71.4; batch group norm 75.2 and 76.1. So: alpha gains 22 points for batch norm without
retraining; ghosts help as much as batch renorm; batch group norm is best; alpha does nothing for batch renorm (at most
0.1); and batch group norm is hardly affected by the batches (76.1 against 76.2 with random ones).

At small scale: ten classes of CIFAR-100, two of them in a batch of 64, because a hundred classes would need long
training. At medium scale all hundred, in batches of 16: as in the paper a step sees four classes, and after the
available number of steps the models are undertrained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from betternorm_lab.experiments import claims, findings, protocol
from betternorm_lab.experiments.arms import Arm
from betternorm_lab.experiments.findings import Findings, FinishedRuns
from betternorm_lab.experiments.scales import FEW, PAPER, SMALL, SMOKE, groups, with_norm, with_renorm
from betternorm_lab.results import Figure, Table, Verdict
from betternorm_lab.training import Config

TITLE = "Batches that are not i.i.d."
PLACE = "Table 1, section 4.4"

BASE: dict[str, dict[str, Config]] = {
    "smoke": {"digits": replace(SMOKE, classes_per_batch=2)},
    "small": {
        "cifar100-10": replace(
            SMALL,
            dataset="cifar100",
            classes=10,
            image_size=16,
            batch_size=64,
            learning_rate=0.05,
            epochs=60,
            classes_per_batch=2,
        )
    },
    "medium": {
        "cifar100-10k": replace(FEW, classes_per_batch=4, batch_size=16, epochs=10, learning_rate=protocol.FOUR_CLASSES)
    },
    "paper": {"cifar100": replace(PAPER, classes_per_batch=4)},
}
SIZES = {"smoke": (8,), "small": (16, 8, 4, 2), "medium": (16, 8, 4, 2), "paper": (64, 32, 16, 8, 4, 2)}
RATES = (0.003, 0.01, 0.001)  # candidates at medium scale, of batch norm and batch group norm
BATCH, RENORM, GHOST, GROUP = "batch norm", "batch renorm", "ghost batch norm", "batch group norm"
RANDOM = "batch group norm, random batches"

# Table 1 of the paper: top-1 with alpha off and on. For random batches it gives one number only.
PAPERS_BATCH = 128
BARS = ("alpha off", "alpha on", "the paper, off", "the paper, on")
PAPERS: dict[tuple[str, int | None], tuple[float | None, float]] = {
    (BATCH, 128): (40.1, 62.2),
    (RENORM, 128): (69.0, 69.0),
    (GHOST, 64): (42.3, 50.8),
    (GHOST, 32): (57.8, 70.9),
    (GHOST, 16): (64.3, 72.2),
    (GHOST, 8): (68.7, 72.0),
    (GHOST, 4): (70.4, 71.5),
    (GHOST, 2): (68.4, 71.4),
    (GROUP, 2): (75.2, 76.1),
    (RANDOM, 2): (None, 76.2),
}


def arms(scale: str) -> dict[Arm, Config]:
    result: dict[Arm, Config] = {}
    for dataset, base in BASE[scale].items():
        task, whole = Arm(dataset), base.batch_size
        group = with_norm(base, "batch_group", num_groups=groups(base, scale))
        result[task.with_method(BATCH, whole)] = base
        result[task.with_method(RENORM, whole)] = with_renorm(base)
        for size in SIZES[scale]:
            if size < whole:
                result[task.with_method(GHOST, size)] = with_norm(base, "ghost", ghost_size=size)
        result[task.with_method(GROUP, 2)] = group
        if scale in ("medium", "paper"):
            result[task.with_method(RANDOM, 2)] = replace(group, classes_per_batch=None)
    return result


def candidates(scale: str) -> dict[Arm, Config]:
    """The learning rates of batch norm and batch group norm at medium scale."""
    return {
        replace(arm, variant=f"learning rate {rate:g}"): replace(config, learning_rate=rate)
        for arm, config in arms(scale).items()
        if arm.method in (BATCH, GROUP)
        for rate in RATES
    }


def conclude(runs: FinishedRuns) -> Findings:
    rows, figures, verdicts = [], [], []
    for task in runs.tasks():
        bars: dict[str, dict[str, list[float]]] = {name: {} for name in BARS}
        for arm in runs.arms(task):
            top1 = [runs.numbers(arm, f"test_top1{tail}") for tail in ("", "_own")]
            cells = map(findings.cell, (*top1, runs.numbers(arm, "alpha_top1")))
            whole = arm.method in (BATCH, RENORM)
            stated = PAPERS.get((arm.method, PAPERS_BATCH if whole else arm.size), (None, None))
            rows.append([arm.title, arm.method, arm.size, *cells, *("" if one is None else one for one in stated)])
            heights = (*top1, *([] if one is None else [one] for one in stated))
            for name, values in zip(bars, heights, strict=True):
                bars[name][f"{arm.method} {arm.size}"] = values
        series = [findings.curve(*one) for one in bars.items()]
        title = f"{task.title}: batches of a few classes"
        figures.append(Figure(title, "method", "test top-1, %", series, kind="bar"))
        of_task = _verdicts(runs, task)
        verdicts += claims.not_tested(of_task, protocol.UNDERTRAINED) if runs.scale == protocol.SCALE else of_task
    headers = ["data", "method", "B'", "test top-1, alpha off, %", "alpha on", "best alpha", "paper, alpha off", "on"]
    return Findings([Table("Test top-1, batches of a few classes", headers, rows)], figures, verdicts)


def _verdicts(runs: FinishedRuns, task: Arm) -> list[Verdict]:
    batch, renorm, *ghosts = (arm for arm in runs.arms(task) if arm.method not in (GROUP, RANDOM))
    group, random = task.with_method(GROUP, 2), task.with_method(RANDOM, 2)
    margin = runs.margin("top1")

    def best(arms: Sequence[Arm], tail: str) -> Arm | None:
        """Chosen on validation data."""
        chosen: Arm | None = findings.best({arm: runs.numbers(arm, f"validation_top1{tail}") for arm in arms})
        return chosen

    def off(arm: Arm | None) -> list[float]:
        return runs.numbers(arm, "test_top1") if arm else []

    def on(arm: Arm | None) -> list[float]:
        return runs.numbers(arm, "test_top1_own") if arm else []

    def more(id: str, claim: str, first: list[float], second: list[float]) -> Verdict:
        return claims.compare(f"{task.title}: {claim}", first, second, id=task.id(id), margin=margin)

    ghosts_off, ghosts_on = best(ghosts, ""), best(ghosts, "_own")
    overall = best((*ghosts, group, renorm), "_own")
    claim = f"{task.title}: alpha raises the top-1 of batch norm"
    result = [
        claims.gain(claim, runs, batch, "test_top1", id=task.id("alpha/batch")),
        more("off/ghosts-batch", "the best ghost size improves on batch norm, alpha off", off(ghosts_off), off(batch)),
        more("on/ghosts-batch", "the best ghost size improves on batch norm, alpha on", on(ghosts_on), on(batch)),
        more(
            "off/ghosts-renorm", "the best ghost size improves on batch renorm, alpha off", off(ghosts_off), off(renorm)
        ),
        more("off/group-batch", "batch group norm improves on batch norm, alpha off", off(group), off(batch)),
        more("on/group-batch", "batch group norm improves on batch norm, alpha on", on(group), on(batch)),
        more("on/group-renorm", "batch group norm improves on batch renorm, alpha on", on(group), on(renorm)),
        more("on/group-ghosts", "batch group norm improves on the best ghost size, alpha on", on(group), on(ghosts_on)),
        more("off/renorm-batch", "batch renorm improves on batch norm, alpha off", off(renorm), off(batch)),
        claims.compare(
            f"{task.title}: the best method halves the error of batch norm",
            [100 - top1 for top1 in on(overall)],
            [(100 - top1) / 2 for top1 in off(batch)],
            claims.LESS,
            id=task.id("halves"),
        ),
        claims.gain(
            f"{task.title}: alpha does nothing for batch renorm, within {margin:g} points",
            runs,
            renorm,
            "test_top1",
            claims.within(margin),
            id=task.id("alpha/renorm"),
        ),
    ]
    if random in runs:
        claim = (
            f"{task.title}: batch group norm does as well as with random batches, within {margin:g} points, alpha on"
        )
        equal, id = claims.within(margin), task.id("random-batches")
        result.append(claims.compare(claim, on(group), on(random), equal, id=id))
    return result
