"""Metrics by alpha, the temperature, and the best alpha for each metric, against what can be computed by hand."""

import numpy as np
import pytest
import torch
from betternorm_lab.training import CALIBRATED, JUDGED_BY, Config, build_model, load_data
from betternorm_lab.training.config import set_window
from betternorm_lab.training.evaluation import TEMPERATURES, best_alphas, evaluate, evaluate_calibrated, with_alpha
from betternorm_lab.trials import Runtime
from scipy import optimize
from torch import nn


class Given(nn.Module):
    """A network whose answers are known."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, rows):
        return self.logits[rows]


def batches(labels, size=40):
    return list(zip(torch.arange(len(labels)).split(size), labels.split(size), strict=True))


@pytest.fixture
def overconfident():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 10, (300,), generator=generator)
    signal = nn.functional.one_hot(labels, 10) + 0.7 * torch.randn(300, 10, generator=generator)
    return Given(4 * signal), labels


def cross_entropy(logits, labels, temperature):
    """In NumPy, float64."""
    scaled = logits.detach().double().numpy() / temperature
    scaled -= scaled.max(1, keepdims=True)
    return float(np.mean(np.log(np.exp(scaled).sum(1)) - scaled[np.arange(len(labels)), labels.numpy()]))


def test_the_temperature_is_the_one_that_lowers_the_cross_entropy_most(overconfident):
    network, labels = overconfident
    (row,) = evaluate_calibrated(network, batches(labels), [None])
    found = optimize.minimize_scalar(lambda one: cross_entropy(network.logits, labels, one), bounds=(0.5, 4.0))
    assert row[CALIBRATED] == pytest.approx(found.fun, abs=1e-4)
    assert row["temperature"] == pytest.approx(found.x, rel=0.02)
    assert row["temperature"] > 1
    assert row["cross_entropy"] == pytest.approx(cross_entropy(network.logits, labels, 1.0), rel=1e-5)
    assert {name: row[name] for name in JUDGED_BY} == evaluate(network, batches(labels))[0]


def test_other_data_is_read_with_the_temperature_that_is_given(overconfident):
    network, labels = overconfident
    (row,) = evaluate_calibrated(network, batches(labels), [None], [TEMPERATURES[3]])
    assert row["temperature"] == TEMPERATURES[3]
    assert row[CALIBRATED] == pytest.approx(cross_entropy(network.logits, labels, TEMPERATURES[3]), rel=1e-5)


def test_every_metric_has_its_own_best_alpha_and_equals_stay_near_the_trained_one():
    table = [
        {"alpha": 0.0, "top1": 0.50, "top5": 0.8, "cross_entropy": 2.0, CALIBRATED: 1.9},
        {"alpha": 0.1, "top1": 0.52, "top5": 0.8, "cross_entropy": 1.9, CALIBRATED: 1.95},
        {"alpha": 0.3, "top1": 0.51, "top5": 0.8, "cross_entropy": 1.8, CALIBRATED: 1.99},
    ]
    assert best_alphas(table, 0.0) == {"top1": 0.1, "top5": 0.0, "cross_entropy": 0.3, CALIBRATED: 0.0}
    assert best_alphas(table, 1.0)["top5"] == 0.3


def test_a_row_of_an_alpha_is_the_network_with_this_alpha():
    config = Config(width=4, blocks=(1,), norm="ghost", norm_options={"ghost_size": 4})
    digits = load_data(config, Runtime())
    network = build_model(config, digits).train()
    network(torch.randn(32, 1, 8, 8))
    assert with_alpha(network) == 0
    images = torch.randn(20, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(20) % 10
    zero, half = evaluate(network, [(images, labels)], (0.0, 0.5))
    assert zero != half
    assert evaluate(network, [(images, labels)]) == [zero]  # alpha is as it was
    assert network.training


@pytest.mark.parametrize("batch_size", [1, 2, 16, 128])
def test_averages_forget_at_the_same_pace_in_examples(batch_size):
    layers = nn.Sequential(nn.BatchNorm2d(2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    set_window(layers, 1215, batch_size)
    for layer in (layers[0], layers[2]):
        assert (1 - layer.momentum) ** (1215 / batch_size) == pytest.approx(np.exp(-1))
    if batch_size == 128:
        assert layers[0].momentum == pytest.approx(0.1, abs=1e-4)
