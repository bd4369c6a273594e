"""Training a network and judging it (section 4): the configuration, the session that runs it, its checkpoints."""

from betternorm.weighing.metrics import CALIBRATED
from betternorm_lab.training.checkpoints import deterministic
from betternorm_lab.training.config import JUDGED_BY, Config, build_model, learning_rate, load_data
from betternorm_lab.training.evaluation import METRICS_VERSION, evaluate, tune_for_row
from betternorm_lab.training.session import Session, train, trained

__all__ = [
    "CALIBRATED",
    "JUDGED_BY",
    "METRICS_VERSION",
    "Config",
    "Session",
    "build_model",
    "deterministic",
    "evaluate",
    "learning_rate",
    "load_data",
    "train",
    "trained",
    "tune_for_row",
]
