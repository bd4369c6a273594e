"""Metrics by alpha, the temperature, and the best alpha for each metric, against what can be computed by hand."""

import numpy as np
import pytest
import torch
from betternorm_lab.training import CALIBRATED, JUDGED_BY, Config, build_model, load_data, tune_for_row
from betternorm_lab.training.config import set_window
from betternorm_lab.training.evaluation import best_alphas, calibrated_rows, evaluate, evaluations, with_alpha
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
    (row,) = calibrated_rows(evaluations(network, batches(labels), [None]), [None])
    found = optimize.minimize_scalar(lambda one: cross_entropy(network.logits, labels, one), bounds=(0.5, 4.0))
    assert row[CALIBRATED] == pytest.approx(found.fun, abs=1e-4)
    assert row["temperature"] == pytest.approx(found.x, rel=0.02)
    assert row["temperature"] > 1
    assert row["cross_entropy"] == pytest.approx(cross_entropy(network.logits, labels, 1.0), rel=1e-5)
    assert {name: row[name] for name in JUDGED_BY} == evaluate(network, batches(labels))[0]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.1, 12.0])
def test_other_data_is_evaluated_at_the_temperature_that_was_fitted(overconfident, temperature):
    network, labels = overconfident
    (row,) = calibrated_rows(evaluations(network, batches(labels), [None]), [None], [temperature])
    assert row["temperature"] == pytest.approx(temperature)
    assert row[CALIBRATED] == pytest.approx(cross_entropy(network.logits, labels, temperature), rel=2e-4)


def test_the_library_and_the_lab_have_one_definition_of_the_metric(overconfident):
    """Row by row, the table of tune_alpha and that of the lab."""
    config = Config(width=4, blocks=(1,), norm="ghost", norm_options={"ghost_size": 4})
    network = build_model(config, load_data(config, Runtime())).train()
    network(torch.randn(32, 1, 8, 8))
    data = [(torch.randn(20, 1, 8, 8), torch.arange(20) % 10) for _ in range(4)]
    alphas = [0.0, 0.1, 0.5, 1.0]
    search = tune_for_row(network, data, grid=alphas, progress=False)
    measured = evaluations(network, data, alphas)
    for row, ours in zip(search.table, calibrated_rows(measured, alphas), strict=True):
        assert {name: ours[name] for name in (*JUDGED_BY, CALIBRATED)} == pytest.approx(
            {name: row[name] for name in (*JUDGED_BY, CALIBRATED)}, rel=1e-6
        )
    assert best_alphas(measured, (*JUDGED_BY, CALIBRATED)) == search.best


def test_every_metric_has_its_own_best_alpha():
    config = Config(width=4, blocks=(1,), norm="ghost", norm_options={"ghost_size": 4})
    network = build_model(config, load_data(config, Runtime())).train()
    network(torch.randn(32, 1, 8, 8))
    data = [(torch.randn(40, 1, 8, 8), torch.arange(40) % 10)]
    alphas = [0.0, 0.1, 0.5, 1.0]
    measured = evaluations(network, data, alphas)
    rows = dict(zip(alphas, calibrated_rows(measured, alphas), strict=True))
    best = best_alphas(measured, (*JUDGED_BY, CALIBRATED))
    for name in ("cross_entropy", CALIBRATED):
        assert best[name] == min(alphas, key=lambda alpha: rows[alpha][name])
    assert best["top1"] == max(alphas, key=lambda alpha: rows[alpha]["top1"])  # of equals the first, alpha 0


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
