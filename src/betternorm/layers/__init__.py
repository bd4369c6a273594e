"""The layers (sections 3.1, 3.2 and 3.4 of the paper): `GroupedBatchNorm` and its subclasses.

They can be used wherever torch's batch norm can: they are instances of it, a `state_dict` has the same keys and shapes,
`num_batches_tracked` counts the steps, `track_running_stats = False` stops the moving averages, and
`torch.optim.swa_utils.update_bn` recomputes them.
"""

from betternorm.layers.batch_group import BatchGroupNorm
from betternorm.layers.frozen import FrozenBatchNorm
from betternorm.layers.ghost import GhostBatchNorm
from betternorm.layers.grouped import GroupedBatchNorm
from betternorm.layers.renorm import BatchRenorm

__all__ = ["BatchGroupNorm", "BatchRenorm", "FrozenBatchNorm", "GhostBatchNorm", "GroupedBatchNorm"]
