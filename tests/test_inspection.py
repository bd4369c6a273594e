"""norm_report: path and effect against truth derived by hand, and nothing left behind."""

from __future__ import annotations

import json
import random
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from betternorm.decay.norms import norm_layers
from betternorm.decay.report import norm_report
from betternorm.decay.visit import guess_input
from betternorm.surgery import convert

WIDTH, BATCH = 6, 10


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def norm(width: int = WIDTH) -> nn.BatchNorm1d:
    """A batch norm whose eps does not blur the exact cancellation, with a gamma and beta of its own."""
    layer = nn.BatchNorm1d(width, eps=1e-12)
    nn.init.uniform_(layer.weight, 0.5, 1.5)
    nn.init.normal_(layer.bias)
    return layer


def linear(inputs: int = WIDTH, outputs: int = WIDTH) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Net(nn.Module):
    """The small networks below: named layers, and a forward pass given as a function."""

    def __init__(self, forward: Callable[..., object], **layers: nn.Module) -> None:
        super().__init__()
        self._forward = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> object:
        return self._forward(self, x)


@dataclass
class Truth:
    """A network and what holds for its layers: (path, effect), the effect as a number or as an open interval."""

    build: Callable[[], nn.Module]
    layers: dict[str, tuple[bool, float | tuple[float, float]]]


SOME = (0.01, 1.0)


def plain_chain() -> nn.Module:
    return nn.Sequential(linear(), norm(), nn.ReLU(), linear(), norm(), nn.ReLU(), linear())


def residual_identity() -> nn.Module:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = x + net.n1(net.l1(x))
        return h + net.n2(net.l2(h))

    return Net(forward, l1=linear(), n1=norm(), l2=linear(), n2=norm())


def residual_projection() -> nn.Module:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = F.relu(net.stem(net.l0(x)))
        return net.n_branch(net.l1(h)) + net.n_projection(net.l2(h))

    return Net(forward, l0=linear(), stem=norm(), l1=linear(), n_branch=norm(), l2=linear(), n_projection=norm())


def preactivation() -> nn.Module:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = x + net.l1(F.relu(net.n1(x)))
        h = h + net.l2(F.relu(net.n2(h)))
        return net.head(F.relu(net.n_final(h)))

    return Net(forward, n1=norm(), l1=linear(), n2=norm(), l2=linear(), n_final=norm(), head=linear())


def concatenated_then_mixed() -> nn.Module:
    def forward(net: Net, x: Tensor) -> Tensor:
        both = torch.cat([net.n_a(net.l_a(x)), net.n_b(net.l_b(x))], dim=1)
        return net.n_after(net.mix(both))

    return Net(forward, l_a=linear(), n_a=norm(), l_b=linear(), n_b=norm(), mix=linear(2 * WIDTH), n_after=norm())


def concatenated_then_normalised() -> nn.Module:
    """Batch norm acts on each channel alone, so it undoes the scaling of either branch."""

    def forward(net: Net, x: Tensor) -> Tensor:
        return net.n_after(torch.cat([net.n_a(net.l_a(x)), net.n_b(net.l_b(x))], dim=1))

    return Net(forward, l_a=linear(), n_a=norm(), l_b=linear(), n_b=norm(), n_after=norm(2 * WIDTH))


def shared() -> nn.Module:
    """The first call is undone by the second, and the second scales the output."""

    def forward(net: Net, x: Tensor) -> Tensor:
        return net.l2(net.n(F.relu(net.l1(net.n(x)))))

    return Net(forward, n=norm(), l1=linear(), l2=linear())


def loop() -> nn.Module:
    """As many turns as the data asks for, and a norm after the loop."""

    def forward(net: Net, x: Tensor) -> Tensor:
        h, turns = x, 0
        while turns < 3 or (h.norm() < 1 and turns < 9):
            h, turns = h + net.n(net.l(h)), turns + 1
        return net.n_after(net.l_after(h)) + h

    return Net(forward, n=norm(), l=linear(), n_after=norm(), l_after=linear())


def two_outputs() -> nn.Module:
    def forward(net: Net, x: Tensor) -> dict[str, Tensor]:
        h = net.n1(net.l1(x))
        g = net.n2(net.l2(F.relu(h)))
        return {"main": net.n3(net.l3(F.relu(g))), "auxiliary": net.side(h)}

    return Net(forward, l1=linear(), n1=norm(), l2=linear(), n2=norm(), l3=linear(), n3=norm(), side=linear())


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
        concatenated_then_normalised, {"n_a": (False, 0.0), "n_b": (False, 0.0), "n_after": (True, 1.0)}
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
def test_layers_of_this_library_normalise_too(to: str, quick: bool) -> None:
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


@pytest.mark.parametrize(
    ("layer", "shape", "groups", "values"),
    [
        (nn.BatchNorm2d(8), (4, 8, 5, 5), "1 channel, the batch", 4 * 25),
        (nn.BatchNorm1d(8), (4, 8), "1 channel, the batch", 4),
        (nn.GroupNorm(2, 8), (4, 8, 5, 5), "4 channels, 1 example", 4 * 25),
        (nn.LayerNorm(8), (4, 3, 8), "8 channels, 1 position", 8),
        (nn.InstanceNorm2d(8, affine=True), (4, 8, 5, 5), "1 channel, 1 example", 25),
    ],
)
def test_what_the_statistics_are_taken_over(layer: nn.Module, shape: tuple[int, ...], groups: str, values: int) -> None:
    row = norm_report(nn.Sequential(layer), torch.randn(shape))["0"]
    assert (row.kind, row.channels, row.groups, row.values_per_group) == (type(layer).__name__, 8, groups, values)


def test_values_per_group_follow_the_batch_size_of_training() -> None:
    net, x = nn.Sequential(nn.BatchNorm2d(8), nn.GroupNorm(2, 8)), torch.randn(4, 8, 5, 5)
    report = norm_report(net, x, batch_size=128)
    assert [row.values_per_group for row in report] == [128 * 25, 4 * 25]
    assert report.batch_size == 128


def test_layers_that_cannot_be_judged_say_so() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = net.hidden(x)
        return net.plain(net.l(h))

    net = Net(forward, hidden=norm(), l=linear(), plain=nn.BatchNorm1d(WIDTH, affine=False), unused=norm())
    report = norm_report(net, torch.randn(BATCH, WIDTH))
    assert report["hidden"].path is None
    assert (report["plain"].path, report["plain"].effect) == (True, None)
    assert "no gamma" in report["plain"].why
    assert (report["unused"].path, report["unused"].effect, report["unused"].calls) == (None, None, 0)
    assert "not called" in report["unused"].why


def test_the_callers_gradient_mode_does_not_matter() -> None:
    net = nn.Sequential(nn.BatchNorm1d(WIDTH, affine=False), linear(), norm())
    with torch.no_grad():
        report = norm_report(net, torch.randn(BATCH, WIDTH), quick=True)
    assert [row.path for row in report] == [False, True]
    assert report["2"].acts


def test_the_batch_size_is_that_of_the_example_be_it_of_whole_numbers() -> None:
    net = nn.Sequential(nn.Embedding(10, 8), nn.LayerNorm(8))
    assert norm_report(net, torch.arange(6).reshape(3, 2)).batch_size == 3


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


def test_classes_of_your_own_count_when_named() -> None:
    class Standardise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x / x.pow(2).mean(1, keepdim=True).sqrt()

    net = nn.Sequential(norm(), linear(), Standardise())
    assert norm_report(net, torch.randn(BATCH, WIDTH))["0"].path is True
    report = norm_report(net, torch.randn(BATCH, WIDTH), norm_types=(Standardise,))
    assert [(row.name, row.path) for row in report] == [("0", False), ("2", True)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: norm_report(nn.Linear(2, 2), torch.randn(2, 2)), "Linear has no norm layers"),
        (lambda: norm_report(plain_chain(), torch.randn(4, 7)), r"example_input \(of shape \(4, 7\)\)"),
        (lambda: norm_report(plain_chain(), torch.randn(1, WIDTH)), "more than 1 value per channel"),
        (lambda: norm_report(plain_chain(), "text"), r"example_input \(a str\)"),
        (lambda: norm_report(plain_chain(), {"y": torch.randn(4, WIDTH)}), "unexpected keyword argument 'y'"),
        (
            lambda: norm_report(Net(lambda net, x: [net.n(x)[0, 0] > 0], n=norm()), torch.randn(4, WIDTH)),
            "returned no floating-point tensor but list",
        ),
        (lambda: norm_report(plain_chain(), torch.randn(4, WIDTH), batch_size=0), "batch_size is 0"),
        (lambda: norm_report(plain_chain(), torch.full((4, WIDTH), torch.inf)), "infinities or NaN"),
        (lambda: norm_report(nn.LazyBatchNorm1d(), torch.randn(4, 2)), "run it once first"),
        (lambda: norm_report(plain_chain(), torch.randn(4, WIDTH))["9"], "no norm layer '9'; there are '1', '4'"),
        (lambda: guess_input(nn.Sequential(nn.Embedding(3, 4), norm(4))), "no example input could be guessed"),
        (lambda: guess_input(plain_chain(), 0), "batch_size is 0"),
    ],
)
def test_bad_input_gets_one_clear_line(call: Callable[[], object], message: str) -> None:
    with pytest.raises((ValueError, KeyError), match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_the_table_names_every_layer_and_the_counts() -> None:
    text = str(norm_report(residual_projection().double(), torch.randn(BATCH, WIDTH).double()))
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["stem", "n_branch", "n_projection"]
    assert "3 norm layers at batch size 10: 2 with a path to the output, 2 whose effect is above 0.01" in text
    assert "undoes it" in text


def test_to_dict_is_json() -> None:
    report = norm_report(preactivation(), torch.randn(BATCH, WIDTH))
    back = json.loads(json.dumps(report.to_dict()))
    assert [layer["name"] for layer in back["layers"]] == ["n1", "n2", "n_final"]
    assert sorted(map(tuple, back["edges"])) == [
        ("n1", "n2"),
        ("n1", "n_final"),
        ("n2", "n_final"),
        ("n_final", "output"),
    ]


@pytest.mark.parametrize("build", [residual_projection, loop, two_outputs])
def test_the_picture_has_a_box_for_every_layer(build: Callable[[], nn.Module]) -> None:
    report = norm_report(build(), torch.randn(BATCH, WIDTH))
    svg = ElementTree.fromstring(report.to_svg())
    boxes = svg.findall("{*}g")
    assert len(boxes) == len(report) + 2  # with input and output
    texts = {text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")}
    assert {layer.name for layer in report} | {"input", "output"} <= texts


def test_the_picture_is_darker_where_the_effect_is_larger() -> None:
    report = norm_report(plain_chain(), torch.randn(BATCH, WIDTH))
    svg = ElementTree.fromstring(report.to_svg())
    fill = {box.find("{*}text").text: box.find("{*}rect").get("fill") for box in svg.findall("{*}g")}
    brightness = {name: sum(bytes.fromhex(colour[1:])) for name, colour in fill.items()}
    assert brightness["1"] > brightness["4"]


def test_a_picture_of_too_many_layers_is_refused() -> None:
    deep = nn.Sequential(*(norm() for _ in range(81)))
    with pytest.raises(ValueError, match="81 norm layers are too many to draw"):
        norm_report(deep, torch.randn(BATCH, WIDTH), quick=True).to_svg()


def test_norm_layers_are_recognised_by_type() -> None:
    net = nn.ModuleDict(
        {
            "a": nn.BatchNorm2d(2),
            "b": nn.SyncBatchNorm(2),
            "c": nn.RMSNorm(2),
            "norm_by_name_only": nn.Linear(2, 2),
            "d": nn.LayerNorm(2),
            "e": nn.GroupNorm(1, 2),
            "f": nn.InstanceNorm1d(2),
        }
    )
    assert list(norm_layers(net)) == ["a", "b", "c", "d", "e", "f"]


def test_timm_layers_are_recognised_by_type() -> None:
    torchvision = pytest.importorskip("betternorm.integrations.torchvision")
    torchvision.ready()
    layers = pytest.importorskip("timm.layers")
    names = [
        "BatchNormAct2d",
        "GroupNormAct",
        "LayerNorm2d",
        "LayerNormAct2d",
        "RmsNorm",
        "RmsNorm2d",
        "RmsNormAct",
        "SimpleNorm",
        "SimpleNorm2d",
        "EvoNorm2dB0",
        "EvoNorm2dB1",
        "EvoNorm2dB2",
        "EvoNorm2dS0",
        "EvoNorm2dS1",
        "EvoNorm2dS2",
        "FilterResponseNormTlu2d",
        "FilterResponseNormAct2d",
        "SplitBatchNorm2d",
        "GroupNorm1",
    ]
    net = nn.ModuleDict({name: getattr(layers, name)(32) for name in names})
    assert list(norm_layers(net)) == names  # the batch norm inside SplitBatchNorm2d is part of it


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
