"""Temperatures compared with SciPy's optimizer, and how a search reports them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from weighing_networks import answer, batches, known, noisy, small_network, squared_error

from betternorm.conversion.convert import convert
from betternorm.weighing.alpha import set_alpha
from betternorm.weighing.metrics import CALIBRATED, METRICS
from betternorm.weighing.result import AlphaSearch
from betternorm.weighing.search import tune_alpha
from betternorm.weighing.temperature import INVERSES, NONE, at_inverse, best_inverse, cross_entropy_curve

optimize = pytest.importorskip("scipy.optimize")
pytestmark = pytest.mark.filterwarnings("ignore::betternorm.errors.UncertainGainWarning")


def answers(sharpness: float, count: int = 500, classes: int = 10) -> tuple[Tensor, Tensor]:
    """Logits, and labels drawn from what they would be at another temperature."""
    logits = torch.randn(count, classes) * 2
    labels = torch.multinomial(logits.softmax(1), 1)[:, 0]
    return logits * sharpness, labels


def loss(logits: Tensor, labels: Tensor, inverse: float) -> float:
    return nn.functional.cross_entropy(logits.double() * inverse, labels).item()


def oracle(logits: Tensor, labels: Tensor) -> float:
    """The best inverse temperature, by scipy."""
    found = optimize.minimize_scalar(
        lambda x: loss(logits, labels, 2**x), bounds=(-8, 5), method="bounded", options={"xatol": 1e-8}
    )
    return float(2**found.x)


@pytest.mark.parametrize("sharpness", [0.1, 0.5, 1.0, 3.0, 10.0, 14.0])
def test_the_temperature_is_that_of_an_optimizer(sharpness: float) -> None:
    logits, labels = answers(sharpness)
    found = best_inverse(cross_entropy_curve(logits, labels), torch.ones(500).double())
    expected = oracle(logits, labels)
    assert found == pytest.approx(expected, rel=2e-3)
    assert loss(logits, labels, found) == pytest.approx(loss(logits, labels, expected), abs=1e-5)


def test_examples_are_interpolated() -> None:
    logits, labels = answers(2.0)
    curves = cross_entropy_curve(logits, labels)
    for inverse in (0.03, 0.37, 0.9, 1.0, 1.7, 5.3):
        expected = nn.functional.cross_entropy(logits.double() * inverse, labels, reduction="none")
        torch.testing.assert_close(at_inverse(curves, inverse), expected, rtol=1e-4, atol=5e-4)
    assert float(INVERSES[NONE]) == 1


def test_the_metric_is_the_cross_entropy_after_the_best_temperature() -> None:
    logits, labels = answers(3.0)
    metric = METRICS[CALIBRATED]
    values, counts = metric.measure(logits, labels)
    found = metric.average(metric.numbers(values, counts), counts).item()
    assert found == pytest.approx(loss(logits, labels, oracle(logits, labels)), abs=1e-4)


def test_a_temperature_is_fitted_without_the_examples_it_is_judged_on() -> None:
    logits, labels = answers(3.0)
    metric = METRICS[CALIBRATED]
    values, counts = metric.measure(logits, labels)
    others = torch.arange(500) < 200
    found = metric.numbers(values, counts, others)
    expected = oracle(logits[:200], labels[:200])
    torch.testing.assert_close(
        found, nn.functional.cross_entropy(logits.double() * expected, labels, reduction="none"), rtol=1e-3, atol=1e-3
    )


def test_what_is_not_a_number_is_the_worst_loss_at_any_temperature() -> None:
    curve = cross_entropy_curve(torch.full((2, 3), float("nan")), torch.tensor([0, 1]))
    assert at_inverse(curve, best_inverse(curve, torch.ones(2).double())).tolist() == [float("inf")] * 2


def data(model: nn.Module | None = None) -> list[tuple[Tensor, Tensor]]:
    """Images with labels that a network like this is too sure of."""
    x = torch.randn(200, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    return batches(x, (model or small_network())(x).mul(0.7).softmax(1).multinomial(1)[:, 0])


def test_every_search_of_a_classifier_has_a_temperature_and_four_rows() -> None:
    model = small_network()
    batched = data()
    found = tune_alpha(model, batched, objective="top1", grid=[0.1], require_significant=False)
    logits, labels = (torch.cat(parts) for parts in zip(*((model(x), y) for x, y in batched), strict=True))
    assert found.temperature == pytest.approx(1 / oracle(logits.detach(), labels), rel=1e-2)
    rows = found.against_temperature
    assert rows is not None
    assert list(rows) == ["temperature alone", "alpha alone", "both"]
    plain = convert(small_network(), "weighed")
    as_trained = nn.functional.cross_entropy(plain(torch.cat([x for x, _ in batched])), labels).item()
    assert all(gain.before == pytest.approx(as_trained, rel=1e-5) for gain in rows.values())
    assert "temperature alone" in str(found)


def test_the_default_objective_is_the_cross_entropy_after_a_temperature() -> None:
    found = tune_alpha(small_network(), data(), grid=[0.1], require_significant=False)
    assert found.objective == CALIBRATED
    gain, rows = found.gains[CALIBRATED], found.against_temperature
    assert rows is not None
    assert (gain.before, gain.after) == (rows["temperature alone"].after, rows["both"].after)


def test_other_tasks_have_no_temperature() -> None:
    found = tune_alpha(known(), noisy(0.3), (), squared_error, forward=answer)
    assert found.temperature is None
    assert found.against_temperature is None


def test_a_temperature_is_folded_into_the_last_layer() -> None:
    model = small_network()
    found = tune_alpha(model, data(), grid=[0.1], fold_temperature=True, require_significant=False)
    plain = convert(small_network(), "weighed")
    set_alpha(plain, found.alpha)
    x = torch.randn(4, 3, 8, 8)
    assert found.temperature is not None
    torch.testing.assert_close(model(x), plain(x) / found.temperature)
    assert found.temperature_folded_into == "9"
    assert "9 was divided by the temperature" in found.verdict()


def test_a_layer_that_does_not_give_the_output_is_left_alone() -> None:
    model = small_network()
    model[8].auxiliary = nn.Linear(3, 3)  # of training, say
    model[9] = nn.Sequential(model[9], nn.Identity())
    last = model[9][0]
    del model[9][0]
    model[8].register_forward_hook(lambda module, inputs, output: last(output))
    weight = model[8].auxiliary.weight.detach().clone()
    with pytest.raises(ValueError, match=r"'8.auxiliary', does not compute the output of the model"):
        tune_alpha(model, data(), objective="top1", grid=[0.1], fold_temperature=True)
    torch.testing.assert_close(model[8].auxiliary.weight.detach(), weight)


def test_without_a_linear_layer_there_is_nothing_to_fold_into() -> None:
    model = small_network()
    model[9] = nn.Conv2d(64, 10, 1)
    model = nn.Sequential(*model[:9], nn.Unflatten(1, (64, 1, 1)), model[9], nn.Flatten())
    with pytest.raises(ValueError, match="needs a linear layer"):
        tune_alpha(model, data(model), grid=[0.1], fold_temperature=True)


def all_right(images: int = 100) -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(images, 3, 8, 8)
    return batches(x, small_network()(x).argmax(1))


def test_where_all_examples_are_right_no_temperature_fits() -> None:
    with pytest.raises(ValueError, match="nearly all examples are classified correctly"):
        tune_alpha(small_network(), all_right())


@pytest.mark.parametrize("objective", ["cross_entropy", "top1"])
def test_other_objectives_do_without(objective: Any) -> None:
    found = tune_alpha(small_network(), all_right(), objective=objective, grid=[0.1])
    assert found.temperature is None


def test_a_temperature_survives_saving(tmp_path: Path) -> None:
    found = tune_alpha(small_network(), data(), grid=[0.1], require_significant=False)
    found.save(tmp_path / "found.json")
    assert AlphaSearch.load(tmp_path / "found.json") == found
