"""Two examples per batch: Group Norm against batch group norm (section 3.4).

The paper claims, with alpha and the number of groups tuned for both: CIFAR-100 73.91 to 74.60 % (three runs),
Caltech-256 48.2 to 53.2 % (two runs), SVHN 98.75 to 98.73 %: batch group norm is better where models overfit, because
its statistics vary with the second example. Expect a gain of several points with few images per class.

At medium scale there are two settings. Two examples per step: 8 epochs, 40,000 steps, after which the models are
undertrained. 128 examples per step, normalized in pairs, as with gradient accumulation: 40 epochs. The learning rate
and the number of groups of each norm are chosen on validation data in each setting; with two examples per step among
candidates of a quarter of the length.
"""

from __future__ import annotations

from dataclasses import replace

from betternorm_lab.experiments import alpha_groupnorm, claims, findings, ghost_size, protocol
from betternorm_lab.experiments.arms import WHOLE_STEPS, Arm
from betternorm_lab.experiments.findings import Findings, FinishedRuns
from betternorm_lab.experiments.scales import MOST_GROUPS, TASKS, at_batch_size, with_norm
from betternorm_lab.results import Figure, Table, Verdict
from betternorm_lab.training import Config

TITLE = "Two examples per batch: Group Norm against batch group norm"
PLACE = "Section 3.4"

BATCH = 2
GROUPS = {"smoke": (4,), "small": (4, 8), "paper": (8, 16, 32, 64)}
METHODS = {"group": "group norm", "batch_group": "batch group norm"}
COLUMNS = {
    "validation_top1": "validation top-1, %",
    "validation_top1_own": "at its best alpha",
    "test_top1": "test top-1, %",
    "test_top1_own": "at its best alpha",
    ghost_size.TRAINING: "training",
}
GROUP, BOTH = METHODS.values()
PAPERS = {  # on validation data
    "the paper, CIFAR-100": {GROUP: [73.91], BOTH: [74.60]},
    "the paper, Caltech-256": {GROUP: [48.2], BOTH: [53.2]},
}
PLAIN = "batch norm"
WITH_DECAY = {method: f"{method}, with decay" for method in (GROUP, BOTH, PLAIN)}

# At medium scale, with two examples per step.
EPOCHS, CANDIDATE_EPOCHS = 8, 2
RATES = (0.0016, 0.005, 0.0125)  # candidates: from proportional to B to proportional to sqrt(B)


def arms(scale: str) -> dict[Arm, Config]:
    if scale == protocol.SCALE:
        return _medium()
    return {
        Arm(dataset, method=METHODS[norm], size=groups): with_norm(
            at_batch_size(config, BATCH), norm, num_groups=groups
        )
        for dataset, config in TASKS[scale].items()
        for norm in METHODS
        for groups in GROUPS[scale]
        if groups <= MOST_GROUPS.get(config.network, groups)
    }


def _medium() -> dict[Arm, Config]:
    """Each norm with the learning rate and the groups of the protocol, with decay and without."""
    result: dict[Arm, Config] = {}
    for dataset, config in TASKS[protocol.SCALE].items():
        for method in (*METHODS.values(), PLAIN):
            for setting, base, chosen in (
                ("", replace(config, batch_size=BATCH, epochs=EPOCHS), protocol.TWO_EXAMPLES),
                (WHOLE_STEPS, config, protocol.TWO_EXAMPLES_TOGETHER),
            ):
                rate, count = chosen[method]
                trial = _normalized(base, method, rate, count)
                result[Arm(dataset, setting, method, count or 1)] = trial
                result[Arm(dataset, setting, WITH_DECAY[method], count or 1)] = replace(trial, norm_decay="all")
    return result


def _normalized(config: Config, method: str, rate: float, count: int | None) -> Config:
    """With statistics over two examples, or over one, whatever the number of examples per step."""
    config = replace(config, learning_rate=rate)
    if method == PLAIN:
        return config if config.batch_size == BATCH else with_norm(config, "ghost", ghost_size=BATCH)
    return with_norm(config, {name: norm for norm, name in METHODS.items()}[method], num_groups=count)


def candidates(scale: str) -> dict[Arm, Config]:
    """The learning rates and groups at medium scale, the same for each norm."""
    return {
        Arm(dataset, setting, method, count or 1, f"learning rate {rate:g}"): _normalized(base, method, rate, count)
        for dataset, config in TASKS[scale].items()
        for setting, base, rates in (
            ("", replace(config, batch_size=BATCH, epochs=CANDIDATE_EPOCHS), RATES),
            (WHOLE_STEPS, config, alpha_groupnorm.RATES),
        )
        for rate in rates
        for method in (PLAIN, *METHODS.values())
        for count in ((None,) if method == PLAIN else alpha_groupnorm.CANDIDATE_GROUPS)
    }


def conclude(runs: FinishedRuns) -> Findings:
    rows = [
        [arm.title, arm.method, arm.size, *(findings.cell(runs.numbers(arm, name)) for name in COLUMNS)] for arm in runs
    ]
    series, verdicts = [], []
    for task in runs.tasks():
        best: dict[str, Arm] = {}  # of each method, the arm with the best number of groups on validation data
        for method in runs.methods(task):
            by_groups = {arm.size: runs.numbers(arm, "validation_top1_own") for arm in runs.arms(task, method)}
            series.append(findings.curve(f"{task.title}, {method}", by_groups))
            best[method] = task.with_method(method, findings.best(by_groups))
        of_task = _verdicts(runs, task, best)
        undertrained = runs.scale == protocol.SCALE and task.setting != WHOLE_STEPS
        verdicts += claims.not_tested(of_task, protocol.UNDERTRAINED) if undertrained else of_task
    headers = ["data", "norm", "groups", *COLUMNS.values()]
    label = "validation top-1, %, at its best alpha"
    figures = [Figure("Two examples per batch", "groups of channels", label, series, log_x=True)]
    if runs.scale == protocol.SCALE:  # which has one number of groups
        figures = [_bars(runs, task) for task in runs.tasks()]
    return Findings([Table(f"Top-1 at B = {BATCH}", headers, rows)], figures, verdicts, ghost_size.TRAINING_NOTE)


def _verdicts(runs: FinishedRuns, task: Arm, best: dict[str, Arm]) -> list[Verdict]:
    margin = runs.margin("top1")
    top1 = {method: runs.numbers(arm, "test_top1_own") for method, arm in best.items()}
    overfit = {method: runs.pairs(arm, ghost_size.TRAINING, "test_top1") for method, arm in best.items()}

    def compare(claim: str, first: list[float], second: list[float], region: claims.Region, id: str) -> Verdict:
        return claims.compare(f"{task.title}: {claim}", first, second, region, id=task.id(id), margin=margin)

    than = f"is better than {{}} at B = {BATCH} (test top-1)"
    result = [
        compare(f"{BOTH} {than.format('Group Norm')}", top1[BOTH], top1[GROUP], claims.MORE, "over-group"),
        compare(
            f"{BOTH} regularizes: training top-1 exceeds test top-1 by less than with Group Norm",
            overfit[BOTH],
            overfit[GROUP],
            claims.LESS,
            "regularizes",
        ),
    ]
    if PLAIN in top1:
        result += [
            compare(f"{BOTH} {than.format(PLAIN)}", top1[BOTH], top1[PLAIN], claims.MORE, "over-batch"),
            compare(
                f"decay on gamma and beta adds to {BOTH} (test top-1)",
                top1[WITH_DECAY[BOTH]],
                top1[BOTH],
                claims.MORE,
                "decay",
            ),
        ]
    for arm in runs.arms(task):
        name = f"{arm.method} with {arm.size} groups" if (arm.size or 1) > 1 else arm.method
        claim, id = f"{task.title}: alpha lowers test cross-entropy, {name}", task.id(f"alpha/{arm.method}/{arm.size}")
        result.append(claims.gain(claim, runs, arm, "test_cross_entropy", claims.LESS, id=id))
    return result


def _bars(runs: FinishedRuns, task: Arm) -> Figure:
    """Every norm with alpha as trained and at its best alpha, and the paper's numbers."""
    arms = runs.arms(task)
    bars: dict[str, dict[str, list[float]]] = {
        "alpha as trained": {arm.method: runs.numbers(arm, "test_top1") for arm in arms},
        "at its best alpha": {arm.method: runs.numbers(arm, "test_top1_own") for arm in arms},
        **{name: {arm.method: stated.get(arm.method, []) for arm in arms} for name, stated in PAPERS.items()},
    }
    series = [findings.curve(name, heights) for name, heights in bars.items()]
    return Figure(f"{task.title}: two examples per batch", "norm", "test top-1, %", series, kind="bar")
