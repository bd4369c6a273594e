"""The report: its rows, its words, its picture."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

import pytest
import torch
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

from betternorm.decay.report import norm_report
from betternorm.decay.visit import guess_input


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


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


def test_the_batch_size_is_that_of_the_example_be_it_of_whole_numbers() -> None:
    net = nn.Sequential(nn.Embedding(10, 8), nn.LayerNorm(8))
    assert norm_report(net, torch.arange(6).reshape(3, 2)).batch_size == 3


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
        (lambda: norm_report(plain_chain(), torch.full((4, WIDTH), torch.inf)), "NaN or infinity"),
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
    assert "3 norm layers at batch size 10: 2 with a path to the output, 2 with an effect above 0.01" in text
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
