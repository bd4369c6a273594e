"""Accuracy against the size of ghost batches (Figure 3, section 3.2).

The paper claims: the effect is unimodal, weak regularisation by large ghosts and too much by small ones; the best size
improves top-1 by 5.8 points on Caltech-256 and 0.84 on CIFAR-100, over batch norm at B = 128; on SVHN, where networks
hardly overfit (98.79 %), there is no improvement. Expect the same wherever the network overfits: a best size
between 4 and 32, and a lower training accuracy the smaller the ghosts.
"""

from __future__ import annotations

from dataclasses import replace

from betternorm_lab.experiments import claims, findings, protocol
from betternorm_lab.experiments.findings import Findings, FinishedRuns, Label
from betternorm_lab.experiments.scales import ALL, FLOWERS102, TASKS, with_norm
from betternorm_lab.results import Figure, Table, Verdict
from betternorm_lab.training import Config

TITLE = "Accuracy against ghost size"
PLACE = "Figure 3, section 3.2"

TRAINING = "evaluated_train_top1"
TRAINING_NOTE = "Training top-1 is of the network in evaluation mode, without augmentation; older rows do not hold it."
COLUMNS = {
    "validation_top1": "validation top-1, %",
    "test_top1": "test top-1, %",
    "test_cross_entropy": "test cross-entropy",
    "test_calibrated_cross_entropy": "after temperature",
    TRAINING: "training top-1, %",
}
TOO_SMALL = 2  # ghosts of this size do not help, says section 4.2
CONTROL = "CIFAR-100, 40,000 images"  # at medium scale: a network that overfits less
RATES = (0.03, 0.1, 0.3)  # candidates at medium scale
OWN_RATES = ", each at its own learning rate"
SIZES = {"smoke": (16, 4), "small": (16, 8, 4, 2), "medium": (32, 16, 8, 4, 2), "paper": (64, 32, 16, 8, 4, 2)}


def arms(scale: str) -> dict[Label, Config]:
    """Every ghost size on every dataset; the largest is the whole batch, which is batch norm."""
    found: dict[Label, Config] = {}
    tasks = TASKS[scale] | ({"Flowers-102": FLOWERS102} if scale == "small" else {})
    for task, config in tasks.items():
        for size in sizes(scale, config):
            found[task, size] = config if size == config.batch_size else with_norm(config, "ghost", ghost_size=size)
    if scale == "medium":
        found |= {
            (f"{task}{OWN_RATES}", size): replace(found[task, size], learning_rate=rate)
            for task in tasks
            for size, rate in protocol.GHOSTS.items()
        }
        found |= {(CONTROL, ALL.batch_size): ALL, (CONTROL, 16): with_norm(ALL, "ghost", ghost_size=16)}
    return found


def candidates(scale: str) -> dict[Label, Config]:
    """What the learning rate of some sizes at medium scale is chosen from."""
    return {
        (task, f"ghost size {size}, learning rate {rate:g}"): replace(arm, learning_rate=rate)
        for (task, size), arm in arms(scale).items()
        if task in TASKS[scale] and size in protocol.GHOSTS
        for rate in RATES
    }


def sizes(scale: str, config: Config) -> list[int]:
    return [config.batch_size, *(size for size in SIZES[scale] if size < config.batch_size)]


def conclude(runs: FinishedRuns) -> Findings:
    rows, series, verdicts = [], [], []
    for task in runs.names():
        by_size = runs.names(1, first=task)
        for size in by_size:
            label = (task, size)
            named = f"{size} (batch norm)" if size == by_size[0] else str(size)
            rows.append([task, named, *(findings.cell(runs.numbers(label, column)) for column in COLUMNS)])
        points = {size: runs.numbers((task, size), "validation_top1") for size in by_size}
        series.append(findings.curve(task, points))
        verdicts += _verdicts(runs, task, points)
    if CONTROL in runs.names():
        verdicts.append(_control(runs))
    headers = ["data", "ghost size", *COLUMNS.values()]
    figure = Figure("Accuracy against ghost size", "ghost size", "validation top-1, %", series, log_x=True)
    return Findings([Table("Top-1 by ghost size", headers, rows)], [figure], verdicts, TRAINING_NOTE)


def _verdicts(runs: FinishedRuns, task: str, points: dict[int, list[float]]) -> list[Verdict]:
    """The best size is chosen on validation data, so it is judged on test data."""
    whole, smallest = next(iter(points)), list(points)[-1]
    found = findings.best({size: values for size, values in points.items() if size != whole})
    if found is None:
        return [claims.compare(f"{task}: some ghost size improves on batch norm (test top-1)", [], [])]
    test = {size: runs.numbers((task, size), "test_top1") for size in points}
    margin = runs.margin("top1")
    better = claims.compare(
        f"{task}: ghost size {found}, the best on validation data, improves on batch norm (test top-1)",
        test[found],
        test[whole],
        margin=margin,
    )
    regularised = claims.compare(
        f"{task}: ghosts regularise: training top-1 is lower with ghost size {smallest} than with batch norm",
        runs.numbers((task, smallest), TRAINING),
        runs.numbers((task, whole), TRAINING),
        claims.LESS,
    )
    if len(points) < 3:
        return [better, regularised]
    worse = claims.compare(
        f"{task}: the smallest ghost size, {smallest}, is worse than the best, {found}",
        test[found],
        test[smallest],
        margin=margin,
    )
    helpful = [size for size in points if TOO_SMALL < size < whole]
    above = claims.together(
        f"{task}: every ghost size above {TOO_SMALL} improves on batch norm (test top-1)",
        [claims.compare(f"{size}", test[size], test[whole], margin=margin) for size in helpful],
    )
    unimodal = claims.together(f"{task}: the effect of the size is unimodal, best in between", [better, worse])
    return [better, above, unimodal, regularised]


def _control(runs: FinishedRuns) -> Verdict:
    """Where the network overfits less, ghosts gain less; the same size on both, the one that the control has."""
    size = runs.names(1, first=CONTROL)[-1]
    gains = []
    for task in (runs.names()[0], CONTROL):
        whole = runs.names(1, first=task)[0]
        ghost, batch = runs.by_seed(((task, size), "test_top1"), ((task, whole), "test_top1"))
        gains.append([a - b for a, b in zip(ghost, batch, strict=True)])
    claim = f"ghost size {size} gains more test top-1 with 10,000 training images than with 40,000"
    return claims.compare(claim, gains[0], gains[1], margin=runs.margin("top1"))
