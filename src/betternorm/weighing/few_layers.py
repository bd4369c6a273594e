"""Alpha in a few layers: those that carry most of the gain, so that everything else can be folded for serving.

Trying every layer would take as many passes as there are layers. Instead one backward pass gives the slope of the
objective by every layer's alpha at 0, and only the steepest are tried, one at a time. The slope at 0 and the value at
one alpha make a parabola for each, and so a best alpha and a gain. The layers with the largest gains are then set
together, at a part of those alphas, since what they do overlaps. That is at most 17 forward passes' worth (a backward
pass counted as two) for up to five layers, however many the network has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from betternorm.display.progress import Bar
from betternorm.weighing.batches import device_of, evaluating
from betternorm.weighing.evaluation import Evaluations, Setting
from betternorm.weighing.evidence import ENOUGH_TO_JUDGE, Gain, gain_between
from betternorm.weighing.folds import Folds
from betternorm.weighing.metrics import CALIBRATED, SHARES
from betternorm.weighing.per_layer import _loss, _replaced
from betternorm.weighing.result import AlphaSearch, FewLayers, LayersRow
from betternorm.weighing.temperature import best_inverse

SHOWN = (1, 3, 5)  # the numbers of layers that the table shows beside the one that was asked for
CANDIDATES = 8  # layers tried one at a time; more only where more are asked for
SLOPES_COST = 3  # of a forward and a backward pass, in forward passes
TRIED_AT = 0.1
SLOPE_AT = 0.001  # a slope exactly at 0 would need the layers' other code path
LEAST, MOST = 0.01, 0.5  # alphas of a layer
OVERLAPS = (0.1, 0.35)  # each further layer takes so much from what the others' alphas should be


def check_layers(count: int, layers: Sequence[str], baseline: float) -> None:
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"layers={count!r} must be a whole number of layers")
    if not 1 <= count <= len(layers):
        raise ValueError(f"layers={count} must lie between 1 and {len(layers)}, the layers that can have an alpha")
    if baseline != 0:
        raise ValueError(
            f"layers={count} keeps alpha out of layers so that they can be folded, and those of GroupNorm and "
            "InstanceNorm cannot be; leave it out"
        )


def tune_few_layers(evaluations: Evaluations, split: Folds, single: AlphaSearch, count: int, seed: int) -> FewLayers:
    """Find ``count`` layers to have an alpha, and judge them on the folds that one alpha for all was judged on."""
    aim = single.objective
    before = evaluations.passes
    counts = sorted({k for k in (*SHOWN, count) if k <= len(evaluations.layers)})
    ranked = _ranked(evaluations, aim, max(*counts, CANDIDATES))
    _try_together(evaluations, aim, ranked, counts, count)
    work = _work(evaluations)
    rows = [_judged(evaluations, split, single, k, work, seed) for k in counts]
    of_all = single.gains[aim]
    rows.append(
        LayersRow(len(evaluations.layers), dict.fromkeys(evaluations.layers, single.best[aim]), of_all, 1.0, 1.0)
    )
    for row in rows:
        row.share = row.gain.difference / of_all.difference if of_all.difference else float("nan")
    chosen = next(row for row in rows if row.layers == count)
    others = {
        metric: _gain(evaluations, split, single, metric, count, seed) for metric in single.gains if metric != aim
    }
    return FewLayers(
        layers=count,
        alphas=chosen.alphas,
        gains={aim: chosen.gain} | others,
        rows=rows,
        certain=chosen.gain.is_certain(evaluations.metrics[aim]) and single.judged_on >= ENOUGH_TO_JUDGE,
        passes=evaluations.passes - before + 1,
        evaluations=SLOPES_COST + len(_settings(evaluations, len(evaluations.layers))) - 1,
    )


def setting_of(evaluations: Evaluations, alphas: dict[str, float]) -> Setting:
    return tuple(alphas.get(name, evaluations.baseline) for name in evaluations.layers)


# ---- which layers, and which alphas ----


def _ranked(evaluations: Evaluations, objective: str, most: int) -> dict[str, float]:
    """The layers with the largest gains by their parabolas, best first, each with its best alpha."""
    slopes = _slopes(evaluations, objective)
    steepest = sorted(slopes, key=slopes.__getitem__)[:most]
    tried = {name: setting_of(evaluations, {name: TRIED_AT}) for name in steepest}
    evaluations.evaluate(list(tried.values()))
    guide, sign = _guide(evaluations, objective)
    as_trained = evaluations.average(guide, evaluations.values[guide][evaluations.baseline])
    found: dict[str, tuple[float, float]] = {}
    for name, setting in tried.items():
        change = sign * (evaluations.average(guide, evaluations.values[guide][setting]) - as_trained)
        found[name] = _lowest_point(slopes[name], change)
    order = sorted(found, key=lambda name: found[name][1])
    return {name: found[name][0] for name in order}


def _lowest_point(slope: float, change: float) -> tuple[float, float]:
    """The best alpha, and the change there, of the parabola with this slope at 0 and this change at `TRIED_AT`."""
    curvature = 2 * (change - slope * TRIED_AT) / TRIED_AT**2
    alpha = -slope / curvature if curvature > 0 and slope < 0 else (TRIED_AT if change < 0 else LEAST)
    alpha = min(max(alpha, LEAST), MOST)
    return float(f"{alpha:.3g}"), slope * alpha + curvature * alpha**2 / 2


def _try_together(
    evaluations: Evaluations, objective: str, ranked: dict[str, float], counts: list[int], asked: int
) -> None:
    """Evaluate the first layers together: for every count with two parts of their alphas, and once more where asked."""
    tried: dict[int, dict[float, Setting]] = {k: {} for k in counts}
    for k in counts:
        names = list(ranked)[:k]
        for overlap in OVERLAPS if k > 1 else OVERLAPS[:1]:
            part = 1 / (1 + overlap * (k - 1))
            tried[k][part] = setting_of(evaluations, {name: _alpha(ranked[name] * part) for name in names})
    evaluations.evaluate([setting for settings in tried.values() for setting in settings.values()])
    guide, sign = _guide(evaluations, objective)

    def score(setting: Setting) -> float:
        return sign * evaluations.average(guide, evaluations.values[guide][setting])

    if len(tried[asked]) == 2:
        (first, at_first), (second, at_second) = tried[asked].items()
        a, b = score(at_first) - score(evaluations.baseline), score(at_second) - score(evaluations.baseline)
        # The parabola through 0 and both parts.
        curvature = (a / first - b / second) / (first - second)
        slope = a / first - curvature * first
        if curvature > 0 and slope < 0:
            part = min(max(-slope / (2 * curvature), 0.1), 1.5)
            names = list(ranked)[:asked]
            evaluations.evaluate([setting_of(evaluations, {name: _alpha(ranked[name] * part) for name in names})])


def _alpha(value: float) -> float:
    return float(f"{min(max(value, LEAST / 4), 1.0):.3g}")


def _guide(evaluations: Evaluations, objective: str) -> tuple[str, int]:
    """The metric that says how good a layer is, smooth where the objective is not, and its sign as a loss."""
    guide = CALIBRATED if objective in SHARES and CALIBRATED in evaluations.values else objective
    return guide, -1 if evaluations.metrics[guide].higher_is_better else 1


def _slopes(evaluations: Evaluations, objective: str) -> dict[str, float]:
    """The derivative of the loss by every layer's alpha where all are 0, from one forward and backward pass."""
    loss = _loss(evaluations.metrics[_guide(evaluations, objective)[0]])
    inverse = torch.ones(())
    if CALIBRATED in evaluations.values:
        curves = evaluations.values[CALIBRATED][evaluations.baseline]
        inverse = torch.tensor(best_inverse(curves, evaluations.counts[CALIBRATED]))
    inverse = inverse.float().to(device_of(evaluations.model))
    alphas = torch.full((len(evaluations.layers),), SLOPE_AT, device=inverse.device, requires_grad=True)
    done, total = 0, torch.zeros(len(evaluations.layers), dtype=torch.float64)
    if evaluations.fit.get("slopes") is not None:
        done, total = evaluations.fit["steps"], evaluations.fit["slopes"]
    steps = 0
    try:
        with (
            evaluating(evaluations.model),
            Bar("slopes of all layers", evaluations.length(), evaluations.progress) as bar,
        ):
            for batch in evaluations.batches():
                steps += 1
                if steps > done:
                    with _replaced(evaluations.layers, alphas):
                        output, target = evaluations.forward(evaluations.model, batch)
                        value = loss(output, target, inverse) * len(target)
                    (slope,) = torch.autograd.grad(value, alphas)
                    total = total + slope.double().cpu()
                    evaluations.fit = {"epochs": None, "steps": steps, "slopes": total}
                    evaluations.save_now_and_then()
                bar.advance()
    finally:
        evaluations.save()
    return dict(zip(evaluations.layers, (total / len(evaluations.keys)).tolist(), strict=True))


# ---- evidence ----


def _settings(evaluations: Evaluations, count: int) -> list[Setting]:
    """What was tried with at most so many layers, and the network as it was trained."""
    tried = next(iter(evaluations.values.values()))
    few = [s for s in tried if isinstance(s, tuple) and sum(alpha != 0 for alpha in s) <= count]
    return [evaluations.baseline, *few]


def _best(evaluations: Evaluations, objective: str, count: int, where: Tensor | None = None) -> Setting:
    metric = evaluations.metrics[objective]
    settings = _settings(evaluations, count)
    scores = [evaluations.average(objective, evaluations.values[objective][setting], where) for setting in settings]
    best = 0
    for index, score in enumerate(scores):
        if metric.is_better(score, scores[best]):
            best = index
    return settings[best]


def _gain(evaluations: Evaluations, split: Folds, single: AlphaSearch, metric: str, count: int, seed: int) -> Gain:
    """What at most so many layers gain in a metric, each fold with what is best for the objective on the others."""
    aim = single.objective
    held_out = split.held_out(metric, lambda fold: _best(evaluations, aim, count, split.of(aim) != fold))
    tried = [evaluations.numbers(metric, setting) for setting in _settings(evaluations, count)[1:]]
    return gain_between(
        evaluations.metrics[metric],
        split.as_trained(metric),
        held_out,
        evaluations.counts[metric],
        evaluations.units(metric),
        tried if metric == aim else (),
        single.confidence,
        seed,
    )


def _judged(
    evaluations: Evaluations, split: Folds, single: AlphaSearch, count: int, work: dict[str, float], seed: int
) -> LayersRow:
    setting = _best(evaluations, single.objective, count)
    values = setting if isinstance(setting, tuple) else (setting,) * len(evaluations.layers)
    alphas = {name: alpha for name, alpha in zip(evaluations.layers, values, strict=True) if alpha != 0}
    gain = _gain(evaluations, split, single, single.objective, count, seed)
    return LayersRow(count, alphas, gain, float("nan"), sum(work[name] for name in alphas))


def _work(evaluations: Evaluations) -> dict[str, float]:
    """The part of all values that pass through these layers which each of them sees: what its alpha costs."""
    seen: dict[str, int] = dict.fromkeys(evaluations.layers, 0)

    def counter(name: str):  # type: ignore[no-untyped-def]
        def count(module: torch.nn.Module, given: tuple[Tensor, ...]) -> None:
            seen[name] += given[0].numel()

        return count

    handles = [layer.register_forward_pre_hook(counter(name)) for name, layer in evaluations.layers.items()]
    try:
        with evaluating(evaluations.model), torch.inference_mode():
            evaluations.forward(evaluations.model, next(evaluations.batches()))
    finally:
        for handle in handles:
            handle.remove()
    total = sum(seen.values()) or 1
    return {name: values / total for name, values in seen.items()}
