"""Alpha for networks trained with Group Norm, which never saw a moving average (Figure 2 and the appendix).

The paper claims: a little of the moving averages, alpha a little below 1, improves slightly on Group Norm: accuracy on
Caltech-256, cross-entropy on CIFAR-100 and SVHN; far from 1 performance decays, slowly at first. Expect small gains,
and the best alpha between 0.7 and 1. The layers keep averages of x and x² in training though they do not use them.
"""

from __future__ import annotations

from dataclasses import replace

from betternorm_lab.experiments import claims, findings, protocol
from betternorm_lab.experiments.alpha_ghost import METRICS
from betternorm_lab.experiments.findings import Findings, FinishedRuns, Label
from betternorm_lab.experiments.scales import CALTECH101, TASKS, groups, with_norm
from betternorm_lab.results import Table, Verdict
from betternorm_lab.training import Config
from betternorm_lab.trials import Trial

TITLE = "Alpha for networks trained with Group Norm"
PLACE = "Figure 2, section 3.1; appendix D"

STILL_NEAR = 0.8  # "a surprisingly large range of values" does as well as 1: this far, as we read it
RATES, CANDIDATE_GROUPS = (0.03, 0.1, 0.3), (8, 16)  # candidates at medium scale
NARROW = 0.3  # how far from 1 the figure of the main text reaches


def arms(scale: str) -> dict[Label, Trial]:
    tasks = dict(TASKS[scale])
    if scale == "small":
        tasks["Caltech-101, 20 classes"] = CALTECH101
    if scale == "medium":
        tasks |= {f"{task}, not augmented": replace(config, augment=False) for task, config in TASKS[scale].items()}
    return {(task,): with_group_norm(config, scale) for task, config in tasks.items()}


def with_group_norm(config: Config, scale: str) -> Config:
    """Group Norm; at medium scale with the learning rate and the groups that the protocol chose for it."""
    if scale != protocol.SCALE:
        return with_norm(config, "group", num_groups=groups(config, scale))
    rate, count = protocol.GROUP_NORM
    return with_norm(replace(config, learning_rate=rate), "group", num_groups=count)


def candidates(scale: str) -> dict[Label, Config]:
    """What the learning rate and the groups at medium scale are chosen from."""
    return {
        (f"{task}, learning rate {rate:g}, {count} groups",): with_norm(
            replace(config, learning_rate=rate), "group", num_groups=count
        )
        for task, config in TASKS[scale].items()
        for rate in RATES
        for count in CANDIDATE_GROUPS
    }


def conclude(runs: FinishedRuns) -> Findings:
    rows, verdicts = [], []
    for task in runs.names():
        for metric, words in METRICS.items():
            names = (metric, f"{metric}_own", metric.replace("test", "alpha"))
            rows.append([task, words, *(findings.cell(runs.numbers((task,), name)) for name in names)])
        verdicts += [
            claims.gain(f"{task}: alpha below 1 raises the top-1 of a Group Norm network", runs, (task,), "test_top1"),
            claims.gain(
                f"{task}: alpha below 1 lowers the cross-entropy of a Group Norm network",
                runs,
                (task,),
                "test_cross_entropy",
                claims.LESS,
            ),
            claims.gain(
                f"{task}: it lowers it also after a temperature",
                runs,
                (task,),
                "test_calibrated_cross_entropy",
                claims.LESS,
            ),
            claims.compare(
                f"{task}: the best alpha for cross-entropy lies below 1",
                runs.numbers((task,), "alpha_cross_entropy"),
                runs.numbers((task,), "alpha_as_trained"),
                claims.LESS,
                paired=True,
            ),
        ]
        verdicts += _far_from_training(runs, task)
    arms = {task: runs[task,] for task in runs.names()}
    figures = [
        *findings.alpha_figures("Group Norm, alpha near 1", arms, NARROW),
        *findings.alpha_figures("Group Norm, all of alpha", arms),
    ]
    headers = ["data", "metric", "Group Norm (alpha = 1)", "at its best alpha", "best alpha for it"]
    return Findings([Table("Alpha for Group Norm networks", headers, rows)], figures, verdicts)


def _far_from_training(runs: FinishedRuns, task: str) -> list[Verdict]:
    """How top-1 falls as alpha leaves 1, on validation data: the test set is read at the best alphas alone."""
    points = findings.alpha_points(runs[task,], "top1")
    trained, margin = points.get(1.0, []), runs.margin("top1")
    return [
        claims.compare(
            f"{task}: with alpha {STILL_NEAR:g} a Group Norm network does as well, within {margin:g} points "
            "(validation top-1)",
            points.get(STILL_NEAR, []),
            trained,
            claims.within(margin),
            paired=True,
        ),
        claims.compare(
            f"{task}: with alpha 0 a Group Norm network is worse (validation top-1)",
            points.get(0.0, []),
            trained,
            claims.LESS,
            paired=True,
            margin=margin,
        ),
    ]
