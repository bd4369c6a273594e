"""Alpha for networks trained with Group Norm, which never saw a moving average (Figure 2 and the appendix).

The paper claims: a little of the moving averages, alpha a little below 1, improves slightly on Group Norm: accuracy on
Caltech-256, cross-entropy on CIFAR-100 and SVHN; far from 1 performance decays, slowly at first. Expect small gains,
and the best alpha between 0.7 and 1. The layers keep averages of x and x² in training though they do not use them.
"""

from __future__ import annotations

from dataclasses import replace

from betternorm.lab.experiments import claims, findings
from betternorm.lab.experiments.alpha_ghost import METRICS
from betternorm.lab.experiments.findings import Findings, FinishedRuns, Label
from betternorm.lab.experiments.scales import CALTECH101, TASKS, groups, with_norm
from betternorm.lab.results import Table
from betternorm.lab.trials import Trial

TITLE = "Alpha for networks trained with Group Norm"
PLACE = "Figure 2, section 3.1; appendix D"

NARROW = 0.3  # how far from 1 the figure of the main text reaches


def arms(scale: str) -> dict[Label, Trial]:
    tasks = dict(TASKS[scale])
    if scale == "small":
        tasks["Caltech-101, 20 classes"] = CALTECH101
    if scale == "medium":
        tasks |= {f"{task}, not augmented": replace(config, augment=False) for task, config in TASKS[scale].items()}
    return {(task,): with_norm(config, "group", num_groups=groups(config, scale)) for task, config in tasks.items()}


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
    arms = {task: runs[task,] for task in runs.names()}
    figures = [
        *findings.alpha_figures("Group Norm, alpha near 1", arms, NARROW),
        *findings.alpha_figures("Group Norm, all of alpha", arms),
    ]
    headers = ["data", "metric", "Group Norm (alpha = 1)", "at its best alpha", "best alpha for it"]
    return Findings([Table("Alpha for Group Norm networks", headers, rows)], figures, verdicts)
