"""Alpha in a few layers: those that carry most of the gain, so that everything else can be folded for serving.

Trying every layer would take as many passes as there are layers. Instead one backward pass gives the slope of the
objective by every layer's alpha at 0, and only the steepest are tried, one at a time. The slope at 0 and the value at
one alpha make a parabola for each, and so a best alpha and a gain. The layers with the largest gains are then set
together, at a part of those alphas, since what they do overlaps. That is at most 17 forward passes' worth (a backward
pass counted as two) for up to five layers, however many the network has.

Under shifts every one of these runs on the clean data and on every shift. Layers are ranked by the mean over all of
them, and the rule for the clean data takes one of the settings that were tried.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from betternorm.display.progress import Bar
from betternorm.weighing.batches import device_of, evaluating, with_input_changed
from betternorm.weighing.evaluation import Evaluations, Setting, under
from betternorm.weighing.evidence import ENOUGH_TO_JUDGE, Gain, gain_between
from betternorm.weighing.folds import Folds
from betternorm.weighing.metrics import CALIBRATED, SHARES
from betternorm.weighing.per_layer import _loss, _replaced
from betternorm.weighing.result import AlphaSearch, FewLayers, LayersRow
from betternorm.weighing.shifted import ShiftedSets
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


def tune_few_layers(
    evaluations: Evaluations, split: Folds, single: AlphaSearch, count: int, seed: int, sets: ShiftedSets | None = None
) -> FewLayers:
    """Find ``count`` layers to have an alpha, and judge them on the folds that one alpha for all was judged on."""
    aim = _Aim(evaluations, split, single, seed, sets)
    before = evaluations.passes
    counts = sorted({k for k in (*SHOWN, count) if k <= len(evaluations.layers)})
    ranked = _ranked(aim, max(*counts, CANDIDATES))
    _try_together(aim, ranked, counts, count)
    work = _work(evaluations)
    rows = [aim.judged(k, work) for k in counts]
    rows.append(LayersRow(len(evaluations.layers), dict.fromkeys(evaluations.layers, aim.single), aim.of_all, 1.0))
    if evaluations.metrics[single.objective].is_better(aim.of_all.after, aim.of_all.before):
        for row in rows:
            row.share = row.gain.difference / aim.of_all.difference
    chosen = next(row for row in rows if row.layers == count)
    return FewLayers(
        layers=count,
        alphas=chosen.alphas,
        gains={metric: aim.gain(metric, count) for metric in single.gains},
        rows=rows,
        certain=chosen.gain.is_certain(evaluations.metrics[single.objective]) and single.judged_on >= ENOUGH_TO_JUDGE,
        passes=evaluations.passes - before + 1,
        evaluations=SLOPES_COST + len(_settings(evaluations, len(evaluations.layers))) - 1,
    )


class _Aim:
    """What layers are chosen for: a metric on the data, or what a rule makes of it on clean and on shifted data.

    Attributes:
        single: one alpha for all layers, the best.
        of_all: what it gains.
        guide: a metric that says how good a layer is, smooth where the objective is not.
        guides: its names on all sets.
    """

    def __init__(
        self, evaluations: Evaluations, split: Folds, single: AlphaSearch, seed: int, sets: ShiftedSets | None
    ) -> None:
        objective = single.objective
        self.evaluations, self._split, self._seed, self._sets = evaluations, split, seed, sets
        self._objective, self._confidence = objective, single.confidence
        self.single, self.of_all = single.best[objective], single.gains[objective]
        self.guide = CALIBRATED if objective in SHARES and CALIBRATED in evaluations.values else objective
        self.guides = [self.guide]
        if sets is not None and single.shifts is not None:
            self.single, self.of_all = sets.chosen, single.shifts.mean
            self.guide = sets.guide.name
            self.guides = [self.guide, *(under(self.guide, shift) for shift in sets.functions)]

    def loss(self, setting: Setting) -> float:
        """How bad a setting is by the guide: the mean over all sets."""
        sign = -1 if self.evaluations.metrics[self.guide].higher_is_better else 1
        averages = [self.evaluations.average(name, self.evaluations.values[name][setting]) for name in self.guides]
        return sign * sum(averages) / len(averages)

    def judged(self, count: int, work: dict[str, float]) -> LayersRow:
        """What at most so many layers gain in the objective, or in what the rule weighs."""
        setting = self._best(count)
        values = setting if isinstance(setting, tuple) else (setting,) * len(self.evaluations.layers)
        alphas = {name: alpha for name, alpha in zip(self.evaluations.layers, values, strict=True) if alpha != 0}
        if self._sets is None:
            gain = self.gain(self._objective, count)
        else:
            chosen = self._without_each_fold(count)
            held_out = {
                name: self._split.held_out(metric, chosen.__getitem__)
                for name, (_, metric) in self._sets.sets().items()
            }
            tried = _settings(self.evaluations, count)[1:]
            gain = self._sets.mean_gain(held_out, self._confidence, self._seed, tried=tried)
        return LayersRow(count, alphas, gain, sum(work[name] for name in alphas))

    def gain(self, metric: str, count: int) -> Gain:
        """What they gain in a metric on the clean data, each fold with what is best without it."""
        evaluations, chosen = self.evaluations, self._without_each_fold(count)
        tried: list[Setting] = []
        if metric == self._objective and self._sets is None:
            tried = _settings(evaluations, count)[1:]
        return gain_between(
            evaluations.metrics[metric],
            self._split.as_trained(metric),
            self._split.held_out(metric, chosen.__getitem__),
            evaluations.counts[metric],
            evaluations.units(metric),
            [evaluations.numbers(metric, setting) for setting in tried],
            self._confidence,
            self._seed,
        )

    def _without_each_fold(self, count: int) -> list[Setting]:
        return [self._best(count, fold) for fold in range(self._split.count)]

    def _best(self, count: int, without: int | None = None) -> Setting:
        """The best setting with at most so many layers, on all the data or without a fold."""
        evaluations, objective = self.evaluations, self._objective
        where = None if without is None else self._split.of(objective) != without
        settings = _settings(evaluations, count)
        if self._sets is not None:
            chosen: Setting = self._sets.choose(lambda name: where, settings)
            return chosen
        scores = [evaluations.average(objective, evaluations.values[objective][setting], where) for setting in settings]
        best = 0
        for index, score in enumerate(scores):
            if evaluations.metrics[objective].is_better(score, scores[best]):
                best = index
        return settings[best]


def setting_of(evaluations: Evaluations, alphas: dict[str, float]) -> Setting:
    return tuple(alphas.get(name, evaluations.baseline) for name in evaluations.layers)


# ---- which layers, and which alphas ----


def _ranked(aim: _Aim, most: int) -> dict[str, float]:
    """The layers with the largest gains by their parabolas, best first, each with its best alpha."""
    evaluations = aim.evaluations
    slopes = _slopes(aim)
    steepest = sorted(slopes, key=slopes.__getitem__)[:most]
    tried = {name: setting_of(evaluations, {name: TRIED_AT}) for name in steepest}
    evaluations.evaluate(list(tried.values()))
    as_trained = aim.loss(evaluations.baseline)
    found = {name: _lowest_point(slopes[name], aim.loss(setting) - as_trained) for name, setting in tried.items()}
    order = sorted(found, key=lambda name: found[name][1])
    return {name: found[name][0] for name in order}


def _lowest_point(slope: float, change: float) -> tuple[float, float]:
    """The best alpha, and the change there, of the parabola with this slope at 0 and this change at `TRIED_AT`."""
    curvature = 2 * (change - slope * TRIED_AT) / TRIED_AT**2
    alpha = -slope / curvature if curvature > 0 and slope < 0 else (TRIED_AT if change < 0 else LEAST)
    alpha = min(max(alpha, LEAST), MOST)
    return float(f"{alpha:.3g}"), slope * alpha + curvature * alpha**2 / 2


def _try_together(aim: _Aim, ranked: dict[str, float], counts: list[int], asked: int) -> None:
    """Evaluate the first layers together: for every count with two parts of their alphas, and once more where asked."""
    evaluations = aim.evaluations
    tried: dict[int, dict[float, Setting]] = {k: {} for k in counts}
    for k in counts:
        names = list(ranked)[:k]
        for overlap in OVERLAPS if k > 1 else OVERLAPS[:1]:
            part = 1 / (1 + overlap * (k - 1))
            tried[k][part] = setting_of(evaluations, {name: _alpha(ranked[name] * part) for name in names})
    evaluations.evaluate([setting for settings in tried.values() for setting in settings.values()])
    if len(tried[asked]) == 2:
        (first, at_first), (second, at_second) = tried[asked].items()
        as_trained = aim.loss(evaluations.baseline)
        a, b = aim.loss(at_first) - as_trained, aim.loss(at_second) - as_trained
        # The parabola through 0 and both parts.
        curvature = (a / first - b / second) / (first - second)
        slope = a / first - curvature * first
        if curvature > 0 and slope < 0:
            part = min(max(-slope / (2 * curvature), 0.1), 1.5)
            names = list(ranked)[:asked]
            evaluations.evaluate([setting_of(evaluations, {name: _alpha(ranked[name] * part) for name in names})])


def _alpha(value: float) -> float:
    return float(f"{min(max(value, LEAST / 4), 1.0):.3g}")


def _slopes(aim: _Aim) -> dict[str, float]:
    """The derivative of the loss by every layer's alpha where all are 0, from one forward and backward pass."""
    evaluations = aim.evaluations
    loss = _loss(evaluations.metrics[aim.guide])
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
                    for shown in (batch, *(with_input_changed(batch, s) for s in evaluations.shifts.values())):
                        with _replaced(evaluations.layers, alphas):
                            output, target = evaluations.forward(evaluations.model, shown)
                            value = loss(output, target, inverse) * len(target)
                        (slope,) = torch.autograd.grad(value, alphas)
                        total = total + slope.double().cpu()
                    evaluations.fit = {"epochs": None, "steps": steps, "slopes": total}
                    evaluations.save_now_and_then()
                bar.advance()
    finally:
        evaluations.save()
    examples = len(evaluations.keys) * (1 + len(evaluations.shifts))
    return dict(zip(evaluations.layers, (total / examples).tolist(), strict=True))


# ---- what was tried, and what it costs ----


def _settings(evaluations: Evaluations, count: int) -> list[Setting]:
    """What was tried with at most so many layers, and the network as it was trained."""
    tried = next(iter(evaluations.values.values()))
    few = [s for s in tried if isinstance(s, tuple) and sum(alpha != 0 for alpha in s) <= count]
    return [evaluations.baseline, *few]


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
