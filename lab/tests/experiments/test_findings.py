"""The rows of arms as numbers, curves and cells."""

from betternorm_lab.experiments import findings
from betternorm_lab.experiments.arms import Arm
from betternorm_lab.store import DONE, Row
from betternorm_lab.training import Config

A, B = Arm("a"), Arm("b")


def row(seed=0, **result):
    trial = Config(seed=seed)
    return Row(trial.key, trial.kind, DONE, trial.config, result)


def test_values_come_in_per_cent_where_they_are_shares_and_alphas_as_they_are():
    runs = findings.FinishedRuns("smoke", {A: [row(test_top1=0.5, test_cross_entropy=1.5, alpha_top1=0.2)], B: []})
    assert runs.numbers(A, "test_top1") == [50.0]
    assert runs.numbers(A, "test_cross_entropy") == [1.5]
    assert runs.numbers(A, "alpha_top1") == [0.2]
    assert runs.numbers(B, "test_top1") == []
    assert runs.tasks() == [A, B]


def test_an_alpha_curve_is_over_the_alphas_that_all_runs_tried():
    first = row(alpha_as_trained=0.0, alpha_table=[{"alpha": a, "top1": a} for a in (0.0, 0.1, 0.5)])
    second = row(1, alpha_as_trained=0.0, alpha_table=[{"alpha": a, "top1": a} for a in (0.0, 0.5, 1.0)])
    assert findings.alpha_points([first, second], "top1") == {0.0: [0.0, 0.0], 0.5: [50.0, 50.0]}
    assert findings.alpha_points([first, second], "top1", within=0.2) == {0.0: [0.0, 0.0]}
    assert findings.alpha_points([], "top1") == {}


def test_a_curve_has_intervals_where_there_are_runs_and_leaves_out_what_has_not_been_run():
    found = findings.curve("curve", {1: [1.0, 3.0], 2: [], 4: [5.0]})
    assert list(found.x) == [1, 4]
    assert list(found.y) == [2.0, 5.0]
    assert found.low[0] < 2.0 < found.high[0]
    assert found.low[1] == found.high[1] == 5.0


def test_arms_are_paired_by_seed():
    runs = findings.FinishedRuns("small", {A: [row(seed, top1=seed) for seed in (0, 2, 1)], B: [row(2, top1=7)]})
    assert runs.by_seed((A, "top1"), (B, "top1")) == [[200.0], [700.0]]


def test_a_row_that_has_not_read_the_test_set_has_no_test_numbers():
    candidate = row(alpha_top1=0.5, alpha_table=[{"alpha": 0.5, "top1": 0.25}])
    assert findings.read(candidate, "validation_top1_own") == 0.25
    assert findings.read(candidate, "test_top1_own") is None
    assert findings.read(candidate, "test_top1") is None


def test_a_metric_at_its_own_alpha_is_also_read_from_rows_that_have_only_tables():
    table = [{"alpha": 0.0, "top1": 0.4}, {"alpha": 0.2, "top1": 0.5}]
    old = row(alpha_top1=0.2, alpha_table=table, test_table=table[::-1], test_top1=0.4)
    new = row(1, test_top1_own=0.6, test_calibrated_cross_entropy=1.5)
    runs = findings.FinishedRuns("small", {A: [old, new]})
    assert runs.numbers(A, "test_top1_own") == [50.0, 60.0]
    assert runs.numbers(A, "validation_top1_own") == [50.0]
    assert runs.numbers(A, "test_calibrated_cross_entropy") == [1.5]
    assert runs.pairs(A, "test_top1_own", "test_top1") == [10.0]
