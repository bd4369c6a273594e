"""What a network is judged by: top-1 and top-5 accuracy, cross-entropy, calibration error, or the user's own.

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

        >>> error = Metric("squared_error", lambda output, target: (output - target).square().mean(1))
        >>> values, counts = error.measure(torch.ones(3, 2), torch.zeros(3, 2))
        >>> error.average(values, counts)
        tensor(1., dtype=torch.float64)
    """

    name: str
    function: Callable[[Any, Any], Any]
    higher_is_better: bool = False
    average: Callable[[Tensor, Tensor], Tensor] = weighted_mean

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


AnyMetric = str | Metric | Callable[[Any, Any], Any]


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
    """In nats, one an example."""
    logits, target = _classified(logits, target)
    loss = F.cross_entropy(logits.float(), target, reduction="none")
    return torch.where(loss.isnan(), torch.full_like(loss, torch.inf), loss)


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
    "cross_entropy": Metric("cross_entropy", cross_entropy),
    "ece": Metric("ece", signed_confidence, average=calibration_error),
}
SHARES = ("top1", "top5", "ece")  # between 0 and 1: shown in per cent


def named_metrics(metrics: Iterable[AnyMetric]) -> dict[str, Metric]:
    """Metrics by name, from names, `Metric` objects and plain functions (whose lower values are better)."""
    if isinstance(metrics, (str, Metric)) or callable(metrics):
        metrics = (metrics,)
    found: dict[str, Metric] = {}
    for metric in metrics:
        if isinstance(metric, str):
            known = METRICS | {"expected_calibration_error": METRICS["ece"]}
            if metric not in known:
                raise ValueError(
                    f"metric {metric!r} is not known; known are {', '.join(METRICS)}, "
                    "and any function of output and target"
                )
            metric = known[metric]
        elif not isinstance(metric, Metric):
            if not callable(metric):
                raise TypeError(f"metric {metric!r} is neither a name, a Metric nor a function of output and target")
            metric = Metric(getattr(metric, "__name__", type(metric).__name__), metric)
        if metric.name in found and found[metric.name] != metric:
            raise ValueError(f"two metrics are called {metric.name!r}; give one another name with Metric(name, ...)")
        found[metric.name] = metric
    return found


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
