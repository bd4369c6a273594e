"""Batch Renormalization, a baseline of the paper (Ioffe, arXiv:1702.03275)."""

from __future__ import annotations

import torch
from torch import Tensor

from betternorm import functional
from betternorm.backends.distributed import ProcessGroup
from betternorm.layers.grouped import GroupedBatchNorm, runs_again_for_backward


class BatchRenorm(GroupedBatchNorm):
    r"""Batch Renormalization (Ioffe, arXiv:1702.03275), the paper's baseline for batches that are not i.i.d.

    In training, the output of batch norm is corrected toward the output with moving averages,

    .. math::
        y = \gamma \left( \frac{x - \mu_B}{\sigma_B} r + d \right) + \beta, \quad
        r = \mathrm{clip}\left(\frac{\sigma_B}{\sigma}, \frac{1}{r_{max}}, r_{max}\right), \quad
        d = \mathrm{clip}\left(\frac{\mu_B - \mu}{\sigma}, -d_{max}, d_{max}\right)

    where r and d are treated as constants in the gradient. The limits start at 1 and 0, which is batch norm, and
    increase linearly after ``warmup_steps``: to ``r_max`` at ``r_steps`` and to ``d_max`` at ``d_steps``. The defaults
    are those of its paper, for more than 100,000 training steps; scale them down for shorter runs.

    Activation checkpointing of this layer raises an error: by the time the layer is run again, the moving averages have
    changed, so r and d would differ.

    Args:
        num_features: C of an input (N, C, *).
        r_max, d_max: the final limits.
        warmup_steps, r_steps, d_steps: the schedule, in training steps (``num_batches_tracked``).
        eps, momentum, affine, alpha, process_group: as in :class:`GroupedBatchNorm`.

    Examples::

        >>> layer = BatchRenorm(64, warmup_steps=100, r_steps=800, d_steps=500)
        >>> layer(torch.randn(32, 64, 8, 8)).shape
        torch.Size([32, 64, 8, 8])
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        *,
        r_max: float = 3.0,
        d_max: float = 5.0,
        warmup_steps: int = 5_000,
        r_steps: int = 40_000,
        d_steps: int = 25_000,
        alpha: float | Tensor = 0.0,
        process_group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features,
            1,
            None,
            eps,
            momentum,
            affine,
            alpha=alpha,
            process_group=process_group,
            device=device,
            dtype=dtype,
        )
        self._set_schedule(r_max, d_max, warmup_steps, r_steps, d_steps)

    def _set_schedule(
        self,
        r_max: float,
        d_max: float,
        warmup_steps: int,
        r_steps: int,
        d_steps: int,
    ) -> None:
        if not r_max >= 1:
            raise ValueError(f"r_max={r_max} must be 1 or more; 1 with d_max=0 is batch norm")
        if not d_max >= 0:
            raise ValueError(f"d_max={d_max} must be 0 or more; 0 with r_max=1 is batch norm")
        if not 0 <= warmup_steps <= min(r_steps, d_steps):
            raise ValueError(
                f"warmup_steps={warmup_steps} must lie between 0 and the smaller of r_steps={r_steps} "
                f"and d_steps={d_steps}"
            )
        self.r_max, self.d_max = r_max, d_max
        self.warmup_steps, self.r_steps, self.d_steps = warmup_steps, r_steps, d_steps

    def limits(self) -> tuple[Tensor, Tensor]:
        """r_max and d_max at the current step."""
        if self.num_batches_tracked is None:
            raise ValueError("num_batches_tracked=None: BatchRenorm needs it for its schedule")
        step = self.num_batches_tracked.float()

        def progress(end: int) -> Tensor:
            return ((step - self.warmup_steps) / max(end - self.warmup_steps, 1)).clamp(0, 1)

        return 1 + (self.r_max - 1) * progress(self.r_steps), self.d_max * progress(self.d_steps)

    def _normalize_batch(self, input: Tensor, momentum: float | None) -> Tensor:
        if input.numel() == 0:
            return super()._normalize_batch(input, momentum)
        if self.track_running_stats and runs_again_for_backward():
            raise RuntimeError(
                "BatchRenorm cannot be checkpointed: its moving averages have changed since the forward pass, so that "
                "r and d would differ in the backward pass; keep this layer outside of the checkpointed part"
            )
        running_mean, running_var = self.running_mean, self.running_var
        if running_mean is None or running_var is None:
            raise ValueError("BatchRenorm needs moving averages, and running_mean is None")
        output, mean, var = functional.grouped_batch_norm(input, eps=self.eps, process_group=self._processes())
        r_max, d_max = self.limits()
        moving_std = torch.sqrt(running_var + self.eps)
        r = (torch.sqrt(var + self.eps) / moving_std).clamp(1 / r_max, r_max)
        d = ((mean - running_mean) / moving_std).clamp(-d_max, d_max)
        self._track(mean, var, momentum)
        scale = r if self.weight is None else r * self.weight
        shift = d if self.weight is None else d * self.weight
        if self.bias is not None:
            shift = shift + self.bias
        shape = (1, -1, *(1,) * (input.dim() - 2))
        return (output * scale.view(shape) + shift.view(shape)).to(input.dtype)

    def _repr_of_groups(self) -> str:
        return f"{self.num_features}, r_max={self.r_max}, d_max={self.d_max}"
