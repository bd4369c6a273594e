"""Fault tolerance: an interruption leaves no process and no failed trial behind, and the same command continues."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from betternorm_lab.store import Store

from betternorm.cli.main import main

QUICK = ["--width", "4", "--blocks", "1", "1", "--steps-per-epoch", "4", "--batch-size", "32", "--validate-every", "0"]
QUICK += ["--threads", "1", "--accelerator", "cpu", "--quiet"]
TRAIN = [sys.executable, "-m", "betternorm.cli", "train", *QUICK]
ENDLESS = ["--epochs", "100000"]
PATIENCE = 240  # seconds; a machine may be busy


class Program:
    """A command with all that it starts, known by a variable of the environment that children inherit."""

    def __init__(self, command, **variables):
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PROGRAM_MARK": self.mark, "OMP_NUM_THREADS": "1"} | variables,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def alive(self):
        """The processes that belong to it and have not ended."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"PROGRAM_MARK={self.mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def ended(self):
        """Exit code, what it printed, and what it complained of."""
        out, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out, err


def eventually(condition, seconds=PATIENCE):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return found


def checkpoints(folder):
    return list(Path(folder).glob("trials/*/checkpoint.pt"))


def attempts(folder):
    return sum(row.attempts for row in Store(folder).rows(status=None))


def statuses(folder):
    return [row.status for row in Store(folder).rows(status=None)]


@pytest.mark.parametrize(
    ("engine", "ending", "code"),
    [
        ("processes", signal.SIGTERM, 143),
        pytest.param("here", signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param("processes", signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("ray", signal.SIGTERM, 143, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_ended_leaves_no_process_behind(tmp_path, engine, ending, code):
    """The signal goes to the command alone, as a scheduler sends it."""
    command = [*TRAIN, *ENDLESS, "--seed", "0", "1", "--output", str(tmp_path), "--engine", engine, "--processes", "2"]
    with Program(command) as program:
        eventually(lambda: len(checkpoints(tmp_path)) == (1 if engine == "here" else 2))
        program.process.send_signal(ending)
        found, _, complaint = program.ended()
        eventually(lambda: not program.alive(), 60)
    assert found == code, complaint
    assert "Traceback" not in complaint
    assert set(statuses(tmp_path)) == {"running"}


@pytest.mark.slow
def test_reproduce_killed_twenty_times_gives_the_same_tables(tmp_path):
    words = [sys.executable, "-m", "betternorm.cli", "reproduce", "ghost-size", "--threads", "1", "--quiet", "--json"]

    def whole(folder):
        with Program([*words, "--output", str(folder)]) as program:
            code, tables, complaint = program.ended()
        assert code == 0, complaint
        return json.loads(tables)

    started = time.monotonic()
    calm, wild = whole(tmp_path / "calm"), tmp_path / "wild"
    seconds, moment, kills = time.monotonic() - started, random.Random(0), 0
    while kills < 20:
        before = attempts(wild)
        with Program([*words, "--output", str(wild)]) as program:
            eventually(lambda: attempts(wild) > before or program.process.poll() is not None)  # noqa: B023
            time.sleep(moment.uniform(0, seconds / 10))
            if program.process.poll() is None:
                program.process.kill()
                kills += 1
                continue
        assert whole(wild) == calm  # it was quicker: on with another
        wild = tmp_path / f"wild after {kills}"
    assert whole(wild) == calm


def test_a_full_disk_ends_a_pool_in_one_line(tmp_path):
    """A limit on the size of files stands for the disk."""
    script = tmp_path / "limited.py"
    script.write_text(LIMITED)
    command = [
        sys.executable,
        str(script),
        "train",
        *QUICK,
        "--epochs",
        "2",
        "--engine",
        "processes",
        "--seed",
        "0",
        "1",
    ]
    with Program([*command, "--output", str(tmp_path / "out")]) as program:
        code, _, complaint = program.ended()
        eventually(lambda: not program.alive(), 20)
    assert code == 2, complaint
    assert complaint.count("\n") == 1
    assert "rows that were already stored are kept" in complaint
    assert "failed" not in statuses(tmp_path / "out")


LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from betternorm.cli.main import main
from betternorm_lab import training  # what is compiled or cached on import is written before the limit
from betternorm_lab.store import Store

if __name__ == "__main__":
    Store(sys.argv[-1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (13_000, 13_000))
    sys.exit(main(sys.argv[1:]))
"""


# Several processes on one trial -------------------------------------------------------------------------------------


@contextlib.contextmanager
def ranks(command, count=2):
    """As torchrun starts them, without torchrun: it would end the others when one is lost."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": "0"}
    shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(Program(command, **shared, RANK=str(rank), LOCAL_RANK=str(rank)))
            for rank in range(count)
        ]


@pytest.mark.slow
def test_a_lost_rank_fails_no_trial_and_the_same_command_goes_on(tmp_path):
    words = [*TRAIN, "--epochs", "12", "--seed", "0", "1"]
    calm, wild = tmp_path / "calm", tmp_path / "wild"
    with ranks([*words, "--output", str(calm)]) as undisturbed:
        assert [program.ended()[0] for program in undisturbed] == [0, 0]
    with ranks([*words, "--output", str(wild)]) as (first, second):
        eventually(lambda: checkpoints(wild))
        second.process.kill()
        code, _, complaint = first.ended()
    assert code == 2
    assert "a process of this run was lost" in complaint
    assert "Traceback" not in complaint
    assert "failed" not in statuses(wild)
    with ranks([*words, "--output", str(wild)]) as again:
        assert [program.ended()[0] for program in again] == [0, 0]
    assert [row.result for row in Store(wild).rows()] == [row.result for row in Store(calm).rows()]


@pytest.mark.slow
def test_an_error_that_all_ranks_meet_fails_its_trial_and_the_grid_goes_on(tmp_path):
    command = [*TRAIN, "--epochs", "1", "--batch-size", "31", "--seed", "0", "1", "--output", str(tmp_path)]
    with ranks(command) as both:
        (code, told, _), (other, silent, _) = (program.ended() for program in both)
    assert (code, other) == (1, 0)
    assert told.count("batch_size is 31; it must be a multiple of the 2 processes") == 2
    assert silent == ""
    assert statuses(tmp_path) == ["failed", "failed"]


def test_a_slurm_task_that_was_told_of_no_others_writes_its_row(tmp_path, monkeypatch, capsys):
    task = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "grid", "SLURM_PROCID": "3", "SLURM_LOCALID": "3"}
    for name, value in (task | {"SLURM_NTASKS": "4", "SLURM_NODEID": "0", "SLURM_NNODES": "1"}).items():
        monkeypatch.setenv(name, value)
    assert main(["train", *QUICK, "--epochs", "1", "--output", str(tmp_path)]) == 0
    (row,) = Store(tmp_path).rows()
    assert row.key in capsys.readouterr().out


# What a machine cannot carry ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--devices 9999", "devices is 9999; it must be from 1 to"),
        ("--devices 0", "devices is 0; it must be from 1 to"),
        ("--workers 1000000", "workers is 1000000; it must be from 0 to"),
        ("--threads 1000000", "threads is 1000000; it must be from 1 to"),
        ("--nodes 0", "nodes is 0; it must be 1 or more"),
        ("--engine processes --devices 2", "several on one trial need engine 'here'"),
    ],
)
def test_more_than_the_machine_has_is_refused_before_anything_starts(tmp_path, capsys, words, said):
    assert main(["train", *QUICK, "--output", str(tmp_path / "out"), *words.split()]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_pool_larger_than_the_machine_is_refused(tmp_path, capsys):
    seeds = [str(seed) for seed in range(9 * os.cpu_count())]
    words = ["--engine", "processes", "--processes", "1000000", "--seed", *seeds]
    assert main(["train", *QUICK, "--output", str(tmp_path), *words]) == 2
    assert f"workers is {len(seeds)}; it must be from 1 to" in capsys.readouterr().err
