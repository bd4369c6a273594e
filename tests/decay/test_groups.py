"""Groups of parameters for an optimizer."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_network import small_net
from torch import Tensor, nn, optim

from betternorm.decay import decay_toward_one, param_groups
from betternorm.decay.groups import NO_DECAY
from betternorm.decay.report import norm_report


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


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
        (lambda: param_groups(small_net(), 0.1, "all", no_decay=("haed.*",)), "'haed.\\*', which is neither a kind"),
        (lambda: param_groups(nn.ReLU(), 0.1), "ReLU has no parameters"),
        (lambda: param_groups(Transformer(), 0.1, example_input=torch.randn(2, 4)), "does not accept example_input"),
        (lambda: param_groups(nn.Sequential(nn.Embedding(3, 4), nn.LayerNorm(4)), 0.1), "runs the model once"),
        (
            lambda: param_groups(small_net(), 0.1, report=norm_report(nn.LayerNorm(4), torch.randn(2, 4))),
            "report does not contain the norm layer '1'",
        ),
        (lambda: decay_toward_one(optim.SGD(small_net().parameters()), small_net(), -1), "weight_decay is -1"),
        (lambda: decay_toward_one(optim.SGD(small_net().parameters()), small_net(), 0.1), "none of the model's gammas"),
        (lambda: decay_toward_one(optim.SGD([torch.ones(1)]), nn.Linear(1, 1)), "no norm layers with a gamma"),
        (lambda: decay_toward_one(optim.LBFGS([torch.ones(1)]), small_net()), "LBFGS has no weight_decay"),
        (lambda: _twice(), "already"),
        (lambda: _undecayed(), "weight_decay is 0 in all groups with gammas"),
        (lambda: _foreign(), "pass decoupled=True"),
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
    card = (Path(__file__).parents[2] / "docs" / "methods" / "weight-decay.md").read_text()
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


class Detector(nn.Module):
    """A part that torchvision compiles by itself stands between the norm layer and the output."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, images: Tensor) -> Tensor:
        from torchvision.ops import roi_align

        boxes = torch.tensor([[0, 0.0, 0, 4, 4], [1, 1.0, 1, 5, 5]])
        return self.head(roi_align(self.norm(self.conv(images)), boxes, 2).mean((2, 3)))


@pytest.mark.filterwarnings("ignore")  # of the compiler, where torchvision has no operators of its own
def test_compiled_parts_of_a_detector_can_be_differentiated_often() -> None:
    from betternorm.integrations import torchvision

    torchvision.ready()
    groups = param_groups(Detector(), 1e-4, example_input=torch.randn(4, 3, 8, 8))
    assert {row.name: row.weight_decay for row in groups.rows}["norm.weight"] == 1e-4
