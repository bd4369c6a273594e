"""The mathematics of grouped batch normalisation, on tensors and without state (sections 3.1, 3.2, 3.4 of the paper).

For every example n and channel c there are the mean m[n, c] and the variance v[n, c] over space. Every statistic here
is an average of those two small (N, C) tables over a group of examples, of channels, or of both, by the law of total
variance: the variance of a group is the mean of the variances plus the variance of the means. That form does not
cancel, as the mean of squares less the square of the mean would. What follows is one pass over the data.

Every forward and backward pass in training goes through :func:`grouped_batch_norm`. It has four ways to the same
numbers: the fused kernel, torch's own batch norm kernel where the group is the whole batch, torch operators with a
hand-written gradient, and :func:`grouped_batch_norm_reference`, which is the plainest and the oracle of the others.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from betternorm import kernel

ProcessGroup = Any  # torch.distributed.ProcessGroup, which builds of torch without distributed support do not have

# Statistics are kept for the backward pass where they are less than this part of the input, and computed again
# where they are more (a ghost size of 2 on a 4x4 map would keep 6 %).
KEEP_STATISTICS_BELOW = 1 / 64


def grouped_batch_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    channels_per_group: int = 1,
    examples_per_group: int | None = None,
    eps: float = 1e-5,
    process_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Normalise with the statistics of groups of examples, channels and space.

    .. math::
        y = \gamma \frac{x - \mu_g}{\sqrt{\sigma_g^2 + \epsilon}} + \beta

    The N examples fall into ceil(N / examples_per_group) runs whose lengths differ by at most one; ``None`` is the
    whole batch. Gradients flow through the statistics.

    Args:
        x: (N, C, *).
        weight, bias: gamma and beta, (C), or None.
        process_group: where given, the examples of all its processes, in the order of rank, are the batch.

    Returns:
        The output, and the mean and biased variance of every channel over the whole batch, for moving averages; the
        two carry no gradient.
    """
    if process_group is not None and dist.get_world_size(process_group) > 1:
        return _across_processes(x, weight, bias, channels_per_group, examples_per_group, eps, process_group)
    groups = number_of_groups(x.shape[0], examples_per_group)
    if kernel.serves(x, channels_per_group) and (groups > 1 or channels_per_group > 1 or x.is_contiguous()):
        if torch.compiler.is_compiling():
            # Straight to the operator: torch.compile makes every gradient that it hands to a Function contiguous, which
            # for channels_last is a copy there and a copy back.
            y, _, _, mean, var = kernel.forward(x, weight, bias, groups, channels_per_group, eps, True)
            return y, mean, var
    elif groups == 1 and channels_per_group == 1 and _same_type(x, weight, bias):
        return _whole_batch(x, weight, bias, eps)
    elif torch.compiler.is_compiling():
        # The compiler fuses the plain form better than it could a function that is opaque to it.
        return _plain(x, weight, bias, channels_per_group, groups, eps)
    if torch._C._are_functorch_transforms_active():
        return _plain(x, weight, bias, channels_per_group, groups, eps)  # which torch.func can transform
    result = _Grouped.apply(x, weight, bias, channels_per_group, groups, eps)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor, Tensor], result)


def grouped_batch_norm_reference(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    channels_per_group: int = 1,
    examples_per_group: int | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`grouped_batch_norm`, group by group as one would explain it, left to autograd."""
    outputs = []
    for examples in x.tensor_split(number_of_groups(x.shape[0], examples_per_group)):
        group = examples.unflatten(1, (-1, channels_per_group))
        over = (0, *range(2, group.dim()))
        var, mean = torch.var_mean(group, over, correction=0, keepdim=True)
        outputs.append(((group - mean) / torch.sqrt(var + eps)).flatten(1, 2))
    y = _affine(torch.cat(outputs), weight, bias)
    var, mean = torch.var_mean(x.detach(), (0, *range(2, x.dim())), correction=0)
    return y, mean, var


def weighed_batch_norm(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    alpha: Tensor | None = None,
    channels_per_group: int = 1,
    eps: float = 1e-5,
) -> Tensor:
    r"""Inference example weighing: normalise with moving averages and the example's own statistics (section 3.1).

    With weight :math:`\alpha` on the example's moments, m and v, and the rest on the moving ones, M and V,

    .. math::
        \mu = (1 - \alpha) M + \alpha m, \qquad
        \sigma^2 = (1 - \alpha) V + \alpha v + \alpha (1 - \alpha) (M - m)^2

    both then averaged over the channels of a group. An example is normalised by itself: its output does not depend on
    the others in the batch. ``alpha=None`` is 0; with one channel a group that is torch's batch norm, to the bit.
    """
    if (alpha is None and channels_per_group == 1) or x.numel() == 0:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, eps)
    tensors = (x, running_mean, running_var, weight, bias, alpha)
    needs_gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    # Whoever loads an exported graph may not have this package.
    fused = not needs_gradient and not torch.compiler.is_exporting() and kernel.serves(x, channels_per_group)
    if alpha is not None and fused and not torch.compiler.is_compiling():
        return kernel.infer(x, running_mean, running_var, weight, bias, alpha, channels_per_group, eps)
    mean, var = running_mean[None], running_var[None]
    if alpha is not None:
        # In a compiled graph the pass that writes is left to the compiler, which joins it with what follows.
        own_mean, own_var = kernel.example_moments(x, running_mean) if fused else _example_moments(x)
        mean, var = (
            mean + alpha * (own_mean - mean),
            (1 - alpha) * var + alpha * own_var + alpha * (1 - alpha) * (mean - own_mean).square(),
        )
    mean, var = _total(mean, var, lambda table: _over_channels(table, channels_per_group))
    return _normalise(x, mean, var, weight, bias, eps)


def number_of_groups(examples: int, examples_per_group: int | None) -> int:
    """ceil(examples / examples_per_group), and one group where the size is None."""
    return 1 if examples_per_group is None else -(-examples // examples_per_group)


def update_moving_averages(
    running_mean: Tensor, running_var: Tensor, mean: Tensor, var: Tensor, momentum: float
) -> None:
    """Move the averages of x and of x² toward those of the batch, in place.

    They are kept as mean and variance, so the variance takes up the distance between the two means:
    (1 - t) V + t v + t (1 - t) (m - M)², with t the momentum.
    """
    if kernel.move(running_mean, running_var, mean, var, momentum):
        return
    with torch.no_grad():
        step = mean.to(running_mean.dtype) - running_mean
        running_var.mul_(1 - momentum).add_(var, alpha=momentum)
        running_var.addcmul_(step, step, value=momentum * (1 - momentum))
        # Not a step from where it is: infinity would turn into NaN one batch later, and in torch's layer it does not.
        running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)


# ---- training, the four ways ----


def _whole_batch(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Torch's own kernel, which tells the batch's statistics only through moving averages, the variance unbiased."""
    count = x.numel() // x.shape[1]
    dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    mean, var = x.new_zeros(x.shape[1], dtype=dtype), x.new_zeros(x.shape[1], dtype=dtype)
    y = F.batch_norm(x, mean, var, weight, bias, True, 1.0, eps)
    return y, mean, var * ((count - 1) / count)


def _plain(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, channels_per_group: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    mean, var = _example_moments(x)
    y_mean, y_var = _total(mean, var, lambda table: _over_group(table, channels_per_group, groups))
    batch_mean, batch_var = _total(mean.detach(), var.detach(), lambda table: table.mean(0, keepdim=True))
    return _normalise(x, y_mean, y_var, weight, bias, eps), batch_mean[0], batch_var[0]


class _Grouped(torch.autograd.Function):
    """Grouped batch norm with a hand-written gradient, by the fused kernel or by torch operators.

    Kept for the backward pass: x, weight, and two numbers a group.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        channels_per_group: int,
        groups: int,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if kernel.serves(x, channels_per_group):
            y, mean, rstd, batch_mean, batch_var = kernel.forward(
                x, weight, bias, groups, channels_per_group, eps, True
            )
        else:
            mean, rstd, batch_mean, batch_var = _statistics(x, channels_per_group, groups, eps)
            centred = x - _by_example(mean, x, channels_per_group)
            y = _affine(centred * _by_example(rstd, x, channels_per_group), weight, bias).to(x.dtype)
        _keep(ctx, x, weight, bias, channels_per_group, groups, eps, mean, rstd)
        ctx.mark_non_differentiable(batch_mean, batch_var)
        return y, batch_mean, batch_var

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        need_dx, need_dweight, need_dbias = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # Somebody differentiates the gradient: through the plain form, where autograd sees every step.
            return (*_differentiable_gradients(ctx, dy, x, weight), None, None, None)
        per, groups = ctx.channels_per_group, ctx.groups
        if kernel.serves(x, per):
            if mean is None:
                _, mean, rstd, *_ = kernel.forward(x, None, None, groups, per, ctx.eps, False)
            dx, dweight, dbias = kernel.backward(dy, x, weight, mean, rstd, groups, need_dx)
        else:
            if mean is None:
                mean, rstd, *_ = _statistics(x, per, groups, ctx.eps)
            dx, dweight, dbias = _gradients(dy, x, weight, mean, rstd, per, groups)
        return (
            dx if need_dx else None,
            dweight.to(weight.dtype) if need_dweight else None,
            dbias.to(ctx.bias_type) if need_dbias else None,
            None,
            None,
            None,
        )


def _keep(
    ctx: Any,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    channels_per_group: int,
    groups: int,
    eps: float,
    mean: Tensor,
    rstd: Tensor,
) -> None:
    ctx.channels_per_group, ctx.groups, ctx.eps = channels_per_group, groups, eps
    ctx.bias_type = None if bias is None else bias.dtype
    small = mean.numel() + rstd.numel() <= KEEP_STATISTICS_BELOW * x.numel()
    ctx.save_for_backward(x, weight, mean if small else None, rstd if small else None)


def _setup_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, groups, channels_per_group, eps, _ = inputs
    _, mean, rstd, batch_mean, batch_var = output
    _keep(ctx, x, weight, bias, channels_per_group, groups, eps, mean, rstd)
    ctx.mark_non_differentiable(batch_mean, batch_var, mean, rstd)


def _operator_backward(ctx: Any, dy: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
    with torch.no_grad():  # compiled graphs are differentiated once
        return (*_Grouped.backward(ctx, dy), None)


torch.library.register_autograd(
    "betternorm::forward", _operator_backward, setup_context=_setup_operator, lib=kernel._operators
)


def _statistics(x: Tensor, channels_per_group: int, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean and 1 / std of every group, (groups, C / channels_per_group), and mean and variance over the batch, (C)."""
    mean, var = _example_moments(x)
    batch_mean, batch_var = _total(mean, var, lambda table: table.mean(0, keepdim=True))
    mean, var = _total(mean, var, lambda table: _over_group(table, channels_per_group, groups))
    runs = _runs(x.shape[0], groups)
    mean, var = (
        torch.cat([t[start:stop:size, ::channels_per_group] for start, stop, size in runs]) for t in (mean, var)
    )
    return mean, torch.rsqrt(var + eps), batch_mean[0], batch_var[0]


def _gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    channels_per_group: int,
    groups: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx = rstd (dxhat - mean over the group of dxhat - xhat * mean over the group of dxhat * xhat)."""
    kind = mean.dtype
    dy = dy.to(kind)
    xhat = (x - _by_example(mean, x, channels_per_group)) * _by_example(rstd, x, channels_per_group)
    space = tuple(range(2, x.dim()))
    sum_dy, sum_dy_xhat = (t.sum(space) if space else t for t in (dy, dy * xhat))
    gamma = 1.0 if weight is None else weight.to(kind)
    count = x[0, 0].numel()
    mean_dxhat, mean_dxhat_xhat = (
        _along_space(_over_group(gamma * table / count, channels_per_group, groups), x)
        for table in (sum_dy, sum_dy_xhat)
    )
    dxhat = dy if weight is None else dy * _along_space(weight.to(kind), x)
    dx = (dxhat - mean_dxhat - xhat * mean_dxhat_xhat) * _by_example(rstd, x, channels_per_group)
    return dx.to(x.dtype), sum_dy_xhat.sum(0), sum_dy.sum(0)


def _differentiable_gradients(
    ctx: Any, dy: Tensor, x: Tensor, weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    y, _, _ = _plain(x, weight, None, ctx.channels_per_group, ctx.groups, ctx.eps)
    need_dx, need_dweight, need_dbias = ctx.needs_input_grad[:3]
    wanted = [t for t, need in ((x, need_dx), (weight, need_dweight)) if need and t is not None]
    found = list(torch.autograd.grad(y, wanted, dy, create_graph=True)) if wanted else []
    dbias = dy.sum((0, *range(2, dy.dim()))).to(ctx.bias_type) if need_dbias else None
    return found.pop(0) if need_dx else None, found.pop(0) if need_dweight else None, dbias


# ---- across processes ----


def _across_processes(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    channels_per_group: int,
    examples_per_group: int | None,
    eps: float,
    process_group: ProcessGroup,
) -> tuple[Tensor, Tensor, Tensor]:
    """Only the two (N, C) tables travel; the examples of all processes, in the order of rank, are the batch."""
    mean, var = _example_moments(x)
    sizes = [torch.zeros(1, dtype=torch.int64, device=x.device) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(sizes, torch.tensor([x.shape[0]], device=x.device), group=process_group)
    counts = [int(size) for size in sizes]
    tables = torch.cat((mean, var), 1)
    gathered = cast(Tensor, _Gather.apply(tables, counts, process_group))  # type: ignore[no-untyped-call]
    mean, var = gathered.chunk(2, 1)
    groups = number_of_groups(sum(counts), examples_per_group)
    if sum(counts) // groups * channels_per_group * x[0, 0].numel() == 1:  # known only here, to all processes alike
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.size()}")
    batch_mean, batch_var = _total(mean.detach(), var.detach(), lambda table: table.mean(0, keepdim=True))
    mean, var = _total(mean, var, lambda table: _over_group(table, channels_per_group, groups))
    rank = dist.get_rank(process_group)
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    return _normalise(x, mean[own], var[own], weight, bias, eps), batch_mean[0], batch_var[0]


class _Gather(torch.autograd.Function):
    """Rows of all processes, in the order of rank; the gradient of a row is the sum over the processes that used it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int], process_group: ProcessGroup) -> Tensor:
        ctx.counts, ctx.process_group = counts, process_group
        # Collectives want equal shapes, and batches need not be equal.
        padded = F.pad(rows, (0, 0, 0, max(counts) - rows.shape[0])).contiguous()
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=process_group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.process_group)
        return grad.split(ctx.counts)[dist.get_rank(ctx.process_group)], None, None


# ---- tables of (N, C) ----


def _example_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over space of every example and channel, (N, C), at least in float32."""
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    if x.dim() == 2:
        return x, torch.zeros_like(x)
    space = tuple(range(2, x.dim()))
    # The mean by itself: the one that var_mean has beside the variance is NaN where a value is infinite.
    return x.mean(space), torch.var(x, space, correction=0)


def _total(mean: Tensor, var: Tensor, average: Any) -> tuple[Tensor, Tensor]:
    """The law of total variance: mean and variance of the union, given the ``average`` over its parts."""
    of_all = average(mean)
    return of_all, average(var + (mean - of_all).square())


def _over_group(table: Tensor, channels_per_group: int, groups: int) -> Tensor:
    return _over_channels(_over_examples(table, groups), channels_per_group)


def _over_channels(table: Tensor, channels_per_group: int) -> Tensor:
    """Every entry replaced by the mean over its channel group."""
    if channels_per_group == 1:
        return table
    mean: Tensor = table.unflatten(1, (-1, channels_per_group)).mean(2)
    return mean.repeat_interleave(channels_per_group, 1)


def _over_examples(table: Tensor, groups: int) -> Tensor:
    """Every row replaced by the mean over its group of examples."""
    parts = []
    for start, stop, size in _runs(table.shape[0], groups):
        group = table[start:stop].unflatten(0, (-1, size))
        parts.append(group.mean(1, keepdim=True).expand_as(group).flatten(0, 1))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _by_example(table: Tensor, x: Tensor, channels_per_group: int) -> Tensor:
    """(groups, C / channels_per_group) to (N, C, 1, ...)."""
    parts = []
    for start, stop, size in _runs(x.shape[0], table.shape[0]):
        count = (stop - start) // size
        parts.append(table[:count].repeat_interleave(size, 0))
        table = table[count:]
    return _along_space(torch.cat(parts).repeat_interleave(channels_per_group, 1), x)


def _runs(examples: int, groups: int) -> list[tuple[int, int, int]]:
    """The examples as runs of groups of one size: first example, end, size. The larger groups come first."""
    size, larger = examples // groups, examples % groups  # torch.compile knows no divmod of sizes that vary
    middle = larger * (size + 1)
    return [run for run in ((0, middle, size + 1), (middle, examples, size)) if run[0] < run[1]]


def _normalise(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """One pass over the data with tables of (N, C) or (1, C)."""
    scale = torch.rsqrt(var + eps)
    if weight is not None:
        scale = scale * weight
    y = (x - _along_space(mean, x)) * _along_space(scale, x)
    return (y if bias is None else y + _along_space(bias, x)).to(x.dtype)


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        y = y * _along_space(weight, y)
    return y if bias is None else y + _along_space(bias, y)


def _along_space(table: Tensor, x: Tensor) -> Tensor:
    """(..., C) to (..., C, 1, ...), to be broadcast against x."""
    return table.reshape(*table.shape, *(1,) * (x.dim() - 2))


def _same_type(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether torch's kernel keeps statistics in float32: parameters of x's type, or float32 ones for half types."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    wanted = torch.float32 if half else x.dtype
    return (weight is not None or not half) and all(t is None or t.dtype == wanted for t in (weight, bias))
