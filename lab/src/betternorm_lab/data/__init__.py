"""Datasets, their splits and the batches drawn from them (section 4.1, and 4.4 for batches that are not i.i.d.).

facts -> splits -> readers -> dataset -> loader. Small images live in memory as bytes; crop, flip and normalisation are
done on whole batches on the device. Large ones are read by DataLoader workers.
"""

from betternorm_lab.data.dataset import Data, data_folder, load
from betternorm_lab.data.facts import DATASETS, Facts
from betternorm_lab.data.loader import Loader, order
from betternorm_lab.data.splits import Split, training_images

__all__ = ["DATASETS", "Data", "Facts", "Loader", "Split", "data_folder", "load", "order", "training_images"]
