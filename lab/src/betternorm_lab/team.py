"""The processes of a distributed trial: on several GPUs, under torchrun, or as tasks of a Slurm job.

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

# While another program runs the trial. A dead process is detected immediately by its closed connection.
PATIENCE = timedelta(days=7)
# Between the first and the last process to finish a trial.
STRAGGLING = timedelta(minutes=5)


def launched_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def world_size(runtime: Runtime) -> int:
    """The number of processes per trial. A Slurm task without ``devices`` or ``nodes`` runs alone."""
    return int(os.environ["WORLD_SIZE"]) if launched_by_torchrun() else runtime.devices * runtime.nodes


def team_of(runtime: Runtime) -> Team:
    """The team of this process; the first call waits for the other processes."""
    if world_size(runtime) == 1:
        return Team()
    if Several.met is None:
        from betternorm_lab.fabric import launch  # slow to import

        Several.met = Several(launch("32-true", runtime).global_rank)
    return Several.met


class Team:
    """A single process."""

    rank = 0

    def told_by_first(self, value: T) -> T:
        """The first process's value, in every process."""
        return value

    def outcome(self, mine: dict[str, Any]) -> dict[str, Any]:
        """The outcome of the first process, or an error of any process."""
        return mine


class Several(Team):
    """Several processes, with a separate process group that does not interfere with that of the trial."""

    met: ClassVar[Several | None] = None  # once per process

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
            # If one process failed, the others would wait inside the trial forever.
            torch.distributed.monitored_barrier(self._group, timeout=STRAGGLING)
            torch.distributed.all_gather_object(outcomes, mine, group=self._group)
        except RuntimeError as problem:
            raise _lost(problem, mine.get("error")) from problem
        return next((outcome for outcome in outcomes if "error" in outcome), outcomes[0])


def _leave() -> None:
    """Destroy the process group before the interpreter exits, which sometimes aborts otherwise."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _lost(problem: RuntimeError, error: str | None = None) -> UserError:
    first = (error or str(problem)).strip().partition("\n")[0]
    return UserError(
        f"a process of this run was lost ({first}); its trial is not finished; repeat the command to continue"
    )
