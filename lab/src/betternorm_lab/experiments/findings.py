"""What an experiment makes of its rows: the numbers of every arm, the cells of a table, the curves of a figure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from betternorm_lab import stats
from betternorm_lab.experiments.scales import MARGINS
from betternorm_lab.results import Figure, Series, Table, Verdict
from betternorm_lab.store import Row
from betternorm_lab.training import CALIBRATED

Label = tuple[Any, ...]
NOT_RUN = "not run"


@dataclass(frozen=True)
class Findings:
    """What an experiment concludes from its rows."""

    tables: Sequence[Table]
    figures: Sequence[Figure]
    verdicts: Sequence[Verdict]
    notes: str = ""


class FinishedRuns(Mapping[Label, list[Row]]):
    """The finished rows of every arm by its label, at one scale. An arm that has none yet is an empty list."""

    def __init__(self, scale: str, rows: Mapping[Label, list[Row]]) -> None:
        self.scale, self._rows = scale, dict(rows)

    def __getitem__(self, label: Label) -> list[Row]:
        return self._rows[label]

    def __iter__(self) -> Iterator[Label]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def names(self, place: int = 0, *, first: Any = None) -> list[Any]:
        """The different values at a place of the labels, in their order: the datasets, or the methods.

        ``first`` counts only labels that begin with it, such as those of one dataset.
        """
        return list(dict.fromkeys(label[place] for label in self if first is None or label[0] == first))

    def numbers(self, label: Label, name: str) -> list[float]:
        """A number of every run of an arm that holds it; shares come in per cent."""
        return list(self._by_seed(label, name).values())

    def _by_seed(self, label: Label, name: str) -> dict[int, float]:
        found = {row["seed"]: read(row, name) for row in self._rows.get(label, [])}
        return {seed: scaled(name, value) for seed, value in found.items() if value is not None}

    def margin(self, metric: str) -> float:
        """The difference of a metric that does not matter at this scale."""
        kind = "cross_entropy" if metric.endswith("cross_entropy") else "top1"
        return MARGINS[self.scale][kind]

    def by_seed(self, *readings: tuple[Label, str]) -> list[list[float]]:
        """Numbers of several arms, seed by seed, for the seeds that all of them have run."""
        found = [self._by_seed(label, name) for label, name in readings]
        seeds = sorted(set.intersection(*map(set, found)))
        return [[values[seed] for seed in seeds] for values in found]

    def pairs(self, label: Label, first: str, second: str) -> list[float]:
        """First less second, run by run."""
        return [a - b for a, b in zip(*self.by_seed((label, first), (label, second)), strict=True)]


def of_candidates(runs: FinishedRuns) -> Findings:
    """What hyperparameters are chosen by; nothing is judged."""
    columns = {"validation_top1": "validation top-1, as trained, %", "validation_top1_own": "at its best alpha"}
    rows = [[", ".join(map(str, label)), *(cell(runs.numbers(label, name)) for name in columns)] for label in runs]
    return Findings([Table("Candidates", ["candidate", *columns.values()], rows)], [], [])


def read(row: Row, name: str) -> float | None:
    """A number of a row, or None where the row does not hold it.

    Rows of before there were ``_own`` columns hold those numbers in their tables, but for the cross-entropy after a
    temperature, which they do not have.
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
    """Shares in per cent, everything else as it is."""
    return value * 100 if name.split("_")[0] != "alpha" and ("top1" in name or "top5" in name) else value


def cell(values: Sequence[float]) -> str:
    """Mean, spread and n, as a table shows them."""
    return str(stats.summary(values)) if len(values) else NOT_RUN


def mean(values: Sequence[float]) -> float:
    return stats.summary(values).mean


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
    """The metrics against alpha, a figure each, a curve an arm."""
    words = {
        "top1": "top-1, %",
        "top5": "top-5, %",
        "cross_entropy": "cross-entropy",
        CALIBRATED: "cross-entropy after temperature",
    }
    figures = []
    for metric, label in words.items():
        held = {name: [row for row in rows if metric in row["alpha_table"][0]] for name, rows in arms.items()}
        series = [curve(name, alpha_points(rows, metric, within)) for name, rows in held.items()]
        series = [one for one in series if one.x]
        if series:
            figures.append(Figure(f"{title}: {label.split(',')[0]}", "alpha", label, series, slider=True))
    return figures


def best(points: Mapping[Any, Sequence[float]], higher: bool = True) -> Any:
    """Where the mean is best, of the points that have been run; None where none has."""
    means = {x: stats.summary(values).mean for x, values in points.items() if len(values)}
    return (max if higher else min)(means, key=lambda x: means[x]) if means else None
