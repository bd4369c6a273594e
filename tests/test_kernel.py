"""The fused kernel: when it serves, that it computes what torch operators compute, and what happens without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from betternorm import functional, kernel

RUN_A_LAYER = """
import torch
from betternorm import GhostBatchNorm, kernel
torch.manual_seed(0)
layer = GhostBatchNorm(8, 4, alpha=0.3)
x = torch.randn(10, 8, 5, 5, requires_grad=True)
y = layer(x)
y.sin().sum().backward()
with torch.no_grad():
    z = layer.eval()(x)
print(kernel.status())
print(*(t.double().abs().sum().item() for t in (y, x.grad, layer.weight.grad, z)))
"""

needs_kernel = pytest.mark.skipif(not kernel.available(), reason=kernel.status())


def run(**environment: str) -> tuple[str, list[float]]:
    """Status of the kernel and the numbers of a layer, in a new process."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN_A_LAYER],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    status, numbers = done.stdout.strip().splitlines()
    return status, [float(number) for number in numbers.split()]


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return run()[1]


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"BETTERNORM_KERNEL": "0"}, "switched off by BETTERNORM_KERNEL=0"),
        ({"CC": "/nowhere/cc"}, "could not be compiled"),
        ({"CC": "false"}, "could not be compiled"),
        ({"PATH": "/nowhere", "CC": ""}, "no C compiler found"),
    ],
)
def test_without_the_kernel_the_numbers_are_the_same_and_the_status_says_why(environment, says, expected, tmp_path):
    status, numbers = run(**environment, BETTERNORM_CACHE=str(tmp_path))
    assert says in status
    assert numbers == pytest.approx(expected, rel=1e-5)


@needs_kernel
def test_it_is_compiled_once_and_kept(expected, tmp_path) -> None:
    status, numbers = run(BETTERNORM_CACHE=str(tmp_path))
    compiled = Path(status)
    assert compiled.parent == tmp_path
    assert list(tmp_path.iterdir()) == [compiled], "no half-made files are left"
    first = compiled.stat().st_mtime_ns
    assert run(BETTERNORM_CACHE=str(tmp_path)) == (status, numbers)
    assert compiled.stat().st_mtime_ns == first
    assert numbers == pytest.approx(expected, rel=1e-6)


@needs_kernel
def test_a_cache_that_cannot_be_made_is_no_hindrance(expected, tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")
    status, numbers = run(BETTERNORM_CACHE=str(tmp_path / "file" / "cache"), TMPDIR=str(tmp_path))
    assert Path(status).is_file()
    assert numbers == pytest.approx(expected, rel=1e-6)


@needs_kernel
def test_a_damaged_file_in_the_cache_is_no_hindrance(expected, tmp_path) -> None:
    status, _ = run(BETTERNORM_CACHE=str(tmp_path))
    Path(status).write_bytes(b"not a library")
    assert run(BETTERNORM_CACHE=str(tmp_path))[1] == pytest.approx(expected, rel=1e-5)


@needs_kernel
@pytest.mark.parametrize(
    ("x", "channels_per_group", "served"),
    [
        (torch.randn(4, 6), 1, True),
        (torch.randn(4, 6, 5), 3, True),
        (torch.randn(4, 6, 5, 5), 6, True),
        (torch.randn(4, 6, 5, 5).to(memory_format=torch.channels_last), 2, True),
        (torch.randn(4, 6, 2, 5, 5).to(memory_format=torch.channels_last_3d), 1, True),
        (torch.randn(4, 6, 5, 5).double(), 1, False),
        (torch.randn(4, 6, 5, 5).bfloat16(), 1, False),
        (torch.randn(4, 6, 5, 5)[:, :, ::2], 1, False),
        (torch.randn(4, 5, 6).transpose(1, 2), 1, False),
        (torch.randn(1, 6, 5, 5).expand(4, 6, 5, 5), 1, False),
        (torch.empty(0, 6), 1, False),
        (torch.empty(4, 6, device="meta"), 1, False),
    ],
)
def test_what_it_serves(x, channels_per_group, served) -> None:
    assert kernel.serves(x, channels_per_group) is served


@needs_kernel
@pytest.mark.parametrize("seed", range(30))
def test_it_agrees_with_torch_operators_on_any_shape(seed, monkeypatch) -> None:
    draw = torch.Generator().manual_seed(seed)

    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draw))

    per = between(1, 20)
    shape = (between(2, 12), per * between(1, 9), *(between(1, 13) for _ in range(between(0, 3))))
    size = between(2, 12)
    x = torch.randn(shape, generator=draw)
    if x.dim() == 4 and seed % 2:
        x = x.contiguous(memory_format=torch.channels_last)
    x += torch.randn(shape[1], generator=draw).view(-1, *(1,) * (x.dim() - 2))
    weight, bias = (torch.randn(shape[1], generator=draw) for _ in range(2))
    moving = torch.randn(shape[1], generator=draw), torch.rand(shape[1], generator=draw) + 0.5
    dy = torch.randn(shape, generator=draw)

    def everything() -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        y, mean, var = functional.grouped_batch_norm(*leaves, per, size, 1e-3)
        y.backward(dy)
        z = functional.weighed_batch_norm(x, *moving, weight, bias, torch.tensor(0.3), per, 1e-3)
        return [y.detach(), mean, var, *(t.grad for t in leaves), z]

    assert kernel.serves(x, per)
    by_kernel = everything()
    monkeypatch.setattr(kernel, "serves", lambda *arguments: False)
    for found, wanted in zip(by_kernel, everything(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@needs_kernel
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_number_of_threads_changes_nothing(layout) -> None:
    x = torch.randn(12, 40, 15, 15).contiguous(memory_format=layout)
    before = torch.get_num_threads()
    outputs = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            outputs.append(kernel.forward(x, None, None, 3, 4, 1e-5, True))
    finally:
        torch.set_num_threads(before)
    for other in outputs[1:]:
        assert all(torch.equal(one, two) for one, two in zip(outputs[0], other, strict=True))


@needs_kernel
def test_the_operators_keep_the_contract_of_torch_library() -> None:
    """Schema, shapes under fake tensors, and tracing: what torch.compile relies on."""
    x = torch.randn(6, 8, 3, 3)
    weight, bias = torch.randn(8), torch.randn(8)
    mean, rstd = torch.randn(2, 4), torch.rand(2, 4) + 0.5
    moving = torch.randn(8), torch.rand(8) + 0.5
    for operator, arguments in (
        (torch.ops.betternorm.forward, (x, weight, bias, 2, 2, 1e-5, True)),
        (torch.ops.betternorm.forward, (x.to(memory_format=torch.channels_last), None, None, 3, 1, 1e-5, False)),
        (torch.ops.betternorm.backward, (torch.randn_like(x), x, weight, mean, rstd, 2, True)),
        (torch.ops.betternorm.backward, (torch.randn_like(x), x, None, mean, rstd, 2, False)),
        (torch.ops.betternorm.infer, (x, *moving, weight, bias, torch.tensor(0.3), 2, 1e-5)),
    ):
        tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
        results = torch.library.opcheck(operator.default, arguments, test_utils=tests)
        assert set(results.values()) == {"SUCCESS"}
