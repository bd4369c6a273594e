"""The same rows from every engine, whatever dies on the way."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from betternorm_lab import engines
from betternorm_lab.store import Store
from betternorm_lab.training import Config
from betternorm_lab.trials import Runtime, Trial, grid

from betternorm.errors import UserError

QUIET = Runtime(threads=1, accelerator="cpu", show=False)


@dataclass(frozen=True, kw_only=True)
class Square(Trial):
    kind: ClassVar[str] = "square"
    number: int = 0
    deaths: int = 0  # how often its process is killed before it answers

    def run(self, folder, runtime, progress):
        with open(folder / "starts", "a+") as file:
            file.write("x")
            file.seek(0)
            if len(file.read()) <= self.deaths:
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
        progress(0.5)
        if self.number < 0:
            raise ValueError("negative")
        return {"square": self.number**2}


SQUARES = grid(Square(), number=range(6))


def starts(folder, trial):
    return len((Store(folder).trial_folder(trial.key) / "starts").read_text())


@pytest.fixture(scope="module")
def ray():
    """One Ray for all tests here: starting it is what takes long."""
    module = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # workers import the trials of this file
        module.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield module
    module.shutdown()


# Ray takes its time to start, and minutes on a machine that is busy.
RAY = pytest.param("ray", marks=pytest.mark.slow)


@pytest.fixture(params=[name if name != "ray" else RAY for name in engines.ENGINES])
def engine(request):
    if request.param == "ray":
        request.getfixturevalue("ray")
    return request.param


pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")  # of Ray's own


def test_every_engine_gives_the_same_rows_in_order(tmp_path, engine):
    some = [*SQUARES, Square(number=-1), SQUARES[0]]
    rows = engines.run_trials(some, tmp_path, engine=engine, runtime=QUIET, workers=2)
    assert [row.result.get("square") for row in rows] == [0, 1, 4, 9, 16, 25, None, 0]
    assert [row.status for row in rows] == ["done"] * 6 + ["failed", "done"]
    assert rows[6].error.startswith("ValueError: negative")
    assert engines.run_trials(some, tmp_path, engine=engine, runtime=QUIET, workers=2) == rows
    assert [starts(tmp_path, trial) for trial in some] == [1] * 8
    engines.run_trials(some, tmp_path, engine=engine, runtime=QUIET, workers=1, retry=True)
    assert [starts(tmp_path, trial) for trial in some] == [1] * 6 + [2, 1]


@pytest.mark.parametrize("engine", ["processes", RAY])
def test_a_killed_worker_is_replaced_and_one_that_always_dies_is_given_up(tmp_path, engine, request):
    if engine == "ray":
        request.getfixturevalue("ray")
    some = [Square(number=2, deaths=1), Square(number=3, deaths=99), *SQUARES[4:]]
    rows = engines.run_trials(some, tmp_path, engine=engine, runtime=QUIET, workers=2)
    assert [row.status for row in rows] == ["done", "failed", "done", "done"]
    assert rows[0]["square"] == 4
    assert "its process died" in rows[1].error
    assert starts(tmp_path, some[1]) == engines.LIVES


@dataclass(frozen=True, kw_only=True)
class Fragile(Config):
    """A training whose process is killed the first time it is half through."""

    kind: ClassVar[str] = "fragile"

    def run(self, folder, runtime, progress):
        def killed(part):
            scar = folder / "scar"
            if part > 0.6 and (self.norm, self.seed) == ("ghost", 1) and not scar.exists():
                scar.write_text("")
                os.kill(os.getpid(), signal.SIGKILL)
            progress(part)

        return super().run(folder, runtime, killed)


SHORT = Fragile(width=4, blocks=(1,), epochs=2, steps_per_epoch=3, batch_size=32, validate_every=0)


@pytest.mark.parametrize(
    ("engine", "seeds"),
    [("processes", 2), *(pytest.param(name, 6, marks=pytest.mark.slow) for name in ("processes", "ray"))],
)
def test_trainings_one_killed_in_the_middle_give_the_table_of_one_process(tmp_path, engine, seeds, request):
    if engine == "ray":
        request.getfixturevalue("ray")
    several = grid(SHORT, norm=("batch", "ghost"), seed=range(seeds))
    for trial in several:  # in this process nothing is to be killed
        folder = Store(tmp_path / "here").trial_folder(trial.key)
        folder.mkdir(parents=True)
        (folder / "scar").write_text("")
    expected = engines.run_trials(several, tmp_path / "here", runtime=QUIET)
    rows = engines.run_trials(several, tmp_path / "there", engine=engine, runtime=QUIET, workers=2)
    assert [row.status for row in rows] == ["done"] * 2 * seeds, [row.error for row in rows]
    assert [row.result for row in rows] == [row.result for row in expected]
    (killed,) = (tmp_path / "there").glob("trials/*/scar")
    assert killed.parent.name == several[seeds + 1].key


def test_two_programs_share_a_grid_and_nothing_runs_twice(tmp_path):
    def other():
        engines.run_trials(SQUARES[::-1], tmp_path, runtime=QUIET)

    thread = threading.Thread(target=other)
    thread.start()
    rows = engines.run_trials(SQUARES, tmp_path, runtime=QUIET)
    thread.join()
    assert [row["square"] for row in rows] == [0, 1, 4, 9, 16, 25]
    assert all(starts(tmp_path, trial) == 1 for trial in SQUARES)


FOREVER = """
import sys, time
from dataclasses import dataclass
from typing import ClassVar
from betternorm_lab import engines
from betternorm_lab.trials import Trial, grid

@dataclass(frozen=True, kw_only=True)
class Sleep(Trial):
    kind: ClassVar[str] = "sleep"
    def run(self, folder, runtime, progress):
        (folder / "begun").write_text(str(__import__("os").getpid()))
        time.sleep(600)

if __name__ == "__main__":
    engines.run_trials(grid(Sleep(), seed=range(4)), sys.argv[1], engine=sys.argv[2], workers=2, show=False)
"""


@pytest.mark.parametrize("engine", ["here", "processes"])
def test_ctrl_c_stops_cleanly(tmp_path, engine):
    (tmp_path / "forever.py").write_text(FOREVER)
    program = subprocess.Popen(
        [sys.executable, str(tmp_path / "forever.py"), str(tmp_path / "out"), engine],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline, wanted, begun = time.monotonic() + 300, 2 if engine == "processes" else 1, []
    while len(begun) < wanted and time.monotonic() < deadline:
        time.sleep(0.05)
        begun = [path for path in (tmp_path / "out").glob("trials/*/begun") if path.read_text()]
    os.killpg(program.pid, signal.SIGINT)  # as a terminal does: to the whole group
    _, words = program.communicate(timeout=120)
    assert len(begun) == wanted
    assert words.strip().endswith("KeyboardInterrupt")
    assert words.count("Traceback") == 1  # the parent's alone
    for path in begun:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)
    assert {row.status for row in Store(tmp_path / "out").rows(status=None)} == {"running"}


@dataclass(frozen=True, kw_only=True)
class Reads(Trial):
    kind: ClassVar[str] = "reads"

    def run(self, folder, runtime, progress):
        loader = torch.utils.data.DataLoader(list(range(8)), batch_size=4, num_workers=1)
        return {"sum": sum(batch.sum().item() for batch in loader)}


def test_a_trial_in_a_pool_may_have_processes_that_read(tmp_path):
    (row,) = engines.run_trials([Reads()], tmp_path, engine="processes", runtime=QUIET)
    assert row.result == {"sum": 28}, row.error


def test_cores_are_divided_and_not_oversubscribed(tmp_path):
    rows = engines.run_trials(
        SQUARES[:2], tmp_path, engine="processes", runtime=replace(QUIET, threads=None), workers=2
    )
    cores = len(os.sched_getaffinity(0))
    assert {row.provenance["machine"]["threads"] for row in rows} == {max(1, cores // 2)}


def test_the_grid_is_shown_as_it_goes(tmp_path, capsys):
    engines.run_trials([*SQUARES[:2], Square(number=-1)], tmp_path, runtime=QUIET, show=True)
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "1 failed" in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine": "slurm"}, "engine is 'slurm'; it must be one of here, processes, ray"),
        ({"engine": "processes", "workers": 0}, "workers is 0; it must be 1 or more"),
    ],
)
def test_engines_that_cannot_be(tmp_path, options, words):
    with pytest.raises(UserError, match=words):
        engines.run_trials(SQUARES, tmp_path, **options)
