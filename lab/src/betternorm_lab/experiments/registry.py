"""Which experiments there are, and the trials of each: its arms at a scale, times its seeds."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType

from betternorm.errors import UserError
from betternorm_lab.experiments import protocol
from betternorm_lab.experiments.findings import Label
from betternorm_lab.experiments.scales import SCALES, SEEDS
from betternorm_lab.trials import Trial

NAMES = (  # in the order of the paper
    "alpha-imagenet",
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

MEDIUM = ("alpha-groupnorm", "ghost-size", "alpha-ghost", "decay", "small-batch", "combined", "non-iid")

Arms = Mapping[Label, Trial]


def names_at(scale: str) -> tuple[str, ...]:
    """The experiments that a scale has: the heart of the paper at the medium one, all at the others."""
    return MEDIUM if scale == "medium" else NAMES


def chosen(words: Sequence[str], scale: str = "smoke") -> list[str]:
    """The names of experiments that some words mean; "all" is every one that the scale has."""
    for word in words:
        if word not in (*NAMES, "all"):
            raise UserError(f"there is no experiment {word!r}; there are all, {', '.join(NAMES)}")
    here = names_at(scale)
    for word in words:
        if word not in (*here, "all"):
            raise UserError(f"there is no experiment {word!r} at {scale} scale; there are all, {', '.join(here)}")
    return [name for name in here if "all" in words or name in words]


def module(name: str) -> ModuleType:
    """Where an experiment declares what it is."""
    return importlib.import_module(f"betternorm_lab.experiments.{chosen([name])[0].replace('-', '_')}")


def trials_of(name: str, scale: str, seeds: int | None = None, own: Arms | None = None) -> dict[Label, list[Trial]]:
    """The trials of an experiment by the label of their arm, one for each seed; ``own`` arms stand in for its own."""
    if scale not in SCALES:
        raise UserError(f"scale is {scale!r}; it has to be one of {', '.join(SCALES)}")
    if seeds is not None and seeds < 1:
        raise UserError(f"seeds is {seeds}; it has to be 1 or more")
    (name,) = chosen([name], scale)
    experiment = module(name)
    if scale == protocol.SCALE and name not in protocol.FIXED:
        return {label: [trial] for label, trial in candidates(name, scale).items()}
    count = seeds or getattr(experiment, "SEEDS", {}).get(scale, SEEDS[scale])
    return {  # a trial in which nothing is random is run once
        label: [replace(trial, seed=seed) for seed in range(count if getattr(trial, "random", True) else 1)]
        for label, trial in (own or experiment.arms(scale)).items()
    }


def candidates(name: str, scale: str) -> dict[Label, Trial]:
    """What the hyperparameters of an experiment are chosen from: one seed, and the test set is never read."""
    experiment = module(name)
    if scale != protocol.SCALE or not hasattr(experiment, "candidates"):
        known = [one for one in MEDIUM if hasattr(module(one), "candidates")]
        raise UserError(f"{name} has no candidates at {scale} scale; at {protocol.SCALE} scale {', '.join(known)} have")
    return {
        label: replace(one, seed=protocol.TUNING_SEED, test=False)
        for label, one in experiment.candidates(scale).items()
    }
