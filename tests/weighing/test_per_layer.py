"""One alpha per layer."""

from __future__ import annotations

import pytest
from torch import Tensor, nn
from weighing_networks import batches, distance, small_network, two_answers, two_targets

from betternorm.conversion.convert import convert
from betternorm.weighing.alpha import get_alpha
from betternorm.weighing.metrics import Metric
from betternorm.weighing.search import tune_alpha

pytestmark = [
    pytest.mark.filterwarnings("ignore::betternorm.errors.UncertainGainWarning"),
    pytest.mark.filterwarnings("ignore:per_layer is deprecated:DeprecationWarning"),
]


def test_layers_that_want_different_alphas_get_them() -> None:
    model = convert(nn.Sequential(nn.BatchNorm1d(1), nn.BatchNorm1d(1)), "weighed").eval()
    found = tune_alpha(model, two_targets(0.1, 0.5), (), distance, forward=two_answers, per_layer=True, epochs=6)
    assert found.per_layer is not None
    assert found.per_layer.kept
    assert get_alpha(model) == found.alpha == found.per_layer.alphas
    assert found.per_layer.alphas == {"0": pytest.approx(0.1, abs=0.02), "1": pytest.approx(0.5, abs=0.03)}
    # One alpha for both is best half way, and loses (0.5 - 0.1)² / 2 to two.
    assert found.per_layer.against_single.difference == pytest.approx(-0.08, abs=0.01)


def test_layers_that_want_the_same_alpha_keep_one() -> None:
    model = convert(nn.Sequential(nn.BatchNorm1d(1), nn.BatchNorm1d(1)), "weighed").eval()
    found = tune_alpha(model, two_targets(0.2, 0.2), (), distance, forward=two_answers, per_layer=True)
    assert found.per_layer is not None
    assert not found.per_layer.kept
    assert get_alpha(model) == found.best["distance"]


def test_gradients_reach_the_alphas_of_a_real_network(images: Tensor, labels: Tensor) -> None:
    model = small_network()
    found = tune_alpha(model, batches(images, labels), per_layer=True, epochs=1, require_significant=False)
    assert found.per_layer is not None
    assert len(set(found.per_layer.alphas.values())) == 3
    assert all(0 <= alpha <= 1 for alpha in found.per_layer.alphas.values())
    assert set(found.per_layer.gains) == {"top1", "top5", "cross_entropy", "calibrated_cross_entropy"}
    assert not any(p.grad is not None for p in model.parameters())


def test_an_objective_without_gradient_is_refused_for_layers() -> None:
    rounded = Metric("rounded", lambda output, target: distance.function(output, target).detach(), False)

    model = convert(nn.Sequential(nn.BatchNorm1d(1), nn.BatchNorm1d(1)), "weighed").eval()
    with pytest.raises(ValueError, match="'rounded' has none"):
        tune_alpha(model, two_targets(0.1, 0.5), (), rounded, forward=two_answers, per_layer=True)
