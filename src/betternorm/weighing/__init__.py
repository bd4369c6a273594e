"""Inference example weighing: at inference, the statistics of the example itself get a weight, alpha (section 3.1)."""

from betternorm.weighing.alpha import get_alpha, set_alpha
from betternorm.weighing.calibration import calibrate
from betternorm.weighing.comparison import compare_alpha
from betternorm.weighing.fit import fit_alpha
from betternorm.weighing.fit_result import AlphaFit
from betternorm.weighing.metrics import Metric
from betternorm.weighing.result import AlphaSearch
from betternorm.weighing.search import tune_alpha
from betternorm.weighing.shifts import corruptions

__all__ = [
    "AlphaFit",
    "AlphaSearch",
    "Metric",
    "calibrate",
    "compare_alpha",
    "corruptions",
    "fit_alpha",
    "get_alpha",
    "set_alpha",
    "tune_alpha",
]
