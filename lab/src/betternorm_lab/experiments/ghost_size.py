"""Accuracy by ghost size (Figure 3, section 3.2).

The paper claims: the effect of the ghost size is unimodal, weak regularization by large ghosts and too much by small
ones; the best size improves top-1 over batch norm at B = 128 by 5.8 points on Caltech-256 and 0.84 on CIFAR-100; on
SVHN, where models hardly overfit (98.79 %), there is no improvement. Expect the same wherever the model overfits: a
best size between 4 and 32, and a lower training accuracy for smaller ghosts.
"""

from __future__ import annotations

from dataclasses import replace

from betternorm_lab.experiments import claims, findings, protocol
from betternorm_lab.experiments.arms import OWN_RATES, Arm
from betternorm_lab.experiments.findings import Findings, FinishedRuns
from betternorm_lab.experiments.scales import ALL, FLOWERS102, TASKS, with_norm
from betternorm_lab.results import Figure, Table, Verdict
from betternorm_lab.training import Config

TITLE = "Accuracy by ghost size"
PLACE = "Figure 3, section 3.2"

TRAINING = "evaluated_train_top1"
TRAINING_NOTE = "Training top-1 is measured in evaluation mode, without augmentation; older rows do not have it."
COLUMNS = {
    "validation_top1": "validation top-1, %",
    "test_top1": "test top-1, %",
    "test_cross_entropy": "test cross-entropy",
    "test_calibrated_cross_entropy": "after temperature scaling",
    TRAINING: "training top-1, %",
}
TOO_SMALL = 2  # ghosts of this size do not help, according to section 4.2
CONTROL = Arm("cifar100-40k")  # at medium scale: a model that overfits less
RATES = (0.03, 0.1, 0.3)  # candidates at medium scale
SIZES = {"smoke": (16, 4), "small": (16, 8, 4, 2), "medium": (32, 16, 8, 4, 2), "paper": (64, 32, 16, 8, 4, 2)}


def arms(scale: str) -> dict[Arm, Config]:
    """Every ghost size on every dataset; the largest is the whole batch, which is batch norm."""
    result: dict[Arm, Config] = {}
    tasks = TASKS[scale] | ({"flowers102": FLOWERS102} if scale == "small" else {})
    for dataset, config in tasks.items():
        for size in sizes(scale, config):
            trial = config if size == config.batch_size else with_norm(config, "ghost", ghost_size=size)
            result[Arm(dataset, size=size)] = trial
    if scale == "medium":
        result |= {
            Arm(dataset, OWN_RATES, size=size): replace(result[Arm(dataset, size=size)], learning_rate=rate)
            for dataset in tasks
            for size, rate in protocol.GHOSTS.items()
        }
        result |= {
            CONTROL.with_method(size=ALL.batch_size): ALL,
            CONTROL.with_method(size=16): with_norm(ALL, "ghost", ghost_size=16),
        }
    return result


def candidates(scale: str) -> dict[Arm, Config]:
    """The learning rates of some ghost sizes at medium scale."""
    return {
        replace(arm, variant=f"learning rate {rate:g}"): replace(trial, learning_rate=rate)
        for arm, trial in arms(scale).items()
        if arm.dataset in TASKS[scale] and not arm.setting and arm.size in protocol.GHOSTS
        for rate in RATES
    }


def sizes(scale: str, config: Config) -> list[int]:
    return [config.batch_size, *(size for size in SIZES[scale] if size < config.batch_size)]


def conclude(runs: FinishedRuns) -> Findings:
    rows, series, verdicts = [], [], []
    for task in runs.tasks():
        whole, *_ = by_size = runs.sizes(task)
        for size in by_size:
            arm = task.with_method(size=size)
            name = f"{size} (batch norm)" if size == whole else str(size)
            rows.append([task.title, name, *(findings.cell(runs.numbers(arm, column)) for column in COLUMNS)])
        points = {size: runs.numbers(task.with_method(size=size), "validation_top1") for size in by_size}
        series.append(findings.curve(task.title, points))
        verdicts += _verdicts(runs, task, points)
    if CONTROL in runs.tasks():
        verdicts.append(_control(runs))
    headers = ["data", "ghost size", *COLUMNS.values()]
    figure = Figure("Accuracy by ghost size", "ghost size", "validation top-1, %", series, log_x=True)
    return Findings([Table("Top-1 by ghost size", headers, rows)], [figure], verdicts, TRAINING_NOTE)


def _verdicts(runs: FinishedRuns, task: Arm, points: dict[int, list[float]]) -> list[Verdict]:
    """The best size is chosen on validation data, so it is evaluated on test data."""
    whole, smallest = next(iter(points)), list(points)[-1]
    chosen = findings.best({size: values for size, values in points.items() if size != whole})
    name, helps = task.title, task.id("ghosts-help")
    if chosen is None:
        return [claims.compare(f"{name}: a ghost size improves test top-1 over batch norm", [], [], id=helps)]
    test = {size: runs.numbers(task.with_method(size=size), "test_top1") for size in points}
    margin = runs.margin("top1")
    better = claims.compare(
        f"{name}: ghost size {chosen}, the best on validation data, improves test top-1 over batch norm",
        test[chosen],
        test[whole],
        id=helps,
        margin=margin,
    )
    regularized = claims.compare(
        f"{name}: ghosts regularize: training top-1 is lower with ghost size {smallest} than with batch norm",
        runs.numbers(task.with_method(size=smallest), TRAINING),
        runs.numbers(task.with_method(size=whole), TRAINING),
        claims.LESS,
        id=task.id("ghosts-regularize"),
    )
    if len(points) < 3:
        return [better, regularized]
    worse = claims.compare(f"the smallest, {smallest}, is worse", test[chosen], test[smallest], margin=margin)
    above = claims.together(
        f"{name}: every ghost size above {TOO_SMALL} improves test top-1 over batch norm",
        [
            claims.compare(str(size), test[size], test[whole], margin=margin)
            for size in points
            if TOO_SMALL < size < whole
        ],
        id=task.id("all-ghosts-help"),
    )
    unimodal = claims.together(
        f"{name}: the effect of the ghost size is unimodal (the best is better than batch norm and the smallest)",
        [better, worse],
        id=task.id("unimodal"),
    )
    return [better, above, unimodal, regularized]


def _control(runs: FinishedRuns) -> Verdict:
    """Ghosts gain less where the model overfits less; the same ghost size on both, the one that the control has."""
    size = runs.sizes(CONTROL)[-1]
    gains = []
    for task in (runs.tasks()[0], CONTROL):
        whole = runs.sizes(task)[0]
        arms = ((task.with_method(size=one), "test_top1") for one in (size, whole))
        gains.append([ghost - batch for ghost, batch in zip(*runs.by_seed(*arms), strict=True)])
    claim = f"ghost size {size} gains more test top-1 with 10,000 training images than with 40,000"
    return claims.compare(claim, gains[0], gains[1], id="less-data-more-gain", margin=runs.margin("top1"))
