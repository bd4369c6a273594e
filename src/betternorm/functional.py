"""Grouped batch normalisation on tensors and without state (sections 3.1, 3.2 and 3.4 of the paper)."""

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
    r"""Normalise with the statistics of groups of examples, channels and space.

    .. math::
        y = \gamma \frac{x - \mu_g}{\sqrt{\sigma_g^2 + \epsilon}} + \beta

    The N examples fall into ceil(N / examples_per_group) runs whose lengths differ by at most one; ``None`` is the
    whole batch. Gradients flow through the statistics.

    Args:
        x: (N, C, *).
        weight, bias: gamma and beta, (C), or None.
        process_group: where given, the examples of all its processes, in the order of rank, are the batch.
        running_mean, running_var: moving averages, (C), updated in place where they are given, with weight ``momentum``
            on this batch: those of x and of x², whatever the groups.
        num_batches_tracked: counted up by one with them.

    Returns:
        The output, and the mean and biased variance of every channel over the whole batch; the two carry no gradient.
    """
    averages: tuple[Any, ...] = ()
    if running_mean is not None and running_var is not None:
        averages = (running_mean, running_var, momentum, num_batches_tracked)
    vectors = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
    if process_group is not None and dist.get_world_size(process_group) > 1:
        check_sizes(x, **vectors)
        y, mean, var = distributed.normalise(
            x, weight, bias, examples_per_group, channels_per_group, eps, process_group
        )
    else:
        chosen = route(x, training=True, channels_per_group=channels_per_group, **vectors)
        if chosen == "empty":
            return _empty_batch(x, weight, bias, num_batches_tracked if averages else None)
        groups = number_of_groups(x.shape[0], examples_per_group)
        if chosen == "kernels":
            return operators.normalise(x, weight, bias, groups, channels_per_group, eps, *averages)
        normalise = {"operator": operators.normalise_in_graph, "graph": graph.normalise}.get(chosen, plain.normalise)
        y, mean, var = normalise(x, weight, bias, groups, channels_per_group, eps)
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
    """:func:`grouped_batch_norm`, group by group as one would explain it, left to autograd."""
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
    r"""Inference example weighing: normalise with moving averages and the example's own statistics (section 3.1).

    With weight :math:`\alpha` on the example's moments, m and v, and the rest on the moving ones, M and V,

    .. math::
        \mu = (1 - \alpha) M + \alpha m, \qquad
        \sigma^2 = (1 - \alpha) V + \alpha v + \alpha (1 - \alpha) (M - m)^2

    both then averaged over the channels of a group. Examples are normalized independently: the output for one does not
    depend on the rest of the batch. ``alpha`` is a tensor with one value, or with one per channel; None is 0, and with
    one channel per group that is torch's batch norm, bit for bit. The output is differentiable with respect to alpha
    and x, also at alpha = 0.
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
