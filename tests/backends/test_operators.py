"""The operators as torch's dispatcher sees them: schemas, shapes, gradients, and what tracing tools see."""

from __future__ import annotations

import pytest
import torch

from betternorm import GhostBatchNorm, functional
from betternorm.backends import cpu

pytestmark = pytest.mark.skipif(not cpu.loaded, reason=cpu.status)

X = torch.randn(6, 8, 3, 3)
LAST = X.to(memory_format=torch.channels_last)
WEIGHT, BIAS = torch.randn(8), torch.randn(8)
MEAN, RSTD = torch.randn(2, 4), torch.rand(2, 4) + 0.5
MOVING = torch.randn(8), torch.rand(8) + 0.5
ALPHAS = torch.rand(8) * (torch.arange(8) % 2)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("forward", (X, WEIGHT, BIAS, 2, 2, 1e-5)),
        ("forward", (LAST.bfloat16(), None, None, 3, 1, 1e-5)),
        ("forward", (X.clone().requires_grad_(), WEIGHT.clone().requires_grad_(), BIAS, 2, 2, 1e-5)),
        ("forward_and_track", (X, WEIGHT, BIAS, 2, 2, 1e-5, *MOVING, 0.1, torch.tensor(3))),
        ("forward_and_track", (X, WEIGHT, BIAS, 2, 2, 1e-5, *MOVING, 0.1, None)),
        ("backward", (torch.randn_like(X), X, WEIGHT, MEAN, RSTD, True)),
        ("backward", (torch.randn_like(LAST), LAST, None, MEAN, RSTD, False)),
        ("infer", (LAST, *MOVING, WEIGHT, BIAS, torch.tensor(0.3), 2, 1e-5)),
        ("infer", (LAST, *MOVING, WEIGHT, BIAS, ALPHAS, 2, 1e-5)),
        ("infer_backward", (torch.randn_like(X), X, *MOVING, WEIGHT, ALPHAS, 2, 1e-5, True)),
        ("infer_backward", (torch.randn_like(LAST), LAST, *MOVING, None, torch.tensor(0.3), 1, 1e-5, False)),
    ],
)
def test_the_operators_keep_the_contract_of_torch_library(name, arguments) -> None:
    results = torch.library.opcheck(getattr(torch.ops.betternorm, name).default, arguments)
    assert set(results.values()) == {"SUCCESS"}


STRIDES = {
    "transposed": lambda: torch.randn(6, 8, 3, 5).transpose(2, 3),
    "permuted": lambda: torch.randn(3, 8, 6, 5).permute(2, 1, 0, 3),
    "cropped": lambda: torch.randn(6, 8, 5, 5)[:, :, 1:4, 1:],
    "every other": lambda: torch.randn(6, 8, 5, 5)[:, :, ::2],
    "channels_last, chunk": lambda: torch.randn(6, 16, 3, 3).to(memory_format=torch.channels_last).chunk(2, 1)[1],
    "channels_last, crop": lambda: torch.randn(6, 8, 5, 5).to(memory_format=torch.channels_last)[:, :, 1:, 1:4],
    "expanded": lambda: torch.randn(1, 8, 3, 3).expand(6, 8, 3, 3),
    "one value of each": lambda: torch.randn(6, 8, 3, 3)[:, :, :1, :1],
    "rank 2, transposed": lambda: torch.randn(8, 6).t(),
    "rank 3, channels last": lambda: torch.randn(6, 5, 8).transpose(1, 2),
    "rank 5, permuted": lambda: torch.randn(6, 8, 2, 3, 4).transpose(2, 4),
}


@pytest.mark.parametrize("layout", STRIDES)
def test_shape_functions_and_kernels_agree_on_strides(layout) -> None:
    x = STRIDES[layout]()
    dy = torch.randn(x.shape)
    calls = {
        "forward": (x, WEIGHT, BIAS, 2, 2, 1e-5),
        "forward_and_track": (x, WEIGHT, BIAS, 2, 2, 1e-5, *MOVING, 0.1, torch.tensor(3)),
        "backward": (dy, x, WEIGHT, MEAN, RSTD, True),
        "infer": (x, *MOVING, WEIGHT, BIAS, ALPHAS, 2, 1e-5),
        "infer_backward": (dy, x, *MOVING, WEIGHT, ALPHAS, 2, 1e-5, True),
    }
    for name, arguments in calls.items():
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(getattr(torch.ops.betternorm, name).default, arguments, test_utils=checks)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit's word on itself
@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_a_trace_is_the_network(alpha) -> None:
    layer = GhostBatchNorm(8, 4, alpha=alpha).eval()
    layer.running_mean.normal_()
    with torch.no_grad():
        traced = torch.jit.trace(layer, X)
        for x in (X, torch.randn(2, 8, 3, 3)):
            torch.testing.assert_close(traced(x), layer(x), rtol=1e-5, atol=1e-5)


def normalize(x: torch.Tensor) -> torch.Tensor:
    return functional.grouped_batch_norm(x, WEIGHT.to(x.dtype), BIAS.to(x.dtype), 2, 3)[0]


def infer(x: torch.Tensor) -> torch.Tensor:
    moving = (t.to(x.dtype) for t in MOVING)
    alpha = torch.tensor(0.3, dtype=x.dtype)
    return functional.weighed_batch_norm(x, *moving, WEIGHT.to(x.dtype), None, alpha, 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit's word on itself
@pytest.mark.parametrize("function", [normalize, infer])
def test_forward_mode_and_functional_transforms_are_right(function) -> None:
    x, tangent = torch.randn(4, 8, 2, 2), torch.randn(4, 8, 2, 2)
    exact = torch.func.jvp(function, (x.double(),), (tangent.double(),))[1]
    _, by_func = torch.func.jvp(function, (x,), (tangent,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        by_dual = torch.autograd.forward_ad.unpack_dual(function(dual)).tangent
    torch.testing.assert_close(by_func.double(), exact, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(by_dual.double(), exact, rtol=1e-4, atol=1e-4)
    many = torch.randn(3, 4, 8, 2, 2)
    torch.testing.assert_close(torch.vmap(function)(many), torch.stack([function(x) for x in many]))
    forward_mode = torch.autograd.functional.jacobian(function, x[:2], strategy="forward-mode", vectorize=True)
    torch.testing.assert_close(forward_mode, torch.autograd.functional.jacobian(function, x[:2]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("function", [normalize, infer])
def test_batched_gradients_are_those_one_by_one(function) -> None:
    x = torch.randn(4, 8, 2, 2, requires_grad=True)
    y = function(x)
    several = torch.randn(3, *y.shape)
    (together,) = torch.autograd.grad(y, x, several, is_grads_batched=True, retain_graph=True)
    alone = [torch.autograd.grad(y, x, dy, retain_graph=True)[0] for dy in several]
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-5, atol=1e-5)
