"""Inference example weighing on trained networks: alphas, calibration, the search and its evidence."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from betternorm.errors import UncertainGainWarning
from betternorm.layers import GhostBatchNorm, GroupedBatchNorm
from betternorm.surgery import convert
from betternorm.weighing.alpha import get_alpha, set_alpha
from betternorm.weighing.calibration import calibrate
from betternorm.weighing.comparison import compare_alpha
from betternorm.weighing.metrics import Metric
from betternorm.weighing.result import AlphaSearch
from betternorm.weighing.search import tune_alpha

# Most tests insist on an alpha, and do not care whether it is any good.
pytestmark = pytest.mark.filterwarnings("ignore::betternorm.errors.UncertainGainWarning")


def small_network(norm: type[nn.Module] | Any = nn.BatchNorm2d) -> nn.Sequential:
    """Three norm layers, with averages that have seen other data than the tests show."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        norm(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        norm(8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 3, padding=1),
        norm(4),
        nn.Flatten(),
        nn.Linear(4 * 16, 10),
    )
    for _ in range(5):
        model(torch.randn(16, 3, 8, 8) * 2 + 1)
    return model.eval()


def group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(2, channels)


@pytest.fixture
def images() -> Tensor:
    return torch.randn(61, 3, 8, 8)


def batches(x: Tensor, y: Tensor, size: int = 16) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


# ---- setting ----


def test_one_number_is_set_on_every_layer() -> None:
    model = convert(small_network(), "weighed")
    set_alpha(model, 0.1)
    assert get_alpha(model) == 0.1
    assert [model[i].alpha for i in (1, 4, 7)] == [0.1] * 3


def test_numbers_by_name_leave_the_other_layers_alone() -> None:
    model = convert(small_network(), "weighed")
    set_alpha(model, {"4": 0.25})
    assert get_alpha(model) == {"1": 0.0, "4": 0.25, "7": 0.0}


def test_a_model_without_such_layers_has_alpha_0() -> None:
    assert get_alpha(small_network()) == 0.0


@pytest.mark.parametrize(
    ("alpha", "message"),
    [
        (1.5, "alpha=1.5 must lie between 0"),
        (-0.1, "alpha=-0.1 must lie between 0"),
        (float("nan"), "alpha=nan must lie between 0"),
        ({"9": 0.1}, "alpha names '9', which is not among the layers that have an alpha: 1, 4, 7"),
        ({"1": 0.5, "4": 2}, "alpha=2.0 must lie between 0"),
    ],
)
def test_an_alpha_that_cannot_be_says_why_and_changes_nothing(alpha: Any, message: str) -> None:
    model = convert(small_network(), "weighed")
    set_alpha(model, 0.3)
    with pytest.raises(ValueError, match=message):
        set_alpha(model, alpha)
    assert get_alpha(model) == 0.3


def test_a_plain_model_has_no_alpha_to_set() -> None:
    with pytest.raises(ValueError, match="convert"):
        set_alpha(small_network(), 0.1)


def test_alphas_travel_with_the_state_dict(tmp_path: Path, images: Tensor) -> None:
    model = convert(small_network(), "weighed")
    set_alpha(model, {"1": 0.1, "7": 0.4})
    torch.save(model.state_dict(), tmp_path / "tuned.pt")
    other = convert(small_network(), "weighed")
    other.load_state_dict(torch.load(tmp_path / "tuned.pt", weights_only=True))
    assert get_alpha(other) == {"1": 0.1, "4": 0.0, "7": 0.4}
    assert torch.equal(other(images), model(images))


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, group_norm, GhostBatchNorm])
def test_an_image_gets_the_same_answer_alone_and_in_any_batch(norm: Any) -> None:
    model = convert(small_network(norm), "weighed")
    calibrate(model, [torch.randn(64, 3, 8, 8)])
    set_alpha(model, 0.2)
    x = torch.randn(256, 3, 8, 8)
    together = model(x)
    for size in (1, 7):
        parts = torch.cat([model(part) for part in x[:21].split(size)])
        torch.testing.assert_close(parts, together[:21], rtol=0, atol=1e-5)


# ---- calibrating ----


def inputs_of_norms(model: nn.Module, x: Tensor) -> dict[str, np.ndarray]:
    """What enters every norm layer, in float64, by hooks of the test's own."""
    seen: dict[str, np.ndarray] = {}
    model = copy.deepcopy(model).double()
    for name, module in model.named_modules():
        if isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.GroupNorm)):
            module.register_forward_pre_hook(
                lambda _, inputs, name=name: seen.__setitem__(name, inputs[0].detach().numpy())
            )
    model(x.double())
    return seen


def assert_averages(model: nn.Module, expected: dict[str, np.ndarray], tolerance: float) -> None:
    for name, x in expected.items():
        layer = model.get_submodule(name)
        np.testing.assert_allclose(layer.running_mean.numpy(), x.mean((0, 2, 3)), atol=tolerance)
        np.testing.assert_allclose(layer.running_var.numpy(), x.var((0, 2, 3)), rtol=tolerance, atol=tolerance)


def test_a_group_norm_network_gets_the_moments_of_its_inputs_in_one_pass(images: Tensor) -> None:
    plain = small_network(group_norm)
    model = convert(copy.deepcopy(plain), "weighed")
    assert calibrate(model, images.split(16)) == 1
    assert_averages(model, inputs_of_norms(plain, images), 1e-6)


def test_a_calibrated_group_norm_network_is_itself_at_alpha_1(images: Tensor) -> None:
    plain = small_network(group_norm)
    model = convert(copy.deepcopy(plain), "weighed")
    calibrate(model, images.split(16))
    assert get_alpha(model) == 1.0
    torch.testing.assert_close(model(images), plain(images), rtol=0, atol=1e-6)


def test_a_batch_norm_network_gets_the_statistics_of_one_batch_of_all_the_data(images: Tensor) -> None:
    model = convert(small_network(), "weighed")
    whole = copy.deepcopy(model).train()
    expected = inputs_of_norms(whole, images)  # in training mode every layer normalises by the batch
    calibrate(model, images.split(16), tolerance=1e-6)
    assert_averages(model, expected, 1e-5)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, group_norm])
@pytest.mark.parametrize("size", [1, 7, 61])
def test_batch_size_and_order_do_not_matter(norm: Any, size: int, images: Tensor) -> None:
    first, second = (convert(small_network(norm), "weighed") for _ in range(2))
    calibrate(first, images.split(16), passes=2)
    calibrate(second, images[torch.randperm(len(images))].split(size), passes=2)
    for name, buffer in first.named_buffers():
        if "running" in name:
            torch.testing.assert_close(second.get_buffer(name), buffer, rtol=1e-5, atol=1e-6)


def test_torchs_own_layers_can_be_calibrated_too(images: Tensor) -> None:
    model = small_network()
    calibrate(model, images.split(16), passes=1)
    x = model[0](images).detach().numpy()
    np.testing.assert_allclose(model[1].running_mean.numpy(), x.mean((0, 2, 3)), atol=1e-6)


def test_a_plain_group_norm_network_is_converted(images: Tensor) -> None:
    model = small_network(group_norm)
    calibrate(model, images.split(16))
    assert isinstance(model[1], GroupedBatchNorm)


def test_a_limit_uses_the_first_examples_only(images: Tensor) -> None:
    first, second = (convert(small_network(group_norm), "weighed") for _ in range(2))
    calibrate(first, images.split(16), limit=20)
    calibrate(second, [images[:20]])
    torch.testing.assert_close(first[4].running_var, second[4].running_var)


def test_calibrating_keeps_modes_and_counts_batches(images: Tensor) -> None:
    model = convert(small_network(), "weighed").train()
    model[4].eval()
    calibrate(model, images.split(16), passes=1)
    assert model.training
    assert model[1].training
    assert not model[4].training
    assert int(model[1].num_batches_tracked) == 4


def test_no_data_to_calibrate_on_is_an_error() -> None:
    with pytest.raises(ValueError, match="no batches"):
        calibrate(small_network(), [])


def test_nothing_to_calibrate_is_an_error() -> None:
    with pytest.warns(UserWarning, match="nothing to convert"), pytest.raises(ValueError, match="no layer"):
        calibrate(nn.Sequential(nn.Linear(3, 3)), [torch.randn(4, 3)])


# ---- a network whose best alpha is known ----


def known() -> nn.Sequential:
    """Its `answer` is its own alpha, so a squared error to numbers is least at their mean."""
    return convert(nn.Sequential(nn.BatchNorm1d(1)), "weighed").eval()


def answer(model: nn.Sequential, batch: Any) -> tuple[Tensor, Tensor]:
    return torch.full((len(batch[0]),), model[0].alpha), batch[1]


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square()


def noisy(target: float, count: int = 400, spread: float = 0.05) -> list[tuple[Tensor, Tensor]]:
    noise = torch.randn(count, generator=torch.Generator().manual_seed(3)) * spread
    return batches(torch.randn(count, 1, generator=torch.Generator().manual_seed(4)), target + noise - noise.mean(), 64)


@pytest.mark.parametrize("best", [0.005, 0.02, 0.033, 0.08, 0.15, 0.4, 0.7, 0.93, 0.985])
def test_the_search_finds_alphas_near_0_in_the_middle_and_near_1(best: float) -> None:
    model = known()
    found = tune_alpha(model, noisy(best, spread=0.01), (), squared_error, forward=answer, insist=True)
    assert found.best["squared_error"] == pytest.approx(best, abs=0.006 if 0.1 < best < 0.9 else 0.001)
    assert found.passes <= 5
    assert found.evaluations <= 12


@pytest.mark.parametrize("best", [0.0, 1.0])
def test_the_search_finds_the_ends(best: float) -> None:
    found = tune_alpha(known(), noisy(best), (), squared_error, forward=answer, insist=True)
    assert found.best["squared_error"] == best


def test_every_metric_is_searched_for() -> None:
    def other(output: Tensor, target: Tensor) -> Tensor:
        return (output - 0.6 - 0 * target).square()

    found = tune_alpha(known(), noisy(0.05), (squared_error, other), squared_error, forward=answer)
    assert abs(found.best["squared_error"] - 0.05) < 0.01
    assert abs(found.best["other"] - 0.6) < 0.03


def test_a_grid_tries_exactly_its_points_and_the_network_as_trained() -> None:
    found = tune_alpha(known(), noisy(0.3), (), squared_error, grid=[0.2, 0.3, 0.7], forward=answer)
    assert [row["alpha"] for row in found.table] == [0.0, 0.2, 0.3, 0.7]
    assert (found.alpha, found.passes) == (0.3, 1)


def test_a_grid_of_33_is_dense_at_both_ends() -> None:
    found = tune_alpha(known(), noisy(0.3), (), squared_error, grid=33, forward=answer)
    alphas = [row["alpha"] for row in found.table]
    assert (len(alphas), alphas[0], alphas[16], alphas[-1]) == (33, 0.0, 0.5, 1.0)
    assert alphas[1] < 0.005
    np.testing.assert_allclose(alphas, 1 - np.array(alphas[::-1]), atol=1e-6)


def test_the_table_holds_the_mean_of_each_metric() -> None:
    data = noisy(0.3)
    found = tune_alpha(known(), data, (), squared_error, grid=[0.1, 0.9], forward=answer, insist=True)
    targets = torch.cat([y for _, y in data]).double().numpy()
    for row in found.table:
        assert row["squared_error"] == pytest.approx(((row["alpha"] - targets) ** 2).mean(), rel=1e-6)


def test_group_norm_starts_from_1_and_is_calibrated() -> None:
    model = convert(nn.Sequential(nn.GroupNorm(1, 1)), "weighed").eval()
    found = tune_alpha(model, [(x * 3 + 1, y) for x, y in noisy(0.9)], (), squared_error, forward=calling_answer)
    assert found.baseline == 1.0
    assert model[0].running_mean.item() == pytest.approx(1, abs=0.3)
    assert get_alpha(model) == pytest.approx(0.9, abs=0.01)


def calling_answer(model: nn.Sequential, batch: Any) -> tuple[Tensor, Tensor]:
    model(batch[0])
    return answer(model, batch)


def test_in_a_mixed_network_layers_without_cross_image_statistics_stay() -> None:
    model = nn.Sequential(nn.BatchNorm1d(1), nn.GroupNorm(1, 1)).eval()
    tune_alpha(model, noisy(0.3), (), squared_error, forward=answer)
    assert model[0].alpha == pytest.approx(0.3, abs=0.01)
    assert model[1].alpha == 1.0


# ---- evidence ----


def test_a_clear_gain_is_set_and_its_interval_holds_the_truth() -> None:
    model = known()
    found = tune_alpha(model, noisy(0.2), (), squared_error, forward=answer)
    gain = found.gains["squared_error"]
    assert found.significant
    assert get_alpha(model) == found.alpha == found.best["squared_error"]
    assert gain.low <= gain.difference <= gain.high < 0
    assert gain.low < -(0.2**2) < gain.high  # from 0 to the mean of the targets


def test_a_gain_that_could_be_chance_is_told_and_not_set() -> None:
    model = known()
    with pytest.warns(UncertainGainWarning, match="not distinguishable from zero: alpha stays 0"):
        found = tune_alpha(model, noisy(0.001, 50, 0.5), (), squared_error, forward=answer)
    assert not found.significant
    assert get_alpha(model) == found.alpha == 0.0


def test_who_insists_gets_the_best_all_the_same() -> None:
    model = known()
    with pytest.warns(UserWarning, match="alpha was set, as asked"):
        found = tune_alpha(model, noisy(0.03, 50, 0.5), (), squared_error, forward=answer, insist=True)
    assert get_alpha(model) == found.alpha == found.best["squared_error"] > 0


def test_without_any_effect_a_false_alarm_is_rare() -> None:
    """Alpha changes answers at random, as often for the better as for the worse: the folds must not be fooled."""

    def coin(output: Tensor, target: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(int(output[0] * 1e6))
        flips = torch.randn(100_000, generator=generator)
        return flips[(target * 1e4).long().abs() % 100_000]

    alarms = 0
    for seed in range(12):
        torch.manual_seed(seed)
        data = batches(torch.randn(300, 1), torch.randn(300))
        found = tune_alpha(known(), data, (), coin, grid=9, forward=answer, insist=True)
        alarms += found.significant
    assert alarms <= 2  # of 12; at 2.5 % each more than 2 happen once in 350 times


def test_accuracy_comes_with_mcnemars_test() -> None:
    model = small_network()
    x = torch.randn(80, 3, 8, 8)
    found = tune_alpha(model, batches(x, torch.randint(10, (80,))), objective="top1", grid=3, insist=True)
    gain = found.gains["top1"]
    assert gain.p_value is not None
    assert 0 < gain.p_value <= 1
    assert found.gains["cross_entropy"].p_value is None


def test_two_settings_are_compared_on_other_data(images: Tensor) -> None:
    model = convert(small_network(), "weighed")
    set_alpha(model, 0.3)
    labels = torch.randint(10, (61,))
    gains = compare_alpha(model, batches(images, labels), {"4": 0.5}, against=0.0, metrics="cross_entropy")
    expected = []
    for alphas in ({"1": 0.0, "4": 0.0, "7": 0.0}, {"1": 0.3, "4": 0.5, "7": 0.3}):
        other = convert(small_network(), "weighed")
        set_alpha(other, alphas)
        expected.append(nn.functional.cross_entropy(other(images), labels).item())
    gain = gains["cross_entropy"]
    assert (gain.before, gain.after) == pytest.approx(tuple(expected), rel=1e-5)
    assert gain.low < gain.difference < gain.high
    assert get_alpha(model) == 0.3


# ---- loaders ----


def evaluated(loader: Any, **options: Any) -> AlphaSearch:
    return tune_alpha(small_network(), loader, grid=[0.1], insist=True, folds=2, **options)


@pytest.fixture
def labels() -> Tensor:
    return torch.randint(10, (61,))


def test_tuples_dicts_and_a_function_of_the_users_give_the_same(images: Tensor, labels: Tensor) -> None:
    pairs = batches(images, labels)
    found = [
        evaluated(pairs),
        evaluated([{"pixel_values": x, "labels": y} for x, y in pairs]),
        evaluated(
            [{"a": x, "b": [y]} for x, y in pairs], forward=lambda model, batch: (model(batch["a"]), *batch["b"])
        ),
        evaluated(DataLoader(TensorDataset(images, labels), batch_size=16)),
    ]
    assert all(one.table == found[0].table for one in found)


def test_batch_size_and_shuffling_change_nothing(images: Tensor, labels: Tensor) -> None:
    plain = evaluated(batches(images, labels))
    shuffled = evaluated(DataLoader(TensorDataset(images, labels), batch_size=7, shuffle=True))
    for one, other in zip(plain.table, shuffled.table, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    one, other = (
        (gain.before, gain.after, gain.low, gain.high)
        for gain in (plain.gains["cross_entropy"], shuffled.gains["cross_entropy"])
    )
    assert one == pytest.approx(other, rel=1e-4)


def test_a_shuffling_loader_is_matched_image_by_image_between_passes(images: Tensor, labels: Tensor) -> None:
    plain = tune_alpha(small_network(), batches(images, labels), insist=True)
    loader = DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=True)
    shuffled = tune_alpha(small_network(), loader, insist=True)
    assert shuffled.best == plain.best
    assert vars(shuffled.gains["top1"]) == pytest.approx(vars(plain.gains["top1"]))


def test_random_augmentation_is_noticed(images: Tensor, labels: Tensor) -> None:
    class Augmented:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return iter(batches(images + 0.1 * torch.randn_like(images), labels))

    model = small_network()
    with pytest.raises(ValueError, match=r"other examples .* switch random augmentation off"):
        tune_alpha(model, Augmented())
    assert get_alpha(model) == 0.0


def test_a_limit_takes_the_first_examples(images: Tensor, labels: Tensor) -> None:
    limited = evaluated(batches(images, labels), limit=20)
    assert limited.examples == 20
    assert limited.table == evaluated(batches(images[:20], labels[:20])).table


@pytest.mark.parametrize(
    ("loader", "kind", "message"),
    [
        (iter([]), TypeError, "can be gone through only once"),
        ([], ValueError, "no batches"),
        ([torch.randn(4, 3, 8, 8)], TypeError, "pair .* forward=function"),
        ([{"image": torch.randn(4, 3, 8, 8)}], TypeError, "a dict with image"),
        ([(torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 10]))], ValueError, "labels run from 0 to 10.*10 classes"),
        ([(torch.randn(4, 3, 8, 8), torch.tensor([0, -1, 2, 3]))], ValueError, "labels run from -1 to 3"),
        ([(torch.randn(4, 3, 8, 8), torch.rand(4, 10))], ValueError, "logits \\(N, classes\\) and labels"),
    ],
)
def test_what_cannot_be_evaluated_says_why(loader: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        tune_alpha(small_network(), loader)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metrics": ("top2",)}, "metric 'top2' is not known; known are top1, top5, cross_entropy, ece"),
        ({"objective": "speed"}, "metric 'speed' is not known"),
        ({"grid": 1}, "grid=1 must be 2 or more"),
        ({"grid": [0.5, 1.2]}, "alpha=1.2 must lie between"),
        ({"folds": 1}, "folds=1 must be 2 or more"),
        ({"limit": 0}, "limit=0 must be 1 or more"),
        ({"confidence": 95}, "confidence=95 must lie between 0 and 1"),
    ],
)
def test_options_that_cannot_be_say_why(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tune_alpha(small_network(), [], **options)


def test_a_network_without_norm_layers_has_nothing_to_tune() -> None:
    with pytest.warns(UserWarning, match="nothing to convert"), pytest.raises(ValueError, match="no alpha to tune"):
        tune_alpha(nn.Sequential(nn.Linear(3, 3)), [])


def test_modes_are_restored_and_outputs_in_wrappers_understood(images: Tensor, labels: Tensor) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_network()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            assert not torch.is_grad_enabled()
            return {"logits": self.inner(x)}

    model = Wrapped().train()
    model.inner[4].eval()
    found = tune_alpha(model, batches(images, labels), grid=[0.1], insist=True, folds=2)
    assert model.inner[1].training
    assert not model.inner[4].training
    assert found.table == evaluated(batches(images, labels)).table


# ---- metrics of other tasks ----


def test_a_number_and_a_count_a_batch(images: Tensor) -> None:
    """Batches are then the units of folds and intervals, and weigh by their count."""

    def per_pixel(output: Tensor, target: Tensor) -> tuple[float, int]:
        return float((output - target).square().mean()), len(target)

    metrics = (Metric("per_pixel", per_pixel), squared_error)
    found = tune_alpha(known(), noisy(0.3, 410), metrics, metrics[0], grid=[0.3], forward=answer)
    for row in found.table:  # the last batch is smaller
        assert row["per_pixel"] == pytest.approx(row["squared_error"], rel=1e-5)
    assert found.significant


def test_a_metric_that_should_rise_is_maximised() -> None:
    closeness = Metric("closeness", lambda output, target: -squared_error(output, target), higher_is_better=True)
    found = tune_alpha(known(), noisy(0.3), (), closeness, forward=answer)
    assert found.alpha == pytest.approx(0.3, abs=0.01)
    assert found.gains["closeness"].low > 0


def test_a_metric_that_returns_something_else_says_so() -> None:
    with pytest.raises(ValueError, match=r"'bad' returned a Tensor of shape \(64, 2\)"):
        tune_alpha(known(), noisy(0.3), (), Metric("bad", lambda o, t: torch.zeros(len(t), 2)), forward=answer)


# ---- one alpha a layer ----


def two_answers(model: nn.Sequential, batch: Any) -> tuple[Tensor, Tensor]:
    alphas = [torch.zeros(()) if layer._alpha is None else layer._alpha for layer in model]
    return torch.stack(alphas).expand(len(batch[0]), 2), batch[1]


def two_targets(first: float, second: float) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(400, 2, generator=generator) * 0.03
    return batches(torch.randn(400, 1, generator=generator), torch.tensor([first, second]) + noise, 20)


def distance(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum(1)


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
    found = tune_alpha(model, batches(images, labels), per_layer=True, epochs=1, insist=True)
    assert found.per_layer is not None
    assert len(set(found.per_layer.alphas.values())) == 3
    assert all(0 <= alpha <= 1 for alpha in found.per_layer.alphas.values())
    assert set(found.per_layer.gains) == {"top1", "top5", "cross_entropy"}
    assert not any(p.grad is not None for p in model.parameters())


def test_an_objective_without_gradient_is_refused_for_layers() -> None:
    def rounded(output: Tensor, target: Tensor) -> Tensor:
        return distance(output, target).detach()

    model = convert(nn.Sequential(nn.BatchNorm1d(1), nn.BatchNorm1d(1)), "weighed").eval()
    with pytest.raises(ValueError, match="'rounded' has none"):
        tune_alpha(model, two_targets(0.1, 0.5), (), rounded, forward=two_answers, per_layer=True)


# ---- interruptions ----


class Interrupted:
    """Counts forward passes of batches, and is interrupted after so many."""

    def __init__(self, after: int | None = None) -> None:
        self.calls, self.after = 0, after

    def __call__(self, model: nn.Sequential, batch: Any) -> tuple[Tensor, Tensor]:
        if self.calls == self.after:
            raise KeyboardInterrupt
        self.calls += 1
        return two_answers(model, batch)


def two_layers() -> nn.Sequential:
    return convert(nn.Sequential(nn.BatchNorm1d(1), nn.BatchNorm1d(1)), "weighed").eval()


@pytest.mark.parametrize("after", [0, 3, 130, 300, 640])
def test_an_interrupted_search_goes_on_where_it_stopped(after: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"metrics": (), "objective": distance, "per_layer": True}
    whole = Interrupted()
    expected = tune_alpha(two_layers(), two_targets(0.1, 0.5), forward=whole, **options)

    model, first, second = two_layers(), Interrupted(after), Interrupted()
    with pytest.raises(KeyboardInterrupt):
        tune_alpha(model, two_targets(0.1, 0.5), forward=first, resume=tmp_path / "kept.pt", **options)
    assert get_alpha(model) == 0.0
    found = tune_alpha(model, two_targets(0.1, 0.5), forward=second, resume=tmp_path / "kept.pt", **options)
    assert found == expected
    again = 100 if after == 640 else 6  # the last pass, which judges; or what was under way of one batch
    assert whole.calls <= first.calls + second.calls <= whole.calls + again


def test_what_was_kept_of_another_network_is_not_used(tmp_path: Path) -> None:
    tune_alpha(known(), noisy(0.3), (), squared_error, forward=answer, resume=tmp_path / "kept.pt")
    other = known()
    other[0].running_mean.fill_(1)
    with pytest.raises(ValueError, match="belongs to another network"):
        tune_alpha(other, noisy(0.3), (), squared_error, forward=answer, resume=tmp_path / "kept.pt")


def test_a_file_that_is_no_search_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "kept.pt").write_text("hello")
    with pytest.raises(ValueError, match="is not a file of a search"):
        tune_alpha(known(), noisy(0.3), (), squared_error, forward=answer, resume=tmp_path / "kept.pt")


# ---- what comes out ----


def test_a_result_is_saved_and_loaded(tmp_path: Path) -> None:
    found = tune_alpha(two_layers(), two_targets(0.1, 0.5), (), distance, forward=two_answers, per_layer=True, epochs=1)
    found.save(tmp_path / "found.json")
    assert AlphaSearch.load(tmp_path / "found.json") == found


def test_a_result_reads_as_a_table() -> None:
    found = tune_alpha(known(), noisy(0.3), (), squared_error, grid=[0.1, 0.3], forward=answer)
    lines = str(found).splitlines()
    assert lines[0].split() == ["alpha", "squared_error"]
    assert "as trained" in lines[2]
    assert "best squared_error" in lines[4]
    assert lines[-1] == "set alpha = 0.3, the best for squared_error (400 examples, 3 alphas, 1 passes)"


def test_a_result_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = tune_alpha(known(), noisy(0.3), (), squared_error, grid=5, forward=answer)
    figure = found.plot(tmp_path / "found.png")
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    (curve, *_) = figure.axes[0].lines
    np.testing.assert_allclose(curve.get_xdata(), [row["alpha"] for row in found.table])
    np.testing.assert_allclose(curve.get_ydata(), [row["squared_error"] for row in found.table])


# ---- a network that others trained ----


@pytest.fixture
def cifar100_test(shared: Path, tmp_path: Path) -> tuple[Tensor, Tensor]:
    unpack = shared / "data/unpack.py"
    subprocess.run([sys.executable, unpack, "cifar100", tmp_path], check=True, capture_output=True)
    with np.load(tmp_path / "cifar100.npz") as file:
        pixels, labels = (torch.from_numpy(file[f"test_{name}"]) for name in ("images", "labels"))
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in ((0.507, 0.487, 0.441), (0.267, 0.256, 0.276)))
    return (pixels.permute(0, 3, 1, 2) / 255 - mean) / std, labels


@pytest.mark.slow
def test_a_published_network_gets_better(shared: Path, cifar100_test: tuple[Tensor, Tensor]) -> None:
    from benchmarks.cifar_resnets import CifarResNet
    from betternorm.integrations.checkpoints import load_checkpoint

    x, y = (part[::10] for part in cifar100_test)
    model = load_checkpoint(CifarResNet(8), shared / "weights/cifar100_resnets/resnet8_cifar100.pth").eval()
    found = tune_alpha(model, batches(x, y, 250))
    assert found.significant
    assert 0.01 < found.best["cross_entropy"] < 0.06
    assert found.gains["cross_entropy"].difference < -0.01


def test_keys_of_rows_do_not_depend_on_the_batch() -> None:
    from betternorm.weighing.batches import example_keys

    x = torch.randn(40, 3, 40, 40)
    keys = example_keys((x, torch.arange(40)))
    assert len(set(keys.tolist())) == 40
    for part, expected in zip(x.split(7), keys.split(7), strict=True):
        assert torch.equal(example_keys({"image": part, "label": torch.zeros(len(part))}), expected)
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(keys))
