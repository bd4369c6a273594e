"""The experiments, and the trials of each: its arms at a scale, times its seeds."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType

from betternorm.errors import UserError
from betternorm_lab.experiments import protocol
from betternorm_lab.experiments.arms import Arm
from betternorm_lab.experiments.scales import SCALES, SEEDS
from betternorm_lab.trials import Trial

NAMES = (  # in the order of the paper
    "alpha-pretrained",
    "alpha-groupnorm",
    "ghost-size",
    "alpha-ghost",
    "decay",
    "small-batch",
    "combined",
    "transfer",
    "non-iid",
    "output-range",
    "negative",
    "baselines",
)

OLD_NAMES = {"alpha-imagenet": "alpha-pretrained"}
MEDIUM = ("alpha-groupnorm", "ghost-size", "alpha-ghost", "decay", "small-batch", "combined", "non-iid")

Arms = Mapping[Arm, Trial]


def names_at(scale: str) -> tuple[str, ...]:
    """The experiments of a scale: the main claims of the paper at medium scale, all experiments at the others."""
    return MEDIUM if scale == "medium" else NAMES


def chosen(words: Sequence[str], scale: str = "smoke") -> list[str]:
    """Names of experiments, in order; "all" is every experiment of the scale."""
    words = [OLD_NAMES.get(word, word) for word in words]
    for word in words:
        if word not in (*NAMES, "all"):
            raise UserError(f"there is no experiment {word!r}; there are all, {', '.join(NAMES)}")
    here = names_at(scale)
    for word in words:
        if word not in (*here, "all"):
            raise UserError(f"there is no experiment {word!r} at {scale} scale; there are all, {', '.join(here)}")
    return [name for name in here if "all" in words or name in words]


def module(name: str) -> ModuleType:
    """The module of an experiment."""
    return importlib.import_module(f"betternorm_lab.experiments.{chosen([name])[0].replace('-', '_')}")


def trials_of(name: str, scale: str, seeds: int | None = None, own: Arms | None = None) -> dict[Arm, list[Trial]]:
    """The trials of an experiment by arm, one per seed; ``own`` arms replace those of the experiment."""
    if scale not in SCALES:
        raise UserError(f"scale is {scale!r}; it must be one of {', '.join(SCALES)}")
    if seeds is not None and seeds < 1:
        raise UserError(f"seeds is {seeds}; it must be 1 or more")
    (name,) = chosen([name], scale)
    experiment = module(name)
    if scale == protocol.SCALE and name not in protocol.FIXED:
        return {arm: [trial] for arm, trial in candidates(name, scale).items()}
    count = seeds or getattr(experiment, "SEEDS", {}).get(scale, SEEDS[scale])
    return {  # a trial without randomness is run once
        arm: [replace(trial, seed=seed) for seed in range(count if getattr(trial, "random", True) else 1)]
        for arm, trial in (own or experiment.arms(scale)).items()
    }


def candidates(name: str, scale: str) -> dict[Arm, Trial]:
    """The hyperparameter candidates of an experiment: one seed, never evaluated on the test set."""
    experiment = module(name)
    if scale != protocol.SCALE or not hasattr(experiment, "candidates"):
        known = [one for one in MEDIUM if hasattr(module(one), "candidates")]
        raise UserError(f"{name} has no candidates at {scale} scale; at {protocol.SCALE} scale {', '.join(known)} have")
    return {
        arm: replace(one, seed=protocol.TUNING_SEED, test=False) for arm, one in experiment.candidates(scale).items()
    }
