"""What every experiment declares, at every scale, and what it concludes from any rows."""

from pathlib import Path
from random import Random

import pytest
import torch
from betternorm_lab import models
from betternorm_lab.cli import report
from betternorm_lab.experiments import findings, protocol, registry, runner, saved_rows, scales, trained_networks
from betternorm_lab.results import Outcome
from betternorm_lab.store import Store
from betternorm_lab.training import Config
from torch import nn

from betternorm.errors import UserError

ROOT = Path(__file__).parents[3]


def test_unknown_names_scales_and_numbers_of_seeds_are_refused():
    with pytest.raises(UserError, match="no experiment 'ghost'"):
        registry.chosen(["ghost"])
    with pytest.raises(UserError, match="scale is 'large'"):
        registry.trials_of("ghost-size", "large")
    with pytest.raises(UserError, match="seeds is 0"):
        registry.trials_of("ghost-size", "smoke", 0)
    assert registry.chosen(["decay", "ghost-size"]) == ["ghost-size", "decay"]
    assert registry.chosen(["all"]) == list(registry.NAMES)


EVERY = [(name, scale) for scale in scales.SCALES for name in registry.names_at(scale)]


@pytest.mark.parametrize(("name", "scale"), EVERY)
def test_every_experiment_says_so_where_nothing_has_been_run(name, scale, tmp_path):
    found = runner.result(name, scale, Store(tmp_path))
    assert found.rows == []
    assert "have not been run" in found.notes
    assert f"betternorm reproduce {name} --scale {scale}" in found.notes
    assert {verdict.outcome for verdict in found.verdicts} <= {Outcome.NOT_TESTED}
    assert registry.module(name).__doc__.count("paper") >= 1


@pytest.mark.parametrize(("name", "scale"), EVERY)
def test_arms_are_different_trials_and_seeds_are_at_least_two(name, scale):
    arms = registry.trials_of(name, scale)
    if name != "combined":  # batch norm at the full batch is also the largest of the ghosts there
        for task in {arm.task for arm in arms}:  # the settings of a dataset may share a network
            keys = [trial.key for arm, trials in arms.items() if arm.task == task for trial in trials]
            assert len(set(keys)) == len(keys)
    if scale != protocol.SCALE or name in protocol.FIXED:
        assert all(len(arm) >= 2 for arm in arms.values() if getattr(arm[0], "random", True))
    assert len(arms) >= (1 if name == "alpha-groupnorm" else 2)


def test_small_effects_have_more_seeds():
    assert {len(arm) for arm in registry.trials_of("decay", "small").values()} == {10}
    assert {len(arm) for arm in registry.trials_of("ghost-size", "small").values()} == {5}


def test_experiments_share_trials_that_are_the_same():
    keys = {
        name: {trial.key for arm in registry.trials_of(name, "small").values() for trial in arm}
        for name in ("ghost-size", "alpha-ghost", "combined", "small-batch", "baselines")
    }
    assert keys["ghost-size"] == keys["alpha-ghost"]
    assert len(keys["ghost-size"] & keys["combined"]) == 25  # the smaller of its two tasks
    assert keys["small-batch"] & keys["combined"] & keys["baselines"]


def test_rows_come_back_from_pages_as_they_were(tmp_path):
    """So that a trial whose row is in docs/results is never run again."""
    (first, *_), *_ = registry.trials_of("ghost-size", "smoke").values()
    result = {
        "test_top1": 0.1 + 0.2,
        "alpha": 0.0,
        "kept": True,
        "history": [{"loss": 1e-9}],
        "word": "text",
        "steps": 7,
    }
    before = Store(tmp_path / "before")
    before.finish(first.key, first.kind, first.config, result=result, provenance={"seed": 0, "commit": "abc+"})
    before.finish("another", "trial", {"seed": 1}, result={"list": [1]})  # whose columns the first does not have
    (tmp_path / "pages").mkdir()
    saved_rows.save(before.rows(), tmp_path / "pages" / saved_rows.table_of("smoke"))

    after = Store(tmp_path / "after")
    assert saved_rows.restore(tmp_path / "pages", "smoke", after, ["ghost-size"]) == 1
    (found,) = after.rows()
    assert found.result == {name: value for name, value in result.items() if name != "history"}
    assert found.config == before.rows()[0].config
    assert found.provenance == {"seed": 0, "commit": "abc+"}
    assert saved_rows.restore(tmp_path / "pages", "smoke", after, ["ghost-size"]) == 0
    assert saved_rows.restore(tmp_path / "elsewhere", "smoke", after) == 0


def test_a_network_that_another_trial_needs_is_trained_once(tmp_path):
    from betternorm_lab.experiments.scales import SMOKE
    from betternorm_lab.trials import Runtime

    config = Config(**SMOKE.config | {"epochs": 1, "steps_per_epoch": 1, "tune_alpha": False, "test": False})
    folder = tmp_path / "trials" / "this"
    file = trained_networks.network_file(config, folder, Runtime(threads=1, show=False))
    written = file.stat().st_mtime_ns
    network = trained_networks.network_of(config, folder, Runtime(threads=1, show=False))
    assert file.stat().st_mtime_ns == written
    assert not network.training
    assert torch.isfinite(network(torch.randn(2, 1, 8, 8))).all()


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    """The rows of docs/results."""
    store = Store(tmp_path_factory.mktemp("store"))
    assert saved_rows.restore(ROOT / "docs" / "results", "small", store) > 100
    return store


@pytest.mark.parametrize("name", registry.NAMES)
def test_whatever_has_been_run_so_far_comes_to_something(name, committed):
    """A report may be asked for at any time: arms have different seeds then, or none."""
    arms = registry.trials_of(name, "small")
    found = {label: [row for trial in arm if (row := committed.get(trial.key))] for label, arm in arms.items()}
    random = Random(name)
    for share in (0.0, 0.3, 0.6, 0.9, 1.0):
        some = {label: [row for row in rows if random.random() < share] for label, rows in found.items()}
        concluded = registry.module(name).conclude(findings.FinishedRuns("small", some))
        assert concluded.verdicts or not any(some.values())


def test_groups_divide_the_channels_of_the_networks():
    """At the paper's scale too, whose trials are too large to be run here."""
    channels = {}
    for trials in (arm for name in registry.NAMES for arm in registry.trials_of(name, "paper", 1).values()):
        network, count = (
            getattr(trials[0], "network", ""),
            dict(getattr(trials[0], "norm_options", ())).get("num_groups"),
        )
        if count is None:
            continue
        if network not in channels:
            with torch.device("meta"):
                layers = models.build(network, 100).modules()
            channels[network] = {layer.num_features for layer in layers if isinstance(layer, nn.BatchNorm2d)}
        assert not [one for one in channels[network] if one > count and one % count], trials[0]
    assert {"resnet18", "inception_v3", "resnet152"} <= set(channels)


def test_a_report_shows_no_scale_that_was_not_run(committed):
    """What is shown of a layer by itself is the same trial at every scale."""
    assert {result.scale for result in report.collect(committed.folder, watched=False)} == {"small"}
