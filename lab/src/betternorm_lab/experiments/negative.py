"""The paper's negative results (appendix C).

The paper claims, on CIFAR-100: moving averages over examples without augmentation cost half a point of accuracy, and
improve the cross-entropy mildly; averages over the test set behave like those over the training set (within 0.1 points
and 1 % of the cross-entropy). Randomness in its statistics does not improve Group Norm: neither noise, nor random
groups of channels, nor changing their number during training; learning group sizes with Switchable Norm overfits (plain
Switchable Norm is in ``baselines``). A constant number of values per group has mild success, which does not
generalize. Expect no gains, and some losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from betternorm.weighing.alpha import set_alpha
from betternorm.weighing.calibration import calibrate
from betternorm_lab.data import Data, Loader
from betternorm_lab.experiments import claims, findings, trained_networks
from betternorm_lab.experiments.arms import Arm
from betternorm_lab.experiments.findings import Findings, FinishedRuns
from betternorm_lab.experiments.scales import TASKS, groups, steps, with_norm
from betternorm_lab.results import Figure, Table, Verdict
from betternorm_lab.training import evaluate
from betternorm_lab.trials import Progress, Trial

TITLE = "Negative results of the paper"
PLACE = "Appendix C"

ELEMENTS = {"smoke": 128, "small": 512, "paper": 4096}  # values per group, height x width x channels
SPREAD = {"smoke": 0.5, "small": 0.25, "paper": 0.25}  # of the noise, in standard deviations of the statistics
AVERAGES = {
    "moving": "as trained",
    "augmented": "training set, augmented",
    "plain": "training set, not augmented",
    "test": "test set, without labels",
}
AVERAGED, BASELINE = "averages", "Group Norm"
SAME = 0.5  # margin of equivalence, points of top-1


@dataclass(frozen=True, kw_only=True)
class Recalibrated(trained_networks.OnTrainedNetwork):
    """A trained model evaluated with other averages in its norm layers; nothing is trained."""

    kind: ClassVar[str] = "recalibrated"

    def measure(self, network: nn.Module, data: Data, progress: Progress) -> dict[str, Any]:
        set_alpha(network, 0.0)
        test = trained_networks.held_out(data)
        sources = {
            "augmented": Loader(data, data.train, self.batch_size, train=True, seed=self.seed),
            "plain": Loader(data, data.train, 250),
            "test": test,
        }
        result: dict[str, Any] = {}
        for number, name in enumerate(AVERAGES):
            if name in sources:
                calibrate(network, sources[name], progress=False)
            (row,) = evaluate(network, test)
            result |= {f"{metric}_{name}": value for metric, value in row.items()}
            progress((number + 1) / len(AVERAGES))
        return result


def arms(scale: str) -> dict[Arm, Trial]:
    dataset, config = next(iter(TASKS[scale].items()))
    count, own, length = groups(config, scale), "betternorm.lab.norms:", steps(config)
    few, many = max(2, count // 4), count * 2
    trials: dict[str, Trial] = {
        AVERAGED: Recalibrated.of(config),
        BASELINE: with_norm(config, "group", num_groups=count),
        "noise": with_norm(config, f"{own}noisy_group", num_groups=count, strength=SPREAD[scale]),
        "random groups": with_norm(config, f"{own}random_group", num_groups=count),
        "random groups, half the time": with_norm(config, f"{own}random_group", num_groups=count, share=0.5),
        "more and more groups": with_norm(config, f"{own}changing_group", first=few, last=many, steps=length),
        "fewer and fewer groups": with_norm(config, f"{own}changing_group", first=many, last=few, steps=length),
        "constant values per group": with_norm(config, f"{own}even_group", elements=ELEMENTS[scale]),
    }
    return {Arm(dataset, method=method): trial for method, trial in trials.items()}


def conclude(runs: FinishedRuns) -> Findings:
    (task,) = runs.tasks()
    names = ("top1", "cross_entropy")
    averages = {
        name: {of: runs.numbers(task.with_method(AVERAGED), f"{name}_{of}") for of in AVERAGES} for name in names
    }
    rows = [[words, *(findings.cell(averages[name][of]) for name in names)] for of, words in AVERAGES.items()]
    variants = [arm for arm in runs if arm.method != AVERAGED]
    groups = {arm.method: runs.numbers(arm, "test_top1") for arm in variants}
    columns = ("validation_top1", "test_top1", "train_top1")
    cells = [[arm.method, *(findings.cell(runs.numbers(arm, column)) for column in columns)] for arm in variants]
    tables = [
        Table("Batch norm with other averages", ["averages over", "test top-1, %", "test cross-entropy"], rows),
        Table("Group Norm, perturbed", ["variant", "validation top-1, %", "test top-1, %", "training top-1, %"], cells),
    ]
    by_average = {words: averages["top1"][of] for of, words in AVERAGES.items()}
    figures = [
        Figure(title, label, "test top-1, %", [findings.curve("test top-1", bars)], kind="bar")
        for title, label, bars in (
            ("Group Norm, perturbed", "variant", groups),
            ("Batch norm with other averages", "averages over", by_average),
        )
    ]
    return Findings(tables, figures, [*_averages(averages), *_randomness(groups, runs.margin("top1"))])


def _averages(averages: Mapping[str, Mapping[str, list[float]]]) -> list[Verdict]:
    top1, loss = averages["top1"], averages["cross_entropy"]
    relative = [100 * (a / b - 1) for a, b in zip(loss["test"], loss["augmented"], strict=True)]
    none = [0.0] * len(relative)
    return [
        claims.compare(f"averages {claim}", first, second, region, id=id, paired=True)
        for claim, id, first, second, region in (
            ("without augmentation lower test top-1", "plain/top1", top1["plain"], top1["augmented"], claims.LESS),
            (
                "without augmentation lower test cross-entropy",
                "plain/cross_entropy",
                loss["plain"],
                loss["augmented"],
                claims.LESS,
            ),
            (
                f"over the test set give the same top-1 as over the training set, within {SAME} points",
                "test/top1",
                top1["test"],
                top1["augmented"],
                claims.within(SAME),
            ),
            (
                "over the test set change the cross-entropy by less than 1 %",
                "test/cross_entropy",
                relative,
                none,
                claims.within(1.0),
            ),
        )
    ]


def _randomness(groups: Mapping[str, list[float]], margin: float) -> list[Verdict]:
    return [
        claims.compare(
            f"Group Norm does not improve by {margin:g} points with: {method}",
            values,
            groups[BASELINE],
            claims.at_most(margin),
            id=f"group/{method}",
        )
        for method, values in groups.items()
        if method != BASELINE
    ]
