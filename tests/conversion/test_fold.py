"""Folded networks compute what they computed before; what cannot be folded is said."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import betternorm
from betternorm import BatchGroupNorm, BatchRenorm, GhostBatchNorm
from betternorm.conversion.fold import fold
from betternorm.integrations import torchvision as torchvision_support


def settled(model: nn.Module) -> nn.Module:
    """A network whose norm layers do something."""
    torch.manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            for tensor, low, high in (
                (layer.running_mean, -0.5, 0.5),
                (layer.running_var, 0.5, 2),
                (layer.weight, -1.5, 1.5),
                (layer.bias, -0.5, 0.5),
            ):
                if tensor is not None:
                    nn.init.uniform_(tensor, low, high)
    return model.eval()


def norms_left(model: nn.Module) -> int:
    return sum(isinstance(layer, _BatchNorm) for layer in model.modules())


def assert_folded(model: nn.Module, x: Tensor, left: int = 0) -> nn.Module:
    model = settled(model)
    with torch.no_grad():
        expected = model(x)
        folded = fold(model)
        torch.testing.assert_close(folded(x), expected, rtol=1e-5, atol=1e-5)
    assert folded is model
    assert norms_left(model) == left
    return model


CASES: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...]]] = {
    "convolution": (lambda: [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)], (2, 3, 8, 8)),
    "with bias, groups and padding": (
        lambda: [nn.Conv2d(4, 6, 3, padding=1, groups=2, bias=True), nn.BatchNorm2d(6)],
        (2, 4, 8, 8),
    ),
    "without bias": (lambda: [nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6)], (2, 3, 8, 8)),
    "without affine": (lambda: [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, affine=False)], (2, 3, 8, 8)),
    "one dimension": (lambda: [nn.Conv1d(3, 6, 3), nn.BatchNorm1d(6)], (2, 3, 8)),
    "three dimensions": (lambda: [nn.Conv3d(3, 6, 3), nn.BatchNorm3d(6)], (2, 3, 4, 4, 4)),
    "transposed": (lambda: [nn.ConvTranspose2d(3, 6, 3, stride=2), nn.BatchNorm2d(6)], (2, 3, 5, 5)),
    "linear": (lambda: [nn.Linear(3, 6), nn.BatchNorm1d(6)], (5, 3)),
    "linear without bias": (lambda: [nn.Linear(3, 6, bias=False), nn.BatchNorm1d(6)], (5, 3)),
    "ghost": (lambda: [nn.Conv2d(3, 6, 3), GhostBatchNorm(6, 2)], (2, 3, 8, 8)),
    "renorm": (lambda: [nn.Conv2d(3, 6, 3), BatchRenorm(6)], (2, 3, 8, 8)),
    "synchronised": (lambda: [nn.Conv2d(3, 6, 3), nn.SyncBatchNorm(6)], (2, 3, 8, 8)),
}


@pytest.mark.parametrize("case", CASES)
def test_folded_outputs_are_equal(case: str) -> None:
    layers, shape = CASES[case]
    assert_folded(nn.Sequential(*layers(), nn.ReLU()), torch.randn(shape))


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "regnet_y_400mf"])
def test_networks_of_torchvision_fold_whole(name: str) -> None:
    torchvision_support.ready()
    models = pytest.importorskip("torchvision.models")
    assert_folded(getattr(models, name)(weights=None), torch.randn(2, 3, 64, 64))


def test_layers_with_alpha_stay_and_the_others_go() -> None:
    torchvision_support.ready()
    models = pytest.importorskip("torchvision.models")
    model = betternorm.convert(settled(models.resnet18(weights=None)), "weighed")
    betternorm.set_alpha(model, {"bn1": 0.1, "layer3.0.bn2": 0.3})
    assert_folded(model, torch.randn(2, 3, 64, 64), left=2)
    assert betternorm.get_alpha(model) == {"bn1": 0.1, "layer3.0.bn2": 0.3}


def test_timm_layers_keep_their_activation() -> None:
    torchvision_support.ready()
    timm = pytest.importorskip("timm")
    for convert in (False, True):
        model = timm.create_model("efficientnet_lite0")
        assert_folded(betternorm.convert(model, "weighed") if convert else model, torch.randn(2, 3, 64, 64))


def test_channel_groups_stay() -> None:
    with pytest.raises(ValueError, match="groups of 3 channels"):
        fold(nn.Sequential(nn.Conv2d(3, 6, 3), BatchGroupNorm(2, 6)))


class Two(nn.Module):
    """A convolution, a norm layer, and a forward pass."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.run = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def twice_used(net: Any, x: Tensor) -> Tensor:
    y = net.conv(x)
    return net.norm(y) + y


UNSAFE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "output used twice": (lambda: Two(twice_used), "is used elsewhere too"),
    "activation between": (lambda: Two(lambda net, x: net.norm(net.conv(x).relu())), "follows 'relu'"),
    "layer run twice": (lambda: Two(lambda net, x: net.norm(net.conv(net.conv(x)))), "used twice"),
    "weight read": (lambda: Two(lambda net, x: net.norm(net.conv(x)) * net.conv.weight.mean()), "read elsewhere"),
    "norm first": (lambda: Two(lambda net, x: net.conv(net.norm(x))), "comes first"),
    "not used": (lambda: Two(lambda net, x: net.conv(x)), "not used at inference"),
    "depends on values": (lambda: Two(lambda net, x: net.norm(net.conv(x)) if x.sum() > 0 else x), "cannot trace"),
    "no averages": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)),
        "no moving averages",
    ),
    "other channels": (lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(3)), "has 5 channels, and it has 3"),
    "transposed with groups": (
        lambda: nn.Sequential(nn.ConvTranspose2d(4, 4, 1, groups=2), nn.BatchNorm2d(4)),
        "transposed convolution before it has groups",
    ),
    "parametrised": (
        lambda: nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1)), nn.BatchNorm2d(4)),
        "forward pass is its own|parametrised",
    ),
}


@pytest.mark.parametrize("case", UNSAFE)
def test_what_cannot_be_shown_is_refused_and_nothing_is_touched(case: str) -> None:
    make, words = UNSAFE[case]
    model = make().train()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=f"nothing to fold.*({words})"):
        fold(model)
    assert model.training
    assert all(module.training for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_hook_keeps_its_layer() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    model[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="has hooks"):
        fold(model)


def test_shared_layers_stay() -> None:
    conv = nn.Conv2d(4, 4, 1)
    with pytest.raises(ValueError, match=r"used twice|two places"):
        fold(nn.Sequential(conv, nn.BatchNorm2d(4), conv, nn.BatchNorm2d(4)))


def test_a_model_without_batch_norm_is_refused() -> None:
    with pytest.raises(ValueError, match="no batch norm layer"):
        fold(nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4)))


def test_parts_of_an_untraceable_network_are_folded_and_the_rest_is_named() -> None:
    block = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    model = settled(Two(lambda net, x: net.block(net.norm(net.conv(x))) if x.sum() > 0 else x, block=block))
    x = torch.rand(2, 4, 3, 3)
    expected = model(x)
    with pytest.warns(UserWarning, match=r"folded 1 of 2 layers; not layer 'norm' \(torch.fx cannot trace"):
        fold(model)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


def test_the_report_says_where_each_layer_went(capsys: pytest.CaptureFixture[str]) -> None:
    model = betternorm.convert(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)), "weighed")
    betternorm.set_alpha(model, {"2": 0.25})
    fold(model, verbose=True)
    report = capsys.readouterr().out
    assert "in 0" in report
    assert "it has alpha 0.25" in report


def test_a_norm_folded_into_a_linear_layer_refuses_sequences() -> None:
    """BatchNorm1d of (N, L, C) normalises L, which no linear layer can take over."""
    model = fold(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    with pytest.raises(ValueError, match=r"shape \(2, 4, 4\).*without betternorm.fold"):
        model(torch.randn(2, 4, 4))


def test_a_folded_network_is_exported() -> None:
    model = betternorm.convert(
        settled(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))), "weighed"
    )
    betternorm.set_alpha(model, {"3": 0.25})
    x = torch.randn(2, 3, 5, 5)
    expected = model(x)
    program = torch.export.export(fold(model), (x,)).module()
    torch.testing.assert_close(program(x), expected, rtol=1e-5, atol=1e-5)
