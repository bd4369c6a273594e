"""What the paper tried in vain (appendix C).

The paper claims, on CIFAR-100: moving averages over examples without augmentation cost half a point of accuracy, and
improve the cross-entropy mildly; averages over the test set behave like those over the training set (within 0.1 points
and 1 % of the cross-entropy). Group Norm does not improve by randomness in its statistics: not by noise, not by random
groups of channels, not by changing their number during training, and learning group sizes with Switchable Norm
overfits (plain Switchable Norm is in ``baselines``). A constant number of values per group has mild
success, which does not generalise. Expect nulls, and some losses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from betternorm.weighing.alpha import set_alpha
from betternorm.weighing.calibration import calibrate
from betternorm_lab.data import Data, Loader
from betternorm_lab.experiments import claims, findings, trained_networks
from betternorm_lab.experiments.findings import Findings, FinishedRuns, Label
from betternorm_lab.experiments.scales import TASKS, groups, steps, with_norm
from betternorm_lab.results import Figure, Table
from betternorm_lab.training import evaluate
from betternorm_lab.trials import Progress, Trial

TITLE = "What the paper tried in vain"
PLACE = "Appendix C"

ELEMENTS = {"smoke": 128, "small": 512, "paper": 4096}  # values per group, height x width x channels
SPREAD = {"smoke": 0.5, "small": 0.25, "paper": 0.25}  # of the noise, in deviations of the statistics
AVERAGES = {
    "moving": "as trained",
    "augmented": "training set, augmented",
    "plain": "training set, not augmented",
    "test": "test set, without labels",
}
SAME = 0.5  # points of top-1 that count as no difference


@dataclass(frozen=True, kw_only=True)
class Recalibrated(trained_networks.OnTrainedNetwork):
    """A trained network judged with other averages in its norm layers; nothing is trained."""

    kind: ClassVar[str] = "recalibrated"

    def measure(self, network: nn.Module, data: Data, progress: Progress) -> dict[str, Any]:
        set_alpha(network, 0.0)
        test = trained_networks.held_out(data)
        sources = {
            "augmented": Loader(data, data.train, self.batch_size, train=True, seed=self.seed),
            "plain": Loader(data, data.train, 250),
            "test": test,
        }
        found: dict[str, Any] = {}
        for number, name in enumerate(AVERAGES):
            if name in sources:
                calibrate(network, sources[name], progress=False)
            (row,) = evaluate(network, test)
            found |= {f"{metric}_{name}": value for metric, value in row.items()}
            progress((number + 1) / len(AVERAGES))
        return found


def arms(scale: str) -> dict[Label, Trial]:
    task, config = next(iter(TASKS[scale].items()))
    count, own = groups(config, scale), "betternorm.lab.norms:"
    length = steps(config)
    few, many = max(2, count // 4), count * 2
    return {
        (task, "averages"): Recalibrated.of(config),
        (task, "Group Norm"): with_norm(config, "group", num_groups=count),
        (task, "noise"): with_norm(config, f"{own}noisy_group", num_groups=count, strength=SPREAD[scale]),
        (task, "random groups"): with_norm(config, f"{own}random_group", num_groups=count),
        (task, "random groups, half the time"): with_norm(config, f"{own}random_group", num_groups=count, share=0.5),
        (task, "more and more groups"): with_norm(config, f"{own}changing_group", first=few, last=many, steps=length),
        (task, "fewer and fewer groups"): with_norm(config, f"{own}changing_group", first=many, last=few, steps=length),
        (task, "constant values per group"): with_norm(config, f"{own}even_group", elements=ELEMENTS[scale]),
    }


def conclude(runs: FinishedRuns) -> Findings:
    (task,) = runs.names()
    label = (task, "averages")
    names = ("top1", "cross_entropy")
    averages = {name: {of: runs.numbers(label, f"{name}_{of}") for of in AVERAGES} for name in names}
    rows = [[words, *(findings.cell(averages[name][of]) for name in names)] for of, words in AVERAGES.items()]
    groups = {one: runs.numbers((task, one), "test_top1") for one in runs.names(1) if one != "averages"}
    columns = ("validation_top1", "test_top1", "train_top1")
    variants = [[one, *(findings.cell(runs.numbers((task, one), column)) for column in columns)] for one in groups]
    margin = runs.margin("top1")
    top1, loss = averages["top1"], averages["cross_entropy"]
    relative = [100 * (a / b - 1) for a, b in zip(loss["test"], loss["augmented"], strict=True)]
    verdicts = [
        claims.compare(
            "averages without augmentation lower test top-1", top1["plain"], top1["augmented"], claims.LESS, paired=True
        ),
        claims.compare(
            "averages without augmentation lower test cross-entropy",
            loss["plain"],
            loss["augmented"],
            claims.LESS,
            paired=True,
        ),
        claims.compare(
            f"averages over the test set give the same top-1 as over the training set, within {SAME} points",
            top1["test"],
            top1["augmented"],
            claims.within(SAME),
            paired=True,
        ),
        claims.compare(
            "averages over the test set change the cross-entropy by less than 1 %",
            relative,
            [0.0] * len(relative),
            claims.within(1.0),
            paired=True,
        ),
    ]
    for one, values in list(groups.items())[1:]:
        claim = f"Group Norm does not improve by {margin:g} points with: {one}"
        verdicts.append(claims.compare(claim, values, groups["Group Norm"], claims.at_most(margin)))
    tables = [
        Table("Batch norm with other averages", ["averages over", "test top-1, %", "test cross-entropy"], rows),
        Table(
            "Group Norm, disturbed", ["variant", "validation top-1, %", "test top-1, %", "training top-1, %"], variants
        ),
    ]
    bars = [findings.curve("test top-1", groups)]
    figures = [Figure("Group Norm, disturbed", "variant", "test top-1, %", bars, kind="bar")]
    figures.append(
        Figure(
            "Batch norm with other averages",
            "averages over",
            "test top-1, %",
            [findings.curve("test top-1", {words: top1[of] for of, words in AVERAGES.items()})],
            kind="bar",
        )
    )
    return Findings(tables, figures, verdicts)
