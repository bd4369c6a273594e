"""Two examples per batch: Group Norm against groups of channels and examples together (section 3.4).

The paper claims, with alpha tuned for both and the number of groups for each: CIFAR-100 73.91 to 74.60 % (three runs),
Caltech-256 48.2 to 53.2 % (two runs), SVHN 98.75 to 98.73 %: batch group norm is better where networks overfit, for two
examples make its statistics vary. Expect a gain of points with few images per class.

At medium scale there are two settings. Steps of two examples: 8 epochs, 40,000 steps, in which the networks are far
from overfitting. Steps of 128 examples, normalised two by two, as when memory holds two and gradients are accumulated:
40 epochs. The learning rate of each norm, and the number of groups, are chosen on validation data in each; with steps
of two examples among candidates of a quarter of the length.
"""

from __future__ import annotations

from dataclasses import replace

from betternorm_lab.experiments import alpha_groupnorm, claims, findings, ghost_size, protocol
from betternorm_lab.experiments.findings import Findings, FinishedRuns, Label
from betternorm_lab.experiments.scales import MOST_GROUPS, TASKS, at_batch_size, with_norm
from betternorm_lab.results import Figure, Table
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
DECAYED = ", with decay"

# At medium scale: the two settings, and what the learning rates and groups are chosen from, for each norm alike.
EPOCHS, CANDIDATE_EPOCHS = 8, 2  # with steps of two examples
TOGETHER = ", steps of 128"
RATES = (0.0016, 0.005, 0.0125)  # with steps of two examples: in proportion to B, to sqrt(B)


def arms(scale: str) -> dict[Label, Config]:
    if scale == "medium":
        return _medium()
    return {
        (task, METHODS[norm], groups): with_norm(at_batch_size(config, BATCH), norm, num_groups=groups)
        for task, config in TASKS[scale].items()
        for norm in METHODS
        for groups in GROUPS[scale]
        if groups <= MOST_GROUPS.get(config.network, groups)
    }


def _medium() -> dict[Label, Config]:
    """Each norm at the learning rate and with the groups that the protocol chose for it, with decay and without."""
    found: dict[Label, Config] = {}
    for task, config in TASKS["medium"].items():
        for method in (*METHODS.values(), PLAIN):
            for setting, base, chosen in (
                ("", replace(config, batch_size=BATCH, epochs=EPOCHS), protocol.TWO_EXAMPLES),
                (TOGETHER, config, protocol.TWO_EXAMPLES_TOGETHER),
            ):
                rate, count = chosen[method]
                here = _normalised(base, method, rate, count)
                found[f"{task}{setting}", method, count or 1] = here
                found[f"{task}{setting}", f"{method}{DECAYED}", count or 1] = replace(here, norm_decay="all")
    return found


def _normalised(config: Config, method: str, rate: float, count: int | None) -> Config:
    """With a norm whose statistics are of two examples, or of one, however many there are in a step."""
    config = replace(config, learning_rate=rate)
    if method == PLAIN:
        return config if config.batch_size == BATCH else with_norm(config, "ghost", ghost_size=BATCH)
    return with_norm(config, {name: norm for norm, name in METHODS.items()}[method], num_groups=count)


def candidates(scale: str) -> dict[Label, Config]:
    """What the learning rates and groups at medium scale are chosen from, for each norm alike."""
    return {
        (f"{task}{setting}", f"{method}, learning rate {rate:g}", count or 1): _normalised(base, method, rate, count)
        for task, config in TASKS[scale].items()
        for setting, base, rates in (
            ("", replace(config, batch_size=BATCH, epochs=CANDIDATE_EPOCHS), RATES),
            (TOGETHER, config, alpha_groupnorm.RATES),
        )
        for rate in rates
        for method in (PLAIN, *METHODS.values())
        for count in ((None,) if method == PLAIN else alpha_groupnorm.CANDIDATE_GROUPS)
    }


def conclude(runs: FinishedRuns) -> Findings:
    rows = [[*label, *(findings.cell(runs.numbers(label, name)) for name in COLUMNS)] for label in runs]
    series, verdicts = [], []
    margin = runs.margin("top1")
    for task in runs.names():
        read: dict[str, list[float]] = {}
        overfit: dict[str, list[float]] = {}
        for method in runs.names(1, first=task):
            by_groups = {
                label[2]: runs.numbers(label, "validation_top1_own") for label in runs if label[:2] == (task, method)
            }
            series.append(findings.curve(f"{task}, {method}", by_groups))
            found = findings.best(by_groups)
            label = (task, method, found)
            read[method] = runs.numbers(label, "test_top1_own")
            overfit[method] = runs.pairs(label, ghost_size.TRAINING, "test_top1")
        claim = f"{task}: batch group norm is better than Group Norm at B = {BATCH} (test top-1)"
        verdicts.append(claims.compare(claim, read[BOTH], read[GROUP], margin=margin))
        verdicts.append(
            claims.compare(
                f"{task}: batch group norm regularises: training top-1 exceeds test top-1 by less than with Group Norm",
                overfit[BOTH],
                overfit[GROUP],
                claims.LESS,
                margin=margin,
            )
        )
        if PLAIN in read:
            verdicts += [
                claims.compare(
                    f"{task}: batch group norm is better than batch norm at B = {BATCH} (test top-1)",
                    read[BOTH],
                    read[PLAIN],
                    margin=margin,
                ),
                claims.compare(
                    f"{task}: decay on gamma and beta adds to batch group norm (test top-1)",
                    read[f"{BOTH}{DECAYED}"],
                    read[BOTH],
                    margin=margin,
                ),
            ]
        for label in (label for label in runs if label[0] == task):
            named = f"{label[1]} with {label[2]} groups" if label[2] > 1 else label[1]
            claim = f"{task}: alpha lowers test cross-entropy, {named}"
            verdicts.append(claims.gain(claim, runs, label, "test_cross_entropy", claims.LESS))
    headers = ["data", "norm", "groups", *COLUMNS.values()]
    figures = [
        Figure(
            "Two examples per batch", "groups of channels", "validation top-1, %, at its best alpha", series, log_x=True
        )
    ]
    if runs.scale == "medium":  # where the number of groups is settled
        figures = [_bars(runs, task) for task in runs.names()]
    return Findings([Table(f"Top-1 at B = {BATCH}", headers, rows)], figures, verdicts, ghost_size.TRAINING_NOTE)


def _bars(runs: FinishedRuns, task: str) -> Figure:
    """Every norm as trained and at its best alpha, with what the paper states."""
    labels = [label for label in runs if label[0] == task]
    bars: dict[str, dict[str, list[float]]] = {
        "as trained": {label[1]: runs.numbers(label, "test_top1") for label in labels},
        "at its best alpha": {label[1]: runs.numbers(label, "test_top1_own") for label in labels},
        **{name: {label[1]: stated.get(label[1], []) for label in labels} for name, stated in PAPERS.items()},
    }
    series = [findings.curve(name, heights) for name, heights in bars.items()]
    return Figure(f"{task}: two examples per batch", "norm", "test top-1, %", series, kind="bar")
