"""The demo says what its rows say: with rows made up here, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from betternorm_lab import demo, engines
from betternorm_lab.results import Outcome
from betternorm_lab.store import Store
from betternorm_lab.trials import Runtime, provenance

from betternorm.errors import UserError

# Test accuracy and loss of the three seeds, as trained; tuned they are half a point and 0.01 better.
MEASURED = {
    demo.PLAIN: [(0.93, 0.25), (0.94, 0.20), (0.95, 0.21)],
    demo.GHOST: [(0.95, 0.17), (0.95, 0.18), (0.95, 0.16)],
    demo.DECAYED: [(0.95, 0.15), (0.96, 0.16), (0.96, 0.14)],
    demo.GROUP: [(0.93, 0.20), (0.94, 0.22), (0.92, 0.21)],
    demo.BATCH_GROUP: [(0.94, 0.19), (0.93, 0.22), (0.93, 0.20)],
}


# Of the three seeds, accuracy at alpha 0 and at the chosen one: original digits, low contrast, fog, noise.
SHIFTED = [
    [(0.93, 0.93), (0.20, 0.70), (0.50, 0.60), (0.80, 0.80)],
    [(0.94, 0.93), (0.30, 0.75), (0.40, 0.60), (0.80, 0.79)],
    [(0.95, 0.94), (0.25, 0.74), (0.45, 0.60), (0.80, 0.81)],
]


def fill(folder, measured=MEASURED) -> None:
    """A store in which every trial of the demo is done."""
    store = Store(folder)
    for config, seeds in measured.items():
        for seed, (top1, loss) in enumerate(seeds):
            trial = replace(config, seed=seed)
            lines = [{"alpha": a, "top1": top1 - a, "top5": 0.99, "cross_entropy": loss + a} for a in (0.0, 0.1)]
            result = {
                "parameters": 78_000,
                "alpha": 0.1,
                "alpha_as_trained": 0.0,
                "alpha_table": lines,
                "test_top1": top1,
                "test_cross_entropy": loss,
                "test_top1_tuned": top1 + 0.005,
                "test_cross_entropy_tuned": loss - 0.01,
            }
            origin = provenance(trial, Runtime()) | {"duration": 3.0}
            store.finish(trial.key, trial.kind, trial.config, result=result, provenance=origin)
    for seed, tops in enumerate(SHIFTED):
        trial = replace(demo.SHIFTED, seed=seed)
        result = {"alpha": 0.2}
        for number, (before, after) in enumerate(tops):
            result |= {f"test_top1_{number}": before, f"test_top1_{number}_tuned": after}
        origin = provenance(trial, Runtime()) | {"duration": 1.0}
        store.finish(trial.key, trial.kind, trial.config, result=result, provenance=origin)


@pytest.fixture
def finished(tmp_path):
    fill(tmp_path)
    return tmp_path


def test_what_is_in_the_store_is_not_trained_again(finished, monkeypatch):
    monkeypatch.setattr(engines, "_processes", lambda todo, *rest: pytest.fail(f"{len(todo)} to do") if todo else None)
    assert demo.run_demo(finished, seeds=3).rows


def test_the_first_table_has_mean_spread_gain_with_interval_and_seeds_won(finished):
    table = demo.run_demo(finished, seeds=3).tables[0]
    assert table.headers == ["test data", "accuracy, %", "cross-entropy"]
    plain, improved, gain, won = table.rows
    assert plain == ["batch norm", "94.00 ± 1.00 (n = 3)", "0.2200 ± 0.0265 (n = 3)"]
    assert improved == ["all three", "96.17 ± 0.58 (n = 3)", "0.1400 ± 0.0100 (n = 3)"]
    # Differences of accuracy 2.5, 2.5, 1.5: mean 2.1667, deviation 0.5774; t of two degrees at 95 % is 4.3027.
    half = 4.302653 * 0.5773503 / 3**0.5
    assert gain[1] == f"+2.17 [{13 / 6 - half:.2f}, {13 / 6 + half:.2f}]"
    assert gain[2].startswith("-0.0800 [")
    assert won == ["seeds improved", "3 of 3", "3 of 3"]


def test_each_step_is_told_from_the_one_before(finished):
    table = demo.run_demo(finished, seeds=3).tables[1]
    assert [row[0] for row in table.rows] == [step.name for step in demo.LADDER]
    assert [row[2].split(" ")[0] for row in table.rows] == ["", "+1.00", "+0.67", "+0.50"]
    assert [row[4].split(" ")[0] for row in table.rows] == ["", "-0.0500", "-0.0200", "-0.0100"]


def test_verdicts_follow_the_intervals_and_a_tie_is_no_win(finished):
    result = demo.run_demo(finished, seeds=3)
    outcomes = [verdict.outcome for verdict in result.verdicts]
    # Ghosts gain 2, 1 and 0 points: the interval has zero in it.
    assert outcomes[:2] == [Outcome.REPLICATED, Outcome.INCONCLUSIVE]
    assert demo.held(result)


def test_a_gain_that_is_not_there_is_not_told(tmp_path):
    fill(tmp_path, MEASURED | {demo.DECAYED: [(top1 - 0.02, loss) for top1, loss in MEASURED[demo.PLAIN]]})
    result = demo.run_demo(tmp_path, seeds=3)
    assert not demo.held(result)
    assert result.tables[0].rows[3] == ["seeds improved", "0 of 3", "3 of 3"]
    assert result.verdicts[0].outcome is Outcome.OPPOSITE


def test_shifted_digits_are_reported_with_the_change_on_original_digits(finished):
    result = demo.run_demo(finished, seeds=3)
    table = result.tables[2]
    assert table.headers == ["test digits", "alpha 0", "alpha 0.2", "gain"]
    assert [row[0] for row in table.rows] == list(demo.SHIFTS)
    assert [row[3].split(" ")[0] for row in table.rows] == ["-0.67", "+48.00", "+15.00", "+0.00"]
    claims = {v.claim: v.outcome for v in result.verdicts if v.claim.endswith("digits without retraining")}
    of_shift = {claim.split(" on ")[1].split(" digits")[0]: outcome for claim, outcome in claims.items()}
    assert of_shift == {
        "low-contrast": Outcome.REPLICATED,
        "foggy": Outcome.REPLICATED,
        "noisy": Outcome.INCONCLUSIVE,
    }


def test_figures_show_the_ladder_the_seeds_and_alpha(finished):
    accuracy, loss, seeds, *alphas = demo.run_demo(finished, seeds=3).figures
    assert list(accuracy.series[0].x) == list(loss.series[0].x) == [step.name for step in demo.LADDER]
    assert accuracy.series[0].y == pytest.approx([94.0, 95.0, 95.6667, 96.1667], abs=1e-4)
    assert [series.y for series in seeds.series] == [[0.25, 0.20, 0.21], pytest.approx([0.14, 0.15, 0.13])]
    assert {figure.y_label.split(",")[0] for figure in alphas} >= {"top-1", "cross-entropy"}


def test_a_report_finds_the_demo_in_its_store(finished, tmp_path):
    (found,) = demo.results(finished)
    assert found == demo.run_demo(finished, seeds=3)
    assert demo.results(tmp_path / "empty") == []


def test_one_seed_is_refused_because_it_has_no_interval(tmp_path):
    with pytest.raises(UserError, match="seeds is 1"):
        demo.run_demo(tmp_path, seeds=1)


def test_a_trial_that_failed_is_named(finished, monkeypatch):
    monkeypatch.setattr(engines, "_processes", lambda *_: None)  # as if they failed again
    trial = replace(demo.PLAIN, seed=3)
    store = Store(finished)
    for config in (*MEASURED, demo.SHIFTED):
        store.finish(replace(config, seed=3).key, trial.kind, trial.config, error="the loss is nan\nmore")
    with pytest.raises(UserError, match=r"6 of 24 trials failed; the first: the loss is nan$"):
        demo.run_demo(finished, seeds=4)
