"""The rule that judges claims, and the rows of arms as curves and cells."""

import math
from pathlib import Path
from random import Random

import pytest
import torch
from torch import nn

from betternorm.commands import report
from betternorm.errors import UserError
from betternorm.lab import experiments, models
from betternorm.lab.experiments import suite
from betternorm.lab.results import Outcome
from betternorm.lab.store import DONE, Row, Store, export
from betternorm.lab.training import Config

ROOT = Path(__file__).parents[3]
SEEN, NOT_SEEN, UNDECIDED = Outcome.SEEN, Outcome.NOT_SEEN, Outcome.UNDECIDED


@pytest.mark.parametrize(
    ("interval", "claimed", "outcome"),
    [
        ((0.1, 2.0), suite.MORE, SEEN),
        ((-2.0, -0.1), suite.MORE, NOT_SEEN),
        ((-0.1, 2.0), suite.MORE, UNDECIDED),
        ((0.0, 0.0), suite.MORE, NOT_SEEN),
        ((-2.0, -0.1), suite.LESS, SEEN),
        ((0.1, 2.0), suite.LESS, NOT_SEEN),
        ((-0.4, 0.3), suite.within(0.5), SEEN),
        ((0.6, 0.9), suite.within(0.5), NOT_SEEN),
        ((0.4, 0.9), suite.within(0.5), UNDECIDED),
        ((math.nan, math.nan), suite.MORE, UNDECIDED),
    ],
)
def test_a_claim_is_seen_where_the_interval_lies_inside_and_not_seen_where_it_lies_outside(interval, claimed, outcome):
    assert suite.judge("claim", interval, claimed, "").outcome is outcome


def test_two_arms_apart_are_seen_apart_and_few_runs_decide_nothing():
    assert suite.compare("more", [3.0, 3.1, 2.9], [1.0, 1.1, 0.9]).outcome is SEEN
    assert suite.compare("more", [1.0, 1.1, 0.9], [3.0, 3.1, 2.9]).outcome is NOT_SEEN
    assert suite.compare("more", [3.0], [1.0, 1.1]).outcome is UNDECIDED
    assert "it takes two" in suite.compare("more", [], [1.0, 1.1]).evidence


def test_pairs_decide_what_the_spread_between_networks_hides():
    before, after = [40.0, 50.0, 60.0], [41.0, 51.1, 60.9]
    assert suite.compare("more", after, before).outcome is UNDECIDED
    assert suite.compare("more", after, before, paired=True).outcome is SEEN


@pytest.mark.parametrize(
    ("parts", "outcome"),
    [((SEEN, SEEN), SEEN), ((SEEN, UNDECIDED), UNDECIDED), ((UNDECIDED, NOT_SEEN), NOT_SEEN)],
)
def test_a_claim_of_parts_holds_where_all_parts_do(parts, outcome):
    verdicts = [suite.Verdict("part", part, "") for part in parts]
    assert suite.together("whole", verdicts).outcome is outcome


def row(seed=0, **result):
    trial = Config(seed=seed)
    return Row(trial.key, trial.kind, DONE, trial.config, result)


def test_values_come_in_per_cent_where_they_are_shares_and_alphas_as_they_are():
    runs = suite.Runs("smoke", {("a",): [row(test_top1=0.5, test_cross_entropy=1.5, alpha_top1=0.2)], ("b",): []})
    assert runs.values(("a",), "test_top1") == [50.0]
    assert runs.values(("a",), "test_cross_entropy") == [1.5]
    assert runs.values(("a",), "alpha_top1") == [0.2]
    assert runs.values(("b",), "test_top1") == []
    assert runs.names() == ["a", "b"]


def test_an_alpha_curve_is_over_the_alphas_that_all_runs_tried():
    first = row(alpha_as_trained=0.0, alpha_table=[{"alpha": a, "top1": a} for a in (0.0, 0.1, 0.5)])
    second = row(1, alpha_as_trained=0.0, alpha_table=[{"alpha": a, "top1": a} for a in (0.0, 0.5, 1.0)])
    assert suite.alpha_points([first, second], "top1") == {0.0: [0.0, 0.0], 0.5: [50.0, 50.0]}
    assert suite.alpha_points([first, second], "top1", within=0.2) == {0.0: [0.0, 0.0]}
    assert suite.alpha_points([], "top1") == {}


def test_a_curve_has_intervals_where_there_are_runs_and_leaves_out_what_has_not_been_run():
    found = suite.curve("curve", {1: [1.0, 3.0], 2: [], 4: [5.0]})
    assert list(found.x) == [1, 4]
    assert list(found.y) == [2.0, 5.0]
    assert found.low[0] < 2.0 < found.high[0]
    assert found.low[1] == found.high[1] == 5.0


def test_unknown_names_scales_and_numbers_of_seeds_are_refused():
    with pytest.raises(UserError, match="no experiment 'ghost'"):
        experiments.chosen(["ghost"])
    with pytest.raises(UserError, match="scale is 'large'"):
        experiments.trials("ghost-size", "large")
    with pytest.raises(UserError, match="seeds is 0"):
        experiments.trials("ghost-size", "smoke", 0)
    assert experiments.chosen(["decay", "ghost-size"]) == ["ghost-size", "decay"]
    assert experiments.chosen(["all"]) == list(experiments.NAMES)


@pytest.mark.parametrize("scale", experiments.SCALES)
@pytest.mark.parametrize("name", experiments.NAMES)
def test_every_experiment_says_so_where_nothing_has_been_run(name, scale, tmp_path):
    found = experiments.result(name, scale, Store(tmp_path))
    assert found.rows == []
    assert "have not been run yet" in found.notes
    assert f"betternorm reproduce {name} --scale {scale}" in found.notes
    assert {verdict.outcome for verdict in found.verdicts} <= {UNDECIDED}
    assert experiments.module(name).__doc__.count("paper") >= 1


@pytest.mark.parametrize("scale", experiments.SCALES)
@pytest.mark.parametrize("name", experiments.NAMES)
def test_arms_are_different_trials_and_seeds_are_at_least_two(name, scale):
    arms = experiments.trials(name, scale)
    keys = [trial.key for arm in arms.values() for trial in arm]
    if name != "combined":  # batch norm at the full batch is also the largest of the ghosts there
        assert len(set(keys)) == len(keys)
    assert all(len(arm) >= 2 for arm in arms.values() if getattr(arm[0], "random", True))
    assert len(arms) >= (1 if name == "alpha-groupnorm" else 2)


def test_small_effects_have_more_seeds():
    assert {len(arm) for arm in experiments.trials("decay", "small").values()} == {10}
    assert {len(arm) for arm in experiments.trials("ghost-size", "small").values()} == {5}


def test_experiments_share_trials_that_are_the_same():
    keys = {
        name: {trial.key for arm in experiments.trials(name, "small").values() for trial in arm}
        for name in ("ghost-size", "alpha-ghost", "combined", "small-batch", "baselines")
    }
    assert keys["ghost-size"] == keys["alpha-ghost"]
    assert len(keys["ghost-size"] & keys["combined"]) == 25  # the smaller of its two tasks
    assert keys["small-batch"] & keys["combined"] & keys["baselines"]


def test_rows_come_back_from_pages_as_they_were(tmp_path):
    """So that a trial whose row is in docs/results is never run again."""
    (first, *_), *_ = experiments.trials("ghost-size", "smoke").values()
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
    (tmp_path / "pages" / "ghost-size").mkdir(parents=True)
    export(before.rows(), tmp_path / "pages" / "ghost-size" / "rows.csv")

    after = Store(tmp_path / "after")
    assert experiments.restore(tmp_path / "pages", "smoke", after, ["ghost-size"]) == 1
    (found,) = after.rows()
    assert found.result == result
    assert found.config == before.rows()[0].config
    assert found.provenance == {"seed": 0, "commit": "abc+"}
    assert experiments.restore(tmp_path / "pages", "smoke", after, ["ghost-size"]) == 0
    assert experiments.restore(tmp_path / "elsewhere", "smoke", after) == 0


def test_a_network_that_another_trial_needs_is_trained_once(tmp_path):
    from betternorm.lab.experiments.tasks import SMOKE
    from betternorm.lab.trials import Runtime

    config = Config(**SMOKE.config | {"epochs": 1, "steps_per_epoch": 1, "tune_alpha": False, "test": False})
    folder = tmp_path / "trials" / "this"
    file = suite.network_file(config, folder, Runtime(threads=1, show=False))
    written = file.stat().st_mtime_ns
    network = suite.network_of(config, folder, Runtime(threads=1, show=False))
    assert file.stat().st_mtime_ns == written
    assert not network.training
    assert torch.isfinite(network(torch.randn(2, 1, 8, 8))).all()


def test_arms_are_paired_by_seed():
    runs = suite.Runs("small", {("a",): [row(seed, top1=seed) for seed in (0, 2, 1)], ("b",): [row(2, top1=7)]})
    assert runs.by_seed((("a",), "top1"), (("b",), "top1")) == [[200.0], [700.0]]


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    """The rows of docs/results."""
    store = Store(tmp_path_factory.mktemp("store"))
    assert experiments.restore(ROOT / "docs" / "results", "small", store) > 100
    return store


@pytest.mark.parametrize("name", experiments.NAMES)
def test_whatever_has_been_run_so_far_comes_to_something(name, committed):
    """A report may be asked for at any time: arms have different seeds then, or none."""
    arms = experiments.trials(name, "small")
    found = {label: [row for trial in arm if (row := committed.get(trial.key))] for label, arm in arms.items()}
    random = Random(name)
    for share in (0.0, 0.3, 0.6, 0.9, 1.0):
        some = {label: [row for row in rows if random.random() < share] for label, rows in found.items()}
        findings = experiments.module(name).conclude(suite.Runs("small", some))
        assert findings.verdicts or not any(some.values())


def test_groups_divide_the_channels_of_the_networks():
    """At the paper's scale too, whose trials are too large to be run here."""
    channels = {}
    for trials in (arm for name in experiments.NAMES for arm in experiments.trials(name, "paper", 1).values()):
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
