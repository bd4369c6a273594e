"""Moving averages from data."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from weighing_networks import group_norm, small_network

from betternorm.conversion.convert import convert
from betternorm.layers import GroupedBatchNorm
from betternorm.weighing.alpha import get_alpha
from betternorm.weighing.calibration import calibrate


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
    calibrate(first, images.split(16), max_examples=20)
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


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, group_norm])
def test_layers_that_do_not_count_batches_are_calibrated_too(norm: Any, images: Tensor) -> None:
    counting, silent = (convert(small_network(norm), "weighed") for _ in range(2))
    for layer in (silent[1], silent[4], silent[7]):
        layer.num_batches_tracked = None
    for model in (counting, silent):
        calibrate(model, images.split(16))
    torch.testing.assert_close(silent[7].running_var, counting[7].running_var)
    assert silent[7].num_batches_tracked is None


def test_no_data_to_calibrate_on_is_an_error() -> None:
    with pytest.raises(ValueError, match="no batches"):
        calibrate(small_network(), [])


def test_nothing_to_calibrate_is_an_error() -> None:
    with pytest.warns(UserWarning, match="nothing to convert"), pytest.raises(ValueError, match="no layer"):
        calibrate(nn.Sequential(nn.Linear(3, 3)), [torch.randn(4, 3)])


def test_a_loader_that_shuffles_gives_what_a_fixed_one_does() -> None:
    """Passes on different examples would not converge: errors of one layer grow in the next."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    for _ in range(5):
        layers += [nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    model = nn.Sequential(*layers).eval()
    data = torch.utils.data.TensorDataset(torch.randn(60, 3, 6, 6), torch.zeros(60))
    state = torch.get_rng_state()
    shuffled = torch.utils.data.DataLoader(data, 16, shuffle=True, drop_last=True)
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    calibrate(first, shuffled)
    assert torch.equal(torch.get_rng_state(), state)
    calibrate(second, list(shuffled))  # the same shuffle, from the same random state
    for one, other in zip(first, second, strict=True):
        if isinstance(one, nn.BatchNorm2d):
            torch.testing.assert_close(one.running_mean, other.running_mean)
            torch.testing.assert_close(one.running_var, other.running_var)
