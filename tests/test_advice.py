"""Recommendations and their evidence, what `upgrade` does and undoes, and the search for a ghost size."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from betternorm.advice import advise, tune_ghost_size, upgrade
from betternorm.advice.evidence import MEASURED
from betternorm.advice.ghost_size import usual_ghost_sizes
from betternorm.conversion.convert import revert
from betternorm.decay.report import norm_report
from betternorm.layers import BatchGroupNorm, GhostBatchNorm, GroupedBatchNorm


@pytest.mark.parametrize(
    ("batch_size", "situation", "to", "options"),
    [
        (1024, {}, "ghost", {"ghost_size": 16}),
        (128, {}, "ghost", {"ghost_size": 16}),
        (32, {}, "ghost", {"ghost_size": 16}),
        (16, {}, "ghost", {"ghost_size": 8}),
        (8, {}, "ghost", {"ghost_size": 4}),
        (5, {}, "ghost", {"ghost_size": 4}),
        (4, {}, "weighed", {}),
        (64, {"step_size": 128}, "ghost", {"ghost_size": 16}),
        (16, {"step_size": 128}, "weighed", {}),
        (4, {"step_size": 128}, "weighed", {}),
        (3, {"step_size": 129}, "weighed", {}),
        (2, {"step_size": 128}, "weighed", {}),
        (1, {"step_size": 128}, "group", {}),
        (3, {}, "batch_group", {"examples_per_group": 3}),
        (2, {}, "batch_group", {"examples_per_group": 2}),
        (1, {}, "group", {}),
        (128, {"overfits": True}, "ghost", {"ghost_size": 16}),
        (128, {"overfits": False}, "weighed", {}),
        (2, {"overfits": False}, "group", {}),
        (1, {"overfits": False}, "group", {}),
        (128, {"iid": False}, "weighed", {}),
        (1, {"iid": False}, "group", {}),
    ],
)
def test_which_layer_at_which_batch_size(
    batch_size: int, situation: dict[str, bool], to: str, options: dict[str, int]
) -> None:
    advice = advise(batch_size, **situation)
    assert (advice.to, advice.options) == (to, options)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 128])
@pytest.mark.parametrize("overfits", [None, True, False])
def test_every_line_has_its_section_and_evidence(batch_size: int, overfits: bool | None) -> None:
    advice = advise(batch_size, overfits=overfits)
    sections = ["3.2" if batch_size >= 4 else "3.4" if batch_size >= 2 else "4.2", "3.1", "3.3"]
    if batch_size in (2, 3):
        sections.insert(1, "none")  # FrozenBatchNorm, which the paper does not have
    assert [line.section for line in advice.lines] == sections
    text = " ".join(str(advice).split())
    for line in advice.lines:
        assert line.what in text
        assert f"(section {line.section}; {line.evidence})" in text
    assert json.loads(json.dumps(advice.to_dict()))["to"] == advice.to


def test_where_ours_disagree_with_the_paper_ours_decide() -> None:
    """Batch group norm is what the paper recommends in all three."""
    for arguments, to in (({"step_size": 128}, "weighed"), ({"iid": False}, "weighed"), ({}, "batch_group")):
        line = advise(2, **arguments).lines[0]
        assert line.agreement == ("agrees" if to == "batch_group" else "disagrees")
        assert advise(2, **arguments).to == to
    decay = advise(2, step_size=128).lines[-1]
    assert decay.agreement == "disagrees"
    assert decay.what.startswith("no decay on gamma and beta")
    frozen = advise(2).lines[1]
    assert (frozen.method, frozen.agreement) == ("frozen batch norm", "not measured here")
    assert "Not measured here" in frozen.evidence


def test_an_outcome_is_where_the_interval_lies() -> None:
    outcomes = {name: measured.outcome for name, measured in MEASURED.items()}
    assert outcomes["batch_group, accumulated"] == "disagrees"
    assert outcomes["batch_group"] == outcomes["ghost"] == "agrees"
    assert outcomes["batch_group, group"] == "inconclusive"


def test_without_overfitting_a_regularizer_is_not_expected_to_help() -> None:
    for batch_size in (2, 128):
        assert "not expected to help without overfitting" in advise(batch_size, overfits=False).lines[0].what
        assert "do not expect a gain where the model does not overfit" in advise(batch_size).lines[0].what
        assert "no decay on gamma and beta" in advise(batch_size, overfits=False).lines[-1].what


def test_the_report_says_where_decay_is_advised() -> None:
    chain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4, eps=1e-12))
    line = advise(128, report=norm_report(chain, torch.randn(16, 4))).lines[-1]
    assert "of 1 of the 2 norm layers" in line.what
    undone = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))
    line = advise(128, report=norm_report(undone, torch.randn(16, 4))).lines[-1]
    assert "it has no effect in any of the 2 norm layers" in line.what


@pytest.mark.parametrize(
    ("batch_size", "start", "sizes"),
    [(4, 4, [2, 4]), (6, 4, [2, 4, 6]), (16, 8, [2, 4, 8, 16]), (128, 16, [2, 4, 8, 16, 32, 64, 128])],
)
def test_ghost_sizes_to_try(batch_size: int, start: int, sizes: list[int]) -> None:
    assert usual_ghost_sizes(batch_size) == (start, sizes)


def small_net(*channels: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in zip((3, *channels), channels, strict=False):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers)


@pytest.mark.parametrize(
    ("batch_size", "options", "kind", "grouping"),
    [
        (128, {}, GhostBatchNorm, [(1, 16), (1, 16)]),
        (128, {"ghost_size": 32}, GhostBatchNorm, [(1, 32), (1, 32)]),
        (2, {}, BatchGroupNorm, [(2, 2), (4, 2)]),
        (3, {}, BatchGroupNorm, [(2, 3), (4, 3)]),
        (2, {"num_groups": 16}, BatchGroupNorm, [(4, 2), (8, 2)]),
        (1, {}, GroupedBatchNorm, [(2, 1), (4, 1)]),
        (128, {"overfits": False}, GroupedBatchNorm, [(1, None), (1, None)]),
        (4, {}, GroupedBatchNorm, [(1, None), (1, None)]),
        (2, {"step_size": 128}, GroupedBatchNorm, [(1, None), (1, None)]),
    ],
)
def test_upgrade_applies_the_advice_and_can_be_undone(
    batch_size: int, options: dict[str, Any], kind: type[nn.Module], grouping: list[tuple[int, int | None]]
) -> None:
    net = small_net(64, 128)
    parameters, x = list(net.parameters()), torch.randn(max(batch_size, 2), 3, 6, 6)
    before = net(x)
    original = [type(layer) for layer in net]
    assert upgrade(net, batch_size, verbose=False, **options) is net
    assert [type(net[1]), type(net[4])] == [kind, kind]
    assert [(net[i].channels_per_group, net[i].examples_per_group) for i in (1, 4)] == grouping
    assert all(p is q for p, q in zip(parameters, net.parameters(), strict=True))
    assert net(x).shape == before.shape
    revert(net)
    assert [type(layer) for layer in net] == original
    torch.testing.assert_close(net(x), before)


def test_upgrade_takes_a_number_of_groups_that_suits_every_layer() -> None:
    """24 divides 72 and 48; a layer with 16 channels gets one channel per group."""
    net = upgrade(small_net(72, 48, 16), 2, verbose=False)
    assert [net[i].channels_per_group for i in (1, 4, 7)] == [3, 2, 1]


@pytest.mark.parametrize(("batch_size", "examples"), [(128, 1), (2, 2), (1, 1)])
def test_upgrade_of_a_group_norm_model_keeps_its_groups(batch_size: int, examples: int) -> None:
    net = upgrade(nn.Sequential(nn.Conv2d(3, 12, 3), nn.GroupNorm(4, 12)), batch_size, verbose=False)
    assert (net[1].channels_per_group, net[1].examples_per_group) == (3, examples)


@pytest.mark.parametrize("batch_size", [1, 2, 16, 128, 512])
def test_averages_of_an_upgraded_model_reach_back_as_many_examples_at_every_batch_size(batch_size: int) -> None:
    layer = upgrade(small_net(64), batch_size, verbose=False)[1]
    left = (1 - layer.momentum) ** (1280 / min(batch_size, 128))  # of what was there before, after 1280 examples
    assert left == pytest.approx(0.9**10)
    assert layer.momentum <= 0.1


def test_upgrade_keeps_a_momentum_other_than_the_default() -> None:
    net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64, momentum=0.03), nn.BatchNorm2d(64, momentum=None))
    assert [layer.momentum for layer in upgrade(net, 16, verbose=False)[1:]] == [0.03, None]


def test_upgrade_logs_the_momentum_that_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "betternorm")
    upgrade(small_net(64, 64), 16, verbose=False)
    assert caplog.messages == ["momentum of 2 layers: 0.1 -> 0.013, for 16 examples per batch"]
    caplog.clear()
    upgrade(small_net(64), 128, verbose=False)
    assert caplog.messages == []


@pytest.mark.parametrize("ghost_size", [8, 16])
def test_a_ghost_size_that_is_not_below_the_batch_size_is_warned_of(ghost_size: int) -> None:
    with pytest.warns(UserWarning, match=f"ghost_size={ghost_size} is not below batch_size=8"):
        upgrade(small_net(64), 8, ghost_size=ghost_size, verbose=False)


def test_upgrade_prints_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    upgrade(small_net(64, 64), 128)
    printed = capsys.readouterr().out
    assert "2 BatchNorm2d -> GhostBatchNorm(ghost_size=16)" in printed
    assert "undo: revert(model)" in printed
    assert "Advice at batch size 128" in printed
    upgrade(small_net(64), 128, verbose=False)
    assert capsys.readouterr().out == ""


def peak_at(best: int) -> Callable[[int], float]:
    return lambda size: 0.8 - 0.01 * abs(math.log2(size / best))


@pytest.mark.parametrize("best", [2, 4, 8, 16, 32, 64, 128])
def test_the_search_finds_a_single_peak_wherever_it_is(best: int) -> None:
    found = tune_ghost_size(peak_at(best), 128)
    assert (found.ghost_size, found.score) == (best, 0.8)
    assert [trial.ghost_size for trial in found.trials] == [2, 4, 8, 16, 32, 64, 128]


def test_directions_without_improvement_are_abandoned() -> None:
    tried = []

    def train(size: int) -> float:
        tried.append(size)
        return peak_at(16)(size)

    found = tune_ghost_size(train, 1024, patience=1)
    assert tried == [16, 8, 32]
    assert {t.ghost_size: t.outcome for t in found.trials if t.outcome != "skipped"} == dict.fromkeys(
        [8, 16, 32], "finished"
    )
    assert "16" in next(line for line in str(found).splitlines() if "(best)" in line)


def test_hopeless_sizes_are_stopped_early_and_closed() -> None:
    epochs: dict[int, int] = {}
    closed = []

    def train(size: int) -> Iterator[float]:
        try:
            for epoch in range(10):
                epochs[size] = epoch + 1
                yield peak_at(16)(size) - 1 / (epoch + 1)
        finally:
            closed.append(size)

    found = tune_ghost_size(train, 128, patience=10, grace=3)
    assert found.ghost_size == 16
    # 16 and 8 run to the end for lack of two others; 32 equals 8; whatever is worse ends after the grace.
    assert epochs == {16: 10, 8: 10, 32: 10, 4: 3, 64: 3, 2: 3, 128: 3}
    assert sorted(closed) == sorted(epochs)
    assert {t.ghost_size: t.outcome for t in found.trials} == {
        size: "finished" if count == 10 else "stopped early" for size, count in epochs.items()
    }


def test_training_that_diverges_comes_last() -> None:
    found = tune_ghost_size(lambda size: math.nan if size == 16 else peak_at(16)(size), 64)
    assert found.ghost_size in (8, 32)


@pytest.mark.parametrize("score", [0.5, torch.tensor(0.5), [0.1, 0.5]])
def test_scores_may_be_numbers_tensors_or_lists(score: Any) -> None:
    assert tune_ghost_size(lambda size: score, 8, ghost_sizes=[4]).score == 0.5


class FrozenBatchNorm2d(nn.Module):
    """torchvision's, as far as it is recognized."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_var", torch.ones(4))


class FrozenNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = FrozenBatchNorm2d()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: advise(0), "batch_size is 0; it must be a whole number of 1 or more"),
        (lambda: advise(-4), "batch_size is -4"),
        (lambda: advise(2.5), "batch_size is 2.5"),
        (lambda: advise(8, step_size=0), "step_size is 0; it must be a whole number of 1 or more"),
        (lambda: advise(8, step_size=4), "step_size is 4; it must be at least batch_size=8"),
        (lambda: upgrade(small_net(8), 0), "batch_size is 0"),
        (lambda: upgrade(nn.Linear(2, 2), 8), "Linear has no norm layers"),
        (lambda: upgrade(FrozenNet(), 8), r"norm layers of FrozenNet are frozen .*convert\(model, 'weighed'\)"),
        (lambda: tune_ghost_size(peak_at(4), 2), "batch_size is 2; ghost batch norm is for batches of 4 and more"),
        (lambda: tune_ghost_size(peak_at(4), 8, ghost_sizes=[4, 16]), r"ghost_sizes has \[16\]"),
        (lambda: tune_ghost_size(peak_at(4), 8, ghost_sizes=[]), "ghost_sizes has no size"),
        (lambda: tune_ghost_size(peak_at(4), 8, patience=0), "patience is 0"),
        (lambda: tune_ghost_size(lambda size: [], 8), r"train\(4\) yielded no score"),
        (lambda: tune_ghost_size(lambda size: math.nan, 8), "no finite score"),
    ],
)
def test_bad_input_gets_one_clear_line(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)
