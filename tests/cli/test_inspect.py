"""``betternorm inspect`` as a user calls it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from betternorm.backends import cpu
from betternorm.cli import BAD_INPUT, OK
from betternorm.cli.main import main

CHAIN = """
from torch import nn

def build():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )

def plain():
    return nn.Linear(3, 3)

def picky():
    return nn.Sequential(nn.Embedding(3, 4), nn.LayerNorm(4))

def number():
    return 4
"""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def nets(tmp_path: Path) -> Path:
    path = tmp_path / "nets.py"
    path.write_text(CHAIN)
    return path


def test_report_and_advice_on_the_terminal(nets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", f"{nets}:build", "--batch-size", "64", "--input", "3,8,8"]) == OK
    printed = capsys.readouterr().out
    first, last = (line.split() for line in printed.splitlines()[2:4])
    assert (first[0], first[-4], first[-2:]) == ("1", "no", ["no", "decay"])
    assert (last[0], last[-3], last[-1]) == ("4", "yes", "decay")
    assert "2 norm layers at batch size 64: 1 with a path to the output, 1 with an effect above 0.01" in printed
    assert "Advice at batch size 64" in printed


def test_the_assumed_input_is_printed(nets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", f"{nets}:build", "--quick"]) == OK
    assert "input: 3x64x64 (guessed; --input sets it)" in capsys.readouterr().out
    assert main(["inspect", f"{nets}:build", "--quick", "--input", "3,8,8"]) == OK
    assert "input: 3x8x8 (as given by --input)" in capsys.readouterr().out


def test_a_known_model_is_inspected_at_its_own_resolution(capsys: pytest.CaptureFixture[str]) -> None:
    """The last layer of a resnet18 has 7x7 positions, so two examples give 98 values."""
    assert main(["inspect", "torchvision:resnet18", "--quick", "--batch-size", "2", "--quiet"]) == OK
    printed = capsys.readouterr().out
    assert "input: 3x224x224 (declared by the model; --input sets another)" in printed
    last = next(line for line in printed.splitlines() if line.startswith("layer4.1.bn2"))
    assert " 98 " in last


@pytest.mark.parametrize("options", [[], ["--quick"], ["--input", "3,16,16"]])
def test_json(nets: Path, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    assert main(["inspect", f"{nets}:build", "--batch-size", "2", "--json", *options]) == OK
    found = json.loads(capsys.readouterr().out)
    assert [layer["path"] for layer in found["report"]["layers"]] == [False, True]
    assert found["report"]["quick"] is ("--quick" in options)
    assert found["advice"]["to"] == "batch_group"
    side = 16 if "--input" in options else 64
    assert found["report"]["layers"][0]["values_per_group"] == 2 * side**2


def test_a_graph_of_the_layers_is_drawn(nets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawing = tmp_path / "layers.svg"
    assert main(["inspect", f"{nets}:build", "--svg", str(drawing), "--overfits", "no", "--quick"]) == OK
    assert len(ElementTree.fromstring(drawing.read_text()).findall("{*}g")) == 2 + 2
    printed = capsys.readouterr().out
    assert "2 norm layers" in printed
    assert "Advice at batch size 32" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{nets}:build", "--batch-size", "0"], "--batch-size is 0; it must be 1 or more"),
        (["{nets}:build", "--input", "3,x"], "--input is '3,x'; write the shape of one example"),
        (["{nets}:build", "--input", "3,0,8"], "--input is '3,0,8'"),
        (["{nets}:build", "--input", "4,8,8"], "the model does not accept example_input (of shape (4, 4, 8, 8))"),
        (["{nets}:build", "--svg", "/nowhere/at/all.svg"], "--svg /nowhere/at/all.svg cannot be written"),
        (["{nets}:plain"], "Linear has no norm layers"),
        (["{nets}:picky"], "no example input could be guessed"),
        (["{nets}:number"], "gave a int, not a torch.nn.Module"),
        (["{nets}:missing"], "has no function 'missing'"),
        (["nowhere.py:build"], "there is no file nowhere.py"),
        (["resnet50"], "write it as timm:NAME"),
        (["timm:resnet5o"], "timm has no model 'resnet5o'; did you mean resnet50"),
        (["torchvision:resnet5o"], "torchvision has no model 'resnet5o'; did you mean resnet50"),
    ],
)
def test_bad_input_gets_one_clear_line(
    nets: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["inspect", *(word.format(nets=nets) for word in words)]) == BAD_INPUT
    error = capsys.readouterr().err
    assert error.startswith("betternorm inspect: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("spec", "layers"), [("timm:lcnet_050", 1 + 13 * 2), ("torchvision:resnet18", 20)])
def test_models_of_other_libraries(spec: str, layers: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", spec, "--quick", "--json", "--input", "3,64,64"]) == OK
    assert len(json.loads(capsys.readouterr().out)["report"]["layers"]) == layers


@pytest.mark.parametrize("loaded", [True, False])
def test_a_package_without_compiled_kernels_says_so(loaded, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(cpu, "loaded", loaded)
    monkeypatch.setattr(cpu, "status", "installed without compiled kernels")
    (tmp_path / "nets.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))\n"
    )
    assert main(["inspect", f"{tmp_path}/nets.py:build"]) == OK
    assert ("kernels: installed without compiled kernels" in capsys.readouterr().out) is not loaded
