"""The Triton kernels against float64: by the interpreter on CPU tensors (TRITON_INTERPRET=1), else on a GPU.

The interpreter has to be chosen before triton is imported, so `test_triton.py` runs this file in a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from betternorm.backends import triton as backend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden"

LAYOUTS = ["contiguous", "channels_last"]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
EPS = 1e-5

# Shape, runs of examples, channels per group.
CASES = [
    ((6, 4), 1, 1),
    ((7, 12), 2, 3),
    ((5, 3, 9), 2, 1),
    ((4, 8, 4, 4), 2, 1),
    ((7, 4, 5, 3), 3, 2),
    ((5, 6, 1, 1), 2, 6),
    ((3, 40, 2, 2), 3, 5),
    ((9, 2, 12, 12), 4, 1),
    ((2, 3, 7, 11), 2, 3),
    ((3, 4, 2, 3, 5), 2, 2),
]
NAMES = [f"{'x'.join(map(str, shape))} in {groups}, {per} channels" for shape, groups, per in CASES]


@pytest.fixture(autouse=True, params=["whole", "pieces"])
def _trips(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that fit into a program, and the same cut into pieces, as large ones are."""
    if request.param == "pieces":
        monkeypatch.setattr(backend, "HELD", 16)
        monkeypatch.setattr(backend, "PIECE", 64)
        monkeypatch.setattr(backend, "TABLE", 32)


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """channels_last for any rank: channels last in memory."""
    return x.contiguous() if layout == "contiguous" else x.movedim(1, -1).contiguous().movedim(-1, 1)


def sizes(examples: int, groups: int) -> list[int]:
    return [examples // groups + (run < examples % groups) for run in range(groups)]


def problem(shape: tuple[int, ...], layout: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias."""
    x = laid_out((2 * torch.randn(shape) + 3).to(dtype), layout)
    return x.to(DEVICE), torch.randn(shape[1]).to(DEVICE), torch.randn(shape[1]).to(DEVICE)


def close(actual: Tensor, expected: Tensor | np.ndarray, dtype: torch.dtype = torch.float32) -> None:
    expected = torch.as_tensor(expected)
    scale = max(float(expected.abs().max()), 1.0)
    torch.testing.assert_close(actual.cpu().double(), expected.cpu().double(), rtol=0, atol=TOLERANCE[dtype] * scale)


# ---- training ----


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("shape", "groups", "per"), CASES, ids=NAMES)
def test_training(shape: tuple[int, ...], groups: int, per: int, layout: str, dtype: torch.dtype) -> None:
    x, weight, bias = problem(shape, layout, dtype)
    y, mean, rstd, batch_mean, batch_var = backend.forward(x, weight, bias, groups, per, EPS)
    dy = torch.randn(shape).to(x)
    dx, dweight, dbias = backend.backward(dy, x, weight, mean, rstd, groups, per)

    exact = [t.detach().cpu().double().requires_grad_() for t in (x, weight, bias)]
    expected = oracle.normalize(*exact, per, sizes(shape[0], groups), EPS)
    gradients = torch.autograd.grad(expected, exact, dy.cpu().double())
    close(y, expected.detach(), dtype)
    for actual, gradient in zip((dx, dweight, dbias), gradients, strict=True):
        assert actual is not None
        close(actual, gradient, dtype)

    over = (0, *range(2, x.dim()))
    close(batch_mean, exact[0].mean(over).detach())
    close(batch_var, exact[0].var(over, correction=0).detach())
    for run, examples in enumerate(exact[0].detach().split(sizes(shape[0], groups))):
        group = examples.unflatten(1, (-1, per)).movedim(1, 0).flatten(1)
        close(mean[run], group.mean(1))
        close(rstd[run], (group.var(1, correction=0) + EPS).rsqrt())

    assert y.dtype == dx.dtype == dtype
    assert y.stride() == dx.stride() == x.stride()
    assert {t.dtype for t in (mean, rstd, batch_mean, batch_var, dweight, dbias)} == {torch.float32}


@pytest.mark.parametrize("_trips", ["whole"], indirect=True)
def test_a_run_that_no_program_holds(layout: str) -> None:
    x, weight, bias = problem((2, 2, 160, 160), layout)
    y, mean, rstd, *_ = backend.forward(x, weight, bias, 1, 1, EPS)
    dy = torch.randn_like(x)
    dx, *_ = backend.backward(dy, x, weight, mean, rstd, 1, 1)
    exact = x.cpu().double().requires_grad_()
    expected = oracle.normalize(exact, weight.cpu(), bias.cpu(), 1, [2], EPS)
    close(y, expected.detach())
    assert dx is not None
    close(dx, torch.autograd.grad(expected, exact, dy.cpu().double())[0])


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_moving_averages_take_one_step(kind: torch.dtype, layout: str) -> None:
    batches = [problem((7, 5, 4, 3), layout)[0] for _ in range(3)]
    running_mean, running_var = torch.zeros(5, dtype=kind, device=DEVICE), torch.ones(5, dtype=kind, device=DEVICE)
    for x in batches:
        backend.forward(x, None, None, 3, 1, EPS, running_mean, running_var, 0.1)
    mean, var = oracle.moving_averages([x.cpu() for x in batches], 0.1)
    tolerance = kind if kind == torch.bfloat16 else torch.float32
    close(running_mean, mean, tolerance)
    close(running_var, var, tolerance)


@pytest.mark.parametrize("given", ["neither", "weight", "bias"])
def test_weight_and_bias_may_be_missing(given: str, layout: str) -> None:
    x, weight, bias = problem((5, 6, 3, 3), layout)
    gamma, beta = (weight if given == "weight" else None), (bias if given == "bias" else None)
    y, mean, rstd, *_ = backend.forward(x, gamma, beta, 2, 3, EPS)
    cpu = [None if t is None else t.cpu() for t in (x, gamma, beta)]
    close(y, oracle.normalize(*cpu, 3, [3, 2], EPS))
    dy = torch.randn_like(x)
    dx, dweight, dbias = backend.backward(dy, x, gamma, mean, rstd, 2, 3)
    none, same_dweight, same_dbias = backend.backward(dy, x, gamma, mean, rstd, 2, 3, need_dx=False)
    assert dx is not None
    assert none is None
    assert torch.equal(dweight, same_dweight)
    assert torch.equal(dbias, same_dbias)


def test_parameters_of_another_type(layout: str) -> None:
    x, weight, bias = problem((4, 6, 3, 3), layout, torch.bfloat16)
    expected, *_ = backend.forward(x, weight.bfloat16().float(), bias.bfloat16().float(), 2, 1, EPS)
    actual, *_ = backend.forward(x, weight.bfloat16(), bias.bfloat16(), 2, 1, EPS)
    assert torch.equal(actual, expected)


def test_a_gradient_in_another_layout(layout: str) -> None:
    x, weight, bias = problem((4, 6, 3, 5), layout)
    _, mean, rstd, *_ = backend.forward(x, weight, bias, 2, 2, EPS)
    dy = torch.randn(x.shape, device=DEVICE)
    found = [backend.backward(laid_out(dy, other), x, weight, mean, rstd, 2, 2) for other in LAYOUTS]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_large_mean_costs_no_more_digits_than_in_torch(layout: str) -> None:
    x = laid_out(torch.randn(8, 2, 20, 20), layout) + 1e4
    spacing = 2**-10  # of the float32 numbers there, of which the mean is one, in torch's layer too
    exact = F.batch_norm(x.double(), None, None, training=True)
    torch_error = (F.batch_norm(x, None, None, training=True) - exact).abs().max()
    y, _, _, _, batch_var = backend.forward(x.to(DEVICE), None, None, 1, 1, EPS)
    assert (y.cpu() - exact).abs().max() <= max(torch_error, spacing)
    close(batch_var, x.double().var((0, 2, 3), correction=0))

    exact = F.instance_norm(x.double())
    torch_error = (F.instance_norm(x) - exact).abs().max()
    running = torch.tensor([[1e4] * 2, [1.0] * 2], device=DEVICE)
    y = backend.infer(x.to(DEVICE), *running, None, None, torch.tensor(1.0, device=DEVICE), 1, EPS)
    assert (y.cpu() - exact).abs().max() <= max(torch_error, spacing)


def test_a_constant_has_variance_zero(layout: str) -> None:
    x = laid_out(torch.full((3, 2, 5, 5), 0.1), layout).to(DEVICE)
    y, _, _, _, batch_var = backend.forward(x, None, None, 1, 1, EPS)
    assert torch.equal(batch_var, torch.zeros_like(batch_var))
    close(y, torch.zeros(x.shape))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, in the interpreter
def test_an_infinite_value_stays_in_its_channel(layout: str) -> None:
    x, *_ = problem((4, 3, 5, 5), layout)
    x[1, 2, 0, 0] = torch.inf
    running_mean, running_var = torch.zeros(3, device=DEVICE), torch.ones(3, device=DEVICE)
    y, *_ = backend.forward(x, None, None, 2, 1, EPS, running_mean, running_var, 0.1)
    assert y[:, :2].isfinite().all()
    assert y[2:].isfinite().all()
    assert running_mean.isfinite().tolist() == [True, True, False]
    assert running_mean[2] == torch.inf


def test_a_view_that_is_neither_layout(layout: str) -> None:
    x, weight, bias = problem((4, 6, 5, 5), layout)
    part = x[:, ::2, 1:]
    y, *_ = backend.forward(part, weight[::2].contiguous(), bias[::2].contiguous(), 2, 1, EPS)
    close(y, oracle.normalize(part.cpu(), weight[::2].cpu(), bias[::2].cpu(), 1, [2, 2], EPS))


def test_parameters_and_averages_that_are_not_contiguous(layout: str) -> None:
    x, weight, bias = problem((6, 4, 3, 3), layout)
    spread = [torch.stack((t, t + 1), 1)[:, 0] for t in (weight, bias, torch.zeros_like(bias), torch.ones_like(bias))]
    dense = [t.clone(memory_format=torch.contiguous_format) for t in spread]
    alpha = torch.tensor(0.3, device=DEVICE)
    found = []
    for gamma, beta, *running in (spread, dense):
        y, mean, rstd, *_ = backend.forward(x, gamma, beta, 2, 2, EPS, *running, 0.1)
        dx, *_ = backend.backward(y, x, gamma, mean, rstd, 2, 2)
        found.append([y, dx, *running, backend.infer(x, *running, gamma, beta, alpha, 2, EPS)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_too_many_channels_a_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "HELD", 8)
    x, weight, bias = problem((4, 16, 2, 2), "contiguous")
    with pytest.raises(ValueError, match="channels_per_group = 16: the GPU kernels take at most 8"):
        backend.forward(x, weight, bias, 2, 16, EPS)


# ---- inference ----


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("shape", "per"), {(shape, per) for shape, _, per in CASES}, ids=str)
def test_inference(shape: tuple[int, ...], per: int, layout: str, dtype: torch.dtype) -> None:
    x, weight, bias = problem(shape, layout, dtype)
    running_mean, running_var = torch.randn(shape[1]) + 3, torch.rand(shape[1]) + 1
    vector = torch.rand(shape[1]) * (torch.arange(shape[1]) % 3 > 0)
    for alpha in (0.0, 0.3, 1.0, vector):
        y = backend.infer(
            x, running_mean.to(DEVICE), running_var.to(DEVICE), weight, bias,
            torch.as_tensor(alpha, device=DEVICE), per, EPS,
        )  # fmt: skip
        expected = oracle.infer(x.cpu(), running_mean, running_var, weight.cpu(), bias.cpu(), alpha, per, EPS)
        if (
            x.dim() > 2 or alpha is vector or alpha < 1 or per > 1
        ):  # else every example is its own mean, and only rounding is left
            close(y, expected, dtype)
        assert y.dtype == dtype
        assert y.stride() == x.stride()


# ---- the layer of the paper's authors ----


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.npz")), ids=lambda path: path.stem)
def test_golden(path: Path, layout: str) -> None:
    recorded = {name: torch.from_numpy(np.asarray(array)) for name, array in np.load(path).items()}
    weight, bias = recorded["gamma"].to(DEVICE), recorded["beta"].to(DEVICE)
    channels = len(weight)
    per = int(recorded["channels_per_group"]) or channels // int(recorded["channel_groups"])
    eps, momentum = float(recorded["eps"]), 1 - float(recorded["decay"])
    running_mean, running_var = torch.zeros(channels, device=DEVICE), torch.ones(channels, device=DEVICE)
    for x, expected in zip(recorded["x_train"], recorded["y_train"], strict=True):
        x = laid_out(x, layout).to(DEVICE)
        groups = -(-len(x) // (int(recorded["examples_per_group"]) or len(x)))
        y, mean, rstd, *_ = backend.forward(x, weight, bias, groups, per, eps, running_mean, running_var, momentum)
        recorded_close(y, expected)
    gradients = backend.backward(recorded["dy"].to(DEVICE), x, weight, mean, rstd, groups, per)
    for actual, name in zip(gradients, ("dx", "dgamma", "dbeta"), strict=True):
        assert actual is not None
        recorded_close(actual, recorded[name])
    recorded_close(running_mean, recorded["moving_x"])
    recorded_close(running_var + running_mean**2, recorded["moving_x2"])

    x = laid_out(recorded["x_eval"], layout).to(DEVICE)
    alpha = recorded["alpha"].to(DEVICE)
    y = backend.infer(x, running_mean, running_var, weight, bias, alpha, per, eps)
    recorded_close(y, recorded["y_eval"])


def recorded_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=1e-5)


# ---- the order of programs, and what they move ----


def run_all(x: Tensor, weight: Tensor, bias: Tensor, groups: int, per: int) -> list[Tensor]:
    running = torch.zeros_like(weight), torch.ones_like(weight)
    y, mean, rstd, *batch = backend.forward(x, weight, bias, groups, per, EPS, *running, 0.1)
    dx, dweight, dbias = backend.backward(y, x, weight, mean, rstd, groups, per)
    assert dx is not None
    alpha = torch.full((), 0.3, device=DEVICE)  # a graph cannot hold a copy from the host
    return [
        y,
        mean,
        rstd,
        *batch,
        *running,
        dx,
        dweight,
        dbias,
        backend.infer(x, *running, weight, bias, alpha, per, EPS),
    ]


@pytest.mark.skipif(not INTERPRETED, reason="the order of programs can be chosen in the interpreter only")
def test_the_order_of_programs_does_not_matter(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import interpreter_builder

    arguments = (*problem((7, 12, 5, 5), layout), 3, 2)
    expected = run_all(*arguments)
    set_program = interpreter_builder.set_grid_idx

    def reverse(x: int, y: int, z: int) -> None:
        set_program(interpreter_builder.grid_dim[0] - 1 - x, y, z)

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", reverse)
    for actual, before in zip(run_all(*arguments), expected, strict=True):
        assert torch.equal(actual, before)


@pytest.mark.skipif(INTERPRETED, reason="programs take turns in the interpreter")
def test_the_same_every_time(layout: str) -> None:
    arguments = (*problem((64, 96, 28, 28), layout), 5, 3)
    expected = run_all(*arguments)
    for _ in range(20):
        for actual, before in zip(run_all(*arguments), expected, strict=True):
            assert torch.equal(actual, before)


@pytest.mark.skipif(INTERPRETED, reason="there are no graphs in the interpreter")
def test_in_a_cuda_graph(layout: str) -> None:
    arguments = (*problem((16, 12, 14, 14), layout), 3, 2)
    expected = run_all(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run_all(*arguments)
    graph.replay()
    for actual, before in zip(found, expected, strict=True):
        assert torch.equal(actual, before)


@pytest.mark.skipif(not INTERPRETED, reason="loads and stores are counted by the interpreter")
@pytest.mark.parametrize(("shape", "groups", "per"), CASES, ids=NAMES)
def test_traffic_is_that_of_the_model(
    shape: tuple[int, ...], groups: int, per: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tensors like x. What many programs read of the small tables comes from caches, and the model has it once."""
    from benchmarks import gpu

    x, weight, bias = problem(shape, layout)
    running = torch.zeros_like(weight), torch.ones_like(weight)
    _, mean, rstd, *_ = backend.forward(x, weight, bias, groups, per, EPS)
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: backend.forward(x, weight, bias, groups, per, EPS, *running, 0.1),
        "backward": lambda: backend.backward(x, x, weight, mean, rstd, groups, per),
        "inference": lambda: backend.infer(x, *running, weight, bias, torch.tensor(0.3), per, EPS),
    }
    counted = {name: count_moves(monkeypatch, call) for name, call in calls.items()}
    for name, launches in gpu.launches(x, groups, per).items():
        read = written = 0
        for launch in launches:
            read += sum(argument in launch.arguments for argument in ("x", "dy"))
            written += launch.arguments.get("WHOLE", True)
        assert counted[name] == {"read": read * x.numel(), "written": written * x.numel()}, name
        model = gpu.ours(x, groups, per)[name]
        assert model.read >= counted[name]["read"] * x.element_size()
        assert model.written >= counted[name]["written"] * x.element_size()


def count_moves(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> dict[str, int]:
    """How many values of tiles are loaded and stored. Tiles are the blocks of three dimensions."""
    from triton.runtime.interpreter import InterpreterBuilder

    found = {"read": 0, "written": 0}
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counting_load(self: Any, ptrs: Any, mask: Any, *args: Any) -> Any:
        found["read"] += int(mask.data.sum()) * (ptrs.data.ndim == 3)
        return load(self, ptrs, mask, *args)

    def counting_store(self: Any, ptrs: Any, value: Any, mask: Any, *args: Any) -> Any:
        found["written"] += int(mask.data.sum()) * (ptrs.data.ndim == 3)
        return store(self, ptrs, value, mask, *args)

    with monkeypatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_load", counting_load)
        patch.setattr(InterpreterBuilder, "create_masked_store", counting_store)
        call()
    return found
