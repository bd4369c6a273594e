"""The mathematics, by the fused kernel and by torch operators, against float64."""

from __future__ import annotations

import itertools

import numpy as np
import oracle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from betternorm.functional import (
    grouped_batch_norm,
    grouped_batch_norm_reference,
    number_of_groups,
    update_moving_averages,
    weighed_batch_norm,
)

# examples, examples_per_group, the sizes of the groups
GROUPS = [
    (8, 4, [4, 4]),
    (8, None, [8]),
    (8, 8, [8]),
    (8, 1, [1] * 8),
    (5, 8, [5]),
    (7, 4, [4, 3]),
    (9, 8, [5, 4]),
    (10, 4, [4, 3, 3]),
    (11, 3, [3, 3, 3, 2]),
    (33, 32, [17, 16]),
]

# Shapes that end in the middle of whatever a fast path takes at a time: no space, 16 values, one more, thousands.
SHAPES = [
    ((7, 6), 3),
    ((7, 48), 1),
    ((7, 6, 1, 1), 2),
    ((7, 36, 1, 1), 12),
    ((7, 19, 5), 1),
    ((7, 6, 4, 4), 1),
    ((7, 6, 4, 4), 6),
    ((7, 67, 3, 3), 1),
    ((7, 132, 3, 3), 4),
    ((7, 6, 17, 1), 2),
    ((7, 5, 7, 43), 1),
    ((7, 2, 67, 70), 2),
    ((7, 35, 16, 16), 5),
    ((7, 6, 2, 3, 5), 3),
    ((7, 40, 3, 4, 5), 1),
]


def case(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x with unlike channels and examples, gamma, beta and the gradient of the output."""
    offsets = torch.randn(shape[0], shape[1], *(1,) * (len(shape) - 2))
    x = torch.randn(shape) * torch.rand(shape[1]).view(-1, *(1,) * (len(shape) - 2)).add(0.5) + offsets
    return tuple(t.to(dtype) for t in (x, torch.randn(shape[1]), torch.randn(shape[1]), torch.randn(shape)))


def layouts(x: Tensor) -> dict[str, Tensor]:
    found = {"contiguous": x}
    if x.dim() in (4, 5):
        last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        found["channels_last"] = x.contiguous(memory_format=last)
    # A slice with gaps: neither format.
    found["strided"] = torch.stack((x, x), -1)[..., 0]
    return found


def gradients(y: Tensor, dy: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, inputs, dy)


def close(actual: Tensor, expected: Tensor | np.ndarray, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(
        actual.detach().double(), torch.as_tensor(expected).detach(), rtol=tolerance, atol=tolerance
    )


# ---- training ----


def check_training(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor, per: int, size: int | None, sizes: list[int]):
    x, weight, bias = (t.detach().requires_grad_() for t in (x, weight, bias))
    y, mean, var = grouped_batch_norm(x, weight, bias, per, size)
    expected = oracle.normalize(x, weight, bias, per, sizes)
    close(y, expected)
    scale = x[0].numel() ** 0.5  # of a sum's rounding
    found, wanted = (gradients(output, dy.to(output.dtype), x, weight, bias) for output in (y, expected))
    # Two or three values that lie close together have a small standard deviation, which the gradient is divided by.
    close(found[0], wanted[0].double(), 1e-5 * max(1.0, wanted[0].abs().max().item()))
    close(found[1], wanted[1].double(), 1e-6 * scale)
    close(found[2], wanted[2].double(), 1e-6 * scale)
    over = (0, *range(2, x.dim()))
    close(mean, oracle.numpy(x).mean(over))
    close(var, oracle.numpy(x).var(over))
    assert not mean.requires_grad
    assert not var.requires_grad
    assert y.dtype == x.dtype


@pytest.mark.parametrize(("examples", "size", "sizes"), GROUPS)
@pytest.mark.parametrize("per", [1, 3])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.usefixtures("way")
def test_examples_fall_into_groups_that_differ_by_at_most_one(examples, size, sizes, per, layout) -> None:
    x, weight, bias, dy = case((examples, 6, 3, 3))
    check_training(layouts(x)[layout], weight, bias, dy, per, size, sizes)


@pytest.mark.parametrize(("shape", "per"), SHAPES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided"])
@pytest.mark.usefixtures("way")
def test_every_shape_and_layout(shape, per, layout) -> None:
    x, weight, bias, dy = case(shape)
    if layout not in layouts(x):
        pytest.skip("this rank has no such format")
    check_training(layouts(x)[layout], weight, bias, dy, per, 3, [3, 2, 2])


@pytest.mark.parametrize("per", [1, 4])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.usefixtures("way", "two_threads")
def test_work_that_is_shared_between_threads(per, layout) -> None:
    x, weight, bias, dy = case((18, 36, 12, 12))
    check_training(layouts(x)[layout], weight, bias, dy, per, 4, [4, 4, 4, 3, 3])


@pytest.mark.parametrize(("shape", "per"), SHAPES)
def test_the_reference_is_right(shape, per) -> None:
    x, weight, bias, dy = case(shape, torch.float64)
    x, weight, bias = (t.requires_grad_() for t in (x, weight, bias))
    y, mean, var = grouped_batch_norm_reference(x, weight, bias, per, 3)
    expected = oracle.normalize(x, weight, bias, per, [3, 2, 2])
    close(y, expected, 1e-10)
    for found, wanted in zip(*(gradients(t, dy, x, weight, bias) for t in (y, expected)), strict=True):
        close(found, wanted, 1e-9)
    over = (0, *range(2, x.dim()))
    close(mean, oracle.numpy(x).mean(over), 1e-10)
    close(var, oracle.numpy(x).var(over), 1e-10)


def test_number_of_groups_never_makes_one_larger_than_asked_or_two_that_differ_by_more_than_one() -> None:
    for examples, size in itertools.product(range(1, 80), range(1, 80)):
        groups = number_of_groups(examples, size)
        sizes = [len(part) for part in torch.arange(examples).tensor_split(groups)]
        assert max(sizes) <= size
        assert max(sizes) - min(sizes) <= 1
        assert groups == 1 or max(sizes) * (groups - 1) < examples + groups  # no more groups than needed
        if size < examples and size > 2:
            assert min(sizes) > 1
    assert number_of_groups(1000, None) == 1


@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("size", [2, None])
@pytest.mark.usefixtures("way")
def test_gamma_and_beta_are_optional(with_weight, with_bias, size) -> None:
    x, weight, bias, dy = case((4, 6, 3, 3))
    x.requires_grad_()
    weight, bias = (t.requires_grad_() if given else None for t, given in ((weight, with_weight), (bias, with_bias)))
    given = [t for t in (x, weight, bias) if t is not None]
    y, _, _ = grouped_batch_norm(x, weight, bias, 1, size)
    expected = oracle.normalize(x, weight, bias, 1, [2, 2] if size else [4])
    close(y, expected)
    for found, wanted in zip(*(gradients(t, dy.to(t.dtype), *given) for t in (y, expected)), strict=True):
        close(found, wanted.double())


@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "weight and bias"])
@pytest.mark.usefixtures("way")
def test_only_the_gradients_asked_for(wanted) -> None:
    x, weight, bias, dy = case((4, 6, 3, 3))
    for name, tensor in {"x": x, "weight": weight, "bias": bias}.items():
        tensor.requires_grad_(name in wanted.split())
    asked = [t for t in (x, weight, bias) if t.requires_grad]
    found = gradients(grouped_batch_norm(x, weight, bias, 2, 2)[0], dy, *asked)
    expected = gradients(oracle.normalize(x, weight, bias, 2, [2, 2]), dy.double(), *asked)
    for one, other in zip(found, expected, strict=True):
        close(one, other.double())


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.usefixtures("way")
def test_a_gradient_of_any_layout(layout) -> None:
    x, weight, bias, dy = case((4, 6, 3, 5))
    x = layouts(x)[layout].requires_grad_()
    expected = gradients(oracle.normalize(x, weight, bias, 1, [2, 2]), dy.double(), x)[0].double()
    for name, gradient in (layouts(dy) | {"transposed": dy.transpose(2, 3).contiguous().transpose(2, 3)}).items():
        y, _, _ = grouped_batch_norm(x, weight, bias, 1, 2)
        torch.testing.assert_close(gradients(y, gradient, x)[0].double(), expected, rtol=1e-5, atol=1e-5, msg=name)
    y, _, _ = grouped_batch_norm(x, weight, bias, 1, 2)
    all_ones = gradients(y.sum(), torch.ones(()), x)[0]  # arrives with strides of 0; the true gradient is 0
    torch.testing.assert_close(all_ones, torch.zeros_like(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("offset", [1e4, -1e4])
@pytest.mark.usefixtures("way")
def test_a_large_mean_costs_no_digits(size, layout, offset) -> None:
    x = layouts(torch.randn(8, 6, 9, 9) + offset)[layout]
    bn = torch.nn.BatchNorm2d(6, affine=False, momentum=1.0)
    sizes = [4, 4] if size else [8]
    expected = oracle.normalize(x, None, None, 1, sizes)
    torch_error = max(
        (bn(part).double() - oracle.normalize(part, None, None, 1, [len(part)])).abs().max() for part in x.split(sizes)
    )
    y, mean, var = grouped_batch_norm(x, examples_per_group=size)
    assert (y.double() - expected).abs().max() <= 2 * torch_error + 1e-6

    bn(x)
    count = x.numel() / 6
    rounding = abs(offset) * 2**-23  # of a mean that is kept in float32, and a tenth of it for a variance of 1
    for found, theirs, true, floor in (
        (mean, bn.running_mean, oracle.numpy(x).mean((0, 2, 3)), rounding),
        (var, bn.running_var * (count - 1) / count, oracle.numpy(x).var((0, 2, 3)), rounding / 10),
    ):
        assert np.abs(oracle.numpy(found) - true).max() <= 2 * np.abs(oracle.numpy(theirs) - true).max() + floor


@pytest.mark.parametrize("value", [0.0, 0.1, 1e4 + 0.1, -3.3e7, 1e-30])
@pytest.mark.parametrize("per", [1, 3])
@pytest.mark.usefixtures("way")
def test_the_variance_of_a_constant_is_not_negative(value, per) -> None:
    for x in layouts(torch.full((10, 6, 7, 7), value)).values():
        y, mean, var = grouped_batch_norm(x, channels_per_group=per, examples_per_group=4)
        close(mean, torch.full((6,), value).double(), 1e-6)
        assert (var >= 0).all()
        assert y.isfinite().all()
        assert (var <= (abs(value) * 1e-6) ** 2).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.usefixtures("way")
def test_a_bad_value_stays_in_its_group(bad, layout) -> None:
    x = layouts(torch.randn(8, 6, 3, 3))[layout]
    y, mean, var = grouped_batch_norm(x, channels_per_group=3, examples_per_group=4)
    worse = x.clone()
    worse[1, 2, 0, 0] = bad
    y_worse, mean_worse, var_worse = grouped_batch_norm(worse, channels_per_group=3, examples_per_group=4)
    touched = torch.zeros(8, 6, dtype=torch.bool)
    touched[:4, :3] = True
    assert torch.equal(y_worse[~touched], y[~touched])
    assert y_worse[touched].isnan().any()
    other_channels = [0, 1, 3, 4, 5]
    assert torch.equal(mean_worse[other_channels], mean[other_channels])
    assert torch.equal(var_worse[other_channels], var[other_channels])
    assert mean_worse[2].isfinite().logical_not()
    assert var_worse[2].isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("parameters", [torch.float32, "same"])
@pytest.mark.parametrize("size", [4, None])
@pytest.mark.parametrize("per", [1, 3])
def test_half_types_have_statistics_in_float32(dtype, parameters, size, per) -> None:
    """Far from zero, statistics in the half type itself would be off by whole numbers."""
    x, weight, bias, dy = (t.to(dtype) for t in case((8, 6, 5, 5)))
    x = (x + 100).requires_grad_()
    weight, bias = (t.to(x.dtype if parameters == "same" else parameters).requires_grad_() for t in (weight, bias))
    y, mean, var = grouped_batch_norm(x, weight, bias, per, size)
    assert y.dtype == dtype
    assert mean.dtype == var.dtype == torch.float32
    close(mean, oracle.numpy(x).mean((0, 2, 3)), 1e-4)
    close(var, oracle.numpy(x).var((0, 2, 3)), 1e-4)
    expected = oracle.normalize(x, weight, bias, per, [4, 4] if size else [8])
    rounding = torch.finfo(dtype).eps
    close(y, expected, 2 * rounding)
    found, wanted = (gradients(t, dy.to(t.dtype), x, weight, bias) for t in (y, expected))
    for one, other, tensor in zip(found, wanted, (x, weight, bias), strict=True):
        assert one.dtype == tensor.dtype
        close(one, other.double(), 16 * rounding)


# ---- inference ----


@pytest.mark.parametrize(("shape", "per"), SHAPES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided"])
@pytest.mark.parametrize("alpha", [0.1, 1.0])
@pytest.mark.usefixtures("way")
def test_inference_mixes_the_moments(shape, per, layout, alpha) -> None:
    x, weight, bias, _ = case(shape)
    if layout not in layouts(x):
        pytest.skip("this rank has no such format")
    moving = torch.randn(shape[1]), torch.rand(shape[1]) + 0.5
    y = weighed_batch_norm(layouts(x)[layout], *moving, weight, bias, torch.tensor(alpha), per)
    close(y, oracle.infer(x, *moving, weight, bias, alpha, per), 2e-4 if len(shape) == 2 else 2e-5)


@pytest.mark.parametrize("per", [1, 2, 6])
def test_inference_without_the_example(per) -> None:
    x, weight, bias, _ = case((5, 6, 4, 4))
    moving = torch.randn(6), torch.rand(6) + 0.5
    y = weighed_batch_norm(x, *moving, weight, bias, None, per)
    close(y, oracle.infer(x, *moving, weight, bias, 0.0, per))
    if per == 1:
        assert torch.equal(y, F.batch_norm(x, *moving, weight, bias))


@pytest.mark.usefixtures("way")
def test_the_variance_takes_up_the_distance_of_the_means() -> None:
    """M = 0, V = 1, and an example that is 2 everywhere: half and half, mean 1 and variance 0.5 + 0.25 * 4."""
    x = torch.full((1, 1, 3, 3), 2.0)
    y = weighed_batch_norm(x, torch.zeros(1), torch.ones(1), alpha=torch.tensor(0.5), eps=0.0)
    close(y, torch.full((1, 1, 3, 3), 1 / 1.5**0.5, dtype=torch.float64))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.usefixtures("way")
def test_the_example_alone_is_instance_and_group_norm(layout) -> None:
    x, weight, bias, _ = case((5, 6, 4, 4))
    moving, one = (torch.randn(6), torch.rand(6) + 0.5), torch.tensor(1.0)
    x = layouts(x)[layout]
    close(weighed_batch_norm(x, *moving, weight, bias, one, 1), F.instance_norm(x, None, None, weight, bias).double())
    close(weighed_batch_norm(x, *moving, weight, bias, one, 3), F.group_norm(x, 2, weight, bias).double())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("alpha", [None, 0.3, 1.0])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided"])
@pytest.mark.parametrize("space", [(3, 3), (1, 1), (9, 9)])
@pytest.mark.usefixtures("way")
def test_a_bad_example_never_changes_another(bad, alpha, layout, space) -> None:
    x, weight, bias, _ = case((5, 20, *space))
    moving = torch.randn(20), torch.rand(20) + 0.5
    alpha = None if alpha is None else torch.tensor(alpha)
    worse = x.clone()
    worse[1] = bad
    for per in (1, 4):
        y, y_worse = (weighed_batch_norm(layouts(t)[layout], *moving, weight, bias, alpha, per) for t in (x, worse))
        others = [0, 2, 3, 4]
        assert torch.equal(y[others], y_worse[others])
        assert not y_worse[1].isfinite().any()


@pytest.mark.parametrize("per", [1, 3])
@pytest.mark.usefixtures("way")
def test_an_example_is_the_same_in_any_batch(per) -> None:
    x, weight, bias, _ = case((9, 6, 5, 5))
    moving, alpha = (torch.randn(6), torch.rand(6) + 0.5), torch.tensor(0.2)
    together = weighed_batch_norm(x, *moving, weight, bias, alpha, per)
    alone = torch.cat([weighed_batch_norm(one[None], *moving, weight, bias, alpha, per) for one in x])
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("alpha", [None, 0.3, 1.0])
@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 2), (2, 4, 2, 3)])
@pytest.mark.parametrize("per", [1, 2])
def test_gradients_at_inference_are_exact_through_the_example_too(alpha, shape, per) -> None:
    x, weight, bias, _ = case(shape, torch.float64)
    moving = torch.randn(4).double(), torch.rand(4).double() + 0.5
    alpha = None if alpha is None else torch.tensor(alpha).double()

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return weighed_batch_norm(x, *moving, weight, bias, alpha, per)

    inputs = [t.requires_grad_() for t in (x, weight, bias)]
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


VECTORS = {
    "zeros in it": lambda channels: torch.rand(channels) * (torch.arange(channels) % 3 > 0),
    "all zero": torch.zeros,
    "all one": torch.ones,
    "one number": lambda channels: torch.tensor(0.3),
    "the number zero": lambda channels: torch.tensor(0.0),
}


@pytest.mark.parametrize("kind", VECTORS)
@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 2), (2, 4, 2, 3)])
@pytest.mark.parametrize("per", [1, 2])
def test_the_gradient_of_alpha_is_exact(kind, shape, per) -> None:
    x, weight, bias, _ = case(shape, torch.float64)
    moving = torch.randn(4).double(), torch.rand(4).double() + 0.5
    inputs = [t.requires_grad_() for t in (x, VECTORS[kind](4).double())]

    def run(x: Tensor, alpha: Tensor) -> Tensor:
        return weighed_batch_norm(x, *moving, weight, bias, alpha, per, eps=0.1)

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize("kind", VECTORS)
@pytest.mark.parametrize(("shape", "per"), SHAPES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("way")
def test_gradients_at_inference_are_those_of_float64(kind, shape, per, layout, dtype) -> None:
    x, weight, bias, dy = case(shape)
    x, dy = x.to(dtype), dy.to(dtype)
    if layout not in layouts(x):
        pytest.skip("this rank has no such format")
    channels = shape[1]
    moving, alpha = (torch.randn(channels), torch.rand(channels) + 0.5), VECTORS[kind](channels)
    leaves = [t.requires_grad_() for t in (layouts(x)[layout].detach(), weight, bias, alpha)]
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias, alpha)]
    y = weighed_batch_norm(leaves[0], *moving, *leaves[1:], per, eps=0.1)
    exact_moving = [t.double() for t in moving]
    wanted = oracle.infer_with_gradient(exact[0], *exact_moving, *exact[1:], per, 0.1)
    found = torch.autograd.grad(y, leaves, dy)
    for one, other in zip(found, torch.autograd.grad(wanted, exact, dy.double()), strict=True):
        scale = max(1.0, float(other.abs().max()))
        close(one / scale, other / scale, 1e-4 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("mean", [0.0, 1e3])
@pytest.mark.usefixtures("way")
def test_the_gradient_of_alpha_is_right_far_from_the_moving_mean(mean) -> None:
    """The fused kernel sums about the moving mean, and reads the example again where that is far."""
    x, dy = torch.randn(3, 4, 9, 9) + mean, torch.randn(3, 4, 9, 9)
    alpha = torch.tensor([0.0, 0.2, 0.9, 1.0])
    found = [t.clone().requires_grad_() for t in (x, alpha)]
    exact = [t.double().requires_grad_() for t in (x, alpha)]
    moving = torch.zeros(4), torch.ones(4)
    y = weighed_batch_norm(found[0], *moving, alpha=found[1])
    wanted = weighed_batch_norm(exact[0], *(t.double() for t in moving), alpha=exact[1])
    for one, other in zip(
        torch.autograd.grad(y, found, dy), torch.autograd.grad(wanted, exact, dy.double()), strict=True
    ):
        scale = float(other.abs().max())
        close(one / scale, other / scale, 1e-4)


def test_alphas_of_another_number_are_refused(way) -> None:
    x, moving = torch.randn(3, 6, 4, 4), (torch.zeros(6), torch.ones(6))
    kind, message = {
        "compiled": (RuntimeError, "alpha has 5 elements and the input has 6 channels"),
        "plain": (ValueError, r"alpha has shape \(5,\) and the input has 6 channels"),
    }[way]
    with pytest.raises(kind, match=message):
        weighed_batch_norm(x, *moving, alpha=torch.rand(5))


@pytest.mark.parametrize(("shape", "per"), SHAPES)
@pytest.mark.usefixtures("way")
def test_a_constant_vector_is_the_number(shape, per) -> None:
    x, weight, bias, _ = case(shape)
    moving = torch.randn(shape[1]), torch.rand(shape[1]) + 0.5
    y, wanted = (
        weighed_batch_norm(x, *moving, weight, bias, alpha, per)
        for alpha in (torch.full((shape[1],), 0.3), torch.tensor(0.3))
    )
    torch.testing.assert_close(y, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("way")
def test_inference_with_and_without_a_gradient_gives_the_same() -> None:
    x, weight, bias, _ = case((5, 6, 4, 4))
    moving, alpha = (torch.randn(6), torch.rand(6) + 0.5), torch.tensor(0.2)
    plain = weighed_batch_norm(x, *moving, weight, bias, alpha, 2)
    close(weighed_batch_norm(x.requires_grad_(), *moving, weight, bias, alpha, 2), plain.double())


@pytest.mark.parametrize("alpha", [None, 0.3])
@pytest.mark.parametrize("shape", [(0, 6), (0, 6, 4), (0, 6, 4, 4)])
@pytest.mark.usefixtures("way")
def test_inference_on_nothing_is_nothing(alpha, shape) -> None:
    alpha = None if alpha is None else torch.tensor(alpha)
    assert weighed_batch_norm(torch.empty(shape), torch.zeros(6), torch.ones(6), alpha=alpha).shape == shape


# ---- moving averages ----


@pytest.mark.parametrize("momentum", [0.0, 0.1, 0.7, 1.0])
def test_moving_averages_are_those_of_x_and_of_its_square(momentum) -> None:
    batches = [torch.randn(6, 3, 4).double() * scale + shift for scale, shift in ((1, 0), (3, 5), (0.2, -7))]
    mean, var = torch.zeros(3).double(), torch.ones(3).double()
    for batch in batches:
        batch_var, batch_mean = torch.var_mean(batch, (0, 2), correction=0)
        update_moving_averages(mean, var, batch_mean, batch_var, momentum)
    wanted_mean, wanted_var = oracle.moving_averages(batches, momentum)
    close(mean, wanted_mean, 1e-12)
    close(var, wanted_var, 1e-12)


def test_moving_averages_of_a_large_mean_do_not_cancel() -> None:
    mean, var = torch.full((1,), 1e4), torch.ones(1)
    for _ in range(100):
        update_moving_averages(mean, var, torch.full((1,), 1e4), torch.full((1,), 1e-3), 0.1)
    close(mean, torch.full((1,), 1e4).double())
    close(var, np.array([1e-3 + (1 - 1e-3) * 0.9**100]), 1e-4)
