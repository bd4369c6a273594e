"""The search for alpha, and the evidence for what it found."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from weighing_networks import answer, batches, calling_answer, known, noisy, squared_error

from betternorm.conversion.convert import convert
from betternorm.errors import UncertainGainWarning
from betternorm.weighing.alpha import get_alpha
from betternorm.weighing.metrics import Metric
from betternorm.weighing.search import tune_alpha

pytestmark = pytest.mark.filterwarnings("ignore::betternorm.errors.UncertainGainWarning")


@pytest.mark.parametrize("best", [0.005, 0.02, 0.033, 0.08, 0.15, 0.4, 0.7, 0.93, 0.985])
def test_the_search_finds_alphas_near_0_in_the_middle_and_near_1(best: float) -> None:
    model = known()
    found = tune_alpha(model, noisy(best, spread=0.01), (), squared_error, forward=answer, require_significant=False)
    assert found.best["squared_error"] == pytest.approx(best, abs=0.006 if 0.1 < best < 0.9 else 0.001)
    assert found.passes <= 5
    assert found.evaluations <= 12


@pytest.mark.parametrize("best", [0.0, 1.0])
def test_the_search_finds_the_ends(best: float) -> None:
    found = tune_alpha(known(), noisy(best), (), squared_error, forward=answer, require_significant=False)
    assert found.best["squared_error"] == best


def test_every_metric_is_searched_for() -> None:
    other = Metric("other", lambda output, target: (output - 0.6 - 0 * target).square(), higher_is_better=False)
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
    found = tune_alpha(known(), data, (), squared_error, grid=[0.1, 0.9], forward=answer, require_significant=False)
    targets = torch.cat([y for _, y in data]).double().numpy()
    for row in found.table:
        assert row["squared_error"] == pytest.approx(((row["alpha"] - targets) ** 2).mean(), rel=1e-6)


def test_group_norm_starts_from_1_and_is_calibrated() -> None:
    model = convert(nn.Sequential(nn.GroupNorm(1, 1)), "weighed").eval()
    found = tune_alpha(model, [(x * 3 + 1, y) for x, y in noisy(0.9)], (), squared_error, forward=calling_answer)
    assert found.baseline == 1.0
    assert model[0].running_mean.item() == pytest.approx(1, abs=0.3)
    assert get_alpha(model) == pytest.approx(0.9, abs=0.01)


def test_in_a_mixed_network_layers_without_cross_image_statistics_stay() -> None:
    model = nn.Sequential(nn.BatchNorm1d(1), nn.GroupNorm(1, 1)).eval()
    tune_alpha(model, noisy(0.3), (), squared_error, forward=answer)
    assert model[0].alpha == pytest.approx(0.3, abs=0.01)
    assert model[1].alpha == 1.0


def test_a_clear_gain_is_set_and_its_interval_holds_the_truth() -> None:
    model = known()
    found = tune_alpha(model, noisy(0.2), (), squared_error, forward=answer)
    gain = found.gains["squared_error"]
    assert found.significant
    assert get_alpha(model) == found.alpha == found.best["squared_error"]
    assert gain.low <= gain.difference <= gain.high < 0
    assert gain.low < -(0.2**2) < gain.high  # from 0 to the mean of the targets


def test_an_insignificant_gain_warns_and_leaves_alpha_unchanged() -> None:
    model = known()
    with pytest.warns(UncertainGainWarning, match="is not significant: alpha unchanged"):
        found = tune_alpha(model, noisy(0.001, 50, 0.5), (), squared_error, forward=answer)
    assert not found.significant
    assert get_alpha(model) == found.alpha == 0.0


def test_the_best_alpha_is_set_if_significance_is_not_required() -> None:
    model = known()
    with pytest.warns(UserWarning, match="alpha set to .*, as requested"):
        found = tune_alpha(model, noisy(0.03, 50, 0.5), (), squared_error, forward=answer, require_significant=False)
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
        found = tune_alpha(
            known(), data, (), Metric("coin", coin, False), grid=9, forward=answer, require_significant=False
        )
        alarms += found.significant
    assert alarms <= 2  # of 12; at 2.5 % each more than 2 happen once in 350 times


@pytest.mark.parametrize(("examples", "certain"), [(2, False), (49, False), (50, True)])
def test_too_few_examples_are_not_judged(examples: int, certain: bool) -> None:
    model = known()
    found = tune_alpha(model, noisy(0.3, examples, 0.001), (), squared_error, forward=answer)
    assert found.significant is certain
    assert (get_alpha(model) > 0) is certain
    assert ("too few to judge a gain (at least 50)" in found.verdict()) is not certain


def test_copies_of_examples_are_too_few_as_well() -> None:
    data = noisy(0.3, 10, 0.001) * 20
    found = tune_alpha(known(), data, (), squared_error, forward=answer)
    assert (found.examples, found.judged_on, found.significant) == (200, 10, False)


def test_a_number_and_a_count_a_batch(images: Tensor) -> None:
    """Batches are then the units of folds and intervals, and weigh by their count."""

    def per_pixel(output: Tensor, target: Tensor) -> tuple[float, int]:
        return float((output - target).square().mean()), len(target)

    metrics = (Metric("per_pixel", per_pixel, False), squared_error)
    found = tune_alpha(known(), noisy(0.3, 410, size=8), metrics, metrics[0], grid=[0.3], forward=answer)
    for row in found.table:  # the last batch is smaller
        assert row["per_pixel"] == pytest.approx(row["squared_error"], rel=1e-5)
    assert found.significant


def test_a_metric_that_should_rise_is_maximised() -> None:
    closeness = Metric(
        "closeness", lambda output, target: -squared_error.function(output, target), higher_is_better=True
    )
    found = tune_alpha(known(), noisy(0.3), (), closeness, forward=answer)
    assert found.alpha == pytest.approx(0.3, abs=0.01)
    assert found.gains["closeness"].low > 0


def test_the_objective_may_be_the_name_of_a_custom_metric() -> None:
    by_name = tune_alpha(known(), noisy(0.3), (squared_error,), "squared_error", grid=5, forward=answer)
    assert by_name == tune_alpha(known(), noisy(0.3), (), squared_error, grid=5, forward=answer)
    with pytest.raises(ValueError, match="two metrics are named 'squared_error'"):
        tune_alpha(known(), noisy(0.3), (squared_error,), Metric("squared_error", len, False), forward=answer)


def test_a_result_cannot_be_changed() -> None:
    result = tune_alpha(known(), noisy(0.3), (), squared_error, grid=[0.3], forward=answer)
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.alpha = 0.5  # type: ignore[misc]


def test_a_metric_that_returns_something_else_says_so() -> None:
    with pytest.raises(ValueError, match=r"'bad' returned a Tensor of shape \(64, 2\)"):
        tune_alpha(known(), noisy(0.3), (), Metric("bad", lambda o, t: torch.zeros(len(t), 2), False), forward=answer)


@pytest.fixture
def cifar100_test(external_file: Callable[[str], Path], tmp_path: Path) -> tuple[Tensor, Tensor]:
    unpack = external_file("data/unpack.py")
    subprocess.run([sys.executable, unpack, "cifar100", tmp_path], check=True, capture_output=True)
    with np.load(tmp_path / "cifar100.npz") as file:
        pixels, labels = (torch.from_numpy(file[f"test_{name}"]) for name in ("images", "labels"))
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in ((0.507, 0.487, 0.441), (0.267, 0.256, 0.276)))
    return (pixels.permute(0, 3, 1, 2) / 255 - mean) / std, labels


@pytest.mark.slow
def test_a_published_network_gets_better(
    external_file: Callable[[str], Path], cifar100_test: tuple[Tensor, Tensor]
) -> None:
    from betternorm_lab.models import CifarResNet

    from betternorm.integrations.checkpoints import load_checkpoint

    x, y = (part[::10] for part in cifar100_test)
    model = load_checkpoint(CifarResNet(8), external_file("weights/cifar100_resnets/resnet8_cifar100.pth")).eval()
    found = tune_alpha(model, batches(x, y, 250), objective="cross_entropy")
    assert found.significant
    assert 0.01 < found.best["cross_entropy"] < 0.06
    assert found.gains["cross_entropy"].difference < -0.01
