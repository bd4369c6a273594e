"""The lean form that exported and compiled graphs hold is the plain form, to rounding, and it is lean."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from betternorm.backends import graph, plain
from betternorm.conversion.convert import convert
from betternorm.layers import BatchGroupNorm, GhostBatchNorm, GroupedBatchNorm
from betternorm.weighing.alpha import set_alpha

SHAPES = [(3, 6), (3, 6, 5), (3, 6, 5, 4), (2, 6, 3, 4, 5)]


def inputs(shape: tuple[int, ...], alpha: Any, affine: bool = True, dtype: torch.dtype = torch.float64) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    x, *tables = (torch.randn(size, generator=generator, dtype=dtype) for size in (shape, *((shape[1],),) * 4))
    mean, var, weight, bias = tables
    affines = [weight, bias] if affine else [None, None]
    return [2 * x + 1, mean, var.square() + 0.1, *affines, torch.tensor(alpha, dtype=dtype)]


@pytest.mark.parametrize("alpha", [0.0, 0.05, 0.5, 1.0, [0.0, 0.3, 1.0, 0.0, 0.9, 0.0]], ids=str)
@pytest.mark.parametrize("channels_per_group", [1, 3])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_lean_is_plain(shape: tuple[int, ...], affine: bool, channels_per_group: int, alpha: float) -> None:
    given = inputs(shape, alpha, affine)
    lean = graph.infer(*given, channels_per_group, 1e-5)
    torch.testing.assert_close(lean, plain.infer(*given, channels_per_group, 1e-5), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("alpha", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("offset", [0.0, 30.0, 1e4])
def test_no_input_makes_lean_inexact_below_an_alpha_of_one(alpha: float, offset: float) -> None:
    """float32 against float64, where the example's mean is up to ten thousand deviations from the moving one."""
    x, mean, *rest = inputs((4, 6, 8, 8), alpha)
    given = [x + offset, mean, *rest]
    exact = plain.infer(*given, 1, 1e-5)
    lean = graph.infer(*(tensor.float() for tensor in given), 1, 1e-5)
    # The input itself is rounded to float32: an error of half a unit in its last place, after scaling.
    rounding = (given[0].float().double() - given[0]).abs().max()
    assert (lean - exact).abs().max() <= 1e-5 * exact.abs().max() + 10 * rounding


@pytest.mark.parametrize("value", [0.1, 1e4 + 0.1, -3.3e7])
def test_lean_is_finite_where_nothing_varies(value: float) -> None:
    x = torch.full((2, 3, 7, 7), value)
    y = graph.infer(x, torch.zeros(3), torch.ones(3), None, None, torch.tensor(1.0), 1, 1e-5)
    assert y.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lean_takes_statistics_of_half_precision_in_float32(dtype: torch.dtype) -> None:
    x, *rest = inputs((2, 6, 40, 40), 0.3, dtype=torch.float32)
    x = (x * 100).to(dtype)  # squares that float16 cannot hold
    lean = graph.infer(x, *rest, 1, 1e-5)
    assert lean.dtype == dtype
    torch.testing.assert_close(lean, plain.infer(x.float(), *rest, 1, 1e-5).to(dtype), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_every_rank_is_exported(tmp_path: Path, dimensions: int) -> None:
    pytest.importorskip("onnxscript")
    model = nn.Sequential([nn.Conv1d, nn.Conv2d, nn.Conv3d][dimensions - 1](3, 6, 3), GroupedBatchNorm(6, 3)).eval()
    set_alpha(model, 0.4)
    x = torch.randn(2, 3, *(5,) * dimensions)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter about itself
        torch.onnx.export(model, (x,), tmp_path / "model.onnx", dynamo=True, verbose=False)
    _equal_in_onnxruntime(tmp_path / "model.onnx", model, x)


def export(path: Path, dynamo: bool) -> Counter[str]:
    """The operators of a convolution, a layer with alpha and ReLU in ONNX."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    set_alpha(convert(model, "weighed"), 0.1)
    assert isinstance(model[1], GroupedBatchNorm)
    x = torch.randn(2, 3, 8, 8)
    how: dict[str, Any] = (
        {"dynamic_shapes": ({0: torch.export.Dim("batch", min=1, max=4096)},)}
        if dynamo
        else {"dynamic_axes": {"x": {0: "batch"}}, "input_names": ["x"]}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporters about themselves
        torch.onnx.export(model, (x,), path, dynamo=dynamo, verbose=False, **how)
    _equal_in_onnxruntime(path, model, torch.randn(5, 3, 8, 8))
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def _equal_in_onnxruntime(path: Path, model: nn.Module, x: Tensor) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dynamo", [True, False])
def test_the_exported_layer_is_lean(tmp_path: Path, dynamo: bool) -> None:
    """Two reductions, four operators on the tensor, ten on a number a channel; no arithmetic with shapes, no casts."""
    operators = export(tmp_path / "model.onnx", dynamo)
    assert operators["GlobalAveragePool" if dynamo else "ReduceMean"] == 2
    assert operators["Conv"] == operators["Reshape"] + 1 == 1
    work = sum(count for name, count in operators.items() if name not in ("Constant", "Identity"))
    assert work - 2 <= 16, operators  # all but the convolution and ReLU


needs_cxx = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")


def check_compiled_training(model: nn.Module, batches: list[Tensor]) -> None:
    """Output, gradients and buffers are those of the eager model."""
    torch._dynamo.reset()
    eager, compiled = copy.deepcopy(model), torch.compile(model)
    for x in batches:
        results = []
        for one, run in ((model, compiled), (eager, eager)):
            one.zero_grad()
            leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
            y = run(leaf)
            y.sin().sum().backward()
            results.append([y, leaf.grad, *(p.grad for p in one.parameters()), *one.buffers()])
        for found, wanted in zip(*results, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    torch._dynamo.reset()


@needs_cxx
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "norm", [GroupedBatchNorm, lambda c: GhostBatchNorm(c, 4), lambda c: BatchGroupNorm(4, c)], ids=str
)
def test_training_compiles_for_several_image_sizes(norm: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm(8), nn.ReLU())
    shapes = [(8, 3, 16, 16), (8, 3, 20, 20), (6, 3, 24, 18)]
    check_compiled_training(model, [torch.randn(shape) for shape in shapes])


class Crossed(nn.Module):
    """A layer that reads its input in an unusual order of memory, as ShuffleNet's do."""

    def __init__(self, layer: nn.Module, how: str) -> None:
        super().__init__()
        self.layer, self.how = layer, how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "transposed":
            return self.layer(x.transpose(2, 3))
        if self.how == "chunk":
            return self.layer(x.contiguous(memory_format=torch.channels_last).chunk(2, 1)[1])
        if self.how == "crop":
            return self.layer(x.contiguous(memory_format=torch.channels_last)[:, :, 1:, 1:])
        return self.layer(x[:, :, ::2])


@needs_cxx
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", ["transposed", "chunk", "crop", "every other"])
def test_training_with_channel_groups_compiles_for_any_strides(how: str) -> None:
    model = Crossed(BatchGroupNorm(4, 8), how)
    check_compiled_training(model, [torch.randn(4, 16 if how == "chunk" else 8, 6, 5) for _ in range(2)])
