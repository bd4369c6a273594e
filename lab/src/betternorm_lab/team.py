"""The processes that work on one trial together: on several GPUs, under torchrun, or as tasks of a Slurm job.

The first process decides what is run and writes the rows; the others do as it says, so that all are always at the same
trial. A process that is lost ends the run: its trial stays unfinished, and the same command goes on with it.
"""

from __future__ import annotations

import atexit
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch.distributed

from betternorm.errors import UserError

if TYPE_CHECKING:
    from betternorm_lab.trials import Runtime

T = TypeVar("T")

# To wait for another program that has the trial. A process that dies is noticed at once, by its closed connection.
PATIENCE = timedelta(days=7)
# Between the first process that is through with a trial and the last: they did the same work side by side.
STRAGGLING = timedelta(minutes=5)


def launched_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def world_size(runtime: Runtime) -> int:
    """How many processes work on one trial. A Slurm task that was not told of others, by devices or nodes, is alone."""
    return int(os.environ["WORLD_SIZE"]) if launched_by_torchrun() else runtime.devices * runtime.nodes


def team_of(runtime: Runtime) -> Team:
    """The team that this process belongs to; the first call waits for the others."""
    if world_size(runtime) == 1:
        return Team()
    if Several.met is None:
        from betternorm_lab.fabric import launch  # slow to import

        Several.met = Several(launch("32-true", runtime).global_rank)
    return Several.met


class Team:
    """One process alone; it agrees with itself."""

    rank = 0

    def told_by_first(self, value: T) -> T:
        """The first process's value, in every process."""
        return value

    def outcome(self, mine: dict[str, Any]) -> dict[str, Any]:
        """What came of a trial that all have run: the first process's outcome, or an error that all met."""
        return mine


class Several(Team):
    """Processes that talk over a group of their own, which the trial's own traffic cannot disturb."""

    met: ClassVar[Several | None] = None  # once in the life of a process

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._group = torch.distributed.new_group(backend="gloo", timeout=PATIENCE)
        atexit.register(_leave)

    def told_by_first(self, value: T) -> T:
        box = [value]
        try:
            torch.distributed.broadcast_object_list(box, src=0, group=self._group)
        except RuntimeError as problem:
            raise _lost(problem) from problem
        return box[0]

    def outcome(self, mine: dict[str, Any]) -> dict[str, Any]:
        outcomes: list[dict[str, Any]] = [{}] * torch.distributed.get_world_size()
        try:
            # One process may have failed alone, with the others waiting inside the trial for ever.
            torch.distributed.monitored_barrier(self._group, timeout=STRAGGLING)
            torch.distributed.all_gather_object(outcomes, mine, group=self._group)
        except RuntimeError as problem:
            raise _lost(problem, mine.get("error")) from problem
        return next((outcome for outcome in outcomes if "error" in outcome), outcomes[0])


def _leave() -> None:
    """Left to the interpreter, the threads of a group are ended too late now and then, and the process aborts."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _lost(problem: RuntimeError, error: str | None = None) -> UserError:
    first = (error or str(problem)).strip().partition("\n")[0]
    return UserError(
        f"a process of this run was lost ({first}); its trial is not finished, and the same command goes on with it"
    )
