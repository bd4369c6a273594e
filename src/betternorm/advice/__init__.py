"""Which norm layer suits a batch size, and changing a model to it."""

from betternorm.advice.recommend import Advice, advise, tune_ghost_size, upgrade, usual_ghost_sizes

__all__ = ["Advice", "advise", "tune_ghost_size", "upgrade", "usual_ghost_sizes"]
