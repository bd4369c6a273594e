"""The reference implementation in PyTorch operators: grouped batch norm and inference example weighing.

For every example n and channel c, m[n, c] and v[n, c] are the mean and variance over the spatial dimensions. All
statistics are averages of these two (N, C) tables over groups of examples, channels or both, by the law of total
variance: the variance of a group is the mean of the variances plus the variance of the means. Unlike the mean of
squares minus the square of the mean, this does not cancel. The output is then one pass over the data.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, channels_per_group: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Training: the output, and the mean and biased variance of every channel over the batch."""
    return normalize_with(*example_moments(x), x, weight, bias, groups, channels_per_group, eps)


def normalize_with(
    mean: Tensor,
    var: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    channels_per_group: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`normalize`, given the moments of the examples."""
    group_mean, group_var = total(mean, var, lambda table: over_group(table, channels_per_group, groups))
    batch_mean, batch_var = total(mean.detach(), var.detach(), lambda table: table.mean(0, keepdim=True))
    return apply_statistics(x, group_mean, group_var, weight, bias, eps), batch_mean[0], batch_var[0]


def infer(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    alpha: Tensor | None,
    channels_per_group: int,
    eps: float,
) -> Tensor:
    """Inference with weight ``alpha``, one value or one per channel, on the example's own statistics."""
    mean, var = at_least_float32(running_mean)[None], at_least_float32(running_var)[None]
    if alpha is not None:
        alpha = alpha.to(mean.dtype)  # in float64 the weights sum to one in float64
        own_mean, own_var = example_moments(x)
        mean, var = (
            mean + alpha * (own_mean - mean),
            (1 - alpha) * var + alpha * own_var + alpha * (1 - alpha) * (mean - own_mean).square(),
        )
    mean, var = total(mean, var, lambda table: over_channels(table, channels_per_group))
    return apply_statistics(x, mean, var, weight, bias, eps)


def update_moving_averages(
    running_mean: Tensor, running_var: Tensor, mean: Tensor, var: Tensor, momentum: float
) -> None:
    """Update the moving averages of x and x² in place.

    They are kept as mean and variance, so the variance takes up the distance between the two means:
    (1 - t) V + t v + t (1 - t) (m - M)², with t the momentum.
    """
    with torch.no_grad():
        if running_mean.dtype != (wide := at_least_float32(running_mean)).dtype:  # rounded once, at the end
            wide_var = at_least_float32(running_var)
            update_moving_averages(wide, wide_var, mean, var, momentum)
            running_mean.copy_(wide)
            running_var.copy_(wide_var)
            return
        step = mean.to(running_mean.dtype) - running_mean
        running_var.mul_(1 - momentum).add_(var, alpha=momentum)
        running_var.addcmul_(step, step, value=momentum * (1 - momentum))
        # Not running_mean += momentum * step, which turns infinity into NaN one batch later; torch's layer does not.
        running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)


def track(
    mean: Tensor, var: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float, batches: Tensor | None
) -> None:
    """Update the moving averages with the mean and variance of a batch, and increment the counter."""
    update_moving_averages(running_mean, running_var, mean, var, momentum)
    if batches is not None:
        batches.add_(1)


# ---- tables of (N, C) ----


def example_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over space of every example and channel, (N, C), at least in float32."""
    x = at_least_float32(x)
    if x.dim() == 2:
        return x, torch.zeros_like(x)
    space = tuple(range(2, x.dim()))
    # Not torch.var_mean, whose mean is NaN where a value is infinite.
    return x.mean(space), torch.var(x, space, correction=0)


def total(mean: Tensor, var: Tensor, average: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The law of total variance: mean and variance of the union, given the ``average`` over its parts."""
    of_all = average(mean)
    return of_all, average(var + (mean - of_all).square())


def over_group(table: Tensor, channels_per_group: int, groups: int) -> Tensor:
    """Every entry replaced by the mean over its group of examples and channels."""
    return over_channels(_over_examples(table, groups), channels_per_group)


def apply_statistics(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """One pass over the data with tables of (N, C) or (1, C)."""
    scale = torch.rsqrt(var + eps)
    if weight is not None:
        scale = scale * weight
    shift = bias
    if mean.requires_grad:
        # y does not depend on a constant subtracted from both x and its mean, so that constant needs no gradient. The
        # gradients of mean and bias then come from one table, and the backward pass sums dy once for both.
        center = mean.detach()
        shift = (center - mean) * scale
        mean, shift = center, shift if bias is None else shift + bias
    y = (x - along_space(mean, x)) * along_space(scale, x)
    return (y if shift is None else y + along_space(shift, x)).to(x.dtype)


def over_channels(table: Tensor, channels_per_group: int) -> Tensor:
    """Every entry replaced by the mean over its channel group."""
    if channels_per_group == 1:
        return table
    mean: Tensor = table.unflatten(1, (-1, channels_per_group)).mean(2)
    return mean.repeat_interleave(channels_per_group, 1)


def _over_examples(table: Tensor, groups: int) -> Tensor:
    """Every row replaced by the mean over its group of examples; the larger groups come first."""
    # torch.compile does not support divmod of dynamic sizes.
    size, larger = table.shape[0] // groups, table.shape[0] % groups
    middle = larger * (size + 1)
    parts = []
    for start, stop, per_group in ((0, middle, size + 1), (middle, table.shape[0], size)):
        if start < stop:
            group = table[start:stop].unflatten(0, (-1, per_group))
            parts.append(group.mean(1, keepdim=True).expand_as(group).flatten(0, 1))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def at_least_float32(t: Tensor) -> Tensor:
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def along_space(table: Tensor, x: Tensor) -> Tensor:
    """(..., C) to (..., C, 1, ...), to be broadcast against x."""
    return table[(..., *(None,) * (x.dim() - 2))]
