"""Random shapes, layouts, types and settings against the float64 oracle, for every backend.

A failure that hypothesis finds is kept below as an `@example`. The cases are the same in every run.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from betternorm import GroupedBatchNorm
from betternorm.backends import cpu, operators, routing

SHORT, LONG = 60, 2000
EPS = 1e-3
# What the output may differ by, where its values are of the order of one. Half types round the output itself.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Case:
    examples: int
    groups: int  # of channels
    channels_per_group: int
    space: tuple[int, ...]
    examples_per_group: int | None
    layout: str
    dtype: torch.dtype
    half_parameters: bool  # a layer of the input's type, where that is a half type; otherwise float32
    affine: bool
    alpha: float | tuple[float, ...]  # a vector is repeated or cut to the number of channels
    training: bool
    offset: float
    wants: tuple[bool, bool, bool]  # gradients of x, weight and bias, and of alpha where it is a vector
    seed: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.examples, self.groups * self.channels_per_group, *self.space)

    def alphas(self) -> float | Tensor:
        if not isinstance(self.alpha, tuple):
            return self.alpha
        return torch.tensor(self.alpha).repeat(self.shape[1])[: self.shape[1]]

    def sizes(self) -> list[int]:
        """The examples of each group; the larger ones come first."""
        groups = 1 if self.examples_per_group is None else -(-self.examples // self.examples_per_group)
        return [self.examples // groups + (index < self.examples % groups) for index in range(groups)]

    def has_statistics(self) -> bool:
        """Two values that are close to one another give a step function, not a derivative."""
        return min(self.sizes()) * self.channels_per_group * int(torch.tensor(self.space).prod()) > 2


number = st.just(0.0) | st.just(1.0) | st.floats(0.001, 0.999)
LAYOUTS = ("contiguous", "channels_last", "transposed", "every other", "expanded")
cases = st.builds(
    Case,
    examples=st.integers(1, 9),
    groups=st.integers(1, 7),
    channels_per_group=st.integers(1, 5),
    space=st.lists(st.integers(1, 7), max_size=3).map(tuple),
    examples_per_group=st.none() | st.integers(1, 10),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(tuple(TOLERANCE)),
    half_parameters=st.booleans(),
    affine=st.booleans(),
    alpha=number | st.lists(number, min_size=1, max_size=7).map(tuple),
    training=st.booleans(),
    offset=st.sampled_from((0.0, 0.0, 3.0, 1000.0)),
    wants=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    seed=st.integers(0, 2**31),
)


def lay_out(x: Tensor, layout: str) -> Tensor:
    """The same values in another order of memory."""
    if layout == "channels_last" and x.dim() in (4, 5):
        return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "every other":
        return torch.stack((x, -x), -1).flatten(-2)[..., ::2]
    if layout == "expanded":  # one example, many times
        return x[:1].contiguous().expand(x.shape)
    return x.contiguous()


def check(case: Case) -> None:
    """Output, gradients and moving averages of one layer, against the same in float64."""
    if case.training and not case.has_statistics():
        return
    draw = torch.Generator().manual_seed(case.seed)
    x = lay_out((torch.randn(case.shape, generator=draw) + case.offset).to(case.dtype), case.layout)
    dy = torch.randn(case.shape, generator=draw).to(case.dtype)
    channels = case.shape[1]
    layer = GroupedBatchNorm(
        channels, case.channels_per_group, case.examples_per_group, affine=case.affine, alpha=case.alphas(), eps=EPS
    )
    draw_averages(layer, case.offset, draw)
    for parameter in layer.parameters():
        parameter.data.normal_(1, 0.5, generator=draw)
    layer.to(case.dtype if case.half_parameters or case.dtype == torch.float64 else torch.float32)
    layer.train(case.training)
    before = copy.deepcopy(layer)

    x.requires_grad_(case.wants[0])
    for parameter, wanted in zip(layer.parameters(), case.wants[1:], strict=False):
        parameter.requires_grad_(wanted)
    y = layer(x)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)

    exact_x = x.detach().double().requires_grad_(case.wants[0])
    exact = [parameter.detach().double().requires_grad_(parameter.requires_grad) for parameter in layer.parameters()]
    weight, bias = exact or (None, None)
    wanted_y = exact_output(case, exact_x, weight, bias, before)
    close(y, wanted_y, case, "output")
    if y.requires_grad:
        y.backward(dy)
        wanted_y.backward(dy.double())
        for name, found, wanted in zip(
            ("x", "weight", "bias"), (x, *layer.parameters()), (exact_x, *exact), strict=False
        ):
            if found.requires_grad:
                close(found.grad, wanted.grad, case, f"gradient of {name}")
    if case.training:
        check_averages(case, exact_x.detach(), before, layer)
    else:
        assert torch.equal(layer.running_mean, before.running_mean)


def draw_averages(layer: GroupedBatchNorm, offset: float, draw: torch.Generator) -> None:
    layer.running_mean.copy_(torch.randn(layer.num_features, generator=draw) + offset)
    layer.running_var.uniform_(0.5, 2, generator=draw)


def exact_output(case: Case, x: Tensor, weight: Any, bias: Any, layer: GroupedBatchNorm) -> Tensor:
    if case.training:
        return oracle.normalize(x, weight, bias, case.channels_per_group, case.sizes(), EPS)
    alpha = layer.state_dict().get("alpha", torch.zeros(())).double()  # float32, as in the layer
    mean, var = layer.running_mean.double(), layer.running_var.double()
    return oracle.infer_with_gradient(x, mean, var, weight, bias, alpha, case.channels_per_group, EPS)


def check_averages(case: Case, x: Tensor, before: GroupedBatchNorm, layer: GroupedBatchNorm) -> None:
    over = (0, *range(2, x.dim()))
    var, mean = torch.var_mean(x, over, correction=0)
    old_mean, old_var = before.running_mean.double(), before.running_var.double()
    close(layer.running_mean, 0.9 * old_mean + 0.1 * mean, case, "running_mean")
    wanted = 0.9 * old_var + 0.1 * var + 0.09 * (mean - old_mean).square()
    close(layer.running_var, wanted, case, "running_var")
    assert layer.num_batches_tracked == 1


def close(found: Tensor, wanted: Tensor, case: Case, what: str) -> None:
    """Relative to the largest value. A large offset costs digits: the oracle's in float64, the layer's in float32."""
    tolerance = max(TOLERANCE[found.dtype], TOLERANCE[case.dtype])
    tolerance += case.offset * (1e-9 if case.dtype == torch.float64 else 1e-5)
    scale = max(1.0, float(wanted.detach().abs().max()))
    error = float((found.detach().double() - wanted.detach()).abs().max())
    assert error <= tolerance * scale, f"{what}: {error:.2e} of {scale:.2e}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler about itself
@pytest.mark.parametrize("seed", range(32))
def test_compiled_layers_are_eager_layers(seed) -> None:
    """Training and inference of a random layer, with vectors of alphas and all kinds of strides."""
    draw = torch.Generator().manual_seed(seed)

    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draw))

    per, groups, rank = between(1, 3), between(1, 4), between(2, 4)
    channels, examples = per * groups, between(4, 7)
    layer = GroupedBatchNorm(channels, per, (None, 2, 3)[between(0, 2)], affine=between(0, 3) > 0, eps=0.1)
    layer.alpha = torch.rand(channels, generator=draw) * (torch.rand(channels, generator=draw) > 0.4)
    layer.running_mean.normal_(generator=draw)
    layer.train(seed % 2 == 0 and (rank > 2 or layer.examples_per_group is None))  # a group needs two values
    x = torch.randn(examples, channels, *(between(2, 6) for _ in range(rank - 2)), generator=draw)
    x = lay_out(x, LAYOUTS[seed % 4])
    torch._dynamo.reset()
    eager, compiled = copy.deepcopy(layer), torch.compile(layer)
    results = []
    for run, one in ((compiled, layer), (eager, eager)):
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        y = run(leaf)
        y.sin().sum().backward()
        results.append([y, leaf.grad, *(p.grad for p in one.parameters()), *one.buffers()])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="module", params=["triton"] if INTERPRETED else ["plain", "cpu"])
def backend(request: pytest.FixtureRequest) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "plain":
            patch.setattr(routing, "has_kernels", lambda x: False)
        elif request.param == "triton":  # the kernels of GPUs, on tensors of the CPU
            patch.setattr(routing, "has_kernels", lambda x: x.dtype in routing.FUSED_TYPES)
            for name in ("forward", "forward_and_track", "backward", "infer"):
                patch.setattr(operators, f"_{name}", getattr(operators, f"_cuda_{name}"))
        elif not cpu.loaded:
            pytest.skip(cpu.status)
        yield request.param


def fuzz(count: int) -> Any:
    phases = (Phase.explicit, Phase.generate, Phase.shrink)
    checks = list(HealthCheck)  # of the time that cases take, above all
    return settings(
        max_examples=count, derandomize=True, database=None, deadline=None, phases=phases, suppress_health_check=checks
    )


# Past failures: rounding between the steps of an update, statistics in half precision, weights of float64 in float32.
ROUNDED_AVERAGES = Case(
    2, 1, 2, (), None, "contiguous", torch.bfloat16, True, False, 0.0, True, 1000.0, (False, False, False), 0
)
HALF_STATISTICS = Case(
    1, 1, 2, (), None, "contiguous", torch.bfloat16, True, False, 0.0, False, 0.0, (False, False, False), 0
)
WEIGHTS_IN_FLOAT32 = Case(
    1, 1, 1, (), None, "contiguous", torch.float64, False, False, 0.3, False, 0.0, (False, False, False), 0
)


@fuzz(SHORT)
@example(case=ROUNDED_AVERAGES)
@example(case=HALF_STATISTICS)
@example(case=WEIGHTS_IN_FLOAT32)
@given(case=cases)
def test_a_few_random_cases(backend, case) -> None:
    check(case)


@pytest.mark.slow
@fuzz(LONG)
@given(case=cases)
def test_many_random_cases(backend, case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is missing")
def test_many_random_cases_by_tritons_interpreter() -> None:
    """In a process of its own: triton asks for the interpreter when it is imported, and then for good."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "slow", "-p", "no:cacheprovider", "-p", "no:xdist", __file__],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
