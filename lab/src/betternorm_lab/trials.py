"""A trial: a frozen, hashable configuration that is run once and stored as a row.

A subclass of :class:`Trial` defines the experiment; :class:`Runtime` defines where and how it runs.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import platform
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from betternorm.errors import UserError
from betternorm_lab.store import DONE, FAILED, RUNNING, Row, Store
from betternorm_lab.team import launched_by_torchrun, team_of

Progress = Callable[[float], None]  # called with the finished fraction of the trial
T = TypeVar("T", bound="Trial")


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Where and how trials run; not part of their configuration.

    Args:
        data_root, download: see :func:`betternorm_lab.data.load`.
        accelerator, devices, nodes: as in Lightning Fabric; "auto" is a GPU if there is one.
        threads: of torch in this process; None leaves them unchanged.
        workers: processes that read images that do not fit in memory.
        channels_last, compile: faster on some machines; the last bits of a result may differ.
        deterministic: use only deterministic algorithms.
        tensorboard: write curves to the folder of the trial.
        show: draw a progress bar; None draws one on a terminal.
    """

    data_root: str | None = None
    download: bool = False
    accelerator: str = "auto"
    devices: int = 1
    nodes: int = 1
    threads: int | None = None
    workers: int = 2
    channels_last: bool = False
    compile: bool = False
    deterministic: bool = True
    tensorboard: bool = False
    show: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A configuration to run. Subclass it as a frozen dataclass with its own ``kind``, and implement :meth:`run`.

    Fields are numbers, text, None and tuples of them; dicts and lists are converted to tuples. The key of a trial is
    a hash of the fields that are not at their default, so that fields can be added without invalidating old rows; the
    meaning of a default must never change.

    Examples::

        >>> @dataclass(frozen=True, kw_only=True)
        ... class Sum(Trial):
        ...     kind: ClassVar[str] = "sum"
        ...     numbers: tuple[int, ...] = ()
        ...
        ...     def run(self, folder, runtime, progress):
        ...         return {"sum": sum(self.numbers)}
        >>> run_trial(Sum(numbers=(1, 2)), "runs")["sum"]
        3
    """

    kind: ClassVar[str] = "trial"
    seed: int = 0

    def __post_init__(self) -> None:
        for item in fields(self):
            object.__setattr__(self, item.name, _frozen(item.name, getattr(self, item.name)))

    def run(self, folder: Path, runtime: Runtime, progress: Progress) -> dict[str, Any]:
        """Run the trial, and return its result. After an interruption, a second call continues from ``folder``."""
        raise NotImplementedError(f"{type(self).__name__} must implement run")

    @property
    def changed(self) -> dict[str, Any]:
        """The fields that are not at their default."""
        return {
            item.name: getattr(self, item.name) for item in fields(self) if getattr(self, item.name) != item.default
        }

    @functools.cached_property
    def key(self) -> str:
        text = json.dumps([self.kind, _canonical(self.changed)], sort_keys=True)
        return sha256(text.encode()).hexdigest()[:16]

    @property
    def config(self) -> dict[str, Any]:
        """All fields, as in the row."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def __str__(self) -> str:
        return f"{self.kind} " + " ".join(f"{name}={value}" for name, value in self.changed.items())


def grid(base: T, **axes: Iterable[Any]) -> list[T]:
    """All combinations of values of some fields: ``grid(base, norm=("batch", "ghost"), seed=range(3))``."""
    return [
        replace(base, **dict(zip(axes, values, strict=True)))
        for values in itertools.product(*(tuple(axis) for axis in axes.values()))
    ]


def run_trial(
    trial: Trial,
    folder: str | os.PathLike[str],
    runtime: Runtime | None = None,
    *,
    retry: bool = False,
    wait: bool = True,
    progress: Progress = lambda part: None,
) -> Row:
    """Run a trial unless it has a row, and return the row.

    Finished trials are not run again; failed ones are, with ``retry``. If another process is running the trial, this
    function waits for it; with ``wait=False`` it returns the row with the status "running".
    """
    runtime = runtime or Runtime()
    store, team = Store(folder), team_of(runtime)
    place = store.trial_folder(trial.key)
    there: Row | None = None  # the row that the first process sees; None if the trial must be run
    if team.rank > 0:
        there = team.told_by_first(there)
        if there is not None:
            return there
        outcome = team.outcome(perform(trial, place, runtime, progress))
        return Row(trial.key, trial.kind, FAILED if "error" in outcome else DONE, trial.config, **outcome)
    there = store.get(trial.key)
    if there is not None and settled(there, retry):
        return team.told_by_first(there)
    with store.claim(trial.key, wait) as mine:
        there = store.get(trial.key)  # the process that had the lock may have finished it
        if not mine or (there is not None and settled(there, retry)):
            return team.told_by_first(there or Row(trial.key, trial.kind, RUNNING, trial.config))
        team.told_by_first(None)
        store.start(trial.key, trial.kind, trial.config)
        outcome = team.outcome(perform(trial, place, runtime, progress))
        store.finish(trial.key, trial.kind, trial.config, **outcome)
    return store[trial.key]


def check_machine(runtime: Runtime) -> None:
    """Raise an error for settings that exceed this machine."""
    cores = os.cpu_count() or 1
    readers = max(64, 4 * cores)  # mostly waiting for the disk
    on_cpu = runtime.accelerator == "cpu" or (runtime.accelerator == "auto" and not torch.cuda.is_available())
    limits = [("nodes", runtime.nodes, 1, None), ("workers", runtime.workers, 0, readers)]
    limits += [("devices", runtime.devices, 1, cores if on_cpu and not launched_by_torchrun() else None)]
    limits += [("threads", 1 if runtime.threads is None else runtime.threads, 1, 4 * cores)]
    for name, value, least, most in limits:
        if value < least or (most is not None and value > most):
            allowed = f"{least} or more" if most is None else f"from {least} to {most} on this machine of {cores} cores"
            raise UserError(f"{name} is {value}; it must be {allowed}")


def settled(row: Row, retry: bool = False) -> bool:
    """Whether the trial of this row needs no further run."""
    return row.status == DONE or (row.status == FAILED and not retry)


def perform(
    trial: Trial, folder: Path, runtime: Runtime | None = None, progress: Progress = lambda part: None
) -> dict[str, Any]:
    """Run a trial, without a store: ``result`` or ``error``, and ``provenance``."""
    runtime = runtime or Runtime()
    started = time.time()
    outcome: dict[str, Any] = {}
    try:
        check_machine(runtime)
        if runtime.threads is not None:
            torch.set_num_threads(runtime.threads)
        outcome["result"] = trial.run(folder, runtime, progress)
    except UserError as problem:
        outcome["error"] = str(problem)
    except Exception as problem:  # the other trials of the grid continue
        where = "".join(traceback.format_tb(problem.__traceback__))
        outcome["error"] = f"{type(problem).__name__}: {problem}\n{where}"
    outcome["provenance"] = provenance(trial, runtime) | {
        "started": started,
        "duration": time.time() - started,
    }
    return outcome


def provenance(trial: Trial, runtime: Runtime) -> dict[str, Any]:
    """The origin of the numbers: seed, versions, commit, machine, runtime and command."""
    return {
        "seed": trial.seed,
        "versions": {name: _version(name) for name in ("betternorm", "torch", "torchvision", "timm", "numpy")}
        | {"python": platform.python_version()},
        "commit": code_version(),
        "machine": {
            "host": socket.gethostname(),
            "platform": platform.platform(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        },
        "runtime": {item.name: getattr(runtime, item.name) for item in fields(runtime)},
        "command": sys.argv,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def code_version() -> str | None:
    """The commit of this code, with a plus for uncommitted changes; None for an installed package."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        changes = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "."],
            cwd=here.parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _frozen(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        value = sorted(value.items())
    if isinstance(value, list | tuple):
        return tuple(_frozen(name, item) for item in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UserError(f"{name} is {value!r}; fields must be numbers, text, None, or lists or dicts of them")


def _canonical(value: Any) -> Any:
    """Equal values become equal text: 1.0 and 1 are the same configuration."""
    if isinstance(value, dict):
        return {name: _canonical(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
