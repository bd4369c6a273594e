"""What a search for alpha found: the table of alphas tried, the gains on held-out data, and what was set."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from betternorm.display.tables import table
from betternorm.weighing.evidence import ENOUGH_TO_JUDGE, Gain
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
        significant: whether the interval of the objective's gain leaves out zero. Under shifts it is the gain in what
            the rule weighs.
        judged_on: how many different examples (or batches) that rests on.
        worse: the metrics that are certainly worse with the alpha that was set.
        temperature: what the logits are best divided by with that alpha; None where there are no logits.
        temperature_folded_into: the layer that was divided by it, where that was asked for.
        against_temperature: the change of the cross-entropy from the network as trained, held out, by "temperature
            alone", "alpha alone" and "both".
        shifts: the scores on shifted data, where those were asked for.
        per_layer: the result with one alpha per layer, where that was asked for.
        few_layers: the result with alpha in a few layers, where that was asked for.
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
    judged_on: int
    worse: list[str] = field(default_factory=list)
    temperature: float | None = None
    temperature_folded_into: str | None = None
    against_temperature: dict[str, Gain] | None = None
    shifts: ShiftEvidence | None = None
    per_layer: PerLayer | None = None
    few_layers: FewLayers | None = None

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
        parts = [tried, self._evidence()]
        if self.against_temperature is not None:
            parts.append(self._four_rows(self.against_temperature))
        if self.shifts is not None:
            parts += self._shifted(self.shifts)
        if self.few_layers is not None:
            parts.append(self._gain_against_cost(self.few_layers))
        return "\n\n".join([*parts, self.verdict()])

    def _mark(self, alpha: float) -> str:
        words = ["as trained"] if alpha == self.baseline else []
        best = [metric for metric, value in self.best.items() if value == alpha]
        return ", ".join(words + ([f"best {' and '.join(best)}"] if best else []))

    def _evidence(self) -> str:
        settings: list[tuple[str, dict[str, Gain]]] = [("one alpha", self.gains)]
        if self.per_layer is not None:
            settings.append(("alpha per layer", self.per_layer.gains))
        rows = [
            [name, metric, *_gain_cells(metric, gain)] for name, gains in settings for metric, gain in gains.items()
        ]
        return table(["held out", "metric", "as trained", "tuned", "change", self._interval()], rows)

    def _four_rows(self, gains: Mapping[str, Gain]) -> str:
        """Is it more than a temperature?"""
        before = next(iter(gains.values())).before
        rows = [["as trained", f"{before:.4f}", "", ""]]
        rows += [[name, *_gain_cells("cross_entropy", gain)[1:]] for name, gain in gains.items()]
        return table(["held out", "cross_entropy", "change", self._interval()], rows)

    def _shifted(self, shifts: ShiftEvidence) -> list[str]:
        metric = self.objective
        names = list(shifts.gains)
        trade = table(
            [metric, *(f"{row['alpha']:.3g}" for row in shifts.table)],
            [[name, *(_shown(metric, row[name]) for row in shifts.table)] for name in names],
        )
        rows = [[name, *_gain_cells(metric, gain)] for name, gain in shifts.gains.items()]
        rows.append([f"mean {shifts.over}", *_gain_cells(metric, shifts.mean)])
        return [trade, table([f"{metric}, held out", "as trained", "tuned", "change", self._interval()], rows)]

    def _gain_against_cost(self, few: FewLayers) -> str:
        """What is kept of the gain, and how much of the network cannot be folded for it."""
        rows = [
            [
                "all" if row is few.rows[-1] else str(row.layers),
                *_gain_cells(self.objective, row.gain)[1:],
                "none" if row.share is None else f"{row.share:.0%}",
                f"{row.work:.1%}",
                ", ".join(f"{name} {alpha:.3g}" for name, alpha in list(row.alphas.items())[:5])
                if row is not few.rows[-1]
                else f"{next(iter(row.alphas.values())):.3g} in each",
            ]
            for row in few.rows
        ]
        headers = ["layers", self._aim(), "change", self._interval(), "of the gain", "not folded", "alpha"]
        return table(headers, rows)

    def _aim(self) -> str:
        """What was improved: the objective, or what the rule weighs of it."""
        return self.objective if self.shifts is None else f"{self.objective}, mean {self.shifts.over}"

    def _interval(self) -> str:
        return f"{self.confidence:.0%} interval"

    def verdict(self) -> str:
        """What was set and why, what gets worse by it, and how it compares with a temperature."""
        cost = f"{self.examples} examples, {self.evaluations} alphas, {self.passes} passes"
        aim = self._aim()
        if self.few_layers is not None:
            few = self.few_layers
            where = f"in {few.layers} of {len(few.rows[-1].alphas)} layers"
            if isinstance(self.alpha, dict):
                doubt = "" if few.certain else ", as asked, though the gain is not distinguishable from zero"
                said = f"set alpha {where}: {', '.join(few.alphas) or 'none'}{doubt} ({cost})"
            else:
                said = f"the gain in {aim} of alpha {where} is not distinguishable from zero: alpha stays 0 ({cost})"
        elif isinstance(self.alpha, dict):
            low, high = min(self.alpha.values()), max(self.alpha.values())
            said = f"set one alpha per layer, from {low:.4g} to {high:.4g}: better held out than one for all ({cost})"
        elif not self.significant:
            kept = "alpha stays" if self.alpha == self.baseline else "alpha was set, as asked, to"
            why = f"the gain in {aim} is not distinguishable from zero"
            if self.judged_on < ENOUGH_TO_JUDGE:
                why = f"{self.judged_on} different examples are too few to judge a gain (at least {ENOUGH_TO_JUDGE})"
            said = f"{why}: {kept} {self.alpha:.4g} ({cost})"
        else:
            said = f"set alpha = {self.alpha:.4g}, the best for {aim} ({cost})"
        gains = self.gains_as_set()
        lines = [said]
        for metric in self.worse:
            _, _, change, interval = _gain_cells(metric, gains[metric])
            lines.append(f"{metric} gets worse: {change}{' points' if metric in SHARES else ''} ({interval})")
        if self.temperature_folded_into is not None:
            lines.append(f"{self.temperature_folded_into} was divided by the temperature, {self.temperature:.4g}")
        return "\n".join(lines)

    def gains_as_set(self) -> dict[str, Gain]:
        """The gains of what was set: one alpha, one per layer, or a few layers."""
        if self.few_layers is not None:
            return self.few_layers.gains
        return self.per_layer.gains if isinstance(self.alpha, dict) and self.per_layer else self.gains

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
        if plain.get("against_temperature") is not None:
            plain["against_temperature"] = {n: Gain(**gain) for n, gain in plain["against_temperature"].items()}
        if plain.get("shifts") is not None:
            shifts = dict(plain["shifts"])
            if "max_clean_loss" in shifts:  # written by version 0.1
                shifts["max_clean_drop"] = shifts.pop("max_clean_loss")
            shifts["gains"] = {name: Gain(**gain) for name, gain in shifts["gains"].items()}
            shifts["mean"] = Gain(**shifts["mean"])
            plain["shifts"] = ShiftEvidence(**shifts)
        if plain["per_layer"] is not None:
            layered = dict(plain["per_layer"])
            layered["gains"] = {metric: Gain(**gain) for metric, gain in layered["gains"].items()}
            layered["against_single"] = Gain(**layered["against_single"])
            plain["per_layer"] = PerLayer(**layered)
        if plain.get("few_layers") is not None:
            few = dict(plain["few_layers"])
            few["gains"] = {metric: Gain(**gain) for metric, gain in few["gains"].items()}
            few["rows"] = [LayersRow(**(row | {"gain": Gain(**row["gain"])})) for row in few["rows"]]
            plain["few_layers"] = FewLayers(**few)
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
        temperature: fitted along with them, on all the data.
    """

    alphas: dict[str, float]
    gains: dict[str, Gain]
    against_single: Gain
    kept: bool
    passes: int
    temperature: float | None = None


@dataclass
class LayersRow:
    """Alpha in at most so many layers.

    Attributes:
        alphas: by layer name.
        gain: in the objective, held out.
        work: of all values that pass through norm layers, the part that passes through these, which cannot be folded.
        share: of the gain of one alpha in all layers; None where that gains nothing.
    """

    layers: int
    alphas: dict[str, float]
    gain: Gain
    work: float
    share: float | None = None


@dataclass
class FewLayers:
    """Alpha in a few layers, so that the others can be folded.

    Attributes:
        layers: how many were asked for.
        alphas: by layer name, the others having none.
        gains: for every metric, the gain over the network as trained, held out, on the data as they are.
        rows: gain against cost, for several numbers of layers; the last is one alpha in all. Under shifts it is the
            gain in what the rule weighs.
        certain: whether the interval of that gain leaves out zero.
        passes, evaluations: further iterations of the loader, and forward passes' worth of all examples.
    """

    layers: int
    alphas: dict[str, float]
    gains: dict[str, Gain]
    rows: list[LayersRow]
    certain: bool
    passes: int
    evaluations: int


@dataclass
class ShiftEvidence:
    """The objective on clean and on shifted data.

    Attributes:
        max_clean_drop: the rule: None for the best mean over all sets, else the most that clean data may lose.
        table: a row for every alpha tried, with the score on every set: the trade.
        gains: for every set, what the rule's choice gains, held out.
        mean: the same for the mean that the rule weighs.
    """

    max_clean_drop: float | None
    table: list[dict[str, float]]
    gains: dict[str, Gain]
    mean: Gain

    @property
    def over(self) -> str:
        if self.max_clean_drop is None:
            return "over clean and shifted data"
        return f"over shifted data at a clean cost of at most {self.max_clean_drop:g}"


def _gain_cells(metric: str, gain: Gain) -> list[str]:
    return [
        _shown(metric, gain.before),
        _shown(metric, gain.after),
        _shown(metric, gain.difference, sign=True),
        f"{_shown(metric, gain.low, sign=True)} to {_shown(metric, gain.high, sign=True)}",
    ]


def _shown(metric: str, value: float, sign: bool = False) -> str:
    """Shares in per cent, the rest as they are."""
    number = value * 100 if metric in SHARES else value
    places = 2 if metric in SHARES else 4
    return f"{number:{'+' if sign else ''}.{places}f}"
