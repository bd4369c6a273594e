"""Statistics across processes: only the two (N, C) tables of moments travel."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from betternorm.backends import plain

ProcessGroup = Any  # torch.distributed.ProcessGroup, which builds of torch without distributed support do not have


def normalise(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    examples_per_group: int | None,
    channels_per_group: int,
    eps: float,
    process_group: ProcessGroup,
) -> tuple[Tensor, Tensor, Tensor]:
    """Training, where the examples of all processes, in the order of rank, are the batch."""
    mean, var = plain.example_moments(x)
    sizes = [torch.zeros(1, dtype=torch.int64, device=x.device) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(sizes, torch.tensor([x.shape[0]], device=x.device), group=process_group)
    counts = [int(size) for size in sizes]
    tables = torch.cat((mean, var), 1)
    gathered = cast(Tensor, _Gather.apply(tables, counts, process_group))  # type: ignore[no-untyped-call]
    mean, var = gathered.chunk(2, 1)
    groups = 1 if examples_per_group is None else -(-sum(counts) // examples_per_group)
    if sum(counts) // groups * channels_per_group * x[0, 0].numel() == 1:  # known only here, to all processes alike
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.size()}")
    batch_mean, batch_var = plain.total(mean.detach(), var.detach(), lambda table: table.mean(0, keepdim=True))
    mean, var = plain.total(mean, var, lambda table: plain.over_group(table, channels_per_group, groups))
    rank = dist.get_rank(process_group)
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    return plain.apply_statistics(x, mean[own], var[own], weight, bias, eps), batch_mean[0], batch_var[0]


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
