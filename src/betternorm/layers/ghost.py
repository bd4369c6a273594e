"""Ghost batch normalization (section 3.2 of the paper)."""

from __future__ import annotations

import torch
from torch import Tensor

from betternorm.backends.distributed import ProcessGroup
from betternorm.layers.checks import check_group_size
from betternorm.layers.grouped import GroupedBatchNorm


class GhostBatchNorm(GroupedBatchNorm):
    r"""Ghost Batch Normalization: normalize in small "ghost" batches (section 3.2).

    In training, the batch is split into groups of ``ghost_size`` consecutive examples, which are normalized separately.
    This acts as a regularizer. Inference, moving averages and uneven batches work as in :class:`GroupedBatchNorm`.

    The ghost size is a hyperparameter. In the paper, accuracy has a single peak over ghost sizes, at 16 for a batch of
    128 (section 4.4, alpha tuned). Expect no gain for models that do not overfit.

    Args:
        num_features: C of an input (N, C, *).
        ghost_size: number of examples normalized together.
        eps, momentum, affine, alpha, process_group: as in :class:`GroupedBatchNorm`.

    Examples::

        >>> layer = GhostBatchNorm(64, ghost_size=8)
        >>> layer(torch.randn(128, 64, 8, 8)).shape
        torch.Size([128, 64, 8, 8])
    """

    def __init__(
        self,
        num_features: int,
        ghost_size: int = 16,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        *,
        alpha: float | Tensor = 0.0,
        process_group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_group_size("ghost_size", ghost_size)
        super().__init__(
            num_features,
            1,
            ghost_size,
            eps,
            momentum,
            affine,
            alpha=alpha,
            process_group=process_group,
            device=device,
            dtype=dtype,
        )

    @property
    def ghost_size(self) -> int | None:
        return self.examples_per_group

    def _repr_of_groups(self) -> str:
        return f"{self.num_features}, ghost_size={self.ghost_size}"
