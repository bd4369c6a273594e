"""The result of `fit_alpha`: the fitted alphas, the strength curve, and the gains on held-out images."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from betternorm.display.tables import table
from betternorm.weighing.alpha import set_alpha
from betternorm.weighing.evidence import Gain, gain_between
from betternorm.weighing.metrics import Metric
from betternorm.weighing.shifts import Rule

STRENGTHS = (0.125, 0.25, 0.375, 0.5, 0.75, 1.0)  # evaluated; 0 is the baseline


@dataclass(frozen=True)
class AlphaFit:
    """What `fit_alpha` fitted, and what it gains.

    Attributes:
        strength: what is set on the model: alpha = baseline + strength * (fitted - baseline).
        chosen: the strength that the rule chose; `strength` is 0 if its gain is not significant.
        fitted: the alphas at strength 1, a tensor per layer.
        baseline: alpha of the pretrained model: 0 for BatchNorm, 1 for GroupNorm and InstanceNorm.
        curve: accuracy on held-out images for every strength: clean, per kind of corruption, and the mean of the kinds.
        gains: the gain at the chosen strength for "clean", every kind, and their mean ("corrupted").
        gain: the gain in what the rule maximizes, with an interval corrected for the choice of the strength.
        significant: whether that interval excludes zero.
        targets: "own", accuracies being estimates without labels, or "labels".
        max_clean_drop: the rule; None is the best mean over clean and corrupted images.
        examples: the number of images.
    """

    strength: float
    chosen: float
    fitted: dict[str, Tensor] = field(repr=False)
    baseline: float
    curve: list[dict[str, float]]
    gains: dict[str, Gain]
    gain: Gain
    targets: str
    max_clean_drop: float | None
    examples: int
    confidence: float
    _model: nn.Module | None = field(default=None, repr=False, compare=False)

    @property
    def significant(self) -> bool:
        return self.gain.low > 0

    @property
    def alpha(self) -> dict[str, Tensor]:
        """What is set on the model, a tensor per layer."""
        return self.at(self.strength)

    @property
    def table(self) -> list[dict[str, Any]]:
        """The gains as rows."""
        return [{"images": name} | asdict(gain) | {"change": gain.difference} for name, gain in self.gains.items()]

    def at(self, strength: float) -> dict[str, Tensor]:
        """The alphas at another point of the curve."""
        if not 0 <= strength <= 1:
            raise ValueError(f"strength={strength} must lie between 0 (the baseline) and 1 (all of the fitted alphas)")
        return {name: self.baseline + strength * (alpha - self.baseline) for name, alpha in self.fitted.items()}

    def set(self, strength: float, model: nn.Module | None = None) -> AlphaFit:
        """Set the alphas of another strength on the model; returns the result with this strength.

        Args:
            model: needed only for a result that was read from a file.
        """
        model = model or self._model
        if model is None:
            raise ValueError("this AlphaFit was read from a file and has no model: pass set(strength, model)")
        alphas = self.at(strength)
        set_alpha(model, alphas if strength else dict.fromkeys(alphas, self.baseline))
        return replace(self, strength=strength, _model=model)

    def __str__(self) -> str:
        accuracy = "estimated accuracy" if self.targets == "own" else "accuracy"
        kinds = [name for name in self.curve[0] if name != "strength"]
        curve = table(
            [f"strength: {accuracy}", *kinds, ""],
            [
                [f"{row['strength']:g}", *(f"{100 * row[kind]:.1f}" for kind in kinds), self._mark(row["strength"])]
                for row in self.curve
            ],
        )
        gains = table(
            [
                f"held out, {accuracy}",
                "baseline",
                f"strength {self.chosen:g}",
                "change",
                f"{self.confidence:.0%} interval",
            ],
            [[name, *_cells(gain)] for name, gain in self.gains.items()],
        )
        return f"{curve}\n\n{gains}\n\n{self.verdict()}"

    def _mark(self, strength: float) -> str:
        marks = ["baseline"] if strength == 0 else ["chosen"] if strength == self.chosen else []
        return ", ".join(marks + (["set"] if strength == self.strength else []))

    def verdict(self) -> str:
        """What was set, and why."""
        corrupted, clean = self.gains["corrupted"], self.gains["clean"]
        estimated = "estimated " if self.targets == "own" else ""
        change = (
            f"{estimated}accuracy on corrupted images {100 * corrupted.difference:+.1f} points "
            f"({100 * corrupted.low:+.1f} to {100 * corrupted.high:+.1f}), on clean images "
            f"{100 * clean.difference:+.1f} ({100 * clean.low:+.1f} to {100 * clean.high:+.1f})"
        )
        if not self.chosen:
            return f"no strength is better than the baseline ({self.examples} images): alpha unchanged"
        if not self.significant:
            kept = "alpha unchanged" if not self.strength else f"strength {self.strength:g} set as requested"
            return f"the gain is not significant: {kept} ({change}; {self.examples} images)"
        layers, values = len(self.fitted), torch.cat([alpha.flatten() for alpha in self.alpha.values()])
        return (
            f"alpha set in {layers} layers, strength {self.strength:g}, mean alpha {float(values.mean()):.3g}: "
            f"{change}; {self.examples} images"
        )

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draw accuracy against strength; returns the matplotlib figure, and writes it if ``path`` is given."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("AlphaFit.plot needs matplotlib: pip install matplotlib") from error
        figure = Figure(figsize=(5.6, 3.6), layout="constrained")
        axes = figure.subplots()
        strengths = [row["strength"] for row in self.curve]
        for name in self.curve[0]:
            if name != "strength":
                wide = name in ("clean", "corrupted")
                color = {"clean": "#33628d", "corrupted": "#c1440e"}.get(name, "#bbbbbb")
                values = [100 * row[name] for row in self.curve]
                axes.plot(strengths, values, marker="o", markersize=3, linewidth=2 if wide else 0.8, color=color)
                axes.annotate(name, (1, values[-1]), (4, 0), textcoords="offset points", fontsize=8, va="center")
        axes.axvline(self.chosen, color="#999999", linewidth=0.8, linestyle="--")
        axes.set_xlim(0, 1.18)
        axes.set_xlabel("strength (0: baseline)")
        axes.set_ylabel("estimated accuracy (%)" if self.targets == "own" else "top-1 (%)")
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, as `save` writes them."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "_model"}
        values["fitted"] = {name: [float(f"{a:.6g}") for a in alpha.tolist()] for name, alpha in self.fitted.items()}
        values["gains"] = {name: asdict(gain) for name, gain in self.gains.items()}
        return values | {"gain": asdict(self.gain)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> AlphaFit:
        """Read what `save` wrote."""
        values = json.loads(Path(path).read_text())
        values["fitted"] = {name: torch.tensor(alpha) for name, alpha in values["fitted"].items()}
        values["gains"] = {name: Gain(**gain) for name, gain in values["gains"].items()}
        return cls(**values | {"gain": Gain(**values["gain"])})


def judge(
    values: Mapping[str, Mapping[float, Tensor]],
    keys: Tensor,
    fitted: Mapping[str, Tensor],
    baseline: float,
    targets: str,
    max_clean_drop: float | None,
    confidence: float,
    seed: int,
) -> AlphaFit:
    """Choose the strength, and give the gains at it.

    Args:
        values: for "clean" and every kind of corruption, and every strength, a value per image; NaN where an image was
            not evaluated.
    """
    metric = Metric("accuracy", lambda output, target: None, higher_is_better=True)
    evaluated = {name: ~by_strength[0.0].isnan() for name, by_strength in values.items()}
    means = {
        name: {strength: float(numbers[evaluated[name]].mean()) for strength, numbers in by_strength.items()}
        for name, by_strength in values.items()
    }
    kinds = [name for name in values if name != "clean"]
    rule = Rule(True, None if max_clean_drop is None else max_clean_drop / 100)
    chosen = rule.choose(means["clean"], [means[kind] for kind in kinds], 0.0)

    def gain(names: list[str], tried: tuple[float, ...] = ()) -> Gain:
        """Every set counts the same, and an image counts once however many corrupted copies of it there are."""
        counts = torch.cat([torch.full_like(keys[evaluated[n]], 1).double() / int(evaluated[n].sum()) for n in names])
        units = torch.cat([keys[evaluated[name]] for name in names])

        def at(strength: float) -> Tensor:
            return torch.cat([values[name][strength][evaluated[name]] for name in names])

        others = [at(strength) for strength in tried if strength != chosen]
        return gain_between(metric, at(0.0), at(chosen), counts, units, others, confidence, seed)

    return AlphaFit(
        strength=chosen,
        chosen=chosen,
        fitted={name: alpha.detach().cpu() for name, alpha in fitted.items()},
        baseline=baseline,
        curve=[
            {"strength": strength}
            | {name: means[name][strength] for name in values}
            | {"corrupted": sum(means[kind][strength] for kind in kinds) / len(kinds)}
            for strength in (0.0, *STRENGTHS)
        ],
        gains={name: gain([name]) for name in values} | {"corrupted": gain(kinds)},
        gain=gain(kinds if max_clean_drop is not None else ["clean", *kinds], STRENGTHS),
        targets=targets,
        max_clean_drop=max_clean_drop,
        examples=len(keys),
        confidence=confidence,
    )


def _cells(gain: Gain) -> list[str]:
    return [
        f"{100 * gain.before:.1f}",
        f"{100 * gain.after:.1f}",
        f"{100 * gain.difference:+.1f}",
        f"{100 * gain.low:+.1f} to {100 * gain.high:+.1f}",
    ]
