"""The layers: one, `GroupedBatchNorm`, and three that are it or build on it (sections 3.1, 3.2 and 3.4 of the paper).

They are torch's batch norm to everything that handles one: `isinstance` says so, a `state_dict` has the same keys and
shapes, `num_batches_tracked` counts the steps, `track_running_stats = False` stops the moving averages, and
`torch.optim.swa_utils.update_bn` refreshes them.
"""

from betternorm.layers.batch_group import BatchGroupNorm
from betternorm.layers.frozen import FrozenBatchNorm
from betternorm.layers.ghost import GhostBatchNorm
from betternorm.layers.grouped import GroupedBatchNorm
from betternorm.layers.renorm import BatchRenorm

__all__ = ["BatchGroupNorm", "BatchRenorm", "FrozenBatchNorm", "GhostBatchNorm", "GroupedBatchNorm"]
