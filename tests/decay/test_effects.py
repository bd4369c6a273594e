"""Paths to the output and effects on it, against what was derived by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from networks_to_inspect import (
    BATCH,
    WIDTH,
    Net,
    linear,
    loop,
    norm,
    plain_chain,
    preactivation,
    residual_projection,
    two_outputs,
)
from torch import Tensor, nn

from betternorm.conversion.convert import convert
from betternorm.decay.report import norm_report


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


@dataclass
class Truth:
    """A network and what holds for its layers: (path, effect), the effect as a number or as an open interval."""

    build: Callable[[], nn.Module]
    layers: dict[str, tuple[bool, float | tuple[float, float]]]


SOME = (0.01, 1.0)


def residual_identity() -> nn.Module:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = x + net.n1(net.l1(x))
        return h + net.n2(net.l2(h))

    return Net(forward, l1=linear(), n1=norm(), l2=linear(), n2=norm())


def concatenated_then_mixed() -> nn.Module:
    def forward(net: Net, x: Tensor) -> Tensor:
        both = torch.cat([net.n_a(net.l_a(x)), net.n_b(net.l_b(x))], dim=1)
        return net.n_after(net.mix(both))

    return Net(forward, l_a=linear(), n_a=norm(), l_b=linear(), n_b=norm(), mix=linear(2 * WIDTH), n_after=norm())


def concatenated_then_normalized() -> nn.Module:
    """Batch norm acts on each channel alone, so it undoes the scaling of either branch."""

    def forward(net: Net, x: Tensor) -> Tensor:
        return net.n_after(torch.cat([net.n_a(net.l_a(x)), net.n_b(net.l_b(x))], dim=1))

    return Net(forward, l_a=linear(), n_a=norm(), l_b=linear(), n_b=norm(), n_after=norm(2 * WIDTH))


def shared() -> nn.Module:
    """The first call is undone by the second, and the second scales the output."""

    def forward(net: Net, x: Tensor) -> Tensor:
        return net.l2(net.n(F.relu(net.l1(net.n(x)))))

    return Net(forward, n=norm(), l1=linear(), l2=linear())


def bent() -> nn.Module:
    """A sigmoid between two norms is not homogeneous, so the second cannot undo the first."""
    return nn.Sequential(linear(), norm(), nn.Sigmoid(), linear(), norm())


def functional_norm() -> nn.Module:
    def forward(net: Net, x: Tensor) -> Tensor:
        return F.layer_norm(net.l2(net.n(net.l1(x))), (WIDTH,), eps=1e-12)

    return Net(forward, l1=linear(), n=_unshifted(), l2=linear())


def functional_fixed_norm() -> nn.Module:
    """F.batch_norm with fixed statistics is a scale and a shift: it undoes nothing."""

    def forward(net: Net, x: Tensor) -> Tensor:
        h = net.n(net.l(x))
        return F.batch_norm(h, torch.zeros_like(h[0]), torch.ones_like(h[0]), training=False)

    return Net(forward, l=linear(), n=norm())


def inplace_on_a_view() -> nn.Module:
    class Transposed(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.t()).t()

    return nn.Sequential(linear(), Transposed(BATCH), nn.ReLU(inplace=True), linear())


def kept_in_evaluation() -> nn.Module:
    class Fixed(nn.BatchNorm1d):
        def train(self, mode: bool = True) -> Fixed:
            return super().train(False)

    return nn.Sequential(linear(), norm(), nn.ReLU(), linear(), Fixed(WIDTH), linear())


def zero_gamma() -> nn.Module:
    """A residual branch that starts at zero, and a classifier that does."""
    net = residual_identity()
    nn.init.zeros_(net.n2.weight)
    nn.init.zeros_(net.n2.bias)
    head = linear()
    nn.init.zeros_(head.weight)
    return nn.Sequential(net, head)


def _unshifted() -> nn.BatchNorm1d:
    layer = norm()
    nn.init.zeros_(layer.bias)
    return layer


TRUTHS = {
    "a plain chain": Truth(plain_chain, {"1": (False, 0.0), "4": (True, 1.0)}),
    "residual with identity": Truth(residual_identity, {"n1": (True, SOME), "n2": (True, SOME)}),
    "residual with projection and norm": Truth(
        residual_projection, {"stem": (False, 0.0), "n_branch": (True, SOME), "n_projection": (True, SOME)}
    ),
    "pre-activation with a final norm": Truth(
        preactivation, {"n1": (False, SOME), "n2": (False, SOME), "n_final": (True, 1.0)}
    ),
    "concatenated branches, mixed": Truth(
        concatenated_then_mixed, {"n_a": (False, SOME), "n_b": (False, SOME), "n_after": (True, 1.0)}
    ),
    "concatenated branches, normalised at once": Truth(
        concatenated_then_normalized, {"n_a": (False, 0.0), "n_b": (False, 0.0), "n_after": (True, 1.0)}
    ),
    "a shared layer": Truth(shared, {"n": (True, 1.0)}),
    "a norm inside a loop": Truth(loop, {"n": (True, SOME), "n_after": (True, SOME)}),
    "two outputs": Truth(two_outputs, {"n1": (True, 1.0), "n2": (False, 0.0), "n3": (True, 1.0)}),
    "a sigmoid between norms": Truth(bent, {"1": (False, SOME), "4": (True, 1.0)}),
    "a functional norm": Truth(functional_norm, {"n": (False, 0.0)}),
    "a functional norm with fixed statistics": Truth(functional_fixed_norm, {"n": (True, 1.0)}),
    "an in-place operation on a view": Truth(inplace_on_a_view, {"1": (True, 1.0)}),
    "a norm kept in evaluation mode": Truth(kept_in_evaluation, {"1": (True, 1.0), "4": (True, 1.0)}),
    "gammas and a classifier of zero": Truth(zero_gamma, {"0.n1": (True, SOME), "0.n2": (True, SOME)}),
}


@pytest.mark.parametrize("quick", [False, True], ids=["measured", "estimated"])
@pytest.mark.parametrize("truth", TRUTHS.values(), ids=TRUTHS.keys())
def test_path_and_effect_are_as_derived_by_hand(truth: Truth, quick: bool) -> None:
    report = norm_report(truth.build().double(), torch.randn(BATCH, WIDTH).double(), quick=quick)
    assert [layer.name for layer in report] == list(truth.layers)
    for name, (path, effect) in truth.layers.items():
        assert report[name].path is path, name
        measured = report[name].effect
        if effect == 0.0:
            assert measured == pytest.approx(0.0, abs=1e-6), name
        elif effect == 1.0 and not quick:
            assert measured == pytest.approx(1.0, abs=1e-6), name
        else:
            assert measured > 0.01, name
        if not quick and isinstance(effect, tuple):
            assert effect[0] < measured < effect[1], name


def test_effect_of_a_residual_branch_is_the_closed_form() -> None:
    """y = x + c b, so the change is |c - 1| ||b|| against ||x + c b|| + ||x + b||."""

    def forward(net: Net, x: Tensor) -> Tensor:
        return x + net.n(net.l(x))

    net = Net(forward, l=linear(), n=norm()).double()
    x = torch.randn(BATCH, WIDTH).double()
    features = x.numpy() @ net.l.weight.detach().numpy().T
    normal = (features - features.mean(0)) / features.std(0)
    branch = normal * net.n.weight.detach().numpy() + net.n.bias.detach().numpy()
    size = np.linalg.norm
    expected = np.mean(
        [3 * abs(c - 1) * size(branch) / (size(x.numpy() + c * branch) + size(x.numpy() + branch)) for c in (0.5, 2)]
    )
    assert norm_report(net, x)["n"].effect == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(
    ("build", "undone"),
    [
        (concatenated_then_mixed, True),  # both branches shrink alike, and the norm after them undoes it
        (residual_projection, True),
        (preactivation, False),  # the input itself, in the sum, does not shrink along
        (bent, False),
    ],
)
def test_scaling_all_layers_without_a_path_together(build: Callable[[], nn.Module], undone: bool, quick: bool) -> None:
    report = norm_report(build().double(), torch.randn(BATCH, WIDTH).double(), quick=quick)
    assert (report.joint_effect < 1e-6) is undone
    assert (report.joint_effect > 0.01) is not undone


def test_eps_does_not_pass_for_an_effect() -> None:
    """With small features eps is a good part of the variance, and keeps some of the scaling from being undone."""
    net = nn.Sequential(nn.BatchNorm1d(WIDTH), linear(), nn.BatchNorm1d(WIDTH))
    nn.init.constant_(net[0].weight, 1e-2)
    assert norm_report(net, torch.randn(BATCH, WIDTH))["0"].effect < 0.01
    assert [net[0].eps, net[2].eps] == [1e-5, 1e-5]


def test_estimated_effects_agree_with_measured_ones_in_size() -> None:
    net, x = preactivation().double(), torch.randn(64, WIDTH).double()
    measured, estimated = norm_report(net, x), norm_report(net, x, quick=True)
    for name in ("n1", "n2", "n_final"):
        assert 1 / 4 < estimated[name].effect / measured[name].effect < 4


CONVERSIONS: dict[str, tuple[dict[str, int], str]] = {
    "weighed": ({}, "1 channel, the batch"),
    "ghost": ({"ghost_size": 4}, "1 channel, 4 examples"),
    "batch_group": ({"num_groups": 3, "examples_per_group": 2}, "2 channels, 2 examples"),
    "group": ({"num_groups": 3}, "2 channels, 1 example"),
    "renorm": ({}, "1 channel, the batch"),
}


@pytest.mark.parametrize("quick", [False, True], ids=["measured", "estimated"])
@pytest.mark.parametrize("to", CONVERSIONS)
def test_layers_of_this_library_normalize_too(to: str, quick: bool) -> None:
    """Their training pass is an autograd function of its own, so no node of the graph has a known name."""
    options, groups = CONVERSIONS[to]
    net = convert(plain_chain().double(), to, **options)
    report = norm_report(net, torch.randn(12, WIDTH).double(), quick=quick)
    assert [row.path for row in report] == [False, True]
    assert report["1"].effect == pytest.approx(0.0, abs=1e-6)
    assert report["4"].effect == pytest.approx(1.0, abs=1e-6) if not quick else report["4"].acts
    assert {row.groups for row in report} == {groups}


def test_a_converted_frozen_norm_undoes_nothing() -> None:
    torchvision = pytest.importorskip("betternorm.integrations.torchvision")
    torchvision.ready()
    ops = pytest.importorskip("torchvision.ops")
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), ops.FrozenBatchNorm2d(4))
    report = norm_report(convert(net, "weighed"), torch.randn(4, 3, 8, 8))
    assert [row.path for row in report] == [True, True]


@pytest.mark.parametrize(
    ("name", "paths", "effects"),
    [
        # Last norms of the 2 blocks of the last stage, and its projection; the last norms of all 8 blocks, 3
        # projections, and the stem, which enters the first block by an identity.
        ("resnet18", 2 + 1, 8 + 3 + 1),
        # As above with 3 blocks in the last stage and 16 in all; there are 4 projections, one right after the stem.
        ("resnet50", 3 + 1, 16 + 4),
    ],
)
def test_residual_networks_of_torchvision(name: str, paths: int, effects: int) -> None:
    from betternorm.integrations.models import load_model

    report = norm_report(load_model(f"torchvision:{name}"), torch.randn(4, 3, 64, 64), quick=True)
    assert (len(report.with_path), len(report.with_effect)) == (paths, effects)


class Scaled(nn.Module):
    """A residual branch with a scale: a layer scale per channel, or one number as in ReZero."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.first, self.inner, self.second, self.norm = linear(), norm(), linear(), norm()
        self.scale = nn.Parameter(scale)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.norm(self.second(F.relu(self.inner(self.first(x)))))


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(
    "scale", [torch.full((WIDTH,), 1e-6), torch.zeros(()), torch.zeros(1), torch.full((1, WIDTH), 1e-5)]
)
def test_a_layer_scale_that_training_has_not_changed_yet_is_measured_as_one(scale: Tensor, quick: bool) -> None:
    net, x = Scaled(scale.double()).double(), torch.randn(BATCH, WIDTH).double()
    other = copy.deepcopy(net)
    nn.init.ones_(other.scale)
    report, expected = norm_report(net, x, quick=quick), norm_report(other, x, quick=quick)
    assert expected["norm"].acts
    assert [row.effect for row in report] == [row.effect for row in expected]
    assert torch.equal(net.scale, scale.double())


def test_a_trained_layer_scale_is_left_as_it_is() -> None:
    """y = x + 0.01 b, and the effect of the branch is that small."""
    net = Scaled(torch.full((WIDTH,), 0.01))
    assert 0 < norm_report(net, torch.randn(BATCH, WIDTH))["norm"].effect < 0.05


@pytest.mark.parametrize("quick", [False, True])
def test_convnext_at_initialization_has_the_effects_of_larger_layer_scales(quick: bool) -> None:
    from betternorm.integrations.models import load_model

    net = load_model("timm:test_convnext")
    x = torch.randn(4, 3, 64, 64)
    small = norm_report(net, x, quick=quick)
    scales = [p for name, p in net.named_parameters() if name.endswith(".gamma")]
    assert scales
    assert all(float(scale.detach().max()) < 1e-3 for scale in scales)
    for scale in scales:
        nn.init.ones_(scale)
    large = norm_report(net, x, quick=quick)
    assert [row.effect for row in small] == [row.effect for row in large]
    assert sum(row.acts for row in small) > len(small) / 2


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("constant", [0.0, 1e3])
def test_a_large_constant_in_the_output_does_not_hide_an_effect(constant: float, quick: bool) -> None:
    head = nn.Linear(WIDTH, 1).double()
    nn.init.constant_(head.bias, constant)
    net = nn.Sequential(linear(), norm(), linear(), norm(), nn.ReLU(), head).double()
    report = norm_report(net, torch.randn(BATCH, WIDTH).double(), quick=quick)
    assert report["1"].effect == pytest.approx(0.0, abs=1e-6)
    assert report["3"].effect > 0.3
