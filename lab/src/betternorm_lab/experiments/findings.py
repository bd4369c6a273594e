"""From rows to results: the numbers of every arm, the cells of a table, the curves of a figure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from betternorm_lab import stats
from betternorm_lab.experiments.arms import Arm
from betternorm_lab.experiments.scales import MARGINS
from betternorm_lab.results import Figure, Series, Table, Verdict
from betternorm_lab.store import Row
from betternorm_lab.training import CALIBRATED

NOT_RUN = "not run"


@dataclass(frozen=True)
class Findings:
    """What an experiment concludes from its rows."""

    tables: Sequence[Table]
    figures: Sequence[Figure]
    verdicts: Sequence[Verdict]
    notes: str = ""


class FinishedRuns(Mapping[Arm, list[Row]]):
    """The finished rows of every arm at one scale. An arm that has none yet is an empty list."""

    def __init__(self, scale: str, rows: Mapping[Arm, list[Row]]) -> None:
        self.scale, self._rows = scale, dict(rows)

    def __getitem__(self, arm: Arm) -> list[Row]:
        return self._rows[arm]

    def __iter__(self) -> Iterator[Arm]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def tasks(self) -> list[Arm]:
        """The combinations of dataset and setting, in order."""
        return list(dict.fromkeys(arm.task for arm in self))

    def arms(self, task: Arm | None = None, method: str | None = None) -> list[Arm]:
        """The arms of a task, or of a method."""
        return [arm for arm in self if task in (None, arm.task) and method in (None, arm.method)]

    def methods(self, task: Arm | None = None) -> list[str]:
        return list(dict.fromkeys(arm.method for arm in self.arms(task)))

    def sizes(self, task: Arm | None = None, method: str | None = None) -> list[int]:
        return list(dict.fromkeys(arm.size for arm in self.arms(task, method) if arm.size is not None))

    def numbers(self, arm: Arm, name: str) -> list[float]:
        """A number of every run of an arm, where the row has it; proportions in percent."""
        return list(self._by_seed(arm, name).values())

    def _by_seed(self, arm: Arm, name: str) -> dict[int, float]:
        values = {row["seed"]: read(row, name) for row in self._rows.get(arm, [])}
        return {seed: scaled(name, value) for seed, value in values.items() if value is not None}

    def margin(self, metric: str) -> float:
        """The margin of equivalence of a metric at this scale."""
        kind = "cross_entropy" if metric.endswith("cross_entropy") else "top1"
        return MARGINS[self.scale][kind]

    def by_seed(self, *readings: tuple[Arm, str]) -> list[list[float]]:
        """Numbers of several arms, seed by seed, for the seeds that all of them have."""
        values = [self._by_seed(arm, name) for arm, name in readings]
        seeds = sorted(set.intersection(*map(set, values)))
        return [[one[seed] for seed in seeds] for one in values]

    def pairs(self, arm: Arm, first: str, second: str) -> list[float]:
        """First minus second, run by run."""
        return [a - b for a, b in zip(*self.by_seed((arm, first), (arm, second)), strict=True)]


def of_candidates(runs: FinishedRuns) -> Findings:
    """The validation numbers that hyperparameters are chosen by; there are no verdicts."""
    columns = {"validation_top1": "validation top-1, alpha as trained, %", "validation_top1_own": "at its best alpha"}
    rows = [[", ".join(arm.labels), *(cell(runs.numbers(arm, name)) for name in columns)] for arm in runs]
    return Findings([Table("Candidates", ["candidate", *columns.values()], rows)], [], [])


def read(row: Row, name: str) -> float | None:
    """A number of a row, or None if the row does not have it.

    Rows older than the ``_own`` columns have those numbers in their tables, except for the cross-entropy after
    temperature scaling.
    """
    if name in row.result:
        return float(row.result[name])
    split, _, metric = name.removesuffix("_own").partition("_")
    table = row.result.get("alpha_table" if split == "validation" else "test_table")
    if not name.endswith("_own") or f"alpha_{metric}" not in row.result or table is None:
        return None
    at = {line["alpha"]: line for line in table}
    return float(at[row.result[f"alpha_{metric}"]][metric])


def scaled(name: str, value: float) -> float:
    """Proportions in percent, everything else unchanged."""
    return value * 100 if name.split("_")[0] != "alpha" and ("top1" in name or "top5" in name) else value


def cell(values: Sequence[float]) -> str:
    """Mean, standard deviation and n, as a table shows them."""
    return str(stats.summary(values)) if len(values) else NOT_RUN


def mean(values: Sequence[float]) -> float:
    return stats.summary(values).mean


def curve(name: str, points: Mapping[Any, Sequence[float]]) -> Series:
    """The mean of every point that has been run, with its interval for two runs or more."""
    points = {x: values for x, values in points.items() if len(values)}
    summaries = [stats.summary(values) for values in points.values()]
    bounds = [one.t_interval if one.n > 1 else (one.mean, one.mean) for one in summaries]
    return Series(name, list(points), [one.mean for one in summaries], [b[0] for b in bounds], [b[1] for b in bounds])


def alpha_points(rows: Iterable[Row], metric: str, within: float = 1.0) -> dict[float, list[float]]:
    """A metric on validation data by alpha, for the alphas that all runs tried, up to ``within`` of the trained one."""
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
    """The metrics against alpha: one figure per metric, one curve per arm."""
    words = {
        "top1": "top-1, %",
        "top5": "top-5, %",
        "cross_entropy": "cross-entropy",
        CALIBRATED: "cross-entropy after temperature scaling",
    }
    figures = []
    for metric, label in words.items():
        having = {name: [row for row in rows if metric in row["alpha_table"][0]] for name, rows in arms.items()}
        series = [curve(name, alpha_points(rows, metric, within)) for name, rows in having.items()]
        series = [one for one in series if one.x]
        if series:
            figures.append(Figure(f"{title}: {label.split(',')[0]}", "alpha", label, series))
    return figures


def best(points: Mapping[Any, Sequence[float]]) -> Any:
    """Where the mean is highest, among the points that have been run; None if there is none."""
    means = {x: stats.summary(values).mean for x, values in points.items() if len(values)}
    return max(means, key=lambda x: means[x]) if means else None
