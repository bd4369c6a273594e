"""The search for the alpha that is best for a trained network, with the evidence for it (section 3.1).

Alpha can be chosen long after training, on labelled data that the network was not trained on. The way of the data:
layers, calibration, evaluation, folds, gains, result.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from betternorm.conversion.convert import convert
from betternorm.deprecation import renamed_parameters
from betternorm.errors import UncertainGainWarning
from betternorm.layers.checks import checked_alpha
from betternorm.weighing.alpha import alpha_as_trained, tuned_layers, weighed_layers
from betternorm.weighing.batches import Forward, check_max_examples, device_of, evaluating, iterate, output_and_target
from betternorm.weighing.calibration import calibrate, has_no_averages
from betternorm.weighing.evaluation import Evaluations, Setting, shift_of
from betternorm.weighing.evidence import ENOUGH_TO_JUDGE, Gain
from betternorm.weighing.few_layers import check_layers, setting_of, tune_few_layers
from betternorm.weighing.folds import Folds
from betternorm.weighing.metrics import CALIBRATED, METRICS, AnyMetric, named_metrics, weighted_mean
from betternorm.weighing.per_layer import tune_per_layer
from betternorm.weighing.result import AlphaSearch
from betternorm.weighing.scale import alpha_at
from betternorm.weighing.shifted import ShiftedSets, Shifts
from betternorm.weighing.temperature import best_inverse, divide_last_linear, is_at_the_end

# Steps of the search, in u.
COARSEST, FINEST = 1 / 4, 1 / 32
WORTH_A_PASS = 0.05  # how far the lowest point must be from the best one tried, as a part of the bracket


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
    """Find the alpha that is best for a trained network, set it, and return the evidence.

    A plain model is converted in place (``convert(model, "weighed")``), which changes nothing about what it computes.
    GroupNorm and InstanceNorm layers that have no moving averages yet are calibrated, on ``stats_loader`` or else on
    ``loader`` without its labels. In a network with layers of both kinds alpha is tuned where statistics reach across
    examples, and stays 1 elsewhere.

    The search is adaptive: five alphas in the first iteration of the loader, then in each further one the neighbours of
    the best so far of every metric, halving the step, and at last the lowest point of a parabola through the objective:
    five iterations at most. Between them only some numbers for every image and alpha are kept. The loader must give
    the same examples every time, in any order: no random augmentation.

    Part of what alpha does to the cross-entropy is to soften outputs that are too sure, which one temperature does as
    well. So every search of a classifier also fits a temperature, and the default objective is the cross-entropy after
    it: what no temperature can give. ``found.temperature`` holds it.

    The evidence is honest about the choice: the data falls into ``folds``; for each, alpha and the temperature are
    fitted on the others and judged where they were not. The interval of the objective's gain is wide enough for the
    best of all alphas tried. Where it includes zero, or where there are fewer than 50 different examples, there is a
    warning, and alpha stays as the network was trained.

    Args:
        loader: batches (x, y), or dicts with "image" and "label" (or similar names), to be iterated several times.
        metrics: names ("top1", "top5", "cross_entropy", "calibrated_cross_entropy", "ece"), `Metric` objects, or
            metrics of torchmetrics.
        objective: the metric to optimise, one of ``metrics`` or another; None is "calibrated_cross_entropy", and with
            ``shifts`` "top1".
        layers: put alpha into at most so many layers, those that carry most of the gain, so that the others can be
            folded for serving (:func:`betternorm.fold`). Up to five take at most 30 forward passes' worth of the data
            in all, however many layers the network has. The table shows what one, three, five and all layers gain, and
            what they cost. With ``shifts`` the same rule chooses them, and a pass is one of the data and all shifts.
        shifts: choose alpha on shifted data too: what :func:`betternorm.weighing.corruptions` returns, or a dict from
            names to functions of the images or to loaders of shifted data. Every alpha is run on every shift.
        max_clean_drop: the rule for ``shifts``. None takes the best mean over the clean data and all shifts; a number
            the best mean over the shifts at a cost on the clean data of at most so much (points for top1 and top5).
        per_layer: also fit one alpha per layer by gradient, and set those where they are better on held-out folds. It
            takes ``epochs`` iterations, each with ``folds + 1`` forward and backward passes.
        grid: instead of searching, try so many alphas (denser near 0 and 1), or exactly these, in one iteration.
        fold_temperature: divide the last linear layer by the temperature, so that the network has it inside.
        confidence: of the intervals.
        require_significant: whether to leave alpha unchanged if the gain is not significant. False sets the best
            alpha in any case.
        forward: ``forward(model, batch)`` returns output and targets, for other kinds of batches and tasks.
        max_examples: use only this many examples, the first ones.
        resume: a file that keeps what has been evaluated. Interrupted, the same call goes on where it stopped.
        progress: show a bar; None shows it on a terminal.

    Examples::

        found = betternorm.tune_alpha(model, val_loader)
        print(found)
        found.plot("alpha.png")
        torch.save(model.state_dict(), "tuned.pt")  # alpha is inside
    """
    if objective is None:
        objective = CALIBRATED if shifts is None else "top1"
    judged = named_metrics(metrics)
    aim = next(iter(named_metrics((objective,))))
    judged |= {name: metric for name, metric in named_metrics((objective,)).items() if name not in judged}
    if any(METRICS.get(name) is metric for name, metric in judged.items()):  # a classifier: it gets a temperature
        judged |= {name: METRICS[name] for name in ("cross_entropy", CALIBRATED) if name not in judged}
    candidates = alpha_grid(grid)
    check_max_examples(max_examples)
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence} must lie between 0 and 1, like 0.95")
    if folds < 2:
        raise ValueError(f"folds={folds} must be 2 or more")
    if shifts is None and max_clean_drop is not None:
        raise ValueError(f"max_clean_drop={max_clean_drop} is a rule for shifted data; give shifts=... too")
    if layers is not None and per_layer:
        raise ValueError(f"layers={layers} does not go together with per_layer")
    if not weighed_layers(model):
        convert(model, "weighed")
    tuned = tuned_layers(model)
    untuned = {name: layer.alpha for name, layer in tuned.items()}
    baseline = alpha_as_trained(tuned)
    if layers is not None:
        check_layers(layers, list(tuned), baseline)
    run = forward or output_and_target
    try:
        layer_by_layer = "per_layer=True" if per_layer else None if layers is None else f"layers={layers}"
        sets = None if shifts is None else ShiftedSets(shifts, judged[aim], max_clean_drop, layer_by_layer)
        calibrating = 0
        if stats_loader is not None or any(has_no_averages(layer) for layer in tuned.values()):
            for layer in tuned.values():
                layer.alpha = baseline
            averaged = loader if stats_loader is None else stats_loader
            calibrating = calibrate(model, averaged, max_examples=max_examples, forward=forward, progress=progress)
        evaluations = Evaluations(
            model,
            tuned,
            loader,
            judged | (sets.metrics() if sets else {}),
            run,
            max_examples,
            resume,
            progress,
            baseline,
            sets.functions if sets else None,
        )
        if sets is not None:
            sets.attach(evaluations, resume)
        _search(evaluations, aim, candidates, sets, follow_others=layers is None)
        split = Folds(evaluations, min(folds, evaluations.groups()), seed)
        result = _judge(evaluations, split, aim, confidence, seed)
        if sets is not None:
            sets.judge(result, split, seed)
        if per_layer:
            result.per_layer = tune_per_layer(evaluations, split, result, epochs, seed, sets)
        if layers is not None:
            result.few_layers = tune_few_layers(evaluations, split, result, layers, seed, sets)
    except BaseException:
        for name, alpha in untuned.items():
            tuned[name].alpha = alpha
        raise
    result.passes += calibrating
    chosen = result.best[aim] if sets is None else sets.chosen
    result.alpha = chosen if result.significant or not require_significant else baseline
    if result.few_layers is not None:
        few = result.few_layers
        result.passes += few.passes
        result.evaluations += few.evaluations
        result.alpha = (
            dict.fromkeys(tuned, baseline) | few.alphas if few.certain or not require_significant else baseline
        )
        if not few.certain:
            warnings.warn(result.verdict(), UncertainGainWarning, stacklevel=3)
        result.temperature = _temperature(
            evaluations,
            setting_of(evaluations, few.alphas) if isinstance(result.alpha, dict) and few.alphas else baseline,
        )
    elif result.per_layer is not None and result.per_layer.kept:
        result.alpha = result.per_layer.alphas
        result.temperature = result.per_layer.temperature
    else:
        if not result.significant:
            warnings.warn(result.verdict(), UncertainGainWarning, stacklevel=3)
        result.temperature = _temperature(evaluations, chosen if result.alpha != baseline else baseline)
    result.worse = _worse(result, evaluations)
    for name, layer in tuned.items():
        layer.alpha = result.alpha[name] if isinstance(result.alpha, dict) else result.alpha
    if fold_temperature:
        _fold_temperature(model, result, run, loader)
    return result


def _worse(result: AlphaSearch, evaluations: Evaluations) -> list[str]:
    """The metrics that are certainly worse with the alpha that was set."""
    if result.alpha == result.baseline:
        return []
    return [name for name, gain in result.gains_as_set().items() if gain.is_certain_loss(evaluations.metrics[name])]


def _temperature(evaluations: Evaluations, alpha: Setting) -> float | None:
    """The temperature that fits all the data best, and None where there are no logits or where nothing fits."""
    if CALIBRATED not in evaluations.values:
        return None
    inverse = best_inverse(evaluations.values[CALIBRATED][alpha], evaluations.counts[CALIBRATED])
    return None if is_at_the_end(inverse) or inverse == 0 else 1 / inverse


def _fold_temperature(model: nn.Module, result: AlphaSearch, run: Forward, loader: Iterable[Any]) -> None:
    """Divide the last linear layer by the temperature, and see that the output is divided by it."""
    if result.temperature is None:
        raise ValueError(
            "fold_temperature=True, and there is none to fold: none from 1/16 to 16 fits, or the outputs are no logits"
        )
    batch = next(iterate(loader, None, device_of(model)))
    with evaluating(model), torch.inference_mode():
        before = run(model, batch)[0]
    name = divide_last_linear(model, result.temperature)
    with evaluating(model), torch.inference_mode():
        after = run(model, batch)[0]
    if not torch.allclose(after * result.temperature, before, rtol=1e-3, atol=1e-4 * float(before.abs().max())):
        divide_last_linear(model, 1 / result.temperature)
        raise ValueError(
            f"fold_temperature=True: the last linear layer, {name!r}, does not give the output of the network; divide "
            "the logits by found.temperature yourself"
        )
    result.temperature_folded_into = name


def _search(
    evaluations: Evaluations,
    objective: str,
    grid: list[float] | None,
    sets: ShiftedSets | None,
    follow_others: bool = True,
) -> None:
    """Try alphas: those of the grid, or five and then ever closer neighbours of the best."""

    def evaluate(alphas: Iterable[float]) -> None:
        evaluations.evaluate(list(alphas))
        if sets is not None:
            sets.evaluate(list(alphas))
        _check_temperature(evaluations, objective)

    if grid is not None:
        evaluate([evaluations.baseline, *grid])
        return
    # A calibration error has no single valley: a network that knows nothing, and says so, is well calibrated.
    followed = [
        name
        for name, metric in evaluations.metrics.items()
        if (follow_others and metric.average is weighted_mean and not shift_of(name)) or name == objective
    ]

    def best(among: Collection[float]) -> set[float]:
        """Of every metric; under shift, where every alpha costs many runs, by the rule alone."""
        if sets is not None:
            return {sets.choose(among=among)}
        return {evaluations.best(metric, among=among) for metric in followed}

    steps = round(1 / COARSEST)
    position = {alpha_at(k / steps): k / steps for k in range(steps + 1)}
    evaluate(position)
    step = COARSEST
    while step > FINEST:
        step /= 2
        around_best = sorted(position[alpha] for alpha in best(position))
        position |= {alpha_at(v): v for u in around_best for v in (u - step, u + step) if 0 <= v <= 1}
        evaluate(position)
    if sets is not None:
        return
    u = position[evaluations.best(objective, among=position)]
    if step <= u <= 1 - step:
        around = [alpha_at(v) for v in (u - step, u, u + step)]
        lowest = _vertex(
            around, [evaluations.average(objective, evaluations.values[objective][alpha]) for alpha in around]
        )
        if abs(lowest - around[1]) > WORTH_A_PASS * (around[2] - around[0]):
            evaluate([float(f"{lowest:.6g}")])


def _check_temperature(evaluations: Evaluations, objective: str) -> None:
    if objective != CALIBRATED:
        return
    values = evaluations.values[CALIBRATED][evaluations.baseline]
    if is_at_the_end(best_inverse(values, evaluations.counts[CALIBRATED])):
        raise ValueError(
            "no temperature from 1/16 to 16 fits: the sharper the outputs, the lower the cross-entropy. Either nearly "
            "all examples are classified right, or the outputs are no logits; objective='cross_entropy' needs none"
        )


def _vertex(x: Sequence[float], y: Sequence[float]) -> float:
    """Where the parabola through three points is flat; between the outer two, the middle one being the best."""
    before, after = (y[1] - y[0]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])
    if before == after or not math.isfinite(before - after):
        return x[1]
    return (x[0] + x[1]) / 2 - before * (x[2] - x[0]) / (after - before) / 2


def alpha_grid(grid: int | Sequence[float] | None) -> list[float] | None:
    """The alphas that ``grid`` asks for: equally spaced in u where it is a number."""
    if grid is None:
        return None
    if isinstance(grid, int):
        if grid < 2:
            raise ValueError(f"grid={grid} must be 2 or more points, or a list of alphas")
        return [alpha_at(k / (grid - 1)) for k in range(grid)]
    return [checked_alpha(alpha) for alpha in grid]


def _judge(evaluations: Evaluations, split: Folds, objective: str, confidence: float, seed: int) -> AlphaSearch:
    names = [name for name in evaluations.metrics if not shift_of(name)]

    def gain(metric: str, before: torch.Tensor, after: torch.Tensor, chosen: bool) -> Gain:
        return evaluations.gain(metric, before, after, confidence, seed, chosen)

    gains = {
        metric: gain(metric, split.as_trained(metric), split.single(objective, metric), metric == objective)
        for metric in names
    }
    alphas = sorted(evaluations.tried())
    rows = [
        {"alpha": alpha} | {metric: evaluations.average(metric, evaluations.values[metric][alpha]) for metric in names}
        for alpha in alphas
    ]
    against_temperature = None
    if CALIBRATED in names:
        plain = evaluations.values["cross_entropy"][evaluations.baseline]
        against_temperature = {
            "temperature alone": gain(CALIBRATED, plain, split.as_trained(CALIBRATED), False),
            "alpha alone": gain("cross_entropy", plain, split.single("cross_entropy", "cross_entropy"), True),
            "both": gain(CALIBRATED, plain, split.single(CALIBRATED, CALIBRATED), True),
        }
    judged_on = len(torch.unique(evaluations.units(objective)))
    certain = gains[objective].is_certain(evaluations.metrics[objective])
    return AlphaSearch(
        alpha=evaluations.baseline,
        objective=objective,
        baseline=evaluations.baseline,
        table=rows,
        best={metric: evaluations.best(metric) for metric in names},
        gains=gains,
        significant=certain and judged_on >= ENOUGH_TO_JUDGE,
        higher_is_better={name: evaluations.metrics[name].higher_is_better for name in names},
        examples=len(evaluations.keys),
        passes=evaluations.passes,
        evaluations=len(alphas),
        folds=split.count,
        confidence=confidence,
        judged_on=judged_on,
        against_temperature=against_temperature,
    )
