"""`tune_alpha`: choose alpha for a pretrained model on labeled data, with cross-validated gains (section 3.1).

In three stages: settings of alpha are evaluated, one of them is chosen, and the choice is judged on held-out folds.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from betternorm.conversion.convert import convert
from betternorm.deprecation import renamed_parameters
from betternorm.errors import UncertainGainWarning
from betternorm.layers import GroupedBatchNorm
from betternorm.layers.checks import checked_alpha
from betternorm.weighing.alpha import alpha_as_trained, tuned_layers, weighed_layers
from betternorm.weighing.batches import Forward, check_max_examples, device_of, evaluating, iterate, output_and_target
from betternorm.weighing.calibration import calibrate, has_no_averages
from betternorm.weighing.evaluation import Evaluations, Setting, shift_of
from betternorm.weighing.evidence import Gain
from betternorm.weighing.few_layers import check_layers, evaluate_few_layers, judge_few_layers
from betternorm.weighing.folds import Folds
from betternorm.weighing.judging import Judge, SingleAlpha
from betternorm.weighing.metrics import CALIBRATED, METRICS, AnyMetric, Metric, named_metrics, weighted_mean
from betternorm.weighing.objective import Objective, Sets, Shifts, best_for, choose
from betternorm.weighing.per_layer import tune_per_layer
from betternorm.weighing.result import AlphaSearch, FewLayers, PerLayer, ShiftEvidence
from betternorm.weighing.scale import alpha_at
from betternorm.weighing.temperature import best_inverse, divide_last_linear, is_at_the_end

# Steps of the search, in u.
COARSEST, FINEST = 1 / 4, 1 / 32
WORTH_A_PASS = 0.05  # least distance of the parabola's minimum from the best alpha tried, as a share of the bracket


@renamed_parameters(
    limit="max_examples",
    max_clean_loss="max_clean_drop",
    insist="not require_significant",
    calibration="stats_loader",
)
def tune_alpha(
    model: nn.Module,
    loader: Iterable[Any],
    metrics: Iterable[AnyMetric] = ("top1", "top5", "cross_entropy"),
    objective: AnyMetric | None = None,
    *,
    layers: int | None = None,
    shifts: Shifts | None = None,
    max_clean_drop: float | None = None,
    per_layer: bool = False,
    grid: int | Sequence[float] | None = None,
    fold_temperature: bool = False,
    epochs: int = 3,
    folds: int = 5,
    confidence: float = 0.95,
    require_significant: bool = True,
    forward: Forward | None = None,
    stats_loader: Iterable[Any] | None = None,
    max_examples: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> AlphaSearch:
    """Choose alpha for a pretrained model on labeled data, set it, and return the results of the search.

    A plain model is converted in place with ``convert(model, "weighed")``, which does not change its outputs.
    GroupNorm and InstanceNorm layers without moving averages are calibrated first, on ``stats_loader`` or on ``loader``
    without its labels. In a model with both BatchNorm and GroupNorm layers, alpha is tuned in the BatchNorm layers.

    The search takes at most five passes over the data: five alphas in the first, then the neighbors of the best alpha
    of each metric at half the step, and finally the minimum of a parabola through the objective. Only a few numbers per
    image and alpha are kept. The loader must yield the same examples in every pass, in any order: no random
    augmentation.

    Part of the effect of alpha on the cross-entropy is to soften overconfident outputs, which a single temperature does
    as well. For classifiers a temperature is therefore fitted for every alpha, and the default objective is the
    cross-entropy after temperature scaling. ``result.temperature`` is the temperature for the chosen alpha.

    Gains are cross-validated: for each of ``folds`` folds, alpha and temperature are fitted on the other folds and
    evaluated on the held-out one. The confidence interval of the objective is corrected for the number of alphas tried.
    If it includes zero, or if there are fewer than 50 distinct examples, a warning is issued and alpha is left
    unchanged: at the baseline, which an alpha that was set earlier (by `fit_alpha`, say) is reset to.

    Args:
        model: a model with BatchNorm, GroupNorm or InstanceNorm layers.
        loader: batches (x, y), or dicts with "image" and "label" (or similar names); iterated several times.
        metrics: names ("top1", "top5", "cross_entropy", "calibrated_cross_entropy", "ece"), `Metric` objects, or
            torchmetrics metrics.
        objective: the metric to optimize, or the name of one of ``metrics``. None means "calibrated_cross_entropy", or
            "top1" with ``shifts``.
        layers: set alpha in at most this many layers, those with the largest gains, so that all others can be folded
            for serving (:func:`betternorm.fold`). For up to five layers the search costs at most 30 forward passes over
            the data, however many layers the model has. The result compares one, three, five and all layers.
        shifts: choose alpha on shifted data too: the output of :func:`betternorm.weighing.corruptions`, or a dict from
            names to functions of the images or to loaders of shifted data. Every alpha is evaluated on every shift.
        max_clean_drop: how to choose alpha with ``shifts``. None maximizes the mean over the clean data and all shifts.
            A number maximizes the mean over the shifts, with a drop on the clean data of at most this much (in
            percentage points for top1 and top5).
        per_layer: deprecated, use ``fit_alpha(..., per="layer")``. Also fit one alpha per layer by gradient, in
            ``epochs`` passes, and set those if they are better on held-out folds.
        grid: evaluate this many alphas (denser near 0 and 1), or exactly these, in one pass instead of searching.
        fold_temperature: divide the last linear layer by the temperature.
        folds: the number of folds for cross-validation.
        confidence: the level of the intervals.
        require_significant: leave alpha unchanged if the gain is not significant. False sets the best alpha anyway.
        forward: ``forward(model, batch)`` returns outputs and targets, for other formats of batches and other tasks.
        stats_loader: data for the moving averages of GroupNorm and InstanceNorm layers; given explicitly, those of
            BatchNorm layers are recomputed too.
        max_examples: use at most this many examples, the first ones.
        resume: a file for intermediate results; the same call continues an interrupted search.
        seed: for the assignment of folds and the resampling of intervals.
        progress: show a progress bar; None shows it on a terminal.

    Returns:
        An :class:`AlphaSearch`.

    Examples::

        result = betternorm.tune_alpha(model, val_loader)
        print(result)
        result.plot("alpha.svg")
        torch.save(model.state_dict(), "tuned.pt")  # alpha is part of the state_dict
    """
    measured, aim = _metrics(metrics, objective, "top1" if shifts is not None else CALIBRATED)
    candidates = alpha_grid(grid)
    check_max_examples(max_examples)
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence} must lie between 0 and 1, like 0.95")
    if folds < 2:
        raise ValueError(f"folds={folds} must be 2 or more")
    if layers is not None and per_layer:
        raise ValueError(f"layers={layers} cannot be combined with per_layer=True")
    if per_layer:
        warnings.warn('per_layer is deprecated; use fit_alpha(..., per="layer")', DeprecationWarning, stacklevel=3)
    by_layer = "per_layer=True" if per_layer else None if layers is None else f"layers={layers}"
    goal = Objective(measured[aim], shifts, max_clean_drop, by_layer, CALIBRATED in measured)
    if not weighed_layers(model):
        convert(model, "weighed")
    tuned = tuned_layers(model)
    before = {name: layer.alpha for name, layer in tuned.items()}
    baseline = alpha_as_trained(tuned)
    if layers is not None:
        check_layers(layers, list(tuned), baseline)
    run = forward or output_and_target
    try:
        passes = 0
        if stats_loader is not None or any(has_no_averages(layer) for layer in tuned.values()):
            _set(tuned, baseline)
            data = loader if stats_loader is None else stats_loader
            passes = calibrate(model, data, max_examples=max_examples, forward=forward, progress=progress)
        evaluations = Evaluations(
            model,
            tuned,
            loader,
            measured | goal.metrics_under_shifts(),
            run,
            max_examples,
            resume,
            progress,
            baseline,
            goal.functions,
        )
        sets = Sets(goal, evaluations, resume)
        evaluate(sets, candidates, follow_others=layers is None)
        extra_passes = 0 if layers is None else evaluate_few_layers(sets, layers)
        split = Folds(evaluations, folds, seed)
        judge = Judge(
            columns=sets.columns(split),
            metrics={name: evaluations.column(name, split.of(name)) for name in measured},
            rule=goal.rule,
            baseline=baseline,
            folds=split.count,
            confidence=confidence,
            seed=seed,
            reliable=not sets.non_finite().get(baseline),
        )
        single = judge_single(sets, judge)
        layered = tune_per_layer(sets, split, judge, single, epochs) if per_layer else None
        few = judge_few_layers(sets, judge, layers, single, extra_passes) if layers is not None else None
        alpha, gains, certain = _decision(tuned, judge, single, layered, few, require_significant)
        if layered is not None and alpha is layered.alphas:
            temperature = layered.temperature
        else:
            temperature = _temperature(evaluations, alpha)
        _set(tuned, alpha)
        folded_into = _fold_temperature(model, temperature, run, loader) if fold_temperature else None
    except BaseException:
        _set(tuned, before)
        raise
    result = AlphaSearch(
        alpha=alpha,
        objective=aim,
        baseline=baseline,
        table=[
            {"alpha": alpha} | {name: column.average(alpha) for name, column in judge.metrics.items()}
            for alpha in sorted(evaluations.single_alphas())
        ],
        best={name: best_for(column, sets.usable_alphas(), baseline) for name, column in judge.metrics.items()},
        gains=single.gains,
        significant=single.significant,
        higher_is_better={name: metric.higher_is_better for name, metric in measured.items()},
        examples=len(evaluations.keys),
        passes=passes + evaluations.passes + (1 if few else 0),
        evaluations=len(evaluations.single_alphas()) + (few.evaluations if few else 0),
        folds=split.count,
        confidence=confidence,
        judged_on=judge.judged_on,
        worse=[] if alpha == baseline else _worse(judge, gains),
        temperature=temperature,
        temperature_folded_into=folded_into,
        against_temperature=_against_temperature(sets, judge),
        non_finite=[
            {"alpha": alpha, "outputs": count}
            for alpha, count in sets.non_finite().items()
            if not isinstance(alpha, tuple)
        ],
        shifts=single.shifts,
        per_layer=layered,
        few_layers=few,
    )
    if not certain:
        warnings.warn(result.verdict(), UncertainGainWarning, stacklevel=3)
    return result


def _metrics(metrics: Iterable[AnyMetric], objective: AnyMetric | None, default: str) -> tuple[dict[str, Metric], str]:
    """All metrics by name, and the name of the objective."""
    measured = named_metrics(metrics)
    objective = default if objective is None else objective
    if not isinstance(objective, str) or objective not in measured:
        (aim,) = named_metrics((objective,)).values()
        if measured.setdefault(aim.name, aim) != aim:
            raise ValueError(f"two metrics are named {aim.name!r}; rename one of them with Metric(name, ...)")
        objective = aim.name
    if any(METRICS.get(name) is metric for name, metric in measured.items()):  # a classifier: fit a temperature
        measured |= {name: METRICS[name] for name in ("cross_entropy", CALIBRATED) if name not in measured}
    return measured, objective


def _set(layers: Mapping[str, GroupedBatchNorm], alpha: float | Mapping[str, Any]) -> None:
    for name, layer in layers.items():
        layer.alpha = alpha[name] if isinstance(alpha, Mapping) else alpha


def _decision(
    layers: Mapping[str, GroupedBatchNorm],
    judge: Judge,
    single: SingleAlpha,
    layered: PerLayer | None,
    few: FewLayers | None,
    require_significant: bool,
) -> tuple[float | dict[str, float], dict[str, Gain], bool]:
    """The alpha to set, the gains of the choice, and whether they are significant."""
    alpha: float | dict[str, float]
    alpha, gains, certain = single.alpha, single.gains, single.significant
    if few is not None:
        alpha, gains, certain = dict.fromkeys(layers, judge.baseline) | few.alphas, few.gains, few.certain
    elif layered is not None and layered.kept:
        alpha, gains, certain = layered.alphas, layered.gains, True
    if not certain and (require_significant or not judge.reliable):
        alpha = judge.baseline
    return alpha, gains, certain


def _worse(judge: Judge, gains: Mapping[str, Gain]) -> list[str]:
    """The metrics that are significantly worse."""
    return [name for name, gain in gains.items() if gain.is_certain_loss(judge.metrics[name].metric)]


def _temperature(evaluations: Evaluations, alpha: float | dict[str, float]) -> float | None:
    """The best temperature on all data; None if there are no logits or no temperature is best."""
    if CALIBRATED not in evaluations.values:
        return None
    setting: Setting = tuple(alpha.values()) if isinstance(alpha, dict) else alpha
    if setting not in evaluations.settings():  # alpha in no layer
        setting = evaluations.baseline
    column = evaluations.column(CALIBRATED)
    inverse = best_inverse(column.values[setting], column.counts)
    return None if is_at_the_end(inverse) or inverse == 0 else 1 / inverse


def _fold_temperature(model: nn.Module, temperature: float | None, run: Forward, loader: Iterable[Any]) -> str:
    """Divide the last linear layer by the temperature, check the outputs, and return the name of the layer."""
    if temperature is None:
        raise ValueError(
            "fold_temperature=True, and there is no temperature to fold: none between 1/16 and 16 minimizes the "
            "cross-entropy, or the outputs are not logits"
        )
    batch = next(iterate(loader, None, device_of(model)))
    with evaluating(model), torch.inference_mode():
        before = run(model, batch)[0]
    name = divide_last_linear(model, temperature)
    with evaluating(model), torch.inference_mode():
        after = run(model, batch)[0]
    if not torch.allclose(after * temperature, before, rtol=1e-3, atol=1e-4 * float(before.abs().max())):
        divide_last_linear(model, 1 / temperature)
        raise ValueError(
            f"fold_temperature=True: the last linear layer, {name!r}, does not compute the output of the model; divide "
            "the logits by result.temperature instead"
        )
    return name


# ---- evaluate ----


def evaluate(sets: Sets, grid: list[float] | None, follow_others: bool) -> None:
    """Evaluate single alphas: those of the grid, or five and then neighbors of the best at ever smaller steps."""
    objective, clean = sets.objective.metric.name, sets.clean
    if grid is not None:
        sets.evaluate([clean.baseline, *grid])
        _check_temperature(clean, objective)
        return
    # A calibration error may have several minima: a model that always predicts the class frequencies has none at all.
    followed = [
        key
        for key, metric in clean.metrics.items()
        if key == objective or (follow_others and metric.average is weighted_mean and not shift_of(key))
    ]

    def best(position: Mapping[float, float]) -> set[float]:
        """Of every metric; with shifts, where each alpha is expensive, by the rule only."""
        usable = [alpha for alpha in sets.usable_alphas() if alpha in position]
        if sets.objective.shifted:
            return {choose(sets.columns(), sets.objective.rule, usable, clean.baseline)}
        return {best_for(clean.column(key), usable, clean.baseline) for key in followed}

    steps = round(1 / COARSEST)
    position = {alpha_at(k / steps): k / steps for k in range(steps + 1)}
    sets.evaluate(position)
    _check_temperature(clean, objective)
    step = COARSEST
    while step > FINEST:
        step /= 2
        around_best = sorted(position[alpha] for alpha in best(position))
        position |= {alpha_at(v): v for u in around_best for v in (u - step, u + step) if 0 <= v <= 1}
        sets.evaluate(position)
    if sets.objective.shifted:
        return
    column = clean.column(objective)
    u = position[best_for(column, [alpha for alpha in sets.usable_alphas() if alpha in position], clean.baseline)]
    if step <= u <= 1 - step:
        around = [alpha_at(v) for v in (u - step, u, u + step)]
        lowest = _vertex(around, [column.average(alpha) for alpha in around])
        if abs(lowest - around[1]) > WORTH_A_PASS * (around[2] - around[0]):
            sets.evaluate([float(f"{lowest:.6g}")])


def _check_temperature(evaluations: Evaluations, objective: str) -> None:
    if objective == CALIBRATED:
        column = evaluations.column(CALIBRATED)
        if is_at_the_end(best_inverse(column.values[evaluations.baseline], column.counts)):
            raise ValueError(
                "no temperature between 1/16 and 16 minimizes the cross-entropy: sharper outputs are always better. "
                "Either nearly all examples are classified correctly, or the outputs are not logits; use "
                "objective='cross_entropy' instead"
            )


def _vertex(x: Sequence[float], y: Sequence[float]) -> float:
    """The extremum of the parabola through three points, of which the middle one is the best."""
    before, after = (y[1] - y[0]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])
    if before == after or not math.isfinite(before - after):
        return x[1]
    return (x[0] + x[1]) / 2 - before * (x[2] - x[0]) / (after - before) / 2


def alpha_grid(grid: int | Sequence[float] | None) -> list[float] | None:
    """The alphas of ``grid``: equally spaced in u if it is a number."""
    if grid is None:
        return None
    if isinstance(grid, int):
        if grid < 2:
            raise ValueError(f"grid={grid} must be 2 or more points, or a list of alphas")
        return [alpha_at(k / (grid - 1)) for k in range(grid)]
    return [checked_alpha(alpha) for alpha in grid]


# ---- judge ----


def judge_single(sets: Sets, judge: Judge) -> SingleAlpha:
    """One alpha for all layers, and what it gains on folds that did not choose it."""
    settings = sets.usable_alphas()
    by_fold = judge.by_fold(settings)
    gain = judge.gain(by_fold, tried=settings)
    gains = judge.gains(by_fold)
    shifts = None
    if sets.objective.shifted:
        table = [
            {"alpha": alpha} | {name: column.average(alpha) for name, column in judge.columns.items()}
            for alpha in sorted(sets.clean.single_alphas())
        ]
        shifts = ShiftEvidence(sets.objective.max_clean_drop, table, judge.gains_by_set(by_fold), gain)
    else:
        gains[sets.objective.metric.name] = gain
    return SingleAlpha(judge.choose(settings), by_fold, gains, gain, judge.is_significant(gain), shifts)


def _against_temperature(sets: Sets, judge: Judge) -> dict[str, Gain] | None:
    """The gain in cross-entropy over the baseline without a temperature, by temperature, alpha and both."""
    if CALIBRATED not in judge.metrics:
        return None
    plain, scaled = judge.metrics["cross_entropy"], judge.metrics[CALIBRATED]
    before, settings = plain.numbers(judge.baseline), sets.usable_alphas()
    return {
        "temperature alone": judge.column_gain(scaled, [judge.baseline] * judge.folds, before),
        "alpha alone": judge.column_gain(plain, judge.by_fold(settings, plain), before, settings),
        "both": judge.column_gain(scaled, judge.by_fold(settings, scaled), before, settings),
    }
