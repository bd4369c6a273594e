"""Hyperparameters of Round 3, chosen on validation data with seed 0 (``docs/results/evidence/selection/``).

An experiment whose entry is empty has not been decided yet, and reads no test set.
"""

from __future__ import annotations

from typing import TypeVar

from betternorm.errors import UserError

K = TypeVar("K")
V = TypeVar("V")

# Learning rate by the number of examples that batch norm takes its statistics over.
SMALL_BATCHES: dict[int, float] = {2: 0.3, 8: 0.3, 16: 0.1}

# Strength of decay on gamma and beta, relative to the weights' own, with ghosts of 8.
ALL_FOUR: dict[str, int] = {}


def of(settings: dict[K, V], name: K) -> V:
    if name not in settings:
        raise UserError(
            f"nothing has been chosen for {name!r} in {__name__}: run with --select, then commit the choice"
        )
    return settings[name]
