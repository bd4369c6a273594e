"""What the experiments share: the rows of their arms, cells and curves of them, and the rule that judges a claim."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from betternorm.errors import UncertainGainWarning
from betternorm.lab import stats
from betternorm.lab.data import Data, Loader
from betternorm.lab.results import Figure, Outcome, Series, Table, Verdict
from betternorm.lab.store import Row, Store
from betternorm.lab.training import JUDGED_BY, Config, load_data, trained
from betternorm.lab.training import run as train
from betternorm.lab.trials import Progress, Runtime
from betternorm.surgery import convert
from betternorm.weighing.alpha import weighed_layers
from betternorm.weighing.result import AlphaSearch
from betternorm.weighing.search import tune_alpha

Label = tuple[Any, ...]
NOT_RUN = "not run"
RULE = (
    f"A claim says where a difference lies: above 0, say. It is *seen* where the {stats.CONFIDENCE:.0%} interval of "
    "the difference lies inside, *not seen* where it lies outside, and *not decided* where it does both. Different "
    "networks are compared by Welch's t-test, two readings of the same networks by the paired one; P values are "
    "two-sided and not corrected for the number of claims."
)


@dataclass(frozen=True)
class Findings:
    """What an experiment concludes from its rows."""

    tables: Sequence[Table]
    figures: Sequence[Figure]
    verdicts: Sequence[Verdict]
    notes: str = ""


class Runs(Mapping[Label, list[Row]]):
    """The finished rows of every arm by its label, at one scale. An arm that has none yet is an empty list."""

    def __init__(self, scale: str, rows: Mapping[Label, list[Row]]) -> None:
        self.scale, self._rows = scale, dict(rows)

    def __getitem__(self, label: Label) -> list[Row]:
        return self._rows[label]

    def __iter__(self) -> Any:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def names(self, place: int = 0, **where: Any) -> list[Any]:
        """The different values at a place of the labels, in their order: the datasets, or the methods."""
        wanted = {int(key.removeprefix("at")): value for key, value in where.items()}
        labels = [label for label in self if all(label[at] == value for at, value in wanted.items())]
        return list(dict.fromkeys(label[place] for label in labels))

    def values(self, label: Label, name: str) -> list[float]:
        """A number of every run of an arm; shares come in per cent."""
        return [scaled(name, row[name]) for row in self._rows.get(label, [])]

    def by_seed(self, *readings: tuple[Label, str]) -> list[list[float]]:
        """Numbers of several arms, seed by seed, for the seeds that all of them have run."""
        found = [
            dict(zip((row["seed"] for row in self[label]), self.values(label, name), strict=True))
            for label, name in readings
        ]
        seeds = sorted(set.intersection(*map(set, found)))
        return [[values[seed] for seed in seeds] for values in found]

    def pairs(self, label: Label, first: str, second: str) -> list[float]:
        """First less second, run by run."""
        return [a - b for a, b in zip(self.values(label, first), self.values(label, second), strict=True)]


def scaled(name: str, value: float) -> float:
    """Shares in per cent, everything else as it is."""
    return value * 100 if name.split("_")[0] != "alpha" and ("top1" in name or "top5" in name) else value


def cell(values: Sequence[float]) -> str:
    """Mean, spread and n, as a table shows them."""
    return str(stats.summary(values)) if len(values) else NOT_RUN


def mean(values: Sequence[float]) -> float:
    return stats.summary(values).mean


# Curves -------------------------------------------------------------------------------------------------------------


def curve(name: str, points: Mapping[Any, Sequence[float]]) -> Series:
    """The mean of every point that has been run, with the interval of the mean where there are two runs or more."""
    points = {x: values for x, values in points.items() if len(values)}
    found = [stats.summary(values) for values in points.values()]
    bounds = [one.t_interval if one.n > 1 else (one.mean, one.mean) for one in found]
    return Series(name, list(points), [one.mean for one in found], [b[0] for b in bounds], [b[1] for b in bounds])


def alpha_points(rows: Iterable[Row], metric: str, within: float = 1.0) -> dict[float, list[float]]:
    """A metric on validation data by alpha, for those that every run tried, up to ``within`` of the trained one."""
    tables = [({line["alpha"]: line for line in row["alpha_table"]}, row["alpha_as_trained"]) for row in rows]
    if not tables:
        return {}
    shared = set.intersection(*(set(table) for table, _ in tables))
    return {
        alpha: [scaled(metric, table[alpha][metric]) for table, _ in tables]
        for alpha in sorted(shared)
        if all(abs(alpha - trained) <= within for _, trained in tables)
    }


def alpha_figures(title: str, arms: Mapping[str, Sequence[Row]], within: float = 1.0) -> list[Figure]:
    """Top-1, top-5 and cross-entropy against alpha, a figure each, a curve an arm."""
    words = {"top1": "top-1, %", "top5": "top-5, %", "cross_entropy": "cross-entropy"}
    figures = []
    for metric, label in words.items():
        series = [curve(name, alpha_points(rows, metric, within)) for name, rows in arms.items()]
        series = [one for one in series if one.x]
        if series:
            figures.append(Figure(f"{title}: {label.split(',')[0]}", "alpha", label, series, slider=True))
    return figures


# Verdicts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Region:
    """Where a claim says that a difference lies."""

    low: float = -math.inf
    high: float = math.inf


MORE, LESS = Region(low=0.0), Region(high=0.0)


def within(margin: float) -> Region:
    """No difference that matters."""
    return Region(-margin, margin)


def judge(claim: str, interval: tuple[float, float], claimed: Region, evidence: str) -> Verdict:
    """The one rule of this suite, see :data:`RULE`."""
    low, high = interval
    if low > claimed.low and high < claimed.high:
        outcome = Outcome.SEEN
    elif high <= claimed.low or low >= claimed.high:
        outcome = Outcome.NOT_SEEN
    else:
        outcome = Outcome.UNDECIDED
    return Verdict(claim, outcome, evidence)


def compare(
    claim: str,
    first: Sequence[float],
    second: Sequence[float],
    claimed: Region = MORE,
    *,
    paired: bool = False,
) -> Verdict:
    """A verdict on the difference of two arms, first less second."""
    if min(len(first), len(second)) < 2:
        return Verdict(claim, Outcome.UNDECIDED, f"there are {len(first)} and {len(second)} runs; it takes two of each")
    found = (stats.paired if paired else stats.welch)(first, second)
    test = "paired t-test" if paired else "Welch's t-test"
    means = f"{stats.summary(first)} against {stats.summary(second)}"
    return judge(claim, found.interval, claimed, f"{means}: difference {found}, {test}")


def gain(claim: str, runs: Runs, label: Label, metric: str, claimed: Region = MORE) -> Verdict:
    """A verdict on what tuning alpha did to a metric in the same networks."""
    return compare(claim, runs.values(label, f"{metric}_tuned"), runs.values(label, metric), claimed, paired=True)


def certain(claim: str, holds: bool, evidence: str) -> Verdict:
    """A verdict where nothing is random."""
    return Verdict(claim, Outcome.SEEN if holds else Outcome.NOT_SEEN, evidence)


def together(claim: str, parts: Sequence[Verdict]) -> Verdict:
    """A claim that holds where all its parts do."""
    outcomes = {part.outcome for part in parts}
    if outcomes == {Outcome.SEEN}:
        outcome = Outcome.SEEN
    else:
        outcome = Outcome.NOT_SEEN if Outcome.NOT_SEEN in outcomes else Outcome.UNDECIDED
    return Verdict(claim, outcome, "; ".join(part.evidence for part in parts))


def best(points: Mapping[Any, Sequence[float]], higher: bool = True) -> Any:
    """Where the mean is best, of the points that have been run; None where none has."""
    means = {x: stats.summary(values).mean for x, values in points.items() if len(values)}
    return (max if higher else min)(means, key=means.get) if means else None


# Files and networks -------------------------------------------------------------------------------------------


def network_file(config: Config, folder: Path, runtime: Runtime) -> Path:
    """The trained network of another trial of the same store, whose own folder is ``folder``; trained if it must be.

    A row says that a trial is done, but its network may be gone, where rows came from a file.
    """
    place = folder.parent / config.key
    with Store(folder.parent.parent).claim(config.key):
        train(config, place, runtime)
    return place / "model.pt"


def tuned(network: nn.Module, loader: Iterable[Any], **options: Any) -> AlphaSearch:
    """:func:`betternorm.tune_alpha` that sets the best alpha, and leaves it to the row to say that it may be chance."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncertainGainWarning)
        return tune_alpha(network, loader, JUDGED_BY, insist=True, **options)


def data_file(name: str, runtime: Runtime) -> Path:
    """A file as it is named, or in the folder of the datasets."""
    place = Path(runtime.data_root or os.environ.get("BETTERNORM_DATA") or "data") / name
    return place if place.is_file() else Path(name)


@dataclass(frozen=True, kw_only=True)
class OnTrained(Config):
    """A trial that trains nothing: it measures the network of the training with the same fields."""

    kind: ClassVar[str] = "on-trained"

    @classmethod
    def of(cls, config: Config) -> OnTrained:
        return cls(**config.config)

    def run(self, folder: Path, runtime: Runtime, progress: Progress) -> dict[str, Any]:
        config = Config(**self.config)
        network = network_of(config, folder, runtime)
        if not weighed_layers(network):
            convert(network, "weighed")
        return self.measure(network, load_data(config, runtime), progress)

    def measure(self, network: nn.Module, data: Data, progress: Progress) -> dict[str, Any]:
        """What goes into the row. The network is in evaluation mode, with its tuned alpha."""
        raise NotImplementedError(f"{type(self).__name__} has to say what it measures")


def judged_on(data: Data) -> Loader:
    """The test data, or the validation data where there is none."""
    return Loader(data, data.validation if data.test is None else data.test, 250)


def network_of(config: Config, folder: Path, runtime: Runtime) -> nn.Module:
    """The network itself, in evaluation mode, with its tuned alpha."""
    return trained(config, network_file(config, folder, runtime).parent, runtime)
