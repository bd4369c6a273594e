"""Four improvements to batch normalisation, on any PyTorch model."""

from betternorm.layers import BatchGroupNorm, BatchRenorm, GhostBatchNorm, GroupedBatchNorm

__version__ = "0.1.0"

__all__ = ["BatchGroupNorm", "BatchRenorm", "GhostBatchNorm", "GroupedBatchNorm"]
