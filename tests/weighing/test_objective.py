"""Alpha for clean and shifted data together, where the best one is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from weighing_networks import batches, known, small_network, two_layers

from betternorm.weighing.alpha import get_alpha
from betternorm.weighing.metrics import Metric
from betternorm.weighing.result import AlphaSearch
from betternorm.weighing.search import tune_alpha
from betternorm.weighing.shifts import corruptions

pytestmark = [
    pytest.mark.filterwarnings("ignore::betternorm.errors.UncertainGainWarning"),
    pytest.mark.filterwarnings("ignore:per_layer is deprecated:DeprecationWarning"),
]

# Of an input x the best alpha is x: the error is (alpha - x)².
error = Metric("error", lambda output, target: output, higher_is_better=False)


def wanted(alpha: float, count: int = 200) -> list[tuple[Tensor, Tensor]]:
    noise = torch.randn(count, 1, generator=torch.Generator().manual_seed(1)) * 0.01
    return batches(alpha + noise - noise.mean(), torch.zeros(count), 50)


def forward(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    return (model[0].alpha - batch[0][:, 0]).square(), batch[1]


def by_layer(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Every layer's alpha is wanted to be a number of its own."""
    alphas = torch.stack([torch.zeros(()) if layer._alpha is None else layer._alpha for layer in model])
    return (alphas - batch[0]).square().sum(1), batch[1]


def brighter(x: Tensor) -> Tensor:
    return x + 0.4


@pytest.mark.parametrize(
    "shifts", [{"brighter": brighter}, {"brighter": wanted(0.5)}, {"one": brighter, "two": wanted(0.5)}]
)
@pytest.mark.parametrize(("most", "two_sets", "three_sets"), [(None, 0.3, 11 / 30), (0.03, 0.3, 0.3), (1.0, 0.5, 0.5)])
def test_the_rule_chooses(
    shifts: dict[str, Any], most: float | None, two_sets: float, three_sets: float, tmp_path: Path
) -> None:
    """Clean data want 0.1 and shifted ones 0.5; at 0.3 clean data lose 0.2² - 0.1² = 0.03."""
    model = known()
    found = tune_alpha(
        model, wanted(0.1), (), error, shifts=shifts, max_clean_drop=most, forward=forward, resume=tmp_path / "kept"
    )
    assert found.alpha == get_alpha(model) == pytest.approx(two_sets if len(shifts) == 1 else three_sets, abs=0.04)
    assert found.shifts is not None
    assert found.significant
    assert list(found.shifts.gains) == ["clean", *shifts]
    for name, target in (("clean", 0.1), *((name, 0.5) for name in shifts)):
        gain = found.shifts.gains[name]
        assert gain.before == pytest.approx(target**2, abs=1e-3)
        assert gain.after == pytest.approx((found.alpha - target) ** 2, abs=3e-3)
    assert found.gains["error"].after == pytest.approx(found.shifts.gains["clean"].after)
    found.save(tmp_path / "found.json")
    assert AlphaSearch.load(tmp_path / "found.json") == found


def test_the_trade_is_a_table() -> None:
    found = tune_alpha(known(), wanted(0.1), (), error, shifts={"night": brighter}, grid=[0.3], forward=forward)
    assert found.shifts is not None
    assert [set(row) for row in found.shifts.table] == [{"alpha", "clean", "night"}] * 2
    assert found.shifts.table[1]["night"] == pytest.approx(0.04, abs=1e-3)
    assert "night" in str(found)
    assert "mean over clean and shifted data" in found.verdict()


def test_what_only_hurts_is_not_set() -> None:
    found = tune_alpha(known(), wanted(0.0), (), error, shifts={"same": lambda x: x - 0.1}, forward=forward)
    assert (found.alpha, found.significant) == (0.0, False)


def test_an_image_counts_once_however_often_it_is_shifted() -> None:
    """Twenty copies of one shift are no more evidence than one."""
    noise = torch.randn(60, 1, generator=torch.Generator().manual_seed(2))
    data = batches(0.02 + 0.3 * noise, torch.zeros(60), 30)
    once, often = (
        tune_alpha(
            known(), data, (), error, shifts={str(k): lambda x: x for k in range(n)}, grid=[0.1], forward=forward
        )
        for n in (1, 20)
    )
    assert once.shifts is not None
    assert often.shifts is not None
    assert often.shifts.mean.low == pytest.approx(once.shifts.mean.low, rel=1e-6)


def test_accuracy_is_the_objective_under_corruptions(images: Tensor, labels: Tensor) -> None:
    pixels = images.sigmoid()
    found = tune_alpha(
        small_network(),
        batches(pixels, labels),
        shifts=corruptions(["noise:3", "fog:1"]),
        grid=[0.1],
        require_significant=False,
    )
    assert found.objective == "top1"
    assert found.shifts is not None
    assert list(found.shifts.gains) == ["clean", "noise:3", "fog:1"]
    assert set(found.gains) == {"top1", "top5", "cross_entropy", "calibrated_cross_entropy"}


def test_layers_are_fitted_on_shifted_data_too() -> None:
    """The first layer wants 0.1 on clean and 0.3 on shifted data, the second always 0.5."""

    x = torch.tensor([0.1, 0.5]) + 0.02 * torch.randn(400, 2, generator=torch.Generator().manual_seed(1))
    shifts = {"shifted": lambda x: x + torch.tensor([0.2, 0.0])}
    model = two_layers()
    found = tune_alpha(
        model, batches(x, torch.zeros(400), 20), (), error, shifts=shifts, forward=by_layer, per_layer=True, epochs=6
    )
    assert found.per_layer is not None
    assert found.per_layer.kept
    assert get_alpha(model) == {"0": pytest.approx(0.2, abs=0.04), "1": pytest.approx(0.5, abs=0.04)}


@pytest.mark.parametrize(("most", "layer", "alpha"), [(None, "0", 0.2), (0.0, "1", 0.1)])
def test_the_rule_chooses_among_layers(most: float | None, layer: str, alpha: float) -> None:
    """The first layer gains most on the whole and costs clean data; the second gains a little on both."""

    x = torch.tensor([0.0, 0.1]) + 0.02 * torch.randn(400, 2, generator=torch.Generator().manual_seed(1))
    shifts = {"shifted": lambda x: x + torch.tensor([0.4, 0.0])}
    model = two_layers()
    found = tune_alpha(
        model,
        batches(x, torch.zeros(400), 20),
        (),
        error,
        shifts=shifts,
        max_clean_drop=most,
        forward=by_layer,
        layers=1,
    )
    assert found.few_layers is not None
    assert found.few_layers.certain
    assert get_alpha(model) == {"0": 0.0, "1": 0.0} | {layer: pytest.approx(alpha, abs=0.03)}
    gain = found.few_layers.rows[0].gain
    assert gain.difference == pytest.approx(-0.04 if most is None else -0.01, abs=0.003)
    clean = found.few_layers.gains["error"]
    assert clean.difference == pytest.approx(0.04 if most is None else -0.01, abs=0.003)


def test_a_few_layers_of_a_classifier_under_corruptions(images: Tensor, labels: Tensor, tmp_path: Path) -> None:
    found = tune_alpha(
        small_network(),
        batches(images.sigmoid(), labels),
        shifts=corruptions(["noise:3", "fog:1"]),
        layers=1,
        require_significant=False,
    )
    assert found.few_layers is not None
    assert len(found.few_layers.alphas) <= 1
    assert "mean over clean and shifted data" in str(found)
    found.save(tmp_path / "found.json")
    assert AlphaSearch.load(tmp_path / "found.json") == found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shifts": "teapot"}, "shift 'teapot' is not known"),
        ({"shifts": {}}, "shifts is empty"),
        ({"shifts": {"clean": brighter}}, "contains the name 'clean'"),
        ({"max_clean_drop": 1.0}, "pass shifts=... too"),
        ({"shifts": {"a": brighter}, "max_clean_drop": -1.0}, "max_clean_drop=-1.0 must be 0 or more"),
        ({"shifts": {"a": wanted(0.5)}, "per_layer": True}, "'a' is a loader"),
        ({"shifts": {"a": wanted(0.5)}, "layers": 1}, "layers=1 optimizes alphas on .* 'a' is a loader"),
        ({"shifts": {"a": brighter}, "objective": "ece"}, "'ece' is not a mean over examples"),
    ],
)
def test_invalid_shifts_are_errors(options: dict[str, Any], message: str) -> None:
    model = known()
    with pytest.raises(ValueError, match=message):
        tune_alpha(model, wanted(0.1), **({"objective": error, "metrics": ()} | options), forward=forward)
    assert get_alpha(model) == 0.0


def test_a_shifted_set_with_other_classes_is_refused(images: Tensor, labels: Tensor) -> None:
    with pytest.raises(ValueError, match="labels run from 5 to 14, and the model has 10 outputs"):
        tune_alpha(small_network(), batches(images, labels), shifts={"own": batches(images, torch.arange(61) % 10 + 5)})
