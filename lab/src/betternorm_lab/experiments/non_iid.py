"""Batches that are not i.i.d.: a few classes in each (Table 1, section 4.4).

The paper, CIFAR-100 with four classes per batch of 128, top-1 with alpha off and on: batch norm 40.1 and 62.2; batch
renorm 69.0 and 69.0; ghost size 64 42.3 and 50.8, 32 57.8 and 70.9, 16 64.3 and 72.2, 8 68.7 and 72.0, 4
70.4 and 71.5, 2 68.4 and 71.4; batch group norm 75.2 and 76.1. So: alpha gains 22 points for batch norm without
training again; ghosts help as much as batch renorm; batch group norm is best; alpha does nothing for batch renorm (at
most 0.1); and batch group norm is hardly affected by the batches (76.1 against 76.2 with random ones).

At small scale: ten classes of CIFAR-100, two of them in a batch of 64, since with a hundred the training would have
to be long. At medium scale all hundred, in batches of 16: as in the paper a step sees four classes, and in the steps
there are the networks hardly learn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from betternorm_lab.experiments import claims, findings, protocol
from betternorm_lab.experiments.findings import Findings, FinishedRuns, Label
from betternorm_lab.experiments.scales import FEW, PAPER, SMALL, SMOKE, groups, with_norm, with_renorm
from betternorm_lab.results import Figure, Table, Verdict
from betternorm_lab.training import Config

TITLE = "Batches that are not i.i.d."
PLACE = "Table 1, section 4.4"

BASE: dict[str, dict[str, Config]] = {
    "smoke": {"digits": replace(SMOKE, classes_per_batch=2)},
    "small": {
        "CIFAR-100, 10 classes": replace(
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
        "CIFAR-100, 10,000 images": replace(
            FEW, classes_per_batch=4, batch_size=16, epochs=10, learning_rate=protocol.FOUR_CLASSES
        )
    },
    "paper": {"CIFAR-100": replace(PAPER, classes_per_batch=4)},
}
SIZES = {"smoke": (8,), "small": (16, 8, 4, 2), "medium": (16, 8, 4, 2), "paper": (64, 32, 16, 8, 4, 2)}
RATES = (0.003, 0.01, 0.001)  # candidates at medium scale, of batch norm and batch group norm
BATCH, RENORM, GHOST, GROUP = "batch norm", "batch renorm", "ghost batch norm", "batch group norm"
RANDOM = "batch group norm, random batches"

# Table 1 of the paper: top-1 with alpha off and on. Of random batches it gives but one number.
PAPERS_BATCH = 128
BARS = ("alpha off", "alpha on", "the paper, off", "the paper, on")
PAPERS: dict[Label, tuple[float | None, float]] = {
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


def arms(scale: str) -> dict[Label, Config]:
    found: dict[Label, Config] = {}
    for setting, base in BASE[scale].items():
        whole = base.batch_size
        group = with_norm(base, "batch_group", num_groups=groups(base, scale))
        found[setting, BATCH, whole] = base
        found[setting, RENORM, whole] = with_renorm(base)
        for size in SIZES[scale]:
            if size < whole:
                found[setting, GHOST, size] = with_norm(base, "ghost", ghost_size=size)
        found[setting, GROUP, 2] = group
        if scale in ("medium", "paper"):
            found[setting, RANDOM, 2] = replace(group, classes_per_batch=None)
    return found


def candidates(scale: str) -> dict[Label, Config]:
    """What the learning rates at medium scale are chosen from: batch norm and batch group norm at each."""
    return {
        (setting, f"{method}, learning rate {rate:g}", size): replace(config, learning_rate=rate)
        for (setting, method, size), config in arms(scale).items()
        if method in (BATCH, GROUP)
        for rate in RATES
    }


def conclude(runs: FinishedRuns) -> Findings:
    rows, figures, verdicts = [], [], []
    for setting in runs.names():
        read = {
            label[1:]: {tail: runs.numbers(label, f"test_top1{tail}") for tail in ("", "_own")}
            for label in runs
            if label[0] == setting
        }
        bars: dict[str, dict[str, list[float]]] = {name: {} for name in BARS}
        for label, top1 in read.items():
            cells = map(findings.cell, (*top1.values(), runs.numbers((setting, *label), "alpha_top1")))
            theirs = (label[0], PAPERS_BATCH) if label[0] in (BATCH, RENORM) else label
            stated = PAPERS.get(theirs, (None, None))
            rows.append([setting, *label, *cells, *("" if one is None else one for one in stated)])
            heights = (*top1.values(), *([] if one is None else [one] for one in stated))
            for name, values in zip(bars, heights, strict=True):
                bars[name][f"{label[0]} {label[1]}"] = values
        figures.append(
            Figure(
                f"{setting}: batches of a few classes",
                "method",
                "test top-1, %",
                [findings.curve(*one) for one in bars.items()],
                kind="bar",
            )
        )
        verdicts += _verdicts(runs, setting, read)
    headers = [
        "data",
        "method",
        "B'",
        "test top-1, alpha off, %",
        "alpha on",
        "best alpha for it",
        "the paper, off",
        "on",
    ]
    return Findings([Table("Test top-1, batches of a few classes", headers, rows)], figures, verdicts)


def _verdicts(runs: FinishedRuns, setting: str, read: Mapping[Label, Mapping[str, list[float]]]) -> list[Verdict]:
    batch, renorm, *ghosts = (label for label in read if label[0] not in (GROUP, RANDOM))
    group = (GROUP, 2)
    best_off, best_on = (
        findings.best({label: runs.numbers((setting, *label), f"validation_top1{tail}") for label in ghosts})
        for tail in ("", "_own")
    )
    best = findings.best(
        {label: runs.numbers((setting, *label), "validation_top1_own") for label in (*ghosts, group, renorm)}
    )
    nothing: dict[str, list[float]] = {"": [], "_own": []}
    off, on = read.get(best_off, nothing)[""], read.get(best_on, nothing)["_own"]
    margin = runs.margin("top1")

    def more(claim: str, first: list[float], second: list[float]) -> Verdict:
        return claims.compare(f"{setting}: {claim}", first, second, margin=margin)

    found = [
        claims.gain(f"{setting}: alpha raises the top-1 of batch norm", runs, (setting, *batch), "test_top1"),
        more("the best ghost size, alpha off, improves on batch norm", off, read[batch][""]),
        more("the best ghost size, alpha on, improves on batch norm with alpha", on, read[batch]["_own"]),
        more("the best ghost size, alpha off, improves on batch renorm", off, read[renorm][""]),
        more("batch group norm improves on batch norm, alpha off", read[group][""], read[batch][""]),
        more("batch group norm improves on batch norm, alpha on for both", read[group]["_own"], read[batch]["_own"]),
        more("batch group norm improves on batch renorm, alpha on for both", read[group]["_own"], read[renorm]["_own"]),
        more("batch group norm improves on the best ghost size, alpha on for both", read[group]["_own"], on),
        more("batch renorm improves on batch norm, alpha off", read[renorm][""], read[batch][""]),
        claims.compare(
            f"{setting}: the best of all halves the error of batch norm",
            [100 - top1 for top1 in read.get(best, nothing)["_own"]],
            [(100 - top1) / 2 for top1 in read[batch][""]],
            claims.LESS,
        ),
        claims.gain(
            f"{setting}: alpha does nothing for batch renorm, within {margin:g} points",
            runs,
            (setting, *renorm),
            "test_top1",
            claims.within(margin),
        ),
    ]
    if (RANDOM, 2) in read:
        found.append(
            claims.compare(
                f"{setting}: batch group norm does as well as with random batches, within {margin:g} points, alpha on",
                read[group]["_own"],
                read[RANDOM, 2]["_own"],
                claims.within(margin),
            )
        )
    return found
