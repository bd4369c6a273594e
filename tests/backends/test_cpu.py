"""The C++ kernels: that they compute what the plain form computes, check what they are given, and life without them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from betternorm import functional
from betternorm.backends import cpu, plain
from betternorm.backends.routing import route

RUN_A_LAYER = """
import torch
from betternorm import GhostBatchNorm, backends
torch.manual_seed(0)
layer = GhostBatchNorm(8, 4, alpha=0.3)
x = torch.randn(10, 8, 5, 5, requires_grad=True)
y = layer(x)
y.sin().sum().backward()
with torch.no_grad():
    z = layer.eval()(x)
print(backends.status())
print(*(t.double().abs().sum().item() for t in (y, x.grad, layer.weight.grad, z)))
"""

needs_kernels = pytest.mark.skipif(not cpu.loaded, reason=cpu.status)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def run(**environment: str) -> tuple[str, list[float]]:
    """Status of the backends and the numbers of a layer, in a new process."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN_A_LAYER],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", "")} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    status, numbers = done.stdout.strip().splitlines()
    return status, [float(number) for number in numbers.split()]


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return run()[1]


def test_switched_off_the_numbers_are_the_same_and_the_status_says_so(expected) -> None:
    status, numbers = run(BETTERNORM_KERNELS="0")
    assert "switched off by BETTERNORM_KERNELS=0" in status
    assert numbers == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "installed without compiled kernels"), (b"not a library", "do not load")],
)
def test_without_a_library_that_loads_the_numbers_are_the_same(content, says, expected, tmp_path) -> None:
    package = Path(cpu.__file__).parents[2]
    copy = shutil.copytree(package, tmp_path / "betternorm", ignore=shutil.ignore_patterns("libbetternorm.so.0", "lab"))
    if content is not None:
        (copy / "backends/cpu/libbetternorm.so.0").write_bytes(content)
    status, numbers = run(PYTHONPATH=str(tmp_path))
    assert says in status
    assert numbers == pytest.approx(expected, rel=1e-5)


def test_nothing_is_written_and_no_home_is_needed(expected, tmp_path) -> None:
    environment = {"HOME": str(tmp_path / "none"), "TMPDIR": str(tmp_path), "CC": "a 'quote", "CXX": "\udcff"}
    assert run(**environment)[1] == expected
    assert not list(tmp_path.iterdir())


@needs_kernels
@pytest.mark.parametrize(
    ("x", "taken"),
    [
        (torch.randn(4, 6), True),
        (torch.randn(4, 6, 5, 5).to(memory_format=torch.channels_last), True),
        (torch.randn(4, 6, 2, 5, 5).to(memory_format=torch.channels_last_3d), True),
        (torch.randn(4, 6, 5, 5).bfloat16(), True),
        (torch.randn(4, 6, 5, 5).half(), True),
        (torch.randn(4, 6, 5, 5)[:, :, ::2], True),
        (torch.randn(4, 5, 6).transpose(1, 2), True),
        (torch.randn(1, 6, 5, 5).expand(4, 6, 5, 5), True),
        (torch.randn(4, 6, 5, 5).double(), False),
        (torch.empty(0, 6), False),
        (torch.empty(4, 6, device="meta"), False),
    ],
)
def test_what_they_take(x, taken) -> None:
    assert (route(x, training=True, channels_per_group=1) == "kernels") is taken


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(24))
def test_they_agree_with_the_plain_form_on_any_shape(seed, dtype) -> None:
    draw = torch.Generator().manual_seed(seed)

    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draw))

    per = between(1, 20)
    shape = (between(2, 12), per * between(1, 9), *(between(1, 13) for _ in range(between(0, 3))))
    groups = between(1, shape[0] // 2)
    x = torch.randn(shape, generator=draw)
    x += torch.randn(shape[1], generator=draw).view(-1, *(1,) * (x.dim() - 2))
    x = x.to(dtype)
    if x.dim() >= 4 and seed % 2:
        x = x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    weight, bias = (torch.randn(shape[1], generator=draw) for _ in range(2))
    moving = torch.randn(shape[1], generator=draw), torch.rand(shape[1], generator=draw) + 0.5
    dy = torch.randn(shape, generator=draw).to(dtype)

    y, mean, rstd, batch_mean, batch_var = torch.ops.betternorm.forward(x, weight, bias, groups, per, 1e-3)
    gradients = torch.ops.betternorm.backward(dy, x, weight, mean, rstd, True)
    z = torch.ops.betternorm.infer(x, *moving, weight, bias, torch.tensor(0.3), per, 1e-3)
    assert y.dtype == gradients[0].dtype == z.dtype == dtype
    assert y.stride() == x.stride() == gradients[0].stride() == z.stride()

    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    wanted_y, wanted_mean, wanted_var = plain.normalize(*leaves, groups, per, 1e-3)
    wanted = torch.autograd.grad(wanted_y, leaves, dy.double())
    wanted_z = plain.infer(*(t.double() for t in (x, *moving, weight, bias, torch.tensor(0.3))), per, 1e-3)
    for found, exact in zip(
        (y, batch_mean, batch_var, *gradients, z),
        (wanted_y, wanted_mean, wanted_var, *wanted, wanted_z),
        strict=True,
    ):
        limit = TOLERANCE[found.dtype] * max(1.0, float(exact.detach().abs().max()))
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=limit)


@needs_kernels
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("groups", [1, 3, 12])
def test_the_number_of_threads_changes_nothing(layout, groups) -> None:
    x, dy = (torch.randn(12, 40, 35, 35).contiguous(memory_format=layout) for _ in range(2))
    before = torch.get_num_threads()
    outputs = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            y, mean, rstd, *batch = torch.ops.betternorm.forward(x, None, None, groups, 4, 1e-5)
            outputs.append([y, mean, rstd, *batch, *torch.ops.betternorm.backward(dy, x, None, mean, rstd, True)])
    finally:
        torch.set_num_threads(before)
    for other in outputs[1:]:
        assert all(torch.equal(one, two) for one, two in zip(outputs[0], other, strict=True))


@needs_kernels
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_large_mean_costs_no_digits(layout, two_threads) -> None:
    """Where float32 resolves 1e-3: as exact as torch's layer, also the gradient, also in a group of two values."""
    for shape, groups in (((8, 5, 9, 9), 1), ((8, 5, 9, 9), 3), ((64, 40, 24, 24), 1), ((4, 3, 1, 1), 2)):
        x = (1e4 + torch.randn(shape)).contiguous(memory_format=layout)
        dy = torch.randn(shape)
        y, mean, rstd, *_ = torch.ops.betternorm.forward(x, None, None, groups, 1, 1e-5)
        dx, _, _ = torch.ops.betternorm.backward(dy, x, None, mean, rstd, True)
        exact = x.double().requires_grad_()
        wanted, _, _ = plain.normalize(exact, None, None, groups, 1, 1e-5)
        (wanted_dx,) = torch.autograd.grad(wanted, exact, dy.double())
        torch.testing.assert_close(y.double(), wanted, rtol=0, atol=1e-5)
        torch.testing.assert_close(dx.double(), wanted_dx, rtol=0, atol=1e-5 * max(1.0, float(rstd.max())))


GOOD = torch.ones(2, 3)


@needs_kernels
@pytest.mark.parametrize(
    ("dy", "mean", "rstd", "message"),
    [
        (torch.ones(4, 6, 3, 3), torch.ones(2, 0), torch.ones(2, 0), "0 channel groups"),
        (torch.ones(4, 6, 3, 3), torch.ones(2, 4), torch.ones(2, 4), "4 channel groups, which does not divide"),
        (torch.ones(4, 6, 3, 3), torch.ones(2, 12), torch.ones(2, 12), "12 channel groups, which does not divide"),
        (torch.ones(4, 6, 3, 3), torch.ones(0, 3), torch.ones(0, 3), "0 groups of 4 examples"),
        (torch.ones(4, 6, 3, 3), torch.ones(9, 3), torch.ones(9, 3), "9 groups of 4 examples"),
        (torch.ones(4, 6, 3, 3), torch.ones(6), GOOD, "mean has to be a contiguous float32 table"),
        (torch.ones(4, 6, 3, 3), GOOD, torch.ones(3), "rstd has to be a contiguous float32 table"),
        (torch.ones(4, 6, 3, 3), GOOD, torch.ones(1, 3), "mean and rstd differ in shape"),
        (torch.ones(4, 6, 3, 3), GOOD.double(), GOOD, "mean has to be a contiguous float32 table"),
        (torch.ones(4, 6, 3, 3), GOOD, torch.ones(3, 2).t(), "rstd has to be a contiguous float32 table"),
        (torch.ones(4, 6, 3, 2), GOOD, GOOD, "dy and x differ in shape"),
        (torch.ones(1, 1, 1, 1), GOOD, GOOD, "dy and x differ in shape"),
    ],
)
def test_malformed_statistics_are_refused(dy, mean, rstd, message) -> None:
    with pytest.raises(RuntimeError, match=message):
        torch.ops.betternorm.backward(dy, torch.ones(4, 6, 3, 3), None, mean, rstd, True)


@needs_kernels
def test_sizes_and_devices_that_do_not_fit_are_refused() -> None:
    """torch raises there too; reading or writing out of bounds would be the alternative."""
    x, short, right = torch.randn(4, 6, 3, 3), torch.ones(5), torch.ones(6)
    forward, infer = torch.ops.betternorm.forward, torch.ops.betternorm.infer
    with pytest.raises(RuntimeError, match="weight has 5 elements and the input has 6 channels"):
        forward(x, short, right, 2, 1, 1e-5)
    with pytest.raises(RuntimeError, match="bias has 5 elements"):
        functional.grouped_batch_norm(x, right, short)
    with pytest.raises(RuntimeError, match="running_mean has 5 elements"):
        functional.grouped_batch_norm(x, right, right, running_mean=short, running_var=right)
    with pytest.raises(RuntimeError, match="running_var has 5 elements"):
        infer(x, right, short, None, None, torch.tensor(0.1), 1, 1e-5)
    with pytest.raises(RuntimeError, match="alpha has 5 elements and the input has 6 channels"):
        infer(x, right, right, None, None, short, 1, 1e-5)
    infer_backward = torch.ops.betternorm.infer_backward
    with pytest.raises(RuntimeError, match="dy and x differ in shape"):
        infer_backward(x[:1], x, right, right, None, right, 1, 1e-5, True)
    with pytest.raises(RuntimeError, match="alpha has 5 elements"):
        infer_backward(x, x, right, right, None, short, 1, 1e-5, True)
    with pytest.raises(RuntimeError, match="9 groups of 4 examples"):
        forward(x, None, None, 9, 1, 1e-5)
    with pytest.raises(RuntimeError, match="channels_per_group=4 does not divide the 6 channels"):
        forward(x, None, None, 2, 4, 1e-5)
    with pytest.raises(RuntimeError, match="device"):
        functional.grouped_batch_norm(x, torch.ones(6, device="meta"))
