"""Decay of gamma toward 1, against the penalty in the loss and against the formula."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_network import DECAY, STEPS, gammas, small_net
from torch import Tensor, nn, optim

from betternorm.decay import decay_toward_one, param_groups


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(8, 4, generator=generator, dtype=torch.double),
        torch.randn(8, 2, generator=generator, dtype=torch.double),
    )


def loss_of(net: nn.Module, step: int) -> Tensor:
    x, y = batch(step)
    return (net(x) - y).square().mean()


def split(net: nn.Sequential, gamma_decay: float, decay: float = DECAY) -> list[dict[str, Any]]:
    own = {id(gamma) for gamma in gammas(net)}
    rest = [p for p in net.parameters() if id(p) not in own]
    return [{"params": rest, "weight_decay": decay}, {"params": gammas(net), "weight_decay": gamma_decay}]


def assert_equal_parameters(a: nn.Module, b: nn.Module, within: float = 1e-9) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=within, msg=lambda text, name=name: f"{name}: {text}")


COUPLED = {
    "sgd": (optim.SGD, {"lr": 0.05}),
    "sgd with momentum": (optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "sgd with nesterov": (optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "sgd foreach": (optim.SGD, {"lr": 0.05, "momentum": 0.9, "foreach": True}),
    "sgd fused": (optim.SGD, {"lr": 0.05, "momentum": 0.9, "fused": True}),
    "adam": (optim.Adam, {"lr": 0.01}),
    "adam foreach": (optim.Adam, {"lr": 0.01, "foreach": True}),
    "adam fused": (optim.Adam, {"lr": 0.01, "fused": True}),
    "rmsprop": (optim.RMSprop, {"lr": 0.001}),
    "adagrad": (optim.Adagrad, {"lr": 0.01}),
    "nadam": (optim.NAdam, {"lr": 0.01}),
}


DECOUPLED = {
    "adamw": (optim.AdamW, {"lr": 0.02}),
    "adamw foreach": (optim.AdamW, {"lr": 0.02, "foreach": True}),
    "adamw fused": (optim.AdamW, {"lr": 0.02, "fused": True}),
    "nadam decoupled": (optim.NAdam, {"lr": 0.02, "decoupled_weight_decay": True}),
}


SCHEDULES: dict[str, Callable[[optim.Optimizer], Any]] = {
    "constant": lambda optimizer: None,
    "cosine": lambda optimizer: optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
@pytest.mark.parametrize(("kind", "options"), COUPLED.values(), ids=COUPLED.keys())
def test_coupled_decay_is_the_penalty_in_the_loss(
    kind: Any, options: dict[str, Any], schedule: Callable[[optim.Optimizer], Any]
) -> None:
    net = small_net()
    other = copy.deepcopy(net)
    optimizer = kind(net.parameters(), weight_decay=DECAY, **options)
    decay_toward_one(optimizer, net)
    reference = kind(split(other, gamma_decay=0.0), **options)
    schedules = [s for s in (schedule(optimizer), schedule(reference)) if s is not None]
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        optimizer.step()
        reference.zero_grad()
        penalty = sum((gamma - 1).square().sum() for gamma in gammas(other))
        (loss_of(other, step) + DECAY / 2 * penalty).backward()
        reference.step()
        for each in schedules:
            each.step()
    assert_equal_parameters(net, other)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
@pytest.mark.parametrize(("kind", "options"), DECOUPLED.values(), ids=DECOUPLED.keys())
def test_decoupled_decay_moves_gamma_itself(
    kind: Any, options: dict[str, Any], schedule: Callable[[optim.Optimizer], Any]
) -> None:
    net = small_net()
    other = copy.deepcopy(net)
    optimizer = kind(net.parameters(), weight_decay=DECAY, **options)
    decay_toward_one(optimizer, net)
    reference = kind(split(other, gamma_decay=0.0), **options)
    schedules = [s for s in (schedule(optimizer), schedule(reference)) if s is not None]
    for step in range(STEPS):
        for model, stepper in ((net, optimizer), (other, reference)):
            stepper.zero_grad()
            loss_of(model, step).backward()
        rate = reference.param_groups[1]["lr"]
        with torch.no_grad():
            for gamma in gammas(other):
                gamma.sub_(rate * DECAY * (gamma - 1))
        optimizer.step()
        reference.step()
        for each in schedules:
            each.step()
    assert_equal_parameters(net, other)


@pytest.mark.parametrize(
    ("kind", "options", "factor"),
    [
        (optim.SGD, {"lr": 0.1}, 1 - 0.1 * DECAY),
        (optim.SGD, {"lr": 0.1, "fused": True, "maximize": True}, 1 - 0.1 * DECAY),
        (optim.AdamW, {"lr": 0.1}, 1 - 0.1 * DECAY),
        (optim.AdamW, {"lr": 0.1, "fused": True, "maximize": True}, 1 - 0.1 * DECAY),
    ],
)
def test_without_a_gradient_of_its_own_gamma_approaches_one_geometrically(
    kind: Any, options: dict[str, Any], factor: float
) -> None:
    net = small_net()
    start = [gamma.detach().clone() for gamma in gammas(net)]
    optimizer = kind(net.parameters(), weight_decay=DECAY, **options)
    decay_toward_one(optimizer, net)
    for step in range(STEPS):
        optimizer.zero_grad()
        (0 * loss_of(net, step)).backward()
        optimizer.step()
    for gamma, first in zip(gammas(net), start, strict=True):
        torch.testing.assert_close(gamma.detach(), 1 + (first - 1) * factor**STEPS, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kind", "options"), [*COUPLED.values(), *DECOUPLED.values()], ids=[*COUPLED, *DECOUPLED])
def test_a_decay_of_its_own_overrides_that_of_the_group(kind: Any, options: dict[str, Any]) -> None:
    """Groups that do not decay gamma at all, as most recipes have them, with the strength said explicitly."""
    net = small_net()
    other = copy.deepcopy(net)
    decayed = kind(split(net, gamma_decay=0.0), **options)
    decay_toward_one(decayed, net, weight_decay=0.2)
    reference = kind(split(other, gamma_decay=0.2), **options)
    decay_toward_one(reference, other)
    for step in range(10):
        for model, optimizer in ((net, decayed), (other, reference)):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    assert_equal_parameters(net, other)


@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW])
@pytest.mark.parametrize("as_keyword", [False, True])
def test_closures(kind: Any, as_keyword: bool) -> None:
    net = small_net()
    other = copy.deepcopy(net)
    first, second = (kind(model.parameters(), lr=0.05, weight_decay=DECAY) for model in (net, other))
    decay_toward_one(first, net)
    decay_toward_one(second, other)
    for step in range(10):

        def closure(step: int = step) -> Tensor:
            first.zero_grad()
            loss = loss_of(net, step)
            loss.backward()
            return loss

        if as_keyword:
            first.step(closure=closure)
        else:
            first.step(closure)
        second.zero_grad()
        loss_of(other, step).backward()
        second.step()
    assert_equal_parameters(net, other)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.AdamW])
def test_gradient_scaling_changes_nothing(kind: Any, unscale_first: bool, fused: bool) -> None:
    net = small_net().float()
    other = copy.deepcopy(net)
    scaled, plain = (kind(model.parameters(), lr=0.01, weight_decay=DECAY, fused=fused) for model in (net, other))
    decay_toward_one(scaled, net)
    decay_toward_one(plain, other)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for step in range(10):
        x, y = (part.float() for part in batch(step))
        scaled.zero_grad()
        scaler.scale((net(x) - y).square().mean()).backward()
        if unscale_first:
            scaler.unscale_(scaled)
        scaler.step(scaled)
        scaler.update()
        plain.zero_grad()
        (other(x) - y).square().mean().backward()
        plain.step()
    # A scale that is a power of two leaves the gradients of SGD as they are; Adam divides by their size near zero.
    assert_equal_parameters(net, other, within=2e-6)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW])
def test_a_step_skipped_for_overflow_leaves_gamma_alone(kind: Any, fused: bool) -> None:
    net = small_net().float()
    before = copy.deepcopy(net)
    optimizer = kind(net.parameters(), lr=0.01, weight_decay=DECAY, fused=fused)
    decay_toward_one(optimizer, net)
    scaler = torch.amp.GradScaler("cpu")
    x, _ = (part.float() for part in batch(0))
    scaler.scale(net(x).sum() * torch.inf).backward()
    scaler.step(optimizer)
    assert_equal_parameters(net, before, within=0.0)


@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW])
def test_gammas_without_a_gradient_are_left_alone(kind: Any) -> None:
    net = small_net()
    net[1].weight.requires_grad_(False)
    before = net[1].weight.clone()
    optimizer = kind(net.parameters(), lr=0.1, weight_decay=DECAY)
    decay_toward_one(optimizer, net)
    loss_of(net, 0).backward()
    optimizer.step()
    assert torch.equal(net[1].weight, before)


def test_gradients_are_as_backward_left_them() -> None:
    net = small_net()
    optimizer = optim.SGD(net.parameters(), lr=0.1, weight_decay=DECAY)
    decay_toward_one(optimizer, net)
    loss_of(net, 0).backward()
    before = [p.grad.clone() for p in net.parameters()]
    optimizer.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize("attach", ["before loading", "after loading"])
@pytest.mark.parametrize(("kind", "options"), [COUPLED["sgd with momentum"], DECOUPLED["adamw"]])
def test_it_is_saved_with_the_state_of_the_optimizer(kind: Any, options: dict[str, Any], attach: str) -> None:
    def train(model: nn.Module, optimizer: optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()

    net = small_net()
    optimizer = kind(net.parameters(), weight_decay=0.0, **options)
    decay_toward_one(optimizer, net, weight_decay=0.3)
    train(net, optimizer, range(10))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = copy.deepcopy(net)
    other = kind(resumed.parameters(), weight_decay=0.0, **options)
    if attach == "before loading":
        decay_toward_one(other, resumed, weight_decay=0.1)  # the saved 0.3 wins
    other.load_state_dict(torch.load(file, weights_only=True))
    if attach == "after loading":
        decay_toward_one(other, resumed)
    train(net, optimizer, range(10, 20))
    train(resumed, other, range(10, 20))
    assert_equal_parameters(net, resumed, within=0.0)


def test_a_state_saved_without_it_does_not_end_it() -> None:
    net = small_net()
    optimizer = optim.SGD(net.parameters(), lr=0.1, weight_decay=DECAY)
    plain = copy.deepcopy(optimizer.state_dict())
    decay_toward_one(optimizer, net)
    wanted = optimizer.state_dict()
    optimizer.load_state_dict(plain)
    assert optimizer.state_dict() == wanted != plain


@pytest.mark.parametrize(("kind", "options"), [COUPLED["sgd with momentum"], DECOUPLED["adamw"]])
def test_removing_it_restores_the_optimizer(kind: Any, options: dict[str, Any]) -> None:
    net = small_net()
    other = copy.deepcopy(net)
    optimizer, plain = (kind(model.parameters(), weight_decay=DECAY, **options) for model in (net, other))
    before = copy.deepcopy(optimizer.state_dict())
    decay_toward_one(optimizer, net).remove()
    assert optimizer.state_dict() == before
    for step in range(5):
        for model, stepper in ((net, optimizer), (other, plain)):
            stepper.zero_grad()
            loss_of(model, step).backward()
            stepper.step()
    assert_equal_parameters(net, other, within=0.0)
    handle = decay_toward_one(optimizer, net)
    handle.remove()
    handle.remove()


def test_groups_with_a_target_of_one_are_what_is_decayed() -> None:
    """Only the last gamma acts on the output; the first is undone by the norm after it and keeps its value."""
    net = small_net()
    groups = param_groups(net, DECAY, gamma_target=1, example_input=batch(0)[0])
    assert [(g["name"], len(g["params"])) for g in groups] == [("decay", 4), ("no decay", 3), ("gamma toward 1", 1)]
    optimizer = optim.SGD(groups, lr=0.1)
    first, last = (gamma.detach().clone() for gamma in gammas(net))
    handle = decay_toward_one(optimizer, net)
    (0 * loss_of(net, 0)).backward()
    optimizer.step()
    assert torch.equal(net[1].weight, first)
    torch.testing.assert_close(net[4].weight.detach(), 1 + (last - 1) * (1 - 0.1 * DECAY))
    handle.remove()
    optimizer.step()
    assert optimizer.param_groups[2]["name"] == "gamma toward 1"
    torch.testing.assert_close(net[4].weight.detach(), (1 + (last - 1) * (1 - 0.1 * DECAY)) * (1 - 0.1 * DECAY))
