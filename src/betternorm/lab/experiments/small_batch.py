"""Two examples per batch: Group Norm against groups of channels and examples together (section 3.4).

The paper claims, with alpha tuned for both and the number of groups for each: CIFAR-100 73.91 to 74.60 % (three runs),
Caltech-256 48.2 to 53.2 % (two runs), SVHN 98.75 to 98.73 %: batch group norm is better where networks overfit, for two
examples make its statistics vary. Expect a gain of points with few images per class.
"""

from __future__ import annotations

from betternorm.lab.experiments import claims, findings
from betternorm.lab.experiments.findings import Findings, FinishedRuns, Label
from betternorm.lab.experiments.scales import MOST_GROUPS, TASKS, at_batch_size, with_norm
from betternorm.lab.results import Figure, Table
from betternorm.lab.trials import Trial

TITLE = "Two examples per batch: Group Norm against batch group norm"
PLACE = "Section 3.4"

BATCH = 2
GROUPS = {"smoke": (4,), "small": (4, 8), "medium": (8,), "paper": (8, 16, 32, 64)}
METHODS = {"group": "group norm", "batch_group": "batch group norm"}


def arms(scale: str) -> dict[Label, Trial]:
    return {
        (task, METHODS[norm], groups): with_norm(at_batch_size(config, BATCH), norm, num_groups=groups)
        for task, config in TASKS[scale].items()
        for norm in METHODS
        for groups in GROUPS[scale]
        if groups <= MOST_GROUPS.get(config.network, groups)
    }


def conclude(runs: FinishedRuns) -> Findings:
    columns = ("validation_top1", "validation_top1_tuned", "test_top1", "test_top1_tuned", "train_top1")
    rows = [[*label, *(findings.cell(runs.numbers(label, name)) for name in columns)] for label in runs]
    series, verdicts = [], []
    for task in runs.names():
        tuned = {}
        for method in METHODS.values():
            by_groups = {
                groups: runs.numbers((task, method, groups), "validation_top1_tuned") for groups in runs.names(2)
            }
            series.append(findings.curve(f"{task}, {method}", by_groups))
            found = findings.best(by_groups)
            tuned[method] = runs.numbers((task, method, found), "test_top1_tuned") if found else []
        group, both = (tuned[method] for method in METHODS.values())
        verdicts.append(
            claims.compare(
                f"{task}: batch group norm is better than Group Norm at B = {BATCH} (test top-1)", both, group
            )
        )
    for label in runs:
        verdicts.append(
            claims.gain(
                f"{label[0]}: alpha lowers test cross-entropy, {label[1]} with {label[2]} groups",
                runs,
                label,
                "test_cross_entropy",
                claims.LESS,
            )
        )
    headers = [
        "data",
        "norm",
        "groups",
        "validation top-1, %",
        "alpha tuned",
        "test top-1, %",
        "alpha tuned",
        "training",
    ]
    figure = Figure(
        "Two examples per batch", "groups of channels", "validation top-1, %, alpha tuned", series, log_x=True
    )
    return Findings([Table(f"Top-1 at B = {BATCH}", headers, rows)], [figure], verdicts)
