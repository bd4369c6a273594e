"""The stateless API (sections 3.1, 3.2 and 3.4 of the paper)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from betternorm.backends import distributed, graph, operators, plain
from betternorm.backends.distributed import ProcessGroup
from betternorm.backends.plain import update_moving_averages
from betternorm.backends.routing import check_sizes, route

__all__ = [
    "grouped_batch_norm",
    "grouped_batch_norm_reference",
    "number_of_groups",
    "update_moving_averages",
    "weighed_batch_norm",
]


def grouped_batch_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    channels_per_group: int = 1,
    examples_per_group: int | None = None,
    eps: float = 1e-5,
    process_group: ProcessGroup | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    momentum: float = 0.1,
    num_batches_tracked: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Normalize with the statistics of groups of examples, channels and space.

    .. math::
        y = \gamma \frac{x - \mu_g}{\sqrt{\sigma_g^2 + \epsilon}} + \beta

    The N examples are split into ceil(N / examples_per_group) groups of consecutive examples, whose sizes differ by at
    most one; ``None`` is the whole batch. Gradients flow through the statistics.

    Args:
        x: input of shape (N, C, *).
        weight, bias: gamma and beta of shape (C,), or None.
        channels_per_group, examples_per_group, eps: as in :class:`betternorm.GroupedBatchNorm`.
        process_group: if given, the batch consists of the examples of all its processes, ordered by rank.
        running_mean, running_var: moving averages of shape (C,), or None. They are updated in place, with weight
            ``momentum`` on this batch, and are those of x and x² over the whole batch, independent of the groups.
        num_batches_tracked: incremented when the moving averages are updated.

    Returns:
        The output, and the mean and biased variance of each channel over the whole batch, both without gradient.
    """
    averages: tuple[Any, ...] = ()
    if running_mean is not None and running_var is not None:
        averages = (running_mean, running_var, momentum, num_batches_tracked)
    vectors = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
    if process_group is not None and dist.get_world_size(process_group) > 1:
        check_sizes(x, **vectors)
        y, mean, var = distributed.normalize(
            x, weight, bias, examples_per_group, channels_per_group, eps, process_group
        )
    else:
        chosen = route(x, training=True, channels_per_group=channels_per_group, **vectors)
        if chosen == "empty":
            return _empty_batch(x, weight, bias, num_batches_tracked if averages else None)
        groups = number_of_groups(x.shape[0], examples_per_group)
        if chosen == "kernels":
            return operators.normalize(x, weight, bias, groups, channels_per_group, eps, *averages)
        normalize = {"operator": operators.normalize_in_graph, "graph": graph.normalize}.get(chosen, plain.normalize)
        y, mean, var = normalize(x, weight, bias, groups, channels_per_group, eps)
    if averages:
        plain.track(mean, var, *averages)
    return y, mean, var


def grouped_batch_norm_reference(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    channels_per_group: int = 1,
    examples_per_group: int | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`grouped_batch_norm` in its simplest form: a loop over groups, differentiated by autograd."""
    outputs = []
    for examples in x.tensor_split(number_of_groups(x.shape[0], examples_per_group)):
        group = examples.unflatten(1, (-1, channels_per_group))
        over = (0, *range(2, group.dim()))
        var, mean = torch.var_mean(group, over, correction=0, keepdim=True)
        outputs.append(((group - mean) / torch.sqrt(var + eps)).flatten(1, 2))
    y = torch.cat(outputs)
    shape = (1, -1, *(1,) * (x.dim() - 2))
    y = y if weight is None else y * weight.view(shape)
    y = y if bias is None else y + bias.view(shape)
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
    r"""Inference example weighing: normalize with moving averages and the example's own statistics (section 3.1).

    With weight :math:`\alpha` on the mean m and variance v of the example and the rest on the moving averages M and V,

    .. math::
        \mu = (1 - \alpha) M + \alpha m, \qquad
        \sigma^2 = (1 - \alpha) V + \alpha v + \alpha (1 - \alpha) (M - m)^2

    and both are then averaged over the channel group. Examples are normalized independently of each other. ``alpha``
    is a tensor with one value, or with one per channel; None means 0, and with one channel per group the result is then
    bit for bit torch's batch norm. The output is differentiable with respect to alpha and x, also at alpha = 0.
    """
    if alpha is None and channels_per_group == 1:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, eps)
    vectors = {"running_mean": running_mean, "running_var": running_var, "weight": weight, "bias": bias}
    chosen = route(x, training=False, channels_per_group=channels_per_group, **vectors, alpha=alpha)
    if alpha is not None and chosen == "kernels":
        return operators.infer(x, running_mean, running_var, weight, bias, alpha, channels_per_group, eps)
    if chosen == "empty":
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, eps)
    infer = graph.infer if chosen == "graph" else plain.infer
    return infer(x, running_mean, running_var, weight, bias, alpha, channels_per_group, eps)


def _empty_batch(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, num_batches_tracked: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As torch's layer: an empty output, gradients of zero, and a batch that is counted but moves no average."""
    if num_batches_tracked is not None:
        num_batches_tracked.add_(1)
    nothing = torch.full((x.shape[1],), torch.nan, device=x.device)
    return F.batch_norm(x, None, None, weight, bias, True), nothing, nothing.clone()


def number_of_groups(examples: int, examples_per_group: int | None) -> int:
    """ceil(examples / examples_per_group), and one group where the size is None."""
    return 1 if examples_per_group is None else -(-examples // examples_per_group)
