"""Tuned networks elsewhere: torch.compile, torch.export and ONNX, with alpha inside and any batch size."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from betternorm.conversion.convert import convert
from betternorm.weighing.alpha import set_alpha
from betternorm.weighing.calibration import calibrate

TOLERANCE = {"rtol": 0, "atol": 1e-5}
SIZES = (1, 7, 256)


def tuned(norm: Any, by_channel: bool = False) -> nn.Sequential:
    """A small network, its alphas set by layer, or by channel and in part zero."""
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        norm(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=2),
        norm(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    ).eval()
    convert(model, "weighed")
    calibrate(model, [torch.randn(32, 3, 8, 8) + 0.5])
    set_alpha(model, {"1": torch.linspace(-1, 1, 8).clamp_min(0), "4": 0.6} if by_channel else {"1": 0.1, "4": 0.6})
    return model


NORMS = {"batch": nn.BatchNorm2d, "group": lambda channels: nn.GroupNorm(2, channels), "instance": nn.InstanceNorm2d}


@pytest.fixture(params=[(name, by_channel) for by_channel in (False, True) for name in NORMS], ids=str)
def model(request: pytest.FixtureRequest) -> nn.Sequential:
    name, by_channel = request.param
    return tuned(NORMS[name], by_channel)


@pytest.fixture
def images() -> Tensor:
    return torch.randn(256, 3, 8, 8)


def dynamic_batch() -> dict[str, Any]:
    return {"dynamic_shapes": ({0: torch.export.Dim("batch", min=1, max=4096)},)}


def test_an_exported_program_is_equal_to_eager_for_any_batch(model: nn.Sequential, images: Tensor) -> None:
    program = torch.export.export(model, (images[:2],), **dynamic_batch()).module()
    with torch.no_grad():
        for size in SIZES:
            torch.testing.assert_close(program(images[:size]), model(images[:size]), **TOLERANCE)
            torch.testing.assert_close(program(images[:size]), model(images)[:size], **TOLERANCE)


def test_an_exported_program_is_saved_and_loaded(tmp_path: Path, images: Tensor) -> None:
    model = tuned(nn.BatchNorm2d)
    torch.export.save(torch.export.export(model, (images[:2],), **dynamic_batch()), tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(program(images), model(images), **TOLERANCE)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dynamo", [True, False])
def test_onnxruntime_is_equal_to_eager_for_any_batch(
    model: nn.Sequential, images: Tensor, tmp_path: Path, dynamo: bool
) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter about itself
        sizes: dict[str, Any] = (
            dynamic_batch() if dynamo else {"dynamic_axes": {"x": {0: "batch"}}, "input_names": ["x"]}
        )
        torch.onnx.export(model, (images[:2],), tmp_path / "model.onnx", dynamo=dynamo, verbose=False, **sizes)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    with torch.no_grad():
        expected = model(images)
    for size in SIZES:
        (found,) = session.run(None, {name: images[:size].numpy()})
        torch.testing.assert_close(torch.from_numpy(found), expected[:size], **TOLERANCE)


def test_alpha_is_inside_the_exported_program(images: Tensor) -> None:
    model = tuned(nn.BatchNorm2d)
    program = torch.export.export(model, (images[:2],), **dynamic_batch()).module()
    before = program(images)
    set_alpha(model, 0.0)
    assert torch.equal(program(images), before)
    assert not torch.allclose(model(images), before, atol=1e-3)


def test_a_compiled_network_is_compiled_once_for_all_alphas(images: Tensor) -> None:
    """Once for 0, which is torch's own batch norm, once for every other number, and once for vectors."""
    torch._dynamo.reset()
    graphs = []

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    model = tuned(nn.BatchNorm2d)
    compiled = torch.compile(model, backend=counting, dynamic=True)
    with torch.no_grad():
        for alpha in (0.1, 0.2, 1.0, 0.05):
            set_alpha(model, alpha)
            torch.testing.assert_close(compiled(images), model(images), **TOLERANCE)
        assert len(graphs) == 1
        for alpha in (0.0, 0.3, 0.0):
            set_alpha(model, alpha)
            torch.testing.assert_close(compiled(images), model(images), **TOLERANCE)
    assert len(graphs) <= 3
    compiled_before = len(graphs)
    with torch.no_grad():
        for alpha in (torch.linspace(0, 1, 8), torch.linspace(1, 0, 8), torch.eye(8)[3]):
            set_alpha(model, {"1": alpha, "4": alpha.flip(0)})
            torch.testing.assert_close(compiled(images), model(images), **TOLERANCE)
    assert len(graphs) == compiled_before + 1
    torch._dynamo.reset()


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler, and there is no g++")
def test_inductor_is_equal_to_eager_for_any_batch(images: Tensor) -> None:
    torch._dynamo.reset()
    for by_channel in (False, True):
        model = tuned(nn.BatchNorm2d, by_channel)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler about itself
            compiled = torch.compile(model, dynamic=True)
            for size in SIZES[1:]:
                torch.testing.assert_close(compiled(images[:size]), model(images)[:size], **TOLERANCE)
    torch._dynamo.reset()
