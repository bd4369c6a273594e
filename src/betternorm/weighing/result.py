"""The results of a search for alpha: the alphas evaluated, the gains on held-out folds, and what was set."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from betternorm.display.tables import table
from betternorm.weighing.evidence import ENOUGH_TO_JUDGE, Gain
from betternorm.weighing.metrics import SHARES
from betternorm.weighing.scale import from_u, to_u


@dataclass(frozen=True)
class AlphaSearch:
    """The result of `tune_alpha`.

    Attributes:
        alpha: the alpha that is set now: a number, or a dict by layer name.
        objective: the metric that was optimized.
        baseline: the alpha that leaves the model unchanged: 0 for BatchNorm, 1 for GroupNorm.
        table: one row per alpha evaluated, with every metric on all data.
        best: the best alpha for every metric.
        gains: the gain in every metric on held-out folds.
        significant: whether the confidence interval of the objective's gain excludes zero. With shifts, this is the
            gain in the mean that the rule maximizes.
        judged_on: the number of distinct examples (or batches) that this is based on.
        worse: the metrics that are significantly worse with the alpha that is set.
        temperature: the best temperature with that alpha; None for models without logits.
        temperature_folded_into: the layer that was divided by the temperature, if requested.
        against_temperature: the gain in cross-entropy over the baseline, held out, by "temperature alone", "alpha
            alone" and "both".
        non_finite: for alphas with NaN or infinite outputs, the number of these outputs. Such alphas are not chosen;
            if the baseline is among them, there is no verdict.
        shifts: the scores on shifted data, if requested.
        per_layer: the result with one alpha per layer, if requested.
        few_layers: the result with alpha in a few layers, if requested.
        examples, passes, evaluations: the cost: examples, passes over the loader, and alphas evaluated on all examples
            (one pass evaluates several).
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
    non_finite: list[dict[str, float]] = field(default_factory=list)
    shifts: ShiftEvidence | None = None
    per_layer: PerLayer | None = None
    few_layers: FewLayers | None = None

    @property
    def has_verdict(self) -> bool:
        """False if outputs at the baseline are not finite, so that there is nothing to compare with."""
        return all(row["alpha"] != self.baseline for row in self.non_finite)

    def __str__(self) -> str:
        metrics = list(self.gains)
        chosen = {self.best[metric] for metric in metrics} | {self.baseline}
        evaluated = table(
            ["alpha", *metrics, ""],
            [
                [f"{row['alpha']:.4g}", *(_shown(metric, row[metric]) for metric in metrics), self._mark(row["alpha"])]
                for row in self.table
                if len(self.table) <= 40 or row["alpha"] in chosen
            ],
        )
        if not self.has_verdict:
            return f"{evaluated}\n\n{self.verdict()}"
        parts = [evaluated, self._evidence()]
        if self.against_temperature is not None:
            parts.append(self._four_rows(self.against_temperature))
        if self.shifts is not None:
            parts += self._shifted(self.shifts)
        if self.few_layers is not None:
            parts.append(self._gain_and_cost(self.few_layers))
        return "\n\n".join([*parts, self.verdict()])

    def _mark(self, alpha: float) -> str:
        words = ["baseline"] if alpha == self.baseline else []
        best = [metric for metric, value in self.best.items() if value == alpha]
        return ", ".join(words + ([f"best {' and '.join(best)}"] if best else []))

    def _evidence(self) -> str:
        settings: list[tuple[str, dict[str, Gain]]] = [("one alpha", self.gains)]
        if self.per_layer is not None:
            settings.append(("alpha per layer", self.per_layer.gains))
        rows = [
            [name, metric, *_gain_cells(metric, gain)] for name, gains in settings for metric, gain in gains.items()
        ]
        return table(["cross-validated", "metric", "baseline", "tuned", "gain", self._interval()], rows)

    def _four_rows(self, gains: Mapping[str, Gain]) -> str:
        """Whether alpha does more than a temperature."""
        before = next(iter(gains.values())).before
        rows = [["baseline", f"{before:.4f}", "", ""]]
        rows += [[name, *_gain_cells("cross_entropy", gain)[1:]] for name, gain in gains.items()]
        return table(["cross-validated", "cross_entropy", "gain", self._interval()], rows)

    def _shifted(self, shifts: ShiftEvidence) -> list[str]:
        metric = self.objective
        trade = table(
            [metric, *(f"{row['alpha']:.3g}" for row in shifts.table)],
            [[name, *(_shown(metric, row[name]) for row in shifts.table)] for name in shifts.gains],
        )
        rows = [[name, *_gain_cells(metric, gain)] for name, gain in shifts.gains.items()]
        rows.append([f"mean {shifts.over}", *_gain_cells(metric, shifts.mean)])
        return [trade, table([f"{metric}, cross-validated", "baseline", "tuned", "gain", self._interval()], rows)]

    def _gain_and_cost(self, few: FewLayers) -> str:
        """The share of the gain that is kept, and the share of the model that cannot be folded."""
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
        headers = ["layers", self._aim(), "gain", self._interval(), "of the gain", "not folded", "alpha"]
        return table(headers, rows)

    def _aim(self) -> str:
        return self.objective if self.shifts is None else f"{self.objective}, mean {self.shifts.over}"

    def _interval(self) -> str:
        return f"{self.confidence:.0%} interval"

    def verdict(self) -> str:
        """What was set and why, and which metrics are worse."""
        cost = f"{_count(self.examples, 'example')}, {_count(self.evaluations, 'alpha')}, {_count(self.passes, 'pass')}"
        lines = [f"{self._decision()} ({cost})"]
        gains = self.gains_as_set()
        for metric in self.worse:
            _, _, change, interval = _gain_cells(metric, gains[metric])
            lines.append(f"{metric} is worse: {change}{' points' if metric in SHARES else ''} ({interval})")
        if self.has_verdict and self.non_finite:
            alphas = ", ".join(f"{row['alpha']:.4g}" for row in self.non_finite)
            lines.append(f"outputs are not finite at alpha {alphas}, which was excluded")
        if self.temperature_folded_into is not None:
            lines.append(f"{self.temperature_folded_into} was divided by the temperature, {self.temperature:.4g}")
        return "\n".join(lines)

    def _decision(self) -> str:
        insignificant = f"the gain in {self._aim()} is not significant"
        few = self.few_layers
        if not self.has_verdict:
            count = next(int(row["outputs"]) for row in self.non_finite if row["alpha"] == self.baseline)
            return (
                f"no verdict: {_count(count, 'output')} of the model {'is' if count == 1 else 'are'} NaN or infinite "
                f"at the baseline, alpha {self.baseline:.4g}; alpha unchanged. Check the inputs and the checkpoint"
            )
        if few is not None:
            where = f"in {few.layers} of {len(few.rows[-1].alphas)} layers"
            if isinstance(self.alpha, dict):
                doubt = "" if few.certain else ", as requested, although the gain is not significant"
                return f"set alpha {where}: {', '.join(few.alphas) or 'none'}{doubt}"
            return f"the gain in {self._aim()} of alpha {where} is not significant: alpha unchanged"
        if isinstance(self.alpha, dict):
            low, high = min(self.alpha.values()), max(self.alpha.values())
            return f"set one alpha per layer, from {low:.4g} to {high:.4g}: better than one for all layers"
        if self.significant:
            return f"set alpha = {self.alpha:.4g}, the best for {self._aim()}"
        if self.judged_on < ENOUGH_TO_JUDGE:
            insignificant = (
                f"{_count(self.judged_on, 'distinct example')} are too few to judge a gain (at least {ENOUGH_TO_JUDGE})"
            )
        kept = "unchanged" if self.alpha == self.baseline else f"set to {self.alpha:.4g}, as requested"
        return f"{insignificant}: alpha {kept}"

    def gains_as_set(self) -> dict[str, Gain]:
        """The gains of what was set: one alpha, one per layer, or a few layers."""
        if self.few_layers is not None:
            return self.few_layers.gains
        return self.per_layer.gains if isinstance(self.alpha, dict) and self.per_layer else self.gains

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draw every metric against alpha; returns the matplotlib figure, and writes it if ``path`` is given."""
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
        """Numbers, strings, lists and dicts, as `save` writes them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AlphaSearch:
        """The inverse of `to_dict`; reads what version 0.1 wrote, too."""
        result: AlphaSearch = _decoded(dict(values))
        if not isinstance(result, cls):
            raise ValueError(f"this is not the result of a search for alpha: {', '.join(values) or 'empty'}")
        return result

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> AlphaSearch:
        """Read what `save` wrote."""
        return cls.from_dict(json.loads(Path(path).read_text()))


@dataclass(frozen=True)
class PerLayer:
    """One alpha per layer, fitted by gradient and cross-validated.

    Attributes:
        alphas: by layer name, fitted on all data.
        gains: the gain in every metric over the baseline, held out.
        against_single: the gain in the objective over the best single alpha, held out.
        kept: whether that gain is significant.
        passes: additional passes over the data.
        temperature: fitted together with the alphas, on all data.
    """

    alphas: dict[str, float]
    gains: dict[str, Gain]
    against_single: Gain
    kept: bool
    passes: int
    temperature: float | None = None


@dataclass(frozen=True)
class LayersRow:
    """Alpha in at most ``layers`` layers.

    Attributes:
        alphas: by layer name.
        gain: in the objective, held out.
        work: the share of all values passing through norm layers that passes through these, which cannot be folded.
        share: of the gain of one alpha in all layers; None if there is no significant gain to share, or a loss.
    """

    layers: int
    alphas: dict[str, float]
    gain: Gain
    work: float
    share: float | None = None


@dataclass(frozen=True)
class FewLayers:
    """Alpha in a few layers, so that all others can be folded.

    Attributes:
        layers: the number of layers requested.
        alphas: by layer name; all others have none.
        gains: the gain in every metric over the baseline, held out, on clean data.
        rows: gain and cost for several numbers of layers; the last is one alpha in all. With shifts, the gain is that
            in the mean that the rule maximizes.
        certain: whether that gain is significant.
        passes, evaluations: additional passes over the loader, and their cost in forward passes over all examples.
    """

    layers: int
    alphas: dict[str, float]
    gains: dict[str, Gain]
    rows: list[LayersRow]
    certain: bool
    passes: int
    evaluations: int


@dataclass(frozen=True)
class ShiftEvidence:
    """The objective on clean and on shifted data.

    Attributes:
        max_clean_drop: the rule: None for the best mean over all sets, or the largest drop allowed on clean data.
        table: one row per alpha evaluated, with the score on every set.
        gains: the gain of the chosen alpha on every set, held out.
        mean: the gain in the mean that the rule maximizes.
    """

    max_clean_drop: float | None
    table: list[dict[str, float]]
    gains: dict[str, Gain]
    mean: Gain

    @property
    def over(self) -> str:
        if self.max_clean_drop is None:
            return "over clean and shifted data"
        return f"over shifted data at a clean drop of at most {self.max_clean_drop:g}"


def _decoded(value: Any) -> Any:
    """Rebuild the classes of this module from dicts that have their fields."""
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    value = {"max_clean_drop" if key == "max_clean_loss" else key: _decoded(item) for key, item in value.items()}
    for kind in (AlphaSearch, FewLayers, LayersRow, PerLayer, ShiftEvidence, Gain):
        required = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
        if required <= value.keys() <= {f.name for f in fields(kind)}:
            return kind(**value)
    return value


def _gain_cells(metric: str, gain: Gain) -> list[str]:
    return [
        _shown(metric, gain.before),
        _shown(metric, gain.after),
        _shown(metric, gain.difference, sign=True),
        f"{_shown(metric, gain.low, sign=True)} to {_shown(metric, gain.high, sign=True)}",
    ]


def _shown(metric: str, value: float, sign: bool = False) -> str:
    """Accuracies in percent."""
    number = value * 100 if metric in SHARES else value
    places = 2 if metric in SHARES else 4
    return f"{number:{'+' if sign else ''}.{places}f}"


def _count(number: int, noun: str) -> str:
    plural = noun if number == 1 else f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {plural}"
