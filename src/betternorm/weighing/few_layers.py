"""Alpha in a few layers: those with the largest gains, so that all others can be folded for serving.

Evaluating every layer separately would take as many passes as there are layers. Instead, one backward pass gives the
derivative of the objective with respect to the alpha of every layer at 0, and only the layers with the steepest slopes
are evaluated, one at a time. The slope at 0 and the value at one alpha define a parabola, and thus a best alpha and a
gain for each. The layers with the largest gains are then evaluated together, at a fraction of those alphas, since
their effects overlap. This costs at most 17 forward passes (a backward pass counts as two) for up to five layers,
however many layers the model has.

With shifts, all of this is evaluated on the clean data and on every shift. Layers are ranked by the mean over all sets,
and the rule chooses among the settings evaluated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from betternorm.display.progress import Bar
from betternorm.weighing.batches import device_of, evaluating
from betternorm.weighing.evaluation import Evaluations, Key, Setting
from betternorm.weighing.gradients import differentiable_loss, with_alphas
from betternorm.weighing.judging import Judge, SingleAlpha
from betternorm.weighing.metrics import CALIBRATED
from betternorm.weighing.objective import Sets
from betternorm.weighing.result import FewLayers, LayersRow
from betternorm.weighing.resume import SAVE_EVERY
from betternorm.weighing.temperature import best_inverse

SHOWN = (1, 3, 5)  # numbers of layers that the table shows, besides the requested one
CANDIDATES = 8  # layers evaluated one at a time, or as many as requested
SLOPES_COST = 3  # of a forward and a backward pass, in forward passes
TRIED_AT = 0.1
SLOPE_AT = 0.001  # at exactly 0 the layers skip the statistics of the example
LEAST, MOST = 0.01, 0.5  # alphas of a layer
OVERLAPS = (0.1, 0.35)  # each further layer reduces the alphas of the others by such a share


def check_layers(count: int, layers: Sequence[str], baseline: float) -> None:
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"layers={count!r} must be an integer")
    if not 1 <= count <= len(layers):
        raise ValueError(
            f"layers={count} must lie between 1 and {len(layers)}, the number of layers that have an alpha"
        )
    if baseline != 0:
        raise ValueError(
            f"layers={count} leaves layers without alpha so that they can be folded, and GroupNorm and InstanceNorm "
            "layers cannot be folded; leave it out"
        )


# ---- evaluate ----


def evaluate_few_layers(sets: Sets, count: int) -> int:
    """Evaluate settings with alpha in a few layers. Returns the number of passes over the data."""
    before = sets.clean.passes
    counts = _counts(sets.clean, count)
    ranked = _ranked(sets, max(*counts, CANDIDATES))
    _evaluate_together(sets, ranked, counts, count)
    return sets.clean.passes - before + 1


def _counts(evaluations: Evaluations, count: int) -> list[int]:
    return sorted({k for k in (*SHOWN, count) if k <= len(evaluations.layers)})


def _loss(sets: Sets, setting: Setting) -> float:
    """The guide, to be minimized: the mean over all sets."""
    metric = sets.objective.guide
    keys: list[Key] = [metric.name, *((metric.name, shift) for shift in sets.objective.functions)]
    averages = [sets.clean.column(key).average(setting) for key in keys]
    return (-1 if metric.higher_is_better else 1) * sum(averages) / len(averages)


def _ranked(sets: Sets, most: int) -> dict[str, float]:
    """The layers with the largest gains by their parabolas, best first, each with its best alpha."""
    slopes = _slopes(sets)
    steepest = sorted(slopes, key=slopes.__getitem__)[:most]
    settings = {name: _setting(sets.clean, {name: TRIED_AT}) for name in steepest}
    sets.evaluate(settings.values())
    at_baseline = _loss(sets, sets.clean.baseline)
    best = {name: _lowest_point(slopes[name], _loss(sets, setting) - at_baseline) for name, setting in settings.items()}
    return {name: best[name][0] for name in sorted(best, key=lambda name: best[name][1])}


def _lowest_point(slope: float, change: float) -> tuple[float, float]:
    """The best alpha, and the change there, of the parabola with this slope at 0 and this change at `TRIED_AT`."""
    curvature = 2 * (change - slope * TRIED_AT) / TRIED_AT**2
    alpha = -slope / curvature if curvature > 0 and slope < 0 else (TRIED_AT if change < 0 else LEAST)
    alpha = min(max(alpha, LEAST), MOST)
    return float(f"{alpha:.3g}"), slope * alpha + curvature * alpha**2 / 2


def _evaluate_together(sets: Sets, ranked: dict[str, float], counts: list[int], requested: int) -> None:
    """Evaluate the first layers together: for every count at two fractions of their alphas, and one more if needed."""

    def at(count: int, fraction: float) -> Setting:
        names = list(ranked)[:count]
        return _setting(sets.clean, {name: _rounded(ranked[name] * fraction) for name in names})

    fractions = {k: [1 / (1 + overlap * (k - 1)) for overlap in (OVERLAPS if k > 1 else OVERLAPS[:1])] for k in counts}
    sets.evaluate([at(k, fraction) for k in counts for fraction in fractions[k]])
    if len(fractions[requested]) == 2:
        first, second = fractions[requested]
        at_baseline = _loss(sets, sets.clean.baseline)
        a, b = (_loss(sets, at(requested, fraction)) - at_baseline for fraction in (first, second))
        # The parabola through 0 and both fractions.
        curvature = (a / first - b / second) / (first - second)
        slope = a / first - curvature * first
        if curvature > 0 and slope < 0:
            sets.evaluate([at(requested, min(max(-slope / (2 * curvature), 0.1), 1.5))])


def _setting(evaluations: Evaluations, alphas: dict[str, float]) -> Setting:
    return tuple(alphas.get(name, evaluations.baseline) for name in evaluations.layers)


def _rounded(alpha: float) -> float:
    return float(f"{min(max(alpha, LEAST / 4), 1.0):.3g}")


def _slopes(sets: Sets) -> dict[str, float]:
    """The derivative of the loss with respect to every layer's alpha at 0, in one forward and backward pass."""
    evaluations = sets.clean
    loss = differentiable_loss(sets.objective.guide)
    inverse = torch.ones(())
    if CALIBRATED in evaluations.values:
        column = evaluations.column(CALIBRATED)
        inverse = torch.tensor(best_inverse(column.values[evaluations.baseline], column.counts))
    inverse = inverse.float().to(device_of(evaluations.model))
    alphas = torch.full((len(evaluations.layers),), SLOPE_AT, device=inverse.device, requires_grad=True)
    done, total = 0, torch.zeros(len(evaluations.layers), dtype=torch.float64)
    if evaluations.fit.get("slopes") is not None:
        done, total = evaluations.fit["steps"], evaluations.fit["slopes"]
    try:
        with (
            evaluating(evaluations.model),
            Bar("slopes of all layers", evaluations.length(), evaluations.progress) as bar,
        ):
            for step, batch in enumerate(evaluations.batches(), 1):
                if step > done:
                    for shifted in evaluations.with_shifts(batch).values():
                        with with_alphas(evaluations.layers, alphas):
                            output, target = evaluations.forward(evaluations.model, shifted)
                            value = loss(output, target, inverse) * len(target)
                        (slope,) = torch.autograd.grad(value, alphas)
                        total = total + slope.double().cpu()
                    evaluations.fit = {"epochs": None, "steps": step, "slopes": total}
                    evaluations.save(SAVE_EVERY)
                bar.advance()
    finally:
        evaluations.save()
    examples = len(evaluations.keys) * (1 + len(evaluations.shifts))
    return dict(zip(evaluations.layers, (total / examples).tolist(), strict=True))


# ---- choose and judge ----


def judge_few_layers(sets: Sets, judge: Judge, count: int, single: SingleAlpha, passes: int) -> FewLayers:
    """The best ``count`` layers, judged on the same folds as one alpha for all layers."""
    layers = sets.clean.layers
    share_of_values = _share_of_values(sets.clean)
    metric = sets.objective.metric
    rows, chosen = [], dict[str, Any]()
    for k in _counts(sets.clean, count):
        settings = _settings(sets, k)
        setting = judge.choose(settings)
        values = setting if isinstance(setting, tuple) else (setting,) * len(layers)
        alphas = {name: alpha for name, alpha in zip(layers, values, strict=True) if alpha != 0}
        by_fold = judge.by_fold(settings)
        gain = judge.gain(by_fold, settings)
        work = sum(share_of_values[name] for name in alphas)
        share = gain.difference / single.gain.difference if single.gain.is_certain(metric) else None
        rows.append(LayersRow(k, alphas, gain, work, None if share is None or share < 0 else share))
        if k == count:
            gains = judge.gains(by_fold)
            if not sets.objective.shifted:
                gains[metric.name] = gain
            chosen = {"alphas": alphas, "gains": gains, "certain": judge.is_significant(gain)}
    whole_share = 1.0 if single.gain.is_certain(metric) else None
    rows.append(LayersRow(len(layers), dict.fromkeys(layers, single.alpha), single.gain, 1.0, whole_share))
    evaluations = SLOPES_COST + len(_settings(sets, len(layers)))
    return FewLayers(layers=count, rows=rows, passes=passes, evaluations=evaluations, **chosen)


def _settings(sets: Sets, count: int) -> list[Setting]:
    """What was evaluated with alpha in at most so many layers."""
    return [s for s in sets.usable() if isinstance(s, tuple) and sum(alpha != 0 for alpha in s) <= count]


def _share_of_values(evaluations: Evaluations) -> dict[str, float]:
    """For every layer its share of all values that pass through these layers: the cost of its alpha in serving."""
    values: dict[str, int] = dict.fromkeys(evaluations.layers, 0)

    def counter(name: str) -> Any:
        def count(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
            values[name] += inputs[0].numel()

        return count

    handles = [layer.register_forward_pre_hook(counter(name)) for name, layer in evaluations.layers.items()]
    try:
        with evaluating(evaluations.model), torch.inference_mode():
            evaluations.forward(evaluations.model, next(evaluations.batches()))
    finally:
        for handle in handles:
            handle.remove()
    total = sum(values.values()) or 1
    return {name: count / total for name, count in values.items()}
