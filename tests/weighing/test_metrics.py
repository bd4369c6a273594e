"""Metrics against scikit-learn and closed forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from betternorm.integrations.torchvision import ready_if_installed
from betternorm.weighing.metrics import METRICS, Metric, named_metrics, rank_of_target

sklearn_metrics = pytest.importorskip("sklearn.metrics")


def value(name: str, logits: Tensor, target: Tensor) -> float:
    return METRICS[name].average(*METRICS[name].measure(logits, target)).item()


@pytest.fixture
def logits() -> Tensor:
    return torch.randn(200, 12) * 2


@pytest.fixture
def target() -> Tensor:
    return torch.randint(12, (200,))


def test_accuracies_are_those_of_scikit_learn(logits: Tensor, target: Tensor) -> None:
    for name, k in (("top1", 1), ("top5", 5)):
        expected = sklearn_metrics.top_k_accuracy_score(target, logits, k=k, labels=range(12))
        assert value(name, logits, target) == pytest.approx(expected)


def test_cross_entropy_is_that_of_scikit_learn(logits: Tensor, target: Tensor) -> None:
    expected = sklearn_metrics.log_loss(target, logits.double().softmax(1), labels=range(12))
    assert value("cross_entropy", logits, target) == pytest.approx(expected, rel=1e-6)


def test_calibration_error_is_the_gap_of_every_bin(logits: Tensor, target: Tensor) -> None:
    chances = logits.double().softmax(1).numpy()
    confidence, right = chances.max(1), chances.argmax(1) == target.numpy()
    expected = 0.0
    for low in np.arange(15) / 15:
        inside = (confidence > low) & (confidence <= low + 1 / 15)
        if inside.any():
            expected += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    assert value("ece", logits, target) == pytest.approx(expected, rel=1e-5)


def test_calibration_of_a_network_that_is_always_sure() -> None:
    logits = torch.eye(10)[torch.zeros(10).long()] * 1e4
    assert value("ece", logits, torch.arange(10)) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("logits", "target", "rank"),
    [
        ([3.0, 2.0, 1.0], 0, 0),
        ([3.0, 2.0, 1.0], 2, 2),
        ([1.0, 1.0, 1.0], 0, 0),
        ([1.0, 1.0, 1.0], 2, 2),  # a constant network is right for the first class alone
        ([float("nan")] * 3, 0, 3),
        ([float("nan"), 1.0, 0.0], 1, 1),
        ([float("inf"), 1.0, 0.0], 0, 0),
    ],
)
def test_ranks_with_ties_and_what_is_not_a_number(logits: list[float], target: int, rank: int) -> None:
    assert rank_of_target(torch.tensor([logits]), torch.tensor([target])).item() == rank


def test_what_is_not_a_number_is_the_worst_loss() -> None:
    assert value("cross_entropy", torch.full((2, 3), float("nan")), torch.tensor([0, 1])) == float("inf")


@pytest.mark.parametrize(
    ("metrics", "kind", "message"),
    [
        (("top3",), ValueError, "'top3' is not known; known are top1"),
        ((3,), TypeError, "metric 3 is neither a name"),
        ((Metric("a", len, False), Metric("a", sum, False)), ValueError, "two metrics are called 'a'"),
    ],
)
def test_metrics_that_cannot_be_say_why(metrics: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        named_metrics(metrics)


def test_a_function_that_does_not_say_its_direction_is_refused() -> None:
    def accuracy(output: Tensor, target: Tensor) -> Tensor:
        return (output.argmax(1) == target).float()

    with pytest.raises(TypeError, match=r"Metric\('accuracy', accuracy, higher_is_better=True\) or =False"):
        named_metrics(accuracy)


def importing_torchmetrics() -> Any:
    ready_if_installed()  # torchvision, which torchmetrics imports
    return pytest.importorskip("torchmetrics")


def test_metrics_of_torchmetrics_are_taken_as_they_are(logits: Tensor, target: Tensor) -> None:
    torchmetrics = importing_torchmetrics()
    accuracy = torchmetrics.classification.MulticlassAccuracy(12, average="micro")
    (metric,) = named_metrics(accuracy).values()
    assert (metric.name, metric.higher_is_better) == ("MulticlassAccuracy", True)
    for rows in (slice(None), slice(50), slice(50, 200)):  # each batch for itself
        expected = sklearn_metrics.accuracy_score(target[rows], logits[rows].argmax(1))
        values, counts = metric.measure(logits[rows], target[rows])
        assert (values.item(), counts.item()) == (pytest.approx(expected), len(target[rows]))


def test_a_metric_of_torchmetrics_without_direction_is_refused() -> None:
    torchmetrics = importing_torchmetrics()
    with pytest.raises(TypeError, match="does not declare whether higher is better"):
        named_metrics(torchmetrics.MeanMetric())


def test_a_single_metric_needs_no_tuple() -> None:
    assert list(named_metrics("top1")) == ["top1"]
    assert list(named_metrics(("expected_calibration_error",))) == ["ece"]


@pytest.mark.parametrize(
    ("returned", "values", "counts"),
    [
        (torch.tensor([1.0, 2.0]), [1.0, 2.0], [1.0, 1.0]),
        (torch.tensor(3.0), [3.0], [2.0]),
        (3.0, [3.0], [2.0]),
        ((3.0, 7), [3.0], [7.0]),
        (torch.tensor([True, False]), [1.0, 0.0], [1.0, 1.0]),
    ],
)
def test_what_a_function_may_return(returned: Any, values: list[float], counts: list[float]) -> None:
    found = Metric("m", lambda output, target: returned, False).measure(torch.zeros(2), torch.zeros(2))
    assert [part.tolist() for part in found] == [values, counts]
