"""The metrics of a model at one alpha or at several, evaluated by the library, as the numbers of a row."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from betternorm.conversion.convert import convert
from betternorm.errors import UncertainGainWarning
from betternorm.weighing.alpha import alpha_as_trained, get_alpha, set_alpha, tuned_layers, weighed_layers
from betternorm.weighing.batches import output_and_target
from betternorm.weighing.evaluation import Evaluations
from betternorm.weighing.metrics import CALIBRATED, named_metrics
from betternorm.weighing.objective import best_for
from betternorm.weighing.result import AlphaSearch
from betternorm.weighing.search import tune_alpha
from betternorm.weighing.temperature import at_inverse, best_inverse
from betternorm_lab.training.config import JUDGED_BY

Batches = Iterable[tuple[Tensor, Tensor]]
Metrics = dict[str, float]

# Of the definitions behind the numbers of a row. 1, rows without a version: the temperature was one of 73 values from
# 0.5 to 4. 2: the temperature of the library, from 1/16 to 16, interpolated.
METRICS_VERSION = 2


def evaluations(
    model: nn.Module,
    batches: Batches,
    alphas: Sequence[float | None],
    baseline: float = 0.0,
    metrics: Sequence[str] = (*JUDGED_BY, CALIBRATED),
) -> Evaluations:
    """The metrics of every example at each alpha; ``[None]`` evaluates the layers as they are, under alpha 0."""
    layers = {} if None in alphas else weighed_layers(model)
    before = get_alpha(model)
    result = Evaluations(model, layers, batches, named_metrics(metrics), output_and_target, None, None, False, baseline)
    result.evaluate([_setting(alpha) for alpha in alphas])
    if layers:
        set_alpha(model, before)
    return result


def evaluate(model: nn.Module, batches: Batches, alphas: Iterable[float | None] = (None,)) -> list[Metrics]:
    """The mean metrics over some batches for each alpha; None leaves the layers as they are."""
    alphas = list(alphas)
    measured = evaluations(model, batches, alphas, metrics=JUDGED_BY)
    return [_means(measured, alpha) for alpha in alphas]


def calibrated_rows(
    measured: Evaluations, alphas: Sequence[float | None], temperatures: Sequence[float] | None = None
) -> list[Metrics]:
    """The mean metrics for each alpha, with ``temperature`` and the cross-entropy after it.

    Without ``temperatures``, one for each alpha, they are fitted on these examples.
    """
    rows = []
    for number, alpha in enumerate(alphas):
        curves, counts = measured.values[CALIBRATED][_setting(alpha)], measured.counts[CALIBRATED]
        inverse = 1 / temperatures[number] if temperatures else best_inverse(curves, counts)
        loss = float(measured.metrics[CALIBRATED].average(at_inverse(curves, inverse), counts))
        temperature = 1 / inverse if inverse else float("inf")
        rows.append(_means(measured, alpha) | {"temperature": temperature, CALIBRATED: loss})
    return rows


def best_alphas(measured: Evaluations, metrics: Iterable[str]) -> Metrics:
    """The best alpha for each metric, by the library's rule."""
    alphas = measured.single_alphas()
    return {name: best_for(measured.column(name), alphas, measured.baseline) for name in metrics}


def with_alpha(model: nn.Module) -> float:
    """Convert a trained model to layers with an alpha, and return the alpha of training."""
    if not weighed_layers(model):
        convert(model, "weighed")
    return alpha_as_trained(tuned_layers(model))


def tune_for_row(network: nn.Module, loader: Iterable[Any], **options: Any) -> AlphaSearch:
    """:func:`betternorm.tune_alpha`, which sets the best alpha even if its gain is not significant."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncertainGainWarning)  # the row contains the significance
        warnings.filterwarnings("ignore", "per_layer is deprecated", DeprecationWarning)
        wanted = {"objective": "cross_entropy"} | options
        return tune_alpha(network, loader, (*JUDGED_BY, CALIBRATED), require_significant=False, **wanted)


def _setting(alpha: float | None) -> float:
    return 0.0 if alpha is None else alpha


def _means(measured: Evaluations, alpha: float | None) -> Metrics:
    return {name: measured.column(name).average(_setting(alpha)) for name in JUDGED_BY}
