"""Batch group normalization (section 3.4 of the paper)."""

from __future__ import annotations

import torch
from torch import Tensor

from betternorm.backends.distributed import ProcessGroup
from betternorm.layers.checks import channels_in_group
from betternorm.layers.grouped import GroupedBatchNorm


class BatchGroupNorm(GroupedBatchNorm):
    r"""Group Normalization that also averages over examples, for batches of two or three examples (section 3.4).

    Statistics are computed over groups of channels, as in ``nn.GroupNorm``, and over ``examples_per_group`` examples.
    For batch sizes of about 4 and above, :class:`GhostBatchNorm` is the better choice.

    arXiv:2012.02782 describes a different method of the same name.

    Args:
        num_groups: number of channel groups, as in ``nn.GroupNorm``; must divide ``num_channels``. With more groups
            than channels, each channel is a group.
        num_channels: C of an input (N, C, *).
        examples_per_group: number of examples normalized together; None is the whole batch.
        eps, momentum, affine, alpha, process_group: as in :class:`GroupedBatchNorm`.

    Examples::

        >>> layer = BatchGroupNorm(32, 64)
        >>> layer(torch.randn(2, 64, 8, 8)).shape
        torch.Size([2, 64, 8, 8])
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        examples_per_group: int | None = 2,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        *,
        alpha: float | Tensor = 0.0,
        process_group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_channels,
            channels_in_group(num_groups, num_channels),
            examples_per_group,
            eps,
            momentum,
            affine,
            alpha=alpha,
            process_group=process_group,
            device=device,
            dtype=dtype,
        )

    @property
    def num_groups(self) -> int:
        return self.num_features // self.channels_per_group

    def _repr_of_groups(self) -> str:
        return f"{self.num_groups}, {self.num_features}, examples_per_group={self.examples_per_group}"
