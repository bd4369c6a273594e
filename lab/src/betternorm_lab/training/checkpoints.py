"""Checkpoints of a training run, including the random state."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from betternorm.errors import UserError
from betternorm_lab.store import atomic
from betternorm_lab.training.config import Config


def write_checkpoint(path: Path, config: Config, state: dict[str, Any]) -> None:
    with atomic(path) as draft:
        try:
            torch.save({"key": config.key, "config": str(config), **state}, draft)
        except RuntimeError as problem:  # raised by torch for a full disk
            raise OSError(28, str(problem).splitlines()[0]) from problem


def read_checkpoint(path: Path, config: Config) -> dict[str, Any] | None:
    """The checkpoint, or None if there is none."""
    if not path.is_file():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        key, described = state["key"], state["config"]
    except Exception as problem:  # not a checkpoint of this program, which are written atomically
        raise UserError(
            f"{path} is not a checkpoint of this program; move it away or choose another folder"
        ) from problem
    if key != config.key:
        raise UserError(f"{path} belongs to another configuration ({described}); this is {config}")
    return state


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % (1 << 32))
    random.seed(seed)


def random_state() -> dict[str, Any]:
    name, keys, *rest = cast(tuple[Any, ...], np.random.get_state())
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [name, keys.tolist(), *rest],
        "python": random.getstate(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    np.random.set_state(tuple(state["numpy"]))
    random.setstate(state["python"])


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Use only deterministic algorithms within the context."""
    settings: Any = torch.utils.deterministic  # an untyped module
    before, filling = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted)
    settings.fill_uninitialized_memory = False  # slow, and only useful for debugging kernels
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = filling
