"""Alpha for models trained with Group Norm, which never used moving averages (Figure 2 and appendix D).

The paper claims: a small share of the moving averages, alpha slightly below 1, improves Group Norm slightly: accuracy
on Caltech-256, cross-entropy on CIFAR-100 and SVHN; far from 1 performance falls, slowly at first. Expect small gains,
and the best alpha between 0.7 and 1. In training the layers track averages of x and x² that they do not use.
"""

from __future__ import annotations

from dataclasses import replace

from betternorm_lab.experiments import claims, findings, protocol
from betternorm_lab.experiments.alpha_ghost import METRICS
from betternorm_lab.experiments.arms import NOT_AUGMENTED, Arm
from betternorm_lab.experiments.findings import Findings, FinishedRuns
from betternorm_lab.experiments.scales import CALTECH101, TASKS, groups, with_norm
from betternorm_lab.results import Table, Verdict
from betternorm_lab.training import Config
from betternorm_lab.trials import Trial

TITLE = "Alpha for models trained with Group Norm"
PLACE = "Figure 2, section 3.1; appendix D"

STILL_NEAR = 0.8  # our reading of "a surprisingly large range of values" that does as well as 1
RATES, CANDIDATE_GROUPS = (0.03, 0.1, 0.3), (8, 16)  # candidates at medium scale
NARROW = 0.3  # how far from 1 the figure of the main text reaches


def arms(scale: str) -> dict[Arm, Trial]:
    tasks = {Arm(dataset): config for dataset, config in TASKS[scale].items()}
    if scale == "small":
        tasks[Arm("caltech101-20")] = CALTECH101
    if scale == "medium":
        tasks |= {replace(task, setting=NOT_AUGMENTED): replace(one, augment=False) for task, one in tasks.items()}
    return {task: with_group_norm(config, scale) for task, config in tasks.items()}


def with_group_norm(config: Config, scale: str) -> Config:
    """Group Norm; at medium scale with the learning rate and the groups of the protocol."""
    if scale != protocol.SCALE:
        return with_norm(config, "group", num_groups=groups(config, scale))
    rate, count = protocol.GROUP_NORM
    return with_norm(replace(config, learning_rate=rate), "group", num_groups=count)


def candidates(scale: str) -> dict[Arm, Config]:
    """The learning rates and groups at medium scale."""
    return {
        Arm(dataset, variant=f"learning rate {rate:g}", size=count): with_norm(
            replace(config, learning_rate=rate), "group", num_groups=count
        )
        for dataset, config in TASKS[scale].items()
        for rate in RATES
        for count in CANDIDATE_GROUPS
    }


def conclude(runs: FinishedRuns) -> Findings:
    rows: list[list[object]] = []
    verdicts: list[Verdict] = []
    for task in runs.tasks():
        for metric, words in METRICS.items():
            names = (metric, f"{metric}_own", metric.replace("test", "alpha"))
            rows.append([task.title, words, *(findings.cell(runs.numbers(task, name)) for name in names)])
        for metric, words, claimed in (
            ("top1", "raises the top-1", claims.MORE),
            ("cross_entropy", "lowers the cross-entropy", claims.LESS),
            ("calibrated_cross_entropy", "lowers the cross-entropy after temperature scaling", claims.LESS),
        ):
            claim = f"{task.title}: alpha below 1 {words} of a Group Norm model"
            verdicts.append(claims.gain(claim, runs, task, f"test_{metric}", claimed, id=task.id(metric)))
        claim = f"{task.title}: the best alpha for cross-entropy is below 1"
        best, trained = runs.numbers(task, "alpha_cross_entropy"), runs.numbers(task, "alpha_as_trained")
        verdicts.append(claims.compare(claim, best, trained, claims.LESS, id=task.id("best-below-1"), paired=True))
        verdicts += _far_from_training(runs, task)
    curves = {task.title: runs[task] for task in runs.tasks()}
    figures = [
        *findings.alpha_figures("Group Norm, alpha near 1", curves, NARROW),
        *findings.alpha_figures("Group Norm, the whole range of alpha", curves),
    ]
    headers = ["data", "metric", "Group Norm (alpha = 1)", "at its best alpha", "best alpha"]
    return Findings([Table("Alpha for Group Norm models", headers, rows)], figures, verdicts)


def _far_from_training(runs: FinishedRuns, task: Arm) -> list[Verdict]:
    """How top-1 falls as alpha leaves 1, on validation data: the test set is evaluated only at the best alphas."""
    points = findings.alpha_points(runs[task], "top1")
    trained, margin = points.get(1.0, []), runs.margin("top1")
    near = claims.compare(
        f"{task.title}: with alpha {STILL_NEAR:g} a Group Norm model does as well, within {margin:g} points "
        "(validation top-1)",
        points.get(STILL_NEAR, []),
        trained,
        claims.within(margin),
        id=task.id("near-1"),
        paired=True,
    )
    zero = claims.compare(
        f"{task.title}: with alpha 0 a Group Norm model is worse (validation top-1)",
        points.get(0.0, []),
        trained,
        claims.LESS,
        id=task.id("alpha-0"),
        paired=True,
        margin=margin,
    )
    return [near, replace(zero, sanity=True)]
