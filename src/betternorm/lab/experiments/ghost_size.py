"""Accuracy against the size of ghost batches (Figure 3, section 3.2).

The paper claims: the effect is unimodal, weak regularisation by large ghosts and too much by small ones; the best size
improves top-1 by 5.8 points on Caltech-256 and 0.84 on CIFAR-100, over batch norm at B = 128; on SVHN, where networks
hardly overfit (98.79 %), there is no improvement. Expect the same wherever the network overfits: a best size
between 4 and 32, and a lower training accuracy the smaller the ghosts.
"""

from __future__ import annotations

from betternorm.lab.experiments import claims, findings
from betternorm.lab.experiments.findings import Findings, FinishedRuns, Label
from betternorm.lab.experiments.scales import ALL, FLOWERS102, TASKS, with_norm
from betternorm.lab.results import Figure, Outcome, Table, Verdict
from betternorm.lab.training import Config

TITLE = "Accuracy against ghost size"
PLACE = "Figure 3, section 3.2"

CONTROL = "CIFAR-100, 40,000 images"  # at medium scale: a network that overfits less
SIZES = {"smoke": (16, 4), "small": (16, 8, 4, 2), "medium": (32, 16, 8, 4, 2), "paper": (64, 32, 16, 8, 4, 2)}


def arms(scale: str) -> dict[Label, Config]:
    """Every ghost size on every dataset; the largest is the whole batch, which is batch norm."""
    found: dict[Label, Config] = {}
    tasks = TASKS[scale] | ({"Flowers-102": FLOWERS102} if scale == "small" else {})
    for task, config in tasks.items():
        for size in sizes(scale, config):
            found[task, size] = config if size == config.batch_size else with_norm(config, "ghost", ghost_size=size)
    if scale == "medium":
        found |= {(CONTROL, ALL.batch_size): ALL, (CONTROL, 16): with_norm(ALL, "ghost", ghost_size=16)}
    return found


def sizes(scale: str, config: Config) -> list[int]:
    return [config.batch_size, *(size for size in SIZES[scale] if size < config.batch_size)]


def conclude(runs: FinishedRuns) -> Findings:
    rows, series, verdicts = [], [], []
    for task in runs.names():
        by_size = runs.names(1, first=task)
        for size in by_size:
            label = (task, size)
            named = f"{size} (batch norm)" if size == by_size[0] else str(size)
            columns = ("validation_top1", "test_top1", "train_top1")
            rows.append([task, named, *(findings.cell(runs.numbers(label, column)) for column in columns)])
        points = {size: runs.numbers((task, size), "validation_top1") for size in by_size}
        series.append(findings.curve(task, points))
        verdicts += _verdicts(runs, task, points)
    headers = ["data", "ghost size", "validation top-1, %", "test top-1, %", "training top-1, %"]
    figure = Figure("Accuracy against ghost size", "ghost size", "validation top-1, %", series, log_x=True)
    return Findings([Table("Top-1 by ghost size", headers, rows)], [figure], verdicts)


def _verdicts(runs: FinishedRuns, task: str, points: dict[int, list[float]]) -> list[Verdict]:
    """The best size is chosen on validation data, so it is judged on test data."""
    whole, smallest = next(iter(points)), list(points)[-1]
    found = findings.best(points)
    if found is None:
        return [Verdict(f"{task}: some ghost size improves on batch norm", Outcome.UNDECIDED, "nothing has been run")]
    test = {size: runs.numbers((task, size), "test_top1") for size in points}
    better = claims.compare(
        f"{task}: ghost size {found}, the best on validation data, improves on batch norm (test top-1)",
        test[found],
        test[whole],
    )
    worse = claims.compare(
        f"{task}: the smallest ghost size, {smallest}, is worse than the best, {found}", test[found], test[smallest]
    )
    regularised = claims.compare(
        f"{task}: ghosts regularise: training top-1 is lower with ghost size {smallest} than with batch norm",
        runs.numbers((task, smallest), "train_top1"),
        runs.numbers((task, whole), "train_top1"),
        claims.LESS,
    )
    unimodal = claims.together(f"{task}: the effect of the size is unimodal, best in between", [better, worse])
    return [better, unimodal, regularised]
