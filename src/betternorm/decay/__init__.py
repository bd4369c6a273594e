"""Weight decay on gamma and beta: where it has an effect, parameter groups, and decay toward 1 (section 3.3)."""

from betternorm.decay.groups import param_groups
from betternorm.decay.report import NormLayer, NormReport, norm_report
from betternorm.decay.toward_one import decay_toward_one

__all__ = ["NormLayer", "NormReport", "decay_toward_one", "norm_report", "param_groups"]
