"""Four improvements to batch normalization, for any PyTorch model."""

from betternorm.advice import Diagnosis, advise, diagnose, tune_ghost_size, upgrade
from betternorm.conversion import changes, convert, fold, revert
from betternorm.decay import decay_toward_one, norm_report, param_groups
from betternorm.integrations.checkpoints import load
from betternorm.layers import BatchGroupNorm, BatchRenorm, GhostBatchNorm, GroupedBatchNorm
from betternorm.weighing import (
    AlphaFit,
    AlphaSearch,
    Metric,
    calibrate,
    compare_alpha,
    fit_alpha,
    get_alpha,
    set_alpha,
    tune_alpha,
)

__version__ = "0.2.0"

__all__ = [
    "AlphaFit",
    "AlphaSearch",
    "BatchGroupNorm",
    "BatchRenorm",
    "Diagnosis",
    "GhostBatchNorm",
    "GroupedBatchNorm",
    "Metric",
    "advise",
    "calibrate",
    "changes",
    "compare_alpha",
    "convert",
    "decay_toward_one",
    "diagnose",
    "fit_alpha",
    "fold",
    "get_alpha",
    "load",
    "norm_report",
    "param_groups",
    "revert",
    "set_alpha",
    "tune_alpha",
    "tune_ghost_size",
    "upgrade",
]
