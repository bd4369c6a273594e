"""Metrics: accuracy, cross-entropy with and without temperature scaling, calibration error, and custom ones.

A metric maps a batch to one number per example (or one per batch), and these numbers to their average. Because the
numbers per example are kept, cross-validation, intervals and paired tests need no further evaluation of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from betternorm.weighing.temperature import at_temperature_of_best_fit, cross_entropy_curve

CALIBRATION_BINS = 15  # Guo et al., arXiv:1706.04599


def weighted_mean(values: Tensor, counts: Tensor) -> Tensor:
    """The mean over the last dimension, weighted by counts."""
    return (values * counts).sum(-1) / counts.sum(-1)


@dataclass(frozen=True)
class Metric:
    """A name, and a function of the model's output and the targets.

    The function returns a tensor with one number per example, or one number for the batch (the mean over its examples),
    or a pair of such a number and the count of items it is the mean of (pixels, boxes, tokens).

    Examples::

        >>> def squared_error(output, target):
        ...     return (output - target).square().mean(1)
        >>> error = Metric("squared_error", squared_error, higher_is_better=False)
        >>> values, counts = error.measure(torch.ones(3, 2), torch.zeros(3, 2))
        >>> error.average(values, counts)
        tensor(1., dtype=torch.float64)
    """

    name: str
    function: Callable[[Any, Any], Any]
    higher_is_better: bool
    average: Callable[[Tensor, Tensor], Tensor] = weighted_mean
    # For metrics with a fitted parameter: maps rows and counts to a number per row, fitted on a subset of the rows.
    fitted: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None

    def numbers(self, values: Tensor, counts: Tensor, fitted_on: Tensor | None = None) -> Tensor:
        """A number per example. A parameter such as a temperature is fitted on some of the examples, or on all."""
        return values if self.fitted is None else self.fitted(values, counts, fitted_on)

    def measure(self, output: Any, target: Any) -> tuple[Tensor, Tensor]:
        """Values and counts, float64 on the CPU: one per example, or one for the batch."""
        result = self.function(output, target)
        if isinstance(result, tuple):
            if len(result) != 2:
                raise ValueError(f"metric {self.name!r} returned {len(result)} values; expected a number and a count")
            number, count = (float(part) for part in result)
        elif isinstance(result, Tensor) and result.dim() == 1:
            values = result.detach().double().cpu()
            return values, torch.ones_like(values)
        elif self.fitted is not None:
            return result.detach().cpu(), torch.ones(len(result), dtype=torch.float64)
        else:
            try:
                number, count = float(result), float(len(target))
            except (TypeError, ValueError):
                shape = f" of shape {tuple(result.shape)}" if isinstance(result, Tensor) else ""
                raise ValueError(
                    f"metric {self.name!r} returned a {type(result).__name__}{shape}; expected one number per example "
                    "(a tensor of rank 1), one number, or a number and a count"
                ) from None
        return torch.tensor([number], dtype=torch.float64), torch.tensor([count], dtype=torch.float64)

    def is_better(self, value: float, than: float) -> bool:
        return value > than if self.higher_is_better else value < than


AnyMetric = str | Metric | Callable[[Any, Any], Any]  # a callable must have the attribute higher_is_better


def rank_of_target(logits: Tensor, target: Tensor) -> Tensor:
    """The number of classes ranked before the true one: 0 means a correct prediction.

    Of equal logits the first class is ranked first, as by ``argmax``, so that a model with constant outputs does not
    count as correct. NaN is ranked before everything.
    """
    logits, target = _classified(logits, target)
    of_target = logits.gather(1, target[:, None])
    earlier = torch.arange(logits.shape[1], device=logits.device) < target[:, None]
    return (~(logits <= of_target) | ((logits == of_target) & earlier)).sum(1)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """One per example, in nats; infinite if it is NaN."""
    logits, target = _classified(logits, target)
    loss = F.cross_entropy(logits.float(), target, reduction="none")
    return torch.where(loss.isnan(), torch.full_like(loss, torch.inf), loss)


def calibrated_curve(logits: Tensor, target: Tensor) -> Tensor:
    """The cross-entropy of every example at many temperatures."""
    return cross_entropy_curve(*_classified(logits, target))


def signed_confidence(logits: Tensor, target: Tensor) -> Tensor:
    """The probability of the predicted class, negative if the prediction is wrong."""
    logits, target = _classified(logits, target)
    confidence = logits.float().softmax(1).amax(1)
    return torch.where(rank_of_target(logits, target) == 0, confidence, -confidence)


def calibration_error(values: Tensor, counts: Tensor) -> Tensor:
    """Expected calibration error: the difference of confidence and accuracy, over bins of equal width."""
    confidence, correct = values.abs(), (values > 0).to(values.dtype)
    bins = (confidence * CALIBRATION_BINS).ceil().sub(1).clamp(0, CALIBRATION_BINS - 1).nan_to_num(0).long()
    gaps = values.new_zeros(*values.shape[:-1], CALIBRATION_BINS)
    gaps = gaps.scatter_add(-1, bins, (correct - confidence) * counts)
    return gaps.abs().sum(-1) / counts.sum(-1)


METRICS: dict[str, Metric] = {
    "top1": Metric("top1", lambda logits, target: rank_of_target(logits, target) < 1, higher_is_better=True),
    "top5": Metric("top5", lambda logits, target: rank_of_target(logits, target) < 5, higher_is_better=True),
    "cross_entropy": Metric("cross_entropy", cross_entropy, higher_is_better=False),
    "calibrated_cross_entropy": Metric(
        "calibrated_cross_entropy", calibrated_curve, higher_is_better=False, fitted=at_temperature_of_best_fit
    ),
    "ece": Metric("ece", signed_confidence, higher_is_better=False, average=calibration_error),
}
CALIBRATED = "calibrated_cross_entropy"
SHARES = ("top1", "top5", "ece")  # between 0 and 1: shown in percent


def named_metrics(metrics: Iterable[AnyMetric]) -> dict[str, Metric]:
    """Metrics by name, from names, `Metric` objects, and callables with ``higher_is_better`` such as torchmetrics."""
    if isinstance(metrics, (str, Metric)) or callable(metrics):
        metrics = (metrics,)
    result: dict[str, Metric] = {}
    for metric in metrics:
        if isinstance(metric, str):
            known = METRICS | {"expected_calibration_error": METRICS["ece"]}
            if metric not in known:
                raise ValueError(
                    f"metric {metric!r} is not known; known are {', '.join(METRICS)}, "
                    "and Metric(name, function, higher_is_better=...)"
                )
            metric = known[metric]
        elif not isinstance(metric, Metric):
            if not callable(metric):
                raise TypeError(f"metric {metric!r} is neither a name, a Metric nor a function of output and target")
            metric = _directed(metric)
        if result.setdefault(metric.name, metric) != metric:
            raise ValueError(f"two metrics are called {metric.name!r}; rename one of them with Metric(name, ...)")
    return result


def _directed(metric: Callable[[Any, Any], Any]) -> Metric:
    """A metric from a callable that declares whether higher is better."""
    name = getattr(metric, "__name__", type(metric).__name__)
    higher_is_better = getattr(metric, "higher_is_better", None)
    if not isinstance(higher_is_better, bool):
        raise TypeError(
            f"{name!r} does not declare whether higher is better; pass "
            f"Metric({name!r}, {name}, higher_is_better=True) or =False"
        )
    if not hasattr(metric, "reset"):
        return Metric(name, metric, higher_is_better)

    def of_a_batch(output: Any, target: Any) -> Any:
        value = metric.to(output.device)(output, target)  # type: ignore[attr-defined]
        metric.reset()  # torchmetrics accumulates over batches
        return value

    return Metric(name, of_a_batch, higher_is_better)


def _classified(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    if logits.dim() != 2 or target.dim() != 1 or len(target) != len(logits) or target.is_floating_point():
        raise ValueError(
            f"the metrics for classification take logits (N, classes) and labels (N), got {tuple(logits.shape)} and "
            f"{target.dtype} {tuple(target.shape)}; for other tasks pass a function of output and target as metric"
        )
    low, high = (int(bound) for bound in target.aminmax()) if len(target) else (0, 0)
    if low < 0 or high >= logits.shape[1]:
        raise ValueError(
            f"labels run from {low} to {high}, and the model has {logits.shape[1]} outputs: "
            f"labels must lie between 0 and {logits.shape[1] - 1}"
        )
    return logits, target.long()
