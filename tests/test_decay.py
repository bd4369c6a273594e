"""Groups for optimizers, and decay of gamma toward 1 against the penalty written into the loss."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from betternorm.decay import decay_toward_one, param_groups
from betternorm.decay.groups import NO_DECAY
from betternorm.decay.report import norm_report

STEPS, DECAY = 50, 0.05


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def small_net() -> nn.Sequential:
    """No biases before norms: their gradient is rounding alone, and Adam would blow it up to full size."""
    net = nn.Sequential(
        nn.Linear(4, 6, bias=False),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.Linear(6, 6, bias=False),
        nn.BatchNorm1d(6),
        nn.Linear(6, 2),
    )
    for layer in (net[1], net[4]):
        nn.init.uniform_(layer.weight, 0.5, 2.0)
    return net.double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(8, 4, generator=generator, dtype=torch.double),
        torch.randn(8, 2, generator=generator, dtype=torch.double),
    )


def loss_of(net: nn.Module, step: int) -> Tensor:
    x, y = batch(step)
    return (net(x) - y).square().mean()


def gammas(net: nn.Sequential) -> list[Tensor]:
    return [net[1].weight, net[4].weight]


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


class Transformer(nn.Module):
    """One of each kind of parameter, a weight shared by two layers, and a norm that is known by type only."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.pos_embed = nn.Parameter(torch.randn(1, 4, 8))
        self.cls_token = nn.Parameter(torch.randn(1, 1, 8))
        self.first = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(()))
        self.plain_name = nn.LayerNorm(8)
        self.second = nn.Linear(8, 8)
        self.special = nn.Parameter(torch.randn(8, 8))
        self.last = nn.LayerNorm(8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.words.weight

    def no_weight_decay(self) -> set[str]:
        return {"special"}

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.pos_embed + self.cls_token
        x = self.second(torch.relu(self.plain_name(self.first(x) * self.scale))) @ self.special
        return self.head(self.last(x))


TOKENS = torch.arange(8).reshape(2, 4)


def test_each_parameter_gets_what_users_expect() -> None:
    groups = param_groups(Transformer(), 0.1, example_input=TOKENS)
    got = {row.name: row.group for row in groups.rows}
    assert got == {
        "words.weight": "no decay",
        "pos_embed": "no decay",
        "cls_token": "no decay",
        "first.weight": "decay",
        "first.bias": "no decay",
        "scale": "no decay",
        "plain_name.weight": "decay",  # the beta of `second` keeps the next norm from undoing it
        "plain_name.bias": "decay",
        "second.weight": "decay",
        "second.bias": "no decay",
        "special": "no decay",
        "last.weight": "decay",
        "last.bias": "decay",
    }


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"norm_decay": "none"}, {"decay": 0.1, "no decay": 0.0}),
        ({"norm_decay": "all"}, {"decay": 0.1, "no decay": 0.0}),
        ({"norm_decay": 0.02}, {"decay": 0.1, "no decay": 0.0, "norm decay": 0.02}),
        ({"norm_decay": 0.1}, {"decay": 0.1, "no decay": 0.0}),
        ({"norm_decay": 0}, {"decay": 0.1, "no decay": 0.0}),
        ({"norm_decay": "all", "gamma_target": 1}, {"decay": 0.1, "no decay": 0.0, "gamma toward 1": 0.1}),
        ({"norm_decay": "all", "no_decay": ()}, {"decay": 0.1}),
    ],
)
def test_groups_are_few_named_and_hold_each_parameter_once(options: dict[str, Any], expected: dict[str, float]) -> None:
    model = Transformer()
    groups = param_groups(model, 0.1, **options)
    assert {group["name"]: group["weight_decay"] for group in groups} == expected
    assert len(groups) == len(expected)
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    members = {group["name"]: {id(p) for p in group["params"]} for group in groups}
    parameters = dict(model.named_parameters())
    assert all(id(parameters[row.name]) in members[row.group] for row in groups.rows)


def test_patterns_overrule_everything_and_the_kinds_can_be_kept() -> None:
    groups = param_groups(Transformer(), 0.1, "all", no_decay=(*NO_DECAY, "second.*", "last.weight"))
    got = {row.name: (row.group, row.why) for row in groups.rows}
    assert got["second.weight"] == ("no decay", "matches 'second.*'")
    assert got["last.weight"] == ("no decay", "matches 'last.weight'")
    assert got["last.bias"][0] == "decay"
    assert got["first.weight"][0] == "decay"


def test_auto_follows_a_report_made_before_and_guesses_an_input_otherwise() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6), nn.BatchNorm1d(6))
    by_report = param_groups(net, 0.1, report=norm_report(net, torch.randn(16, 4)))
    assert {row.name: row.group for row in by_report.rows if "weight" in row.name} == {
        "0.weight": "decay",
        "1.weight": "no decay",
        "3.weight": "decay",
        "4.weight": "decay",
    }
    assert param_groups(net, 0.1).rows == by_report.rows
    assert "undoes it" in next(row.why for row in by_report.rows if row.name == "1.weight")


def test_the_table_shows_each_parameter() -> None:
    text = str(param_groups(Transformer(), 0.1, "all"))
    assert [line.split()[0] for line in text.splitlines()[2:15]] == [n for n, _ in Transformer().named_parameters()]
    assert "8x8" in text
    assert "norm layer, norm_decay='all'" in text
    assert text.endswith("no decay: 7, decay: 6")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: param_groups(small_net(), -1e-4), "weight_decay is -0.0001; it must be a number of 0 or more"),
        (lambda: param_groups(small_net(), float("nan")), "weight_decay is nan"),
        (lambda: param_groups(small_net(), 0.1, -0.1), "norm_decay is -0.1"),
        (lambda: param_groups(small_net(), 0.1, "some"), "norm_decay is 'some'; it must be \"auto\""),
        (lambda: param_groups(small_net(), 0.1, gamma_target=2), "gamma_target is 2; it must be 0 or 1"),
        (lambda: param_groups(small_net(), 0.1, "all", no_decay="bias"), "no_decay is the string 'bias'"),
        (lambda: param_groups(small_net(), 0.1, "all", no_decay=("haed.*",)), "'haed.\\*', which is no kind"),
        (lambda: param_groups(nn.ReLU(), 0.1), "ReLU has no parameters"),
        (lambda: param_groups(Transformer(), 0.1, example_input=torch.randn(2, 4)), "does not accept example_input"),
        (lambda: param_groups(nn.Sequential(nn.Embedding(3, 4), nn.LayerNorm(4)), 0.1), "runs the model once"),
        (
            lambda: param_groups(small_net(), 0.1, report=norm_report(nn.LayerNorm(4), torch.randn(2, 4))),
            "report knows nothing of the norm layer '1'",
        ),
        (lambda: decay_toward_one(optim.SGD(small_net().parameters()), small_net(), -1), "weight_decay is -1"),
        (lambda: decay_toward_one(optim.SGD(small_net().parameters()), small_net(), 0.1), "none of the model's gammas"),
        (lambda: decay_toward_one(optim.SGD([torch.ones(1)]), nn.Linear(1, 1)), "no norm layers with a gamma"),
        (lambda: decay_toward_one(optim.LBFGS([torch.ones(1)]), small_net()), "LBFGS has no weight_decay"),
        (lambda: _twice(), "already"),
        (lambda: _undecayed(), "weight_decay is 0 in every group with gammas"),
        (lambda: _foreign(), "say decoupled=True"),
    ],
)
def test_bad_input_gets_one_clear_line(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


def _twice() -> None:
    net = small_net()
    optimizer = optim.SGD(net.parameters(), weight_decay=0.1)
    decay_toward_one(optimizer, net)
    decay_toward_one(optimizer, net)


def _undecayed() -> None:
    net = small_net()
    decay_toward_one(optim.SGD(net.parameters()), net)


class ForeignOptimizer(optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "weight_decay": 0.1})


def _foreign() -> None:
    net = small_net()
    decay_toward_one(ForeignOptimizer(net.parameters()), net)


def test_the_examples_of_the_method_card_run() -> None:
    card = (Path(__file__).parents[1] / "docs" / "methods" / "weight-decay.md").read_text()
    names: dict[str, Any] = {"print": lambda *_: None}
    examples = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    for example in examples:
        exec(example, names)
    assert len(examples) == 4
    assert [group["name"] for group in names["optimizer"].param_groups] == ["decay", "no decay", "gamma toward 1"]


ARCHITECTURES = [
    "resnet18",
    "resnet26d",
    "resnetv2_50",
    "seresnet18",
    "regnetx_002",
    "regnety_002",
    "mobilenetv2_050",
    "mobilenetv3_small_050",
    "efficientnet_b0",
    "tinynet_e",
    "lcnet_050",
    "mnasnet_small",
    "ghostnet_100",
    "densenet121",
    "inception_v3",
    "dla46_c",
    "repvgg_a0",
    "mobileone_s0",
    "convnext_atto",
    "convnextv2_atto",
    "edgenext_xx_small",
    "vit_tiny_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "swin_tiny_patch4_window7_224",
    "levit_128s",
    "mobilevit_xxs",
    "poolformer_s12",
    "xcit_nano_12_p16_224",
    "resmlp_12_224",
    "pit_ti_224",
]
OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    (optim.SGD, {"lr": 1e-3, "momentum": 0.9, "fused": True}),
    (optim.AdamW, {"lr": 1e-4}),
    (optim.AdamW, {"lr": 1e-4, "fused": True}),
]


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("resnet18", "lcnet_050", "vit_tiny_patch16_224")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in ARCHITECTURES
    ],
)
def test_timm_architectures_train_with_these_groups(name: str) -> None:
    from betternorm.integrations.models import load_model

    model = load_model(f"timm:{name}", num_classes=10)
    size = model.pretrained_cfg["input_size"]
    side = size[-1] if model.pretrained_cfg.get("fixed_input_size") or name == "inception_v3" else 64
    x = torch.randn(2, 3, side, side)
    groups = param_groups(model, 0.05, gamma_target=1, example_input=x)
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    assert len(groups) <= 3
    for kind, options in OPTIMIZERS:
        optimizer = kind(groups, **options)
        handle = decay_toward_one(optimizer, model) if len(groups) == 3 else None
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer.zero_grad()
        model(x).square().mean().backward()
        trained = {n for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        decayed = {row.name for row in groups.rows if row.weight_decay and not row.target} & trained
        assert decayed
        for n, p in model.named_parameters():
            assert p.isfinite().all(), n
            assert n not in decayed or not torch.equal(p, before[n]) or not p.any(), n
        if handle:
            handle.remove()
