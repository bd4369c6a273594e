"""What a search for alpha found: the table of alphas tried, the gains on held-out data, and what was set."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from betternorm.display.tables import table
from betternorm.weighing.evidence import Gain
from betternorm.weighing.metrics import SHARES
from betternorm.weighing.scale import from_u, to_u


@dataclass
class AlphaSearch:
    """What `tune_alpha` found.

    Attributes:
        alpha: what is now set on the model: a number, or a dict by layer name.
        objective: the metric that chose it.
        baseline: the alpha of the network as it was trained: 0 with BatchNorm, 1 with GroupNorm.
        table: a row for every alpha tried, with the value of every metric on all the data.
        best: for every metric, the best alpha tried.
        gains: for every metric, the gain on held-out folds.
        significant: whether the interval of the objective's gain leaves out zero.
        per_layer: the result with one alpha per layer, where that was asked for.
        examples, passes, evaluations: the cost: examples, iterations of the loader, and alphas tried (an evaluation
            is a forward pass of all examples; a step of the search evaluates several alphas in one iteration).
    """

    alpha: float | dict[str, float]
    objective: str
    baseline: float
    table: list[dict[str, float]]
    best: dict[str, float]
    gains: dict[str, Gain]
    significant: bool
    higher_is_better: dict[str, bool]
    examples: int
    passes: int
    evaluations: int
    folds: int
    confidence: float
    per_layer: PerLayer | None = None

    def __str__(self) -> str:
        metrics = list(self.gains)
        chosen = {self.best[metric] for metric in metrics} | {self.baseline}
        tried = table(
            ["alpha", *metrics, ""],
            [
                [f"{row['alpha']:.4g}", *(_shown(metric, row[metric]) for metric in metrics), self._mark(row["alpha"])]
                for row in self.table
                if len(self.table) <= 40 or row["alpha"] in chosen
            ],
        )
        return "\n".join([tried, "", self._evidence(), "", self.verdict()])

    def _mark(self, alpha: float) -> str:
        words = ["as trained"] if alpha == self.baseline else []
        best = [metric for metric, value in self.best.items() if value == alpha]
        return ", ".join(words + ([f"best {' and '.join(best)}"] if best else []))

    def _evidence(self) -> str:
        settings: list[tuple[str, dict[str, Gain]]] = [("one alpha", self.gains)]
        if self.per_layer is not None:
            settings.append(("alpha per layer", self.per_layer.gains))
        percent = f"{self.confidence:.0%} interval"
        rows = [
            [
                name,
                metric,
                _shown(metric, gain.before),
                _shown(metric, gain.after),
                _shown(metric, gain.difference, sign=True),
                f"{_shown(metric, gain.low, sign=True)} to {_shown(metric, gain.high, sign=True)}",
                "" if gain.p_value is None else f"{gain.p_value:.2g}",
            ]
            for name, gains in settings
            for metric, gain in gains.items()
        ]
        return table(["held out", "metric", "as trained", "tuned", "change", percent, "McNemar p"], rows)

    def verdict(self) -> str:
        """One sentence: what was set and why."""
        cost = f"{self.examples} examples, {self.evaluations} alphas, {self.passes} passes"
        if isinstance(self.alpha, dict):
            low, high = min(self.alpha.values()), max(self.alpha.values())
            return f"set one alpha per layer, from {low:.4g} to {high:.4g}: better held out than one for all ({cost})"
        if not self.significant:
            kept = "alpha stays" if self.alpha == self.baseline else "alpha was set, as asked, to"
            return f"the gain in {self.objective} is not distinguishable from zero: {kept} {self.alpha:.4g} ({cost})"
        return f"set alpha = {self.alpha:.4g}, the best for {self.objective} ({cost})"

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draw every metric against alpha; returns the matplotlib figure, and writes it where ``path`` is given."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("AlphaSearch.plot needs matplotlib: pip install matplotlib") from error
        metrics = list(self.gains)
        figure = Figure(figsize=(4.2 * len(metrics), 3.4), layout="constrained")
        alphas = [row["alpha"] for row in self.table]
        for axes, metric in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True):
            scale = 100 if metric in SHARES else 1
            values = [row[metric] * scale for row in self.table]
            axes.plot(alphas, values, marker="o", markersize=3.5, linewidth=1.2, color="#33628d")
            axes.axhline(values[alphas.index(self.baseline)], color="#999999", linewidth=0.8, linestyle="--")
            axes.axvline(self.best[metric], color="#c1440e", linewidth=0.8)
            axes.set_xscale("function", functions=(to_u, from_u))
            axes.set_xticks([0, 0.05, 0.25, 0.5, 0.75, 0.95, 1])
            axes.set_title(f"{metric}: best at alpha {self.best[metric]:.3g}", fontsize=10)
            axes.set_xlabel("alpha")
            axes.set_ylabel(f"{metric} (%)" if metric in SHARES else metric)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, as `save` writes them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AlphaSearch:
        plain = dict(values)
        plain["gains"] = {metric: Gain(**gain) for metric, gain in plain["gains"].items()}
        if plain["per_layer"] is not None:
            layered = dict(plain["per_layer"])
            layered["gains"] = {metric: Gain(**gain) for metric, gain in layered["gains"].items()}
            layered["against_single"] = Gain(**layered["against_single"])
            plain["per_layer"] = PerLayer(**layered)
        return cls(**plain)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> AlphaSearch:
        """Read what `save` wrote."""
        return cls.from_dict(json.loads(Path(path).read_text()))


@dataclass
class PerLayer:
    """One alpha per layer, fitted by gradient and judged on held-out folds.

    Attributes:
        alphas: by layer name, fitted on all the data.
        gains: for every metric, the gain over the network as trained, held out.
        against_single: the gain in the objective over the best single alpha, held out.
        kept: whether that gain's interval leaves out zero.
        passes: further iterations of the loader.
    """

    alphas: dict[str, float]
    gains: dict[str, Gain]
    against_single: Gain
    kept: bool
    passes: int


def _shown(metric: str, value: float, sign: bool = False) -> str:
    """Shares in per cent, the rest as they are."""
    number = value * 100 if metric in SHARES else value
    places = 2 if metric in SHARES else 4
    return f"{number:{'+' if sign else ''}.{places}f}"
