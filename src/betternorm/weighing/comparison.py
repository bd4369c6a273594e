"""`compare_alpha`: two settings of alpha on data that neither was chosen on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from betternorm.deprecation import renamed_parameters
from betternorm.layers.checks import checked_alphas
from betternorm.weighing.alpha import alpha_as_trained, listed, tuned_layers
from betternorm.weighing.batches import Forward, output_and_target
from betternorm.weighing.evaluation import Evaluations
from betternorm.weighing.evidence import Gain, gain_between
from betternorm.weighing.metrics import AnyMetric, named_metrics


@renamed_parameters(limit="max_examples")
def compare_alpha(
    model: nn.Module,
    loader: Iterable[Any],
    alpha: float | Mapping[str, float | Tensor],
    against: float | Mapping[str, float | Tensor] | None = None,
    metrics: Iterable[AnyMetric] = ("top1", "top5", "cross_entropy"),
    *,
    confidence: float = 0.95,
    forward: Forward | None = None,
    max_examples: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> dict[str, Gain]:
    """Compare two settings of alpha: the gain in every metric with a paired interval, in one pass over the data.

    The data should be one that neither setting was chosen on, such as a test set. The model must be converted already;
    it is left unchanged.

    Args:
        alpha: one number, or a dict from layer names to numbers or tensors of one value per channel; other layers keep
            theirs.
        against: the same; None means the baseline (alpha = 0 for BatchNorm, 1 for GroupNorm).
        metrics, forward, max_examples, confidence, progress: as in `tune_alpha`.
    """
    layers = tuned_layers(model)
    current = {name: layer.alpha for name, layer in layers.items()}
    baseline = alpha_as_trained(layers)

    def setting(wanted: float | Mapping[str, float | Tensor]) -> tuple[Any, ...]:
        if not isinstance(wanted, Mapping):
            wanted = dict.fromkeys(layers, wanted)
        if unknown := [name for name in wanted if name not in layers]:
            raise ValueError(f"{unknown[0]!r} is not a layer with an alpha to choose; those are {listed(list(layers))}")
        return tuple(_hashable(wanted.get(name, current[name]), layer.num_features) for name, layer in layers.items())

    before, after = setting(baseline if against is None else against), setting(alpha)
    evaluations = Evaluations(
        model,
        layers,
        loader,
        named_metrics(metrics),
        forward or output_and_target,
        max_examples,
        None,
        progress,
        baseline,
    )
    try:
        evaluations.evaluate([before, after])
    finally:
        for name, value in current.items():
            layers[name].alpha = value
    return {
        name: gain_between(
            column.metric,
            column.numbers(before),
            column.numbers(after),
            column.counts,
            column.units,
            confidence=confidence,
            seed=seed,
        )
        for name, column in ((name, evaluations.column(name)) for name in evaluations.metrics)
    }


def _hashable(alpha: float | Tensor, channels: int) -> float | tuple[float, ...]:
    """The alpha of one layer as a key of the table of evaluations."""
    checked = checked_alphas(alpha, channels)
    return tuple(checked.tolist()) if isinstance(checked, Tensor) else checked
