"""Alpha by ghost size (Figure 4, and appendix D for the whole range of alpha).

The paper claims: the smaller the ghosts, the larger the gain from inference example weighing and the larger the best
alpha; the gain adds to that of ghost batch norm; the best alphas for accuracy and for cross-entropy may differ wildly.
Expect little gain for batch norm and several points for ghost sizes 2 to 4. The models are those of ``ghost-size``.
"""

from __future__ import annotations

from betternorm_lab.experiments import claims, findings, ghost_size
from betternorm_lab.experiments.arms import Arm
from betternorm_lab.experiments.findings import Findings, FinishedRuns
from betternorm_lab.results import Table, Verdict

TITLE = "Alpha by ghost size"
PLACE = "Figure 4, section 3.2; appendix D"

arms = ghost_size.arms
HEADERS = ["data", "ghost size", "metric", "alpha as trained", "at its best alpha", "gain", "best alpha"]
METRICS = {
    "test_top1": "test top-1, %",
    "test_cross_entropy": "test cross-entropy",
    "test_calibrated_cross_entropy": "test cross-entropy after temperature scaling",
}


def conclude(runs: FinishedRuns) -> Findings:
    rows, figures, verdicts = [], [], []
    for task in runs.tasks():
        sizes = runs.sizes(task)
        for size in sizes:
            arm = task.with_method(size=size)
            for metric, words in METRICS.items():
                own = f"{metric}_own"
                before, after = runs.numbers(arm, metric), runs.numbers(arm, own)
                gains, alphas = runs.pairs(arm, own, metric), runs.numbers(arm, metric.replace("test", "alpha"))
                rows.append([task.title, size, words, *map(findings.cell, (before, after, gains, alphas))])
        curves = {f"ghost size {size}": runs[task.with_method(size=size)] for size in sizes}
        figures += findings.alpha_figures(f"{task.title}, alpha by ghost size", curves)
        verdicts += _verdicts(runs, task, sizes)
    notes = (
        "Each metric is evaluated on test data at the alpha that is best for it on validation data. Temperatures are "
        "fitted on validation data, one for every alpha."
    )
    return Findings([Table("Gain from alpha", HEADERS, rows)], figures, verdicts, notes)


def _verdicts(runs: FinishedRuns, task: Arm, sizes: list[int]) -> list[Verdict]:
    whole, smallest = (task.with_method(size=sizes[end]) for end in (0, -1))
    ends = ((whole, "batch norm", "batch"), (smallest, f"ghost size {sizes[-1]}", "smallest"))
    result = []
    for arm, name, key in ends:
        for metric, words, claimed in (
            ("top1", "raises test top-1", claims.MORE),
            ("cross_entropy", "lowers test cross-entropy", claims.LESS),
            ("calibrated_cross_entropy", "lowers test cross-entropy after temperature scaling", claims.LESS),
        ):
            claim, id = f"{task.title}: alpha {words} with {name}", task.id(f"{key}/{metric}")
            result.append(claims.gain(claim, runs, arm, f"test_{metric}", claimed, id=id))
    ghosts = {size: runs.numbers(task.with_method(size=size), "validation_top1") for size in sizes[1:]}
    best = findings.best(ghosts) or sizes[-1]
    claim = f"{task.title}: alpha raises test top-1 with ghost size {best}, the best on validation data"
    result.append(claims.gain(claim, runs, task.with_method(size=best), "test_top1", id=task.id("best-ghosts/top1")))
    claim = f"{task.title}: alpha raises test top-5 with batch norm"
    result.append(claims.gain(claim, runs, whole, "test_top5", id=task.id("batch/top5")))
    than = f"with ghost size {sizes[-1]} than with batch norm"
    for metric, words, claimed in (
        ("test_top1", "gains more test top-1", claims.MORE),
        ("test_cross_entropy", "lowers test cross-entropy more", claims.LESS),
        ("test_calibrated_cross_entropy", "lowers test cross-entropy after temperature scaling more", claims.LESS),
    ):
        ours, theirs = (runs.pairs(arm, f"{metric}_own", metric) for arm in (smallest, whole))
        claim, id = f"{task.title}: alpha {words} {than}", task.id(f"gain-by-size/{metric.removeprefix('test_')}")
        result.append(claims.compare(claim, ours, theirs, claimed, id=id, margin=runs.margin(metric)))
    for metric, words in (("top1", "top-1"), ("cross_entropy", "cross-entropy")):
        ours, theirs = (runs.numbers(arm, f"alpha_{metric}") for arm in (smallest, whole))
        claim, id = f"{task.title}: the best alpha for {words} is larger {than}", task.id(f"alpha-by-size/{metric}")
        result.append(claims.compare(claim, ours, theirs, id=id))
    for arm, name, key in ends:
        top1, loss = runs.by_seed((arm, "alpha_top1"), (arm, "alpha_cross_entropy"))
        intuitive = [1 / (arm.size or 1)] * len(loss)
        claim, id = (
            f"{task.title}: the best alpha for cross-entropy is not 1/B with {name}",
            task.id(f"{key}/not-1-over-b"),
        )
        result.append(claims.differ(claim, loss, intuitive, id=id, paired=True))
        claim = f"{task.title}: the best alphas for top-1 and for cross-entropy differ with {name}"
        result.append(claims.differ(claim, top1, loss, id=task.id(f"{key}/alphas-differ"), paired=True))
    return result
