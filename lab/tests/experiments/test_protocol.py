"""The test set is read only where the protocol says that an experiment is settled, and rows name a commit."""

from dataclasses import replace
from pathlib import Path

import pytest
from betternorm_lab import engines
from betternorm_lab.experiments import (
    alpha_groupnorm,
    combined,
    decay,
    ghost_size,
    non_iid,
    protocol,
    registry,
    runner,
    saved_rows,
    small_batch,
)
from betternorm_lab.experiments.arms import WHOLE_STEPS
from betternorm_lab.experiments.scales import FEW
from betternorm_lab.store import DONE
from betternorm_lab.trials import Runtime

from betternorm import BatchGroupNorm
from betternorm.errors import UserError

ROOT = Path(__file__).parents[3]

UNSETTLED = [name for name in registry.names_at("medium") if name not in protocol.FIXED]


@pytest.mark.parametrize("name", registry.names_at("medium"))
def test_only_settled_experiments_read_the_test_set(name):
    trials = [trial for arm in registry.trials_of(name, "medium").values() for trial in arm]
    if name in UNSETTLED:
        assert {(trial.seed, trial.test) for trial in trials} == {(protocol.TUNING_SEED, False)}
    else:
        assert {trial.test for trial in trials} == {True}
        assert len({trial.seed for trial in trials}) >= 3


@pytest.mark.parametrize("name", ["alpha-groupnorm", "ghost-size", "decay", "small-batch", "non-iid"])
def test_candidates_can_be_run_at_any_time_and_never_read_the_test_set(name):
    candidates = registry.candidates(name, "medium").values()
    assert {(trial.seed, trial.test) for trial in candidates} == {(protocol.TUNING_SEED, False)}


@pytest.mark.parametrize(("name", "scale"), [("combined", "medium"), ("non-iid", "small")])
def test_without_candidates_the_reason_is_said(name, scale):
    with pytest.raises(UserError, match=f"{name} has no candidates at {scale} scale; .* small-batch, non-iid have"):
        registry.candidates(name, scale)


def test_two_examples_in_steps_of_128_are_normalized_two_by_two():
    together = {
        (trial.norm, trial.batch_size, dict(trial.norm_options).get("ghost_size"))
        for label, trial in small_batch.arms("medium").items()
        if label.setting == WHOLE_STEPS
    }
    assert together == {("group", 128, None), ("batch_group", 128, None), ("ghost", 128, 2)}
    assert BatchGroupNorm(8, 32).examples_per_group == small_batch.BATCH  # what batch_group has when it is not told


def test_every_norm_at_two_examples_has_the_same_candidates():
    rates = {}
    for arm, trial in small_batch.candidates("medium").items():
        rates.setdefault((arm.setting, arm.method), set()).add((trial.learning_rate, arm.size))
    for setting in {setting for setting, _ in rates}:
        assert {rate for rate, _ in rates[setting, "batch norm"]} == {rate for rate, _ in rates[setting, "group norm"]}
        assert rates[setting, "group norm"] == rates[setting, "batch group norm"]


def candidates(name):
    """The rows that a choice rests on: validation top-1 at the best alpha, learning rate and groups."""
    for row in saved_rows.read_table(ROOT / "docs/results/protocol" / f"{name}.csv.gz").values():
        assert (row["seed"], row["test"]) == (protocol.TUNING_SEED, False)
        yield row, row["validation_top1_own"], (row["learning_rate"], dict(row["norm_options"]).get("num_groups"))


def test_group_norm_is_the_best_candidate():
    found = {setting: top1 for _, top1, setting in candidates("alpha-groupnorm")}
    assert {*found} == {(rate, count) for rate in alpha_groupnorm.RATES for count in alpha_groupnorm.CANDIDATE_GROUPS}
    assert max(found, key=found.get) == protocol.GROUP_NORM


def test_the_strength_of_decay_is_the_best_candidate():
    found = {}
    for row, top1, _ in candidates("decay"):
        found.setdefault(row["network"], {})[row["norm_decay"]] = top1
    assert {*found} == {*protocol.NORM_DECAY}
    for network, by_strength in found.items():
        assert sorted(by_strength) == sorted(decay.STRENGTHS)
        assert max(by_strength, key=by_strength.get) == protocol.NORM_DECAY[network]


def test_the_learning_rate_of_a_ghost_size_is_the_best_candidate():
    found = {}
    for row, top1, (rate, _) in candidates("ghost-size"):
        size = dict(row["norm_options"]).get("ghost_size", 128)
        found.setdefault(size, {})[rate] = top1
    assert {size: sorted(by_rate) for size, by_rate in found.items()} == dict.fromkeys(
        protocol.GHOSTS, sorted(ghost_size.RATES)
    )
    assert {size: max(by_rate, key=by_rate.get) for size, by_rate in found.items()} == protocol.GHOSTS


@pytest.mark.parametrize(("batch_size", "settled"), [(2, protocol.TWO_EXAMPLES), (128, protocol.TWO_EXAMPLES_TOGETHER)])
def test_what_was_chosen_at_two_examples_is_the_best_candidate(batch_size, settled):
    names = {**small_batch.METHODS, "batch": small_batch.PLAIN, "ghost": small_batch.PLAIN}
    best = {}
    for row, top1, setting in candidates("small-batch"):
        if row["batch_size"] == batch_size:
            best.setdefault(names[row["norm"]], []).append((top1, setting))
    assert sum(map(len, best.values())) == len(registry.candidates("small-batch", "medium")) / 2
    assert {method: max(found)[1] for method, found in best.items()} == settled


def test_the_learning_rate_with_four_classes_per_batch_is_the_best_candidate():
    found = {}
    for _, top1, (rate, _) in candidates("non-iid"):
        found.setdefault(rate, []).append(top1)
    assert {rate: len(top1) for rate, top1 in found.items()} == dict.fromkeys(non_iid.RATES, 2)
    assert max(found, key=lambda rate: sum(found[rate])) == protocol.FOUR_CLASSES


def test_all_four_at_two_examples_are_the_networks_of_the_experiment_on_two_examples():
    same = {
        combined.BATCH: small_batch.PLAIN,
        combined.GROUP: small_batch.GROUP,
        combined.OURS: small_batch.WITH_DECAY[small_batch.BOTH],
    }
    own = {(arm.setting, arm.method): trial for arm, trial in small_batch.arms("medium").items()}
    compared = 0
    for arm, trial in combined.arms("medium").items():
        if arm.size == small_batch.BATCH and arm.method in same:
            assert trial.key == own[arm.setting, same[arm.method]].key
            compared += 1
    assert compared == 2 * len(same)  # in both settings


def test_in_steps_of_128_nothing_but_the_norm_and_its_settings_depends_on_the_batch_size():
    arms = {label: trial for label, trial in combined.arms("medium").items() if label.setting == WHOLE_STEPS}
    assert {arm.size for arm in arms} == {*combined.TOGETHER}
    for arm, trial in arms.items():
        norm = {name: getattr(trial, name) for name in ("norm", "norm_options", "norm_decay", "learning_rate")}
        assert trial == replace(FEW, **norm)
        assert trial.norm_decay == ("all" if arm.method == combined.OURS else "none")
        seen = {"batch": FEW.batch_size, "batch_group": 2, "group": 1}.get(trial.norm)
        assert dict(trial.norm_options).get("ghost_size", seen) <= arm.size


def test_learning_rates_between_the_two_that_were_chosen_lie_between_them():
    rates = {
        arm.size: trial.learning_rate
        for arm, trial in combined.arms("medium").items()
        if arm.method == combined.BATCH and arm.setting != WHOLE_STEPS
    }
    assert rates[128] == FEW.learning_rate
    assert rates[2] == protocol.TWO_EXAMPLES["batch norm"][0]
    assert rates[128] / rates[16] == pytest.approx((rates[128] / rates[2]) ** 0.5, rel=0.01)  # 16 is in the middle


def test_code_that_is_not_committed_does_not_run_at_medium_scale(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "code_version", lambda: "abc+")
    with pytest.raises(UserError, match="uncommitted changes"):
        runner.reproduce(["ghost-size"], "medium", tmp_path)


def test_a_scale_has_its_own_experiments():
    with pytest.raises(UserError, match="no experiment 'transfer' at medium scale"):
        registry.trials_of("transfer", "medium")
    assert registry.chosen(["all"], "medium") == list(registry.MEDIUM)


KINDS = {
    trial.norm: trial
    for name in registry.names_at("medium")
    for (trial, *_) in registry.trials_of(name, "medium").values()
}


@pytest.mark.parametrize("norm", KINDS)
def test_the_code_of_the_medium_scale_runs(norm, tmp_path):
    """Two steps on random images of the same shape, a trial of every norm."""
    few = {"dataset": "stand-in:cifar100", "train_examples": 64, "epochs": 1, "steps_per_epoch": 2, "width": 16}
    trial = replace(KINDS[norm], **few, batch_size=min(16, KINDS[norm].batch_size), alpha_grid=(0.0, 0.5, 1.0))
    runtime = Runtime(threads=1, show=False, channels_last=True)
    (row,) = engines.run_trials([trial], tmp_path, runtime=runtime, show=False)
    assert row.status == DONE, row.error
    assert ("test_top1_own" in row.result) == trial.test
    assert row["evaluated_train_top1"] >= 0
    assert row["averages_over"] == FEW.averages_over
