"""Four improvements to batch normalisation, on any PyTorch model."""

from betternorm.layers import BatchGroupNorm, BatchRenorm, GhostBatchNorm, GroupedBatchNorm
from betternorm.surgery import changes, convert, revert

__version__ = "0.1.0"

__all__ = [
    "BatchGroupNorm",
    "BatchRenorm",
    "GhostBatchNorm",
    "GroupedBatchNorm",
    "changes",
    "convert",
    "revert",
]
