"""Which norm layer suits a batch size, changing a model to it, and what is wrong with a trained one."""

from betternorm.advice.diagnose import diagnose
from betternorm.advice.findings import Diagnosis, Finding
from betternorm.advice.recommend import Advice, advise, tune_ghost_size, upgrade, usual_ghost_sizes

__all__ = ["Advice", "Diagnosis", "Finding", "advise", "diagnose", "tune_ghost_size", "upgrade", "usual_ghost_sizes"]
