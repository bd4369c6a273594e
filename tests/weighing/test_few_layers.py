"""Alpha in a few layers: the right ones, with the right alphas, within a stated number of passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from weighing_networks import batches, group_norm, small_network

from betternorm.conversion.convert import convert
from betternorm.weighing.alpha import get_alpha
from betternorm.weighing.metrics import Metric
from betternorm.weighing.result import AlphaSearch
from betternorm.weighing.search import tune_alpha

TARGETS = torch.tensor([0.0, 0.3, 0.02, 0.0, 0.15, 0.0])


def six_layers() -> nn.Sequential:
    return convert(nn.Sequential(*(nn.BatchNorm1d(1) for _ in TARGETS)), "weighed").eval()


def answers(model: nn.Sequential, batch: Any) -> tuple[Tensor, Tensor]:
    """The network's alphas: each layer's best is known, and they do not interact."""
    alphas = [torch.zeros(()) if layer._alpha is None else layer._alpha for layer in model]
    return torch.stack(alphas).expand(len(batch[0]), len(alphas)), batch[1]


distance = Metric("distance", lambda output, target: (output - target).square().sum(1), higher_is_better=False)


def data(spread: float = 0.03, targets: Tensor = TARGETS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(400, len(targets), generator=generator) * spread
    return batches(torch.randn(400, 1, generator=generator), targets + noise, 20)


def tuned(layers: int, **options: Any) -> tuple[nn.Sequential, AlphaSearch]:
    model = six_layers()
    return model, tune_alpha(
        model, data(), metrics=(distance,), objective=distance, layers=layers, forward=answers, **options
    )


def test_one_layer_is_the_one_that_gains_most() -> None:
    model, found = tuned(1)
    assert found.few_layers is not None
    assert list(found.few_layers.alphas) == ["1"]
    assert found.few_layers.alphas["1"] == pytest.approx(0.3, abs=0.03)
    assert get_alpha(model) == found.alpha == {name: found.few_layers.alphas.get(name, 0.0) for name in "012345"}


def test_two_layers_are_the_two_that_gain_most() -> None:
    _, found = tuned(2)
    assert found.few_layers is not None
    assert set(found.few_layers.alphas) == {"1", "4"}
    # The layers do not overlap here, and the search supposes that layers do: it ends near.
    assert found.few_layers.alphas["1"] == pytest.approx(0.3, abs=0.06)
    assert found.few_layers.alphas["4"] == pytest.approx(0.15, abs=0.03)


def test_the_table_shows_gain_against_cost() -> None:
    _, found = tuned(2)
    assert found.few_layers is not None
    assert [row.layers for row in found.few_layers.rows] == [1, 2, 3, 5, 6]
    gains = [-row.gain.difference for row in found.few_layers.rows[:-1]]
    assert gains == sorted(gains)
    exact = 0.3**2 + 0.15**2
    assert gains[1] == pytest.approx(exact, rel=0.1)
    assert "not folded" in str(found)
    assert "set alpha in 2 of 6 layers: 1, 4" in str(found)


def test_where_alpha_in_all_layers_gains_nothing_there_is_no_share_of_it() -> None:
    one_alone = torch.tensor([0.3, -0.2, -0.2, -0.2, -0.2, -0.2])
    found = tune_alpha(
        six_layers(), data(targets=one_alone), metrics=(distance,), objective=distance, layers=1, forward=answers
    )
    assert found.few_layers is not None
    assert list(found.few_layers.alphas) == ["0"]
    assert found.few_layers.rows[0].gain.difference < -0.05
    assert {row.share for row in found.few_layers.rows} == {None}
    assert "nan" not in str(found)


def test_the_result_is_written_and_read(tmp_path: Path) -> None:
    _, found = tuned(1)
    found.save(tmp_path / "found.json")
    assert AlphaSearch.load(tmp_path / "found.json") == found


def test_an_interrupted_search_goes_on_where_it_stopped(tmp_path: Path) -> None:
    calls = {"all": 0}

    def counting(model: nn.Sequential, batch: Any) -> tuple[Tensor, Tensor]:
        calls["all"] += 1
        if calls["all"] == calls.get("stop"):
            raise KeyboardInterrupt
        return answers(model, batch)

    def search() -> AlphaSearch:
        return tune_alpha(
            six_layers(),
            data(),
            metrics=(distance,),
            objective=distance,
            layers=2,
            forward=counting,
            resume=tmp_path / "search.pt",
        )

    whole = search()
    needed = calls["all"]
    (tmp_path / "search.pt").unlink()
    calls |= {"all": 0, "stop": needed - 150}
    with pytest.raises(KeyboardInterrupt):
        search()
    again = search()
    assert again.alpha == whole.alpha
    assert calls["all"] < needed + 100, "what was evaluated before the interruption is not evaluated again"


def test_three_layers_of_fifty_take_at_most_thirty_passes() -> None:
    examples = 0
    network = convert(nn.Sequential(*(nn.BatchNorm1d(1) for _ in range(50))), "weighed").eval()

    def counting(model: nn.Sequential, batch: Any) -> tuple[Tensor, Tensor]:
        nonlocal examples
        # A forward pass for a gradient has a backward pass behind it, which costs about two.
        examples += len(batch[0]) * (3 if torch.is_grad_enabled() else 1)
        alphas = [torch.zeros(()) if layer._alpha is None else layer._alpha for layer in model]
        return torch.stack(alphas).expand(len(batch[0]), len(alphas)), batch[1]

    generator = torch.Generator().manual_seed(5)
    targets = torch.rand(50, generator=generator).square() * 0.3
    noisy = targets + torch.randn(200, 50, generator=generator) * 0.03
    found = tune_alpha(
        network,
        batches(torch.randn(200, 1, generator=generator), noisy, 50),
        metrics=(distance,),
        objective=distance,
        layers=3,
        forward=counting,
    )
    assert examples <= 30 * 200 + 50  # one batch more, to see the sizes of the layers' inputs
    assert found.evaluations <= 30
    assert found.few_layers is not None
    assert set(found.few_layers.alphas) == {str(int(index)) for index in noisy.mean(0).topk(3).indices}


@pytest.mark.filterwarnings("ignore::betternorm.errors.UncertainGainWarning")
def test_where_there_is_nothing_to_find_alpha_stays(images: Tensor, labels: Tensor) -> None:
    model = small_network()
    found = tune_alpha(model, batches(images, labels), layers=1)
    assert found.few_layers is not None
    if not found.few_layers.certain:
        assert get_alpha(model) == 0.0 == found.alpha


@pytest.mark.filterwarnings("ignore::betternorm.errors.UncertainGainWarning")
@pytest.mark.parametrize("objective", [None, "top1", "cross_entropy", "ece"])
def test_a_classifier_is_judged_by_any_objective(objective: str | None, images: Tensor, labels: Tensor) -> None:
    model = small_network()
    found = tune_alpha(model, batches(images, labels), objective=objective, layers=1, require_significant=False)
    assert found.few_layers is not None
    assert set(found.few_layers.gains) == set(found.gains)
    assert sum(row.work for row in found.few_layers.rows[-1:]) == 1
    assert len(found.few_layers.alphas) <= 1


@pytest.mark.parametrize("layers", [0, -1, 4])
def test_a_number_of_layers_that_there_are_not_is_refused(layers: int, images: Tensor, labels: Tensor) -> None:
    with pytest.raises(ValueError, match=rf"layers={layers} must lie between 1 and 3"):
        tune_alpha(small_network(), batches(images, labels), layers=layers)


def test_layers_that_cannot_be_folded_are_refused(images: Tensor, labels: Tensor) -> None:
    with pytest.raises(ValueError, match=r"layers=1 .*GroupNorm"):
        tune_alpha(small_network(group_norm), batches(images, labels), layers=1)


def test_layers_and_per_layer_are_two_things(images: Tensor, labels: Tensor) -> None:
    with pytest.raises(ValueError, match="layers=1 cannot be combined with per_layer"):
        tune_alpha(small_network(), batches(images, labels), layers=1, per_layer=True)
