"""Statistics across processes, which exchange only the two (N, C) tables of moments."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from betternorm.backends import plain

ProcessGroup = Any  # torch.distributed.ProcessGroup, which builds of torch without distributed support do not have


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    examples_per_group: int | None,
    channels_per_group: int,
    eps: float,
    process_group: ProcessGroup,
) -> tuple[Tensor, Tensor, Tensor]:
    """Training on the examples of all processes, ordered by rank."""
    images, values = x.shape[0] if x.numel() else 0, math.prod(x.shape[2:])
    sizes = [torch.zeros(2, dtype=torch.int64, device=x.device) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(sizes, torch.tensor([images, values], device=x.device), group=process_group)
    counts = [int(size[0]) for size in sizes]
    groups = 1 if examples_per_group is None else -(-sum(counts) // examples_per_group)
    # All processes raise this error together, so that none waits for another.
    if sum(counts) == 0:
        raise ValueError("the batches of all processes are empty, so there are no statistics to train on")
    # As in SyncBatchNorm, every value has the same weight: image sizes may differ between processes.
    weight_of = torch.cat([size[1].expand(count) for size, count in zip(sizes, counts, strict=True)]).to(x.device)
    members = torch.arange(groups, device=x.device).repeat_interleave(_group_sizes(sum(counts), groups, x.device))
    values_of = torch.zeros(groups, dtype=torch.int64, device=x.device).index_add(0, members, weight_of)
    if int(values_of.min()) * channels_per_group == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.size()}")

    tables = torch.cat(plain.example_moments(x), 1) if x.numel() else _no_rows(x)
    gathered = cast(Tensor, _Gather.apply(tables, counts, process_group))  # type: ignore[no-untyped-call]
    mean, var = gathered.chunk(2, 1)

    def over_batch(table: Tensor) -> Tensor:
        return (table * share_of_batch[:, None]).sum(0, keepdim=True)

    def over_group(table: Tensor) -> Tensor:
        rows = table.new_zeros(groups, table.shape[1]).index_add(0, members, table * share_of_group[:, None])
        return plain.over_channels(rows[members], channels_per_group)

    share_of_batch = (weight_of / weight_of.sum()).to(mean.dtype)
    share_of_group = (weight_of / values_of[members]).to(mean.dtype)
    batch_mean, batch_var = plain.total(mean.detach(), var.detach(), over_batch)
    mean, var = plain.total(mean, var, over_group)
    first = sum(counts[: dist.get_rank(process_group)])
    # An empty batch uses any row: the other processes wait for this one in the backward pass.
    own = slice(first, first + images) if images else slice(1)
    return plain.apply_statistics(x, mean[own], var[own], weight, bias, eps), batch_mean[0], batch_var[0]


def _group_sizes(examples: int, groups: int, device: torch.device) -> Tensor:
    """The number of examples of each group, larger groups first."""
    size, larger = divmod(examples, groups)
    return size + (torch.arange(groups, device=device) < larger).long()


def _no_rows(x: Tensor) -> Tensor:
    dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    return x.reshape(0).to(dtype).view(0, 2 * x.shape[1])


class _Gather(torch.autograd.Function):
    """Rows of all processes, ordered by rank. The gradient of a row is the sum over the processes."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int], process_group: ProcessGroup) -> Tensor:
        ctx.counts, ctx.process_group = counts, process_group
        # Collectives require equal shapes, but batch sizes may differ.
        padded = F.pad(rows, (0, 0, 0, max(counts) - rows.shape[0])).contiguous()
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=process_group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.process_group)
        return grad.split(ctx.counts)[dist.get_rank(ctx.process_group)], None, None
