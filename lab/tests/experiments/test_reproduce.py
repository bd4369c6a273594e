"""``betternorm reproduce``: every experiment ends in tables and figures, whatever happens on the way."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from betternorm_lab import engines
from betternorm_lab.experiments import plan, registry, runner
from betternorm_lab.experiments.scales import steps
from betternorm_lab.store import DONE, Store
from betternorm_lab.training import Config
from betternorm_lab.trials import Runtime
from PIL import Image

from betternorm.cli.main import main
from betternorm.integrations.models import load_model

ONE_THREAD = Runtime(threads=1, show=False)


def reproduce(*words):
    return main(["reproduce", *map(str, words), "--quiet", "--threads", "1"])


def check(found):
    """A result that says something."""
    assert found.tables
    assert all(table.rows for table in found.tables)
    assert all(len(row) == len(table.headers) for table in found.tables for row in table.rows)
    assert "not run" not in {cell for table in found.tables for row in table.rows for cell in row}
    assert found.figures
    assert all(figure.series and all(len(one.x) for one in figure.series) for figure in found.figures)
    assert found.verdicts == []  # a smoke run says that it ran, no more
    assert "have not been run" not in found.notes
    assert "failed" not in found.notes


def test_candidates_are_of_one_experiment_and_keep_their_rows_apart(tmp_path, capsys):
    words = ("--scale", "medium", "--candidates", "--rows-only", "--folder", tmp_path / "store", "--pages", tmp_path)
    assert reproduce("non-iid", *words) == 0
    assert "batch norm, 16, learning rate 0.01" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir() if path.name != "store"] == ["protocol"]
    assert reproduce("non-iid", "small-batch", *words) == 2
    assert "one experiment at a time" in capsys.readouterr().err
    assert reproduce("combined", *words) == 2
    assert "combined has no candidates" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ghost-size", "output-range"])
def test_an_experiment_ends_in_table_and_figure(name, tmp_path, capsys):
    """Two here, quickly; all of them in the slow tests."""
    folder, pages = tmp_path / "store", tmp_path / "pages"
    assert reproduce(name, "--folder", folder, "--pages", pages) == 0
    check(runner.result(name, "smoke", Store(folder)))
    printed = capsys.readouterr().out
    assert registry.module(name).TITLE in printed
    assert not re.search(r"^(REPLICATED|OPPOSITE|INCONCLUSIVE|EQUIVALENT)", printed, re.MULTILINE)
    assert (pages / f"{name}.md").is_file()
    assert (pages / name / "figure-1.svg").is_file()

    # From the pages alone, in another store: nothing is run, and the tables are the same.
    rows = {row.key: row.result for row in Store(folder).rows()}
    elsewhere = tmp_path / "elsewhere"
    assert reproduce(name, "--folder", elsewhere, "--pages", pages) == 0
    assert {row.key: row.result for row in Store(elsewhere).rows() if row.key in rows}.keys() <= rows.keys()
    first, second = (runner.result(name, "smoke", Store(one)) for one in (folder, elsewhere))
    assert first.tables == second.tables
    assert first.verdicts == second.verdicts


def test_fewer_seeds_and_unknown_names(tmp_path, capsys):
    assert reproduce("nothing", "--folder", tmp_path) == 2
    assert "there is no experiment 'nothing'" in capsys.readouterr().err
    found = runner.reproduce(["alpha-groupnorm"], "smoke", tmp_path, seeds=1, runtime=ONE_THREAD, show=False)
    assert [len(one.rows) for one in found] == [1]


def test_alpha_on_networks_and_images_of_ones_own(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from betternorm_lab.models import ResNet\n\ndef build():\n    return ResNet(2, width=4, blocks=(1,))\n"
    )
    torch.save(load_model("mine.py:build").state_dict(), tmp_path / "mine.pt")
    images = np.random.RandomState(0).randint(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    for label in range(2):
        (tmp_path / "val" / str(label)).mkdir(parents=True)
        for number in range(10):
            Image.fromarray(images[10 * label + number]).save(tmp_path / "val" / str(label) / f"{number}.png")
    words = ("alpha-pretrained", "--network", "mine.py:build=mine.pt", "--images", "val", "--image-size", "8")
    assert reproduce(*words, "--folder", "store") == 0
    assert "mine.py:build" in capsys.readouterr().out
    (row,) = Store("store").rows()
    assert row["examples"] == 20  # all of them
    assert reproduce("ghost-size", "--images", "val", "--folder", "store") == 2
    assert "used together" in capsys.readouterr().err


def test_without_names_it_is_every_experiment(tmp_path, capsys):
    assert reproduce("--scale", "medium", "--rows-only", "--json", "--folder", tmp_path) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)] == [*registry.MEDIUM]


def test_a_plan_says_what_so_many_seeds_can_show(tmp_path, monkeypatch, capsys):
    """As docs/results/protocol.md has it; nothing of this experiment is left to be timed."""
    pages = Path(__file__).parents[3] / "docs" / "results"
    monkeypatch.chdir(tmp_path)
    assert reproduce("ghost-size", "--scale", "medium", "--plan", "--pages", pages) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"ghost-size 33 30 0 ", said)
    assert "3 seeds show 1.4 points of top-1 between arms, and 0.65 between two readings of the same networks" in said


def test_a_plan_says_what_it_takes_and_runs_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert reproduce("ghost-size", "alpha-ghost", "--scale", "small", "--plan") == 0
    printed = capsys.readouterr().out
    for words in ("GPU hours", "to fetch, GB", "torchrun", "--engine ray", "hours on this CPU"):
        assert words in printed
    rows = [line.split() for line in printed.splitlines()]
    assert [row[1:3] for row in rows if row and row[0] in ("ghost-size", "alpha-ghost")] == [["50", "50"], ["50", "0"]]
    assert list(tmp_path.iterdir()) == []


def test_the_cost_of_a_training_is_its_images_times_the_work_of_one():
    config = Config(dataset="cifar100", width=8, blocks=(1,), epochs=2, batch_size=100)
    one = plan.image_cost("resnet18", "cifar100", None, 8, (1,))
    assert steps(config) == 800
    assert plan.cost(config).operations == pytest.approx(80_000 * one.operations)
    # Stem 3 -> 8, two convolutions 8 -> 8 at 32x32, and the head; a multiplication and an addition each. Backward is
    # twice that, but for the images, which need no gradient.
    layers = [2 * 9 * 3 * 8 * 1024, 2 * 9 * 8 * 8 * 1024, 2 * 9 * 8 * 8 * 1024, 2 * 8 * 100]
    assert one.operations == pytest.approx(3 * sum(layers) - layers[0])


def run_in_process(folder):
    words = ["reproduce", "ghost-size", "--folder", str(folder), "--quiet", "--threads", "1"]
    return subprocess.Popen([sys.executable, "-m", "betternorm.cli", *words], stdout=subprocess.DEVNULL)


def test_killed_in_the_middle_and_restarted_gives_the_same_table(tmp_path):
    process = run_in_process(tmp_path / "killed")
    deadline = time.monotonic() + 300
    store = Store(tmp_path / "killed")
    while len(store.rows()) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = store.rows()
    assert 2 <= len(before) < 6
    assert reproduce("ghost-size", "--folder", tmp_path / "killed") == 0
    assert reproduce("ghost-size", "--folder", tmp_path / "whole") == 0
    killed, whole = (runner.result("ghost-size", "smoke", Store(tmp_path / one)) for one in ("killed", "whole"))
    assert killed.tables == whole.tables
    assert killed.verdicts == whole.verdicts
    # What was finished before was not run again.
    assert [store.get(row.key).provenance for row in before] == [row.provenance for row in before]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["processes", "ray"])
@pytest.mark.parametrize("name", ["ghost-size", "transfer"])
def test_engines_give_the_same_rows(name, engine, tmp_path):
    """Of transfer too, whose trials need a network that only one of them trains."""
    wanted = [trial for arm in registry.trials_of(name, "smoke", 1).values() for trial in arm]
    here = engines.run_trials(wanted, tmp_path / "here", runtime=ONE_THREAD, show=False)
    there = engines.run_trials(wanted, tmp_path / "there", engine=engine, runtime=ONE_THREAD, workers=2, show=False)
    assert [row.status for row in there] == [DONE] * len(wanted)
    assert [(row.key, row.result) for row in here] == [(row.key, row.result) for row in there]


@pytest.mark.slow
def test_all_experiments_at_smoke_scale(tmp_path):
    assert reproduce("all", "--folder", tmp_path / "store", "--pages", tmp_path / "pages") == 0
    found = runner.results(tmp_path / "store", "smoke")
    assert [result.name for result in found] == list(registry.NAMES)
    for result in found:
        check(result)
        assert (tmp_path / "pages" / f"{result.name}.md").is_file()
    assert not Store(tmp_path / "store").rows(status="failed")


def shrunk(trial, weights):
    """At most two steps, a few images, no half precision: the code of the paper's scale on a CPU."""
    few = {"dataset": f"stand-in:{trial.dataset}"}
    if isinstance(trial, Config):
        batch = min(trial.batch_size, 8)
        few |= {
            "epochs": 1,
            "steps_per_epoch": 2,
            "batch_size": batch,
            "train_examples": None if trial.classes_per_batch else 2 * batch,  # not all of these have enough of a class
            "precision": "32-true",
            "alpha_grid": (0.0, 1.0),
            "test": False,
        }
        few |= {"finetune_from": weights} if trial.finetune_from else {}
    else:
        few |= {"alphas": (0.0, 0.5), "limit": 8, "weights": weights, "network": trial.network.partition(".")[0]}
    return replace(trial, **few)


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.NAMES)
def test_the_code_of_the_papers_scale_runs(name, tmp_path):
    """A step or two of the first trial of every kind and network, on stand-in data of the right shape."""
    kinds = {}
    for arm, (trial, *_) in registry.trials_of(name, "paper", 1).items():
        kinds.setdefault((trial.kind, getattr(trial, "network", ""), arm.method), trial)
    for trial in kinds.values():
        if not hasattr(trial, "dataset"):
            continue
        weights = str(tmp_path / "weights.pt")
        if isinstance(trial, Config):
            assert steps(trial) >= 200  # so that two are at most 1 % of them
        if not isinstance(trial, Config) or trial.finetune_from:
            network = getattr(trial, "network", "resnet152").partition(".")[0]
            spec = {"resnet152": "timm:resnet152"}.get(network, network)
            torch.save(load_model(spec).state_dict(), weights)
        (row,) = engines.run_trials([shrunk(trial, weights)], tmp_path / "store", runtime=ONE_THREAD, show=False)
        assert row.status == DONE, row.error
