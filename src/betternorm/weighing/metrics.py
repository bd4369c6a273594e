"""What a network is judged by: accuracy, cross-entropy with and without a temperature, or the user's own.

A metric turns a batch into one number per example (or one per batch), and those numbers into one figure. Keeping the
numbers is what makes folds, intervals and paired tests free: none of them needs the network again.
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
    """Over the last dimension."""
    return (values * counts).sum(-1) / counts.sum(-1)


@dataclass(frozen=True)
class Metric:
    """A name, and a function of the model's output and the targets.

    The function returns a tensor with a number for every example, or one number for the batch (a mean over its
    examples), or a pair of such a number and the count of things it is the mean of (pixels, boxes, tokens).

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
    # For a metric with something to fit: from a row for every example to a number, with the fit on some of the rows.
    fitted: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None

    def numbers(self, values: Tensor, counts: Tensor, fitted_on: Tensor | None = None) -> Tensor:
        """A number for every example, with what there is to fit (a temperature) fitted on some of them, or on all."""
        return values if self.fitted is None else self.fitted(values, counts, fitted_on)

    def measure(self, output: Any, target: Any) -> tuple[Tensor, Tensor]:
        """Values and counts, float64 on the CPU: one a row of the batch, or one for the batch."""
        found = self.function(output, target)
        if isinstance(found, tuple):
            if len(found) != 2:
                raise ValueError(f"metric {self.name!r} returned {len(found)} values; a number and a count are wanted")
            number, count = (float(part) for part in found)
        elif isinstance(found, Tensor) and found.dim() == 1:
            values = found.detach().double().cpu()
            return values, torch.ones_like(values)
        elif self.fitted is not None:
            return found.detach().cpu(), torch.ones(len(found), dtype=torch.float64)
        else:
            try:
                number, count = float(found), float(len(target))
            except (TypeError, ValueError):
                shape = f" of shape {tuple(found.shape)}" if isinstance(found, Tensor) else ""
                raise ValueError(
                    f"metric {self.name!r} returned a {type(found).__name__}{shape}; wanted is a number for every "
                    "example (a tensor of rank 1), one number, or a number and a count"
                ) from None
        return torch.tensor([number], dtype=torch.float64), torch.tensor([count], dtype=torch.float64)

    def is_better(self, value: float, than: float) -> bool:
        return value > than if self.higher_is_better else value < than


AnyMetric = str | Metric | Callable[[Any, Any], Any]  # a callable says itself whether higher is better


def rank_of_target(logits: Tensor, target: Tensor) -> Tensor:
    """How many classes come before the true one: 0 is right.

    Among equal logits the first class comes first, as in ``argmax``, so a network that answers the same for every class
    is not taken for a perfect one; what is not a number comes before everything.
    """
    logits, target = _classified(logits, target)
    of_target = logits.gather(1, target[:, None])
    earlier = torch.arange(logits.shape[1], device=logits.device) < target[:, None]
    return (~(logits <= of_target) | ((logits == of_target) & earlier)).sum(1)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """In nats, one per example."""
    logits, target = _classified(logits, target)
    loss = F.cross_entropy(logits.float(), target, reduction="none")
    return torch.where(loss.isnan(), torch.full_like(loss, torch.inf), loss)


def calibrated_curve(logits: Tensor, target: Tensor) -> Tensor:
    """The cross-entropy of every example at many temperatures."""
    return cross_entropy_curve(*_classified(logits, target))


def signed_confidence(logits: Tensor, target: Tensor) -> Tensor:
    """The probability of the answer, negative where the answer is wrong."""
    logits, target = _classified(logits, target)
    confidence = logits.float().softmax(1).amax(1)
    return torch.where(rank_of_target(logits, target) == 0, confidence, -confidence)


def calibration_error(values: Tensor, counts: Tensor) -> Tensor:
    """Expected calibration error of signed confidences: how far confidence is from accuracy, over equal bins."""
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
SHARES = ("top1", "top5", "ece")  # between 0 and 1: shown in per cent


def named_metrics(metrics: Iterable[AnyMetric]) -> dict[str, Metric]:
    """Metrics by name, from names, `Metric` objects, and what says itself whether higher is better (torchmetrics)."""
    if isinstance(metrics, (str, Metric)) or callable(metrics):
        metrics = (metrics,)
    found: dict[str, Metric] = {}
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
        if metric.name in found and found[metric.name] != metric:
            raise ValueError(f"two metrics are called {metric.name!r}; give one another name with Metric(name, ...)")
        found[metric.name] = metric
    return found


def _directed(metric: Callable[[Any, Any], Any]) -> Metric:
    """A metric of a callable that says whether higher is better."""
    name = getattr(metric, "__name__", type(metric).__name__)
    higher_is_better = getattr(metric, "higher_is_better", None)
    if not isinstance(higher_is_better, bool):
        raise TypeError(
            f"{name!r} does not say whether higher is better; give "
            f"Metric({name!r}, {name}, higher_is_better=True) or =False"
        )
    if not hasattr(metric, "reset"):
        return Metric(name, metric, higher_is_better)

    def of_a_batch(output: Any, target: Any) -> Any:
        found = metric.to(output.device)(output, target)  # type: ignore[attr-defined]
        metric.reset()  # torchmetrics adds up what it has seen
        return found

    return Metric(name, of_a_batch, higher_is_better)


def _classified(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    if logits.dim() != 2 or target.dim() != 1 or len(target) != len(logits) or target.is_floating_point():
        raise ValueError(
            f"the metrics for classification take logits (N, classes) and labels (N), got {tuple(logits.shape)} and "
            f"{target.dtype} {tuple(target.shape)}; for other tasks give a function of output and target as metric"
        )
    low, high = (int(bound) for bound in target.aminmax()) if len(target) else (0, 0)
    if low < 0 or high >= logits.shape[1]:
        raise ValueError(
            f"labels run from {low} to {high}, and the network has {logits.shape[1]} classes: "
            f"labels must lie between 0 and {logits.shape[1] - 1}"
        )
    return logits, target.long()
