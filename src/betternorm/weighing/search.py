"""The search for the alpha that is best for a trained network, with the evidence for it (section 3.1).

Alpha can be chosen long after training, on labelled data that the network was not trained on. The way of the data:
layers, calibration, evaluation, folds, gains, result.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from betternorm.errors import UncertainGainWarning
from betternorm.layers import checked_alpha
from betternorm.surgery import convert
from betternorm.weighing.alpha import alpha_as_trained, tuned_layers, weighed_layers
from betternorm.weighing.batches import Forward, check_limit, output_and_target
from betternorm.weighing.calibration import calibrate, has_no_averages
from betternorm.weighing.evaluation import Evaluations
from betternorm.weighing.folds import Folds
from betternorm.weighing.metrics import AnyMetric, named_metrics, weighted_mean
from betternorm.weighing.per_layer import tune_per_layer
from betternorm.weighing.result import AlphaSearch
from betternorm.weighing.scale import alpha_at

# Steps of the search, in u.
COARSEST, FINEST = 1 / 4, 1 / 32
WORTH_A_PASS = 0.05  # how far the lowest point must be from the best one tried, as a part of the bracket


def tune_alpha(
    model: nn.Module,
    loader: Iterable[Any],
    metrics: Iterable[AnyMetric] = ("top1", "top5", "cross_entropy"),
    objective: AnyMetric = "cross_entropy",
    *,
    grid: int | Sequence[float] | None = None,
    per_layer: bool = False,
    epochs: int = 3,
    folds: int = 5,
    confidence: float = 0.95,
    insist: bool = False,
    forward: Forward | None = None,
    calibration: Iterable[Any] | None = None,
    limit: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> AlphaSearch:
    """Find the alpha that is best for a trained network, set it, and return the evidence.

    A plain model is converted in place (``convert(model, "weighed")``), which changes nothing about what it computes.
    GroupNorm and InstanceNorm layers that have no moving averages yet are calibrated, on ``calibration`` or else on
    ``loader`` without its labels. In a network with layers of both kinds alpha is tuned where statistics reach across
    examples, and stays 1 elsewhere.

    The search is adaptive: five alphas in the first iteration of the loader, then in each further one the neighbours of
    the best so far of every metric, halving the step, and at last the lowest point of a parabola through the objective:
    five iterations at most. Between them only a number for every image, alpha and metric is kept. The loader must give
    the same examples every time, in any order: no random augmentation.

    The evidence is honest about the choice: the data falls into ``folds``; for each, alpha is chosen on the others, and
    it is judged where it was not chosen. (Which alphas are candidates is decided with all the data.) Where the interval
    of the objective's gain includes zero there is a warning, and alpha stays as the network was trained.

    Args:
        loader: batches (x, y), or dicts with "image" and "label" (or similar names), to be iterated several times.
        metrics: names ("top1", "top5", "cross_entropy", "ece"), functions of output and target, or `Metric` objects.
        objective: the metric to optimise, one of ``metrics`` or another.
        grid: instead of searching, try so many alphas (denser near 0 and 1), or exactly these, in one iteration.
        per_layer: also fit one alpha per layer by gradient, and set those where they are better on held-out folds. It
            takes ``epochs`` iterations, each with ``folds + 1`` forward and backward passes.
        confidence: of the intervals.
        insist: set the best alpha even where the gain is not distinguishable from zero.
        forward: ``forward(model, batch)`` returns output and targets, for other kinds of batches and tasks.
        limit: use at most so many examples, the first.
        resume: a file that keeps what has been evaluated. Interrupted, the same call goes on where it stopped.
        progress: show a bar; None shows it on a terminal.

    Examples::

        found = betternorm.tune_alpha(model, val_loader)
        print(found)
        found.plot("alpha.png")
        torch.save(model.state_dict(), "tuned.pt")  # alpha is inside
    """
    judged = named_metrics(metrics)
    aim = next(iter(named_metrics((objective,))))
    judged |= {name: metric for name, metric in named_metrics((objective,)).items() if name not in judged}
    candidates = alpha_grid(grid)
    check_limit(limit)
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence} must lie between 0 and 1, like 0.95")
    if folds < 2:
        raise ValueError(f"folds={folds} must be 2 or more")
    if not weighed_layers(model):
        convert(model, "weighed")
    layers = tuned_layers(model)
    untuned = {name: layer.alpha for name, layer in layers.items()}
    baseline = alpha_as_trained(layers)
    try:
        calibrating = 0
        if calibration is not None or any(has_no_averages(layer) for layer in layers.values()):
            for layer in layers.values():
                layer.alpha = baseline
            averaged = loader if calibration is None else calibration
            calibrating = calibrate(model, averaged, limit=limit, forward=forward, progress=progress)
        evaluations = Evaluations(
            model, layers, loader, judged, forward or output_and_target, limit, resume, progress, baseline
        )
        _search(evaluations, aim, candidates)
        split = Folds(evaluations, min(folds, evaluations.groups()), seed)
        result = _judge(evaluations, split, aim, confidence, seed)
        if per_layer:
            result.per_layer = tune_per_layer(evaluations, split, result, epochs, seed)
    except BaseException:
        for name, alpha in untuned.items():
            layers[name].alpha = alpha
        raise
    result.passes += calibrating
    result.alpha = result.best[aim] if result.significant or insist else baseline
    if result.per_layer is not None and result.per_layer.kept:
        result.alpha = result.per_layer.alphas
    elif not result.significant:
        warnings.warn(result.verdict(), UncertainGainWarning, stacklevel=2)
    for name, layer in layers.items():
        layer.alpha = result.alpha[name] if isinstance(result.alpha, dict) else result.alpha
    return result


def _search(evaluations: Evaluations, objective: str, grid: list[float] | None) -> None:
    """Try alphas: those of the grid, or five and then ever closer neighbours of the best."""
    if grid is not None:
        evaluations.evaluate([evaluations.baseline, *grid])
        return
    # A calibration error has no single valley: a network that knows nothing, and says so, is well calibrated.
    followed = [
        name for name, metric in evaluations.metrics.items() if metric.average is weighted_mean or name == objective
    ]
    steps = round(1 / COARSEST)
    position = {alpha_at(k / steps): k / steps for k in range(steps + 1)}
    evaluations.evaluate(list(position))
    step = COARSEST
    while step > FINEST:
        step /= 2
        best = {position[evaluations.best(metric, among=position)] for metric in followed}
        position |= {alpha_at(v): v for u in sorted(best) for v in (u - step, u + step) if 0 <= v <= 1}
        evaluations.evaluate(list(position))
    u = position[evaluations.best(objective, among=position)]
    if step <= u <= 1 - step:
        around = [alpha_at(v) for v in (u - step, u, u + step)]
        lowest = _vertex(
            around, [evaluations.average(objective, evaluations.values[objective][alpha]) for alpha in around]
        )
        if abs(lowest - around[1]) > WORTH_A_PASS * (around[2] - around[0]):
            evaluations.evaluate([float(f"{lowest:.6g}")])


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
    gains = {
        metric: evaluations.gain(
            metric, values[evaluations.baseline], split.single(objective, metric), confidence, seed
        )
        for metric, values in evaluations.values.items()
    }
    alphas = sorted(evaluations.tried())
    rows = [
        {"alpha": alpha}
        | {metric: evaluations.average(metric, evaluations.values[metric][alpha]) for metric in evaluations.metrics}
        for alpha in alphas
    ]
    return AlphaSearch(
        alpha=evaluations.baseline,
        objective=objective,
        baseline=evaluations.baseline,
        table=rows,
        best={metric: evaluations.best(metric) for metric in evaluations.metrics},
        gains=gains,
        significant=gains[objective].is_certain(evaluations.metrics[objective]),
        higher_is_better={name: metric.higher_is_better for name, metric in evaluations.metrics.items()},
        examples=len(evaluations.keys),
        passes=evaluations.passes,
        evaluations=len(alphas),
        folds=split.count,
        confidence=confidence,
    )
