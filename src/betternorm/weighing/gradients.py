"""Gradients of a metric with respect to the alphas of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from betternorm.layers import GroupedBatchNorm
from betternorm.weighing.metrics import CALIBRATED, METRICS, SHARES, Metric

Loss = Callable[[Any, Any, Tensor], Tensor]  # of output, targets and an inverse temperature


@contextmanager
def with_alphas(layers: Mapping[str, GroupedBatchNorm], alphas: Tensor) -> Iterator[None]:
    """The layers with these alphas, as tensors that require gradients."""
    before = [layer._alpha for layer in layers.values()]
    try:
        for layer, alpha in zip(layers.values(), alphas.unbind(), strict=True):
            layer._alpha = alpha
        yield
    finally:
        for layer, earlier in zip(layers.values(), before, strict=True):
            layer._alpha = earlier


def differentiable_loss(metric: Metric) -> Loss:
    """The metric as a loss; the cross-entropy with a temperature in place of accuracies."""
    if metric.name in (*SHARES, CALIBRATED):

        def cross_entropy(output: Any, target: Any, inverse: Tensor) -> Tensor:
            return METRICS["cross_entropy"].function(output * inverse, target).mean()  # type: ignore[no-any-return]

        return cross_entropy

    def loss(output: Any, target: Any, inverse: Tensor) -> Tensor:
        result = metric.function(output, target)
        value = result[0] if isinstance(result, tuple) else result
        if not isinstance(value, Tensor) or not value.requires_grad:
            raise ValueError(
                f"layers and per_layer need the gradient of the objective, and metric {metric.name!r} has none; return "
                "a tensor from differentiable operations, or choose objective='cross_entropy'"
            )
        return (-value.mean() if metric.higher_is_better else value.mean()) + 0 * inverse

    return loss
