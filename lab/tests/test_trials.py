"""A configuration is a key, a key is a row, and a row is written once."""

import pickle
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from betternorm_lab import trials
from betternorm_lab.store import Store

from betternorm.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Division(trials.Trial):
    kind: ClassVar[str] = "division"
    above: float = 1.0
    below: float = 1.0
    options: tuple = ()

    def run(self, folder, runtime, progress):
        with open(folder / "runs", "a") as file:
            file.write("x")
        progress(1.0)
        return {"quotient": self.above / self.below}


def runs(folder, trial):
    return len((Store(folder).trial_folder(trial.key) / "runs").read_text())


def test_equal_configurations_are_one_trial():
    first = Division(above=1, options={"b": [1, 2], "a": 0.5})
    second = Division(above=1.0, options=(("a", 0.5), ("b", (1, 2))))
    assert first == second
    assert hash(first) == hash(second)
    assert first.key == second.key
    assert pickle.loads(pickle.dumps(first)) == first
    assert first.changed == {"options": (("a", 0.5), ("b", (1, 2)))}


def test_every_field_matters_and_so_does_the_kind():
    @dataclass(frozen=True, kw_only=True)
    class Other(Division):
        kind: ClassVar[str] = "other"

    keys = [Division().key, Division(seed=1).key, Division(above=2).key, Division(below=2).key, Other().key]
    assert len(set(keys)) == 5


def test_a_field_added_later_leaves_old_keys_alone():
    @dataclass(frozen=True, kw_only=True)
    class Later(Division):
        added: int = 7

    assert Later(above=3).key == Division(above=3).key
    assert Later(above=3, added=8).key != Division(above=3).key


def test_keys_never_change():
    assert Division(above=3, seed=1).key == "ffe30902a06ccc0b"


def test_what_cannot_be_frozen():
    with pytest.raises(UserError, match=r"options is .*; fields must be numbers"):
        Division(options={"x": object()})


def test_a_grid_is_every_combination():
    found = trials.grid(Division(below=9), above=(1, 2, 3), seed=range(2))
    assert [(trial.above, trial.seed) for trial in found] == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    assert all(trial.below == 9 for trial in found)


def test_a_finished_trial_never_runs_twice(tmp_path):
    trial = Division(above=6, below=4)
    parts = []
    first = trials.run_trial(trial, tmp_path, progress=parts.append)
    second = trials.run_trial(trial, tmp_path, retry=True)
    assert first == second
    assert first["quotient"] == 1.5
    assert first.config == {"seed": 0, "above": 6, "below": 4, "options": []}
    assert runs(tmp_path, trial) == 1
    assert parts == [1.0]


def test_a_failed_trial_keeps_its_error_and_is_retried_on_demand(tmp_path):
    trial = Division(below=0)
    row = trials.run_trial(trial, tmp_path)
    assert row.status == "failed"
    assert row.error.startswith("ZeroDivisionError: float division by zero")
    assert "test_trials.py" in row.error
    assert trials.run_trial(trial, tmp_path) == row
    assert runs(tmp_path, trial) == 1
    assert trials.run_trial(trial, tmp_path, retry=True).attempts == 2
    assert runs(tmp_path, trial) == 2


def test_a_trial_that_another_process_runs_is_left_to_it(tmp_path):
    trial = Division()
    with Store(tmp_path).claim(trial.key):
        row = trials.run_trial(trial, tmp_path, wait=False)
    assert row.status == "running"
    assert trials.run_trial(trial, tmp_path, wait=False).status == "done"


def test_every_row_says_where_it_came_from(tmp_path):
    row = trials.run_trial(Division(seed=4), tmp_path, trials.Runtime(threads=1))
    found = row.provenance
    assert found["seed"] == 4
    assert found["versions"]["torch"]
    assert found["machine"]["threads"] == 1
    assert found["machine"]["cores"] >= 1
    assert found["duration"] >= 0
    assert found["runtime"]["threads"] == 1
    assert set(found) >= {"commit", "command", "started"}


def test_an_interrupted_trial_is_not_a_failed_one(tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class Stopped(Division):
        kind: ClassVar[str] = "stopped"

        def run(self, folder, runtime, progress):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trials.run_trial(Stopped(), tmp_path)
    assert Store(tmp_path).get(Stopped().key).status == "running"
    assert trials.run_trial(replace(Division(), seed=8), tmp_path).status == "done"
