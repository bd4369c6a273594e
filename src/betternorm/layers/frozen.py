"""Batch normalization with frozen statistics and parameters, as in torchvision and timm."""

from __future__ import annotations

from typing import Any

from betternorm.layers.grouped import GroupedBatchNorm


class FrozenBatchNorm(GroupedBatchNorm):
    """What `betternorm.convert` makes of torchvision's FrozenBatchNorm2d: weight, bias and averages are all buffers.

    It stays in evaluation mode, and so never takes statistics of a batch.
    """

    def train(self, mode: bool = True) -> FrozenBatchNorm:
        super().train(False)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        state_dict.pop(prefix + "num_batches_tracked", None)  # of a layer that was not frozen yet
        super()._load_from_state_dict(state_dict, prefix, *rest)
