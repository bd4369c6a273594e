"""Batches that are not i.i.d.: a few classes in each (Table 1, section 4.4).

The paper, CIFAR-100 with four classes per batch of 128, top-1 with alpha off and on: batch norm 40.1 and 62.2; batch
renorm 69.0 and 69.0; ghost size 64 42.3 and 50.8, 32 57.8 and 70.9, 16 64.3 and 72.2, 8 68.7 and 72.0, 4
70.4 and 71.5, 2 68.4 and 71.4; batch group norm 75.2 and 76.1. So: alpha gains 22 points for batch norm without
training again; ghosts help as much as batch renorm; batch group norm is best; alpha does nothing for batch renorm (at
most 0.1).

At small scale: ten classes of CIFAR-100, two of them in a batch of 64, since with a hundred the training would have
to be long.
"""

from __future__ import annotations

from dataclasses import replace

from betternorm.lab.experiments import claims, findings
from betternorm.lab.experiments.findings import Findings, FinishedRuns, Label
from betternorm.lab.experiments.scales import FEW, PAPER, SMALL, SMOKE, groups, with_norm, with_renorm
from betternorm.lab.results import Figure, Table
from betternorm.lab.trials import Trial

TITLE = "Batches that are not i.i.d."
PLACE = "Table 1, section 4.4"

BASE = {
    "smoke": replace(SMOKE, classes_per_batch=2),
    "small": replace(
        SMALL,
        dataset="cifar100",
        classes=10,
        image_size=16,
        batch_size=64,
        learning_rate=0.05,
        epochs=60,
        classes_per_batch=2,
    ),
    "medium": replace(FEW, classes_per_batch=4),
    "paper": replace(PAPER, classes_per_batch=4),
}
SIZES = {"smoke": (8,), "small": (16, 8, 4, 2), "medium": (32, 16, 8, 4, 2), "paper": (64, 32, 16, 8, 4, 2)}
BATCH, RENORM, GROUP = "batch norm", "batch renorm", "batch group norm"


def arms(scale: str) -> dict[Label, Trial]:
    base = BASE[scale]
    whole = base.batch_size
    found: dict[Label, Trial] = {
        (BATCH, whole): base,
        (RENORM, whole): with_renorm(base),
    }
    found |= {("ghost batch norm", size): with_norm(base, "ghost", ghost_size=size) for size in SIZES[scale]}
    found[GROUP, 2] = with_norm(base, "batch_group", num_groups=groups(base, scale))
    return found


def conclude(runs: FinishedRuns) -> Findings:
    rows = []
    bars: dict[str, dict[str, list[float]]] = {"alpha off": {}, "alpha on": {}}
    for label in runs:
        off, on = (runs.numbers(label, f"test_top1{tail}") for tail in ("", "_tuned"))
        rows.append(
            [*label, findings.cell(off), findings.cell(on), findings.cell(runs.numbers(label, "alpha_cross_entropy"))]
        )
        bars["alpha off"][f"{label[0]} {label[1]}"] = off
        bars["alpha on"][f"{label[0]} {label[1]}"] = on
    batch, renorm, *ghosts, group = runs
    best_off = findings.best({label: runs.numbers(label, "validation_top1") for label in ghosts})
    best_on = findings.best({label: runs.numbers(label, "validation_top1_tuned") for label in ghosts})
    read = {label: {tail: runs.numbers(label, f"test_top1{tail}") for tail in ("", "_tuned")} for label in runs}
    nothing: dict[str, list[float]] = {"": [], "_tuned": []}
    verdicts = [
        claims.gain("alpha raises the top-1 of batch norm", runs, batch, "test_top1"),
        claims.compare(
            "the best ghost size, alpha off, improves on batch norm", read.get(best_off, nothing)[""], read[batch][""]
        ),
        claims.compare(
            "the best ghost size, alpha on, improves on batch norm with alpha",
            read.get(best_on, nothing)["_tuned"],
            read[batch]["_tuned"],
        ),
        claims.compare("batch group norm improves on batch norm, alpha off", read[group][""], read[batch][""]),
        claims.compare(
            "batch group norm improves on batch norm, alpha on for both", read[group]["_tuned"], read[batch]["_tuned"]
        ),
        claims.compare(
            "batch group norm improves on batch renorm, alpha on for both",
            read[group]["_tuned"],
            read[renorm]["_tuned"],
        ),
        claims.compare("batch renorm improves on batch norm, alpha off", read[renorm][""], read[batch][""]),
        claims.gain(
            "alpha does nothing for batch renorm, within 1 point", runs, renorm, "test_top1", claims.within(1.0)
        ),
    ]
    figure = Figure(
        "Batches of a few classes",
        "method",
        "test top-1, %",
        [findings.curve(*one) for one in bars.items()],
        kind="bar",
    )
    headers = ["method", "B'", "test top-1, alpha off, %", "alpha on", "best alpha"]
    return Findings([Table("Test top-1, batches of a few classes", headers, rows)], [figure], verdicts)
