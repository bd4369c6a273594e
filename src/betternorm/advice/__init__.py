"""Recommending norm layers, applying the recommendation, and diagnosing the norm layers of a trained model."""

from betternorm.advice.advise import Advice, advise
from betternorm.advice.diagnose import diagnose
from betternorm.advice.findings import Diagnosis, Finding
from betternorm.advice.ghost_size import tune_ghost_size, usual_ghost_sizes
from betternorm.advice.upgrade import upgrade

__all__ = ["Advice", "Diagnosis", "Finding", "advise", "diagnose", "tune_ghost_size", "upgrade", "usual_ghost_sizes"]
