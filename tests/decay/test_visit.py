"""A model that was looked at is as it was before."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from networks_to_inspect import BATCH, WIDTH, linear, norm, preactivation
from torch import Tensor, nn

from betternorm.decay.report import norm_report
from betternorm.decay.visit import guess_input


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def disturbable() -> nn.Module:
    """Everything that a careless report would change: dropout, moving averages, a frozen parameter, mixed modes."""
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Conv2d(8, 8, 3),
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        nn.Flatten(),
        nn.Linear(8 * 16, 4),
        nn.BatchNorm1d(4, momentum=None),
    )
    net[0].weight.requires_grad_(False)
    nn.init.zeros_(net[1].weight)
    net[3].eval()
    net[5].eval()
    net(torch.randn(4, 3, 8, 8)).sum().backward()
    return net


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("fails", [False, True], ids=["runs", "fails"])
def test_nothing_is_left_behind(quick: bool, fails: bool) -> None:
    net, x = disturbable(), torch.randn(4, 3, 8, 8)

    def state() -> list[object]:
        return [
            {name: value.clone() for name, value in net.state_dict().items()},
            [id(value) for value in (*net.parameters(), *net.buffers())],
            [module.training for module in net.modules()],
            [parameter.requires_grad for parameter in net.parameters()],
            [getattr(module, "eps", None) for module in net.modules()],
            [None if p.grad is None else p.grad.clone() for p in net.parameters()],
            [len(module._forward_hooks) for module in net.modules()],
            torch.get_rng_state(),
            random.getstate(),
            np.random.get_state()[1].tobytes(),
            x.clone(),
        ]

    before = state()
    if fails:
        with pytest.raises(ValueError, match="example_input"):
            norm_report(net, x[:, :2], quick=quick)
    else:
        norm_report(net, x, quick=quick)
    assert all(same_bits(a, b) for a, b in zip(before, state(), strict=True))


def same_bits(a: object, b: object) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same_bits, a, b))
    return a == b


@pytest.mark.parametrize(("quick", "forwards", "backwards"), [(False, 3 + 2 * 3, 0), (True, 1, 3)])
def test_cost_in_passes(quick: bool, forwards: int, backwards: int) -> None:
    """At most three forward and backward passes, and two forward passes for each of the three layers."""
    net = preactivation()
    count = {"forward": 0, "backward": 0}

    def count_forward(*_: object) -> None:
        count["forward"] += 1

    def count_backward(*_: object) -> None:
        count["backward"] += 1

    net.register_forward_hook(count_forward)
    net.head.register_full_backward_hook(count_backward)
    norm_report(net, torch.randn(BATCH, WIDTH), quick=quick)
    assert count == {"forward": forwards, "backward": backwards}


def test_the_callers_gradient_mode_does_not_matter() -> None:
    net = nn.Sequential(nn.BatchNorm1d(WIDTH, affine=False), linear(), norm())
    with torch.no_grad():
        report = norm_report(net, torch.randn(BATCH, WIDTH), quick=True)
    assert [row.path for row in report] == [False, True]
    assert report["2"].acts


def test_inputs_may_be_a_tuple_or_keywords() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return scale * self.n(x)

    x, scale = torch.randn(BATCH, WIDTH), torch.tensor(2.0)
    for example in ((x, scale), {"x": x, "scale": scale}):
        assert norm_report(Two(), example)["n"].effect == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), (4, 3, 64, 64)),
        (nn.Sequential(nn.Linear(7, 4), nn.BatchNorm1d(4)), (4, 7)),
        (nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4)), (4, 2, 64)),
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 900, 2)), (4, 1, 32, 32)),
    ],
)
def test_guess_input_finds_a_shape_that_runs(net: nn.Module, shape: tuple[int, ...]) -> None:
    before = {name: value.clone() for name, value in net.state_dict().items()}
    assert guess_input(net).shape == shape
    assert same_bits(before, dict(net.state_dict()))
