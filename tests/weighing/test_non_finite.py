"""Outputs that are NaN or infinite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from weighing_networks import batches, small_network

from betternorm.errors import UncertainGainWarning
from betternorm.weighing.alpha import get_alpha
from betternorm.weighing.batches import non_finite_rows
from betternorm.weighing.result import AlphaSearch
from betternorm.weighing.search import tune_alpha


def data() -> list[tuple[Tensor, Tensor]]:
    """Labels that the model predicts at alpha = 0.25, with some noise."""
    x = torch.randn(200, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    return batches(x, small_network()(x).mul(0.7).softmax(1).multinomial(1)[:, 0])


def broken(where: Any, images: int | None = 1) -> Any:
    """NaN for the first images of every batch at some alphas."""

    def forward(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        output = model(batch[0])
        if where(model[1].alpha):
            output[:images] = torch.nan
        return output, batch[1]

    return forward


@pytest.mark.parametrize("options", [{}, {"objective": "top1"}, {"layers": 1}, {"shifts": {"dark": lambda x: x / 2}}])
def test_without_finite_outputs_at_the_baseline_there_is_no_verdict(options: dict[str, Any], tmp_path: Path) -> None:
    model = small_network()
    with pytest.warns(UncertainGainWarning, match=r"no verdict: \d+ outputs .* NaN or infinite at the baseline"):
        result = tune_alpha(
            model, data(), forward=broken(lambda alpha: alpha == 0), require_significant=False, **options
        )
    assert not result.has_verdict
    assert not result.significant
    assert get_alpha(model) == result.alpha == 0.0
    sets = 2 if "shifts" in options else 1
    assert result.non_finite == [{"alpha": 0.0, "outputs": len(data()) * sets}]
    assert str(result).endswith(result.verdict())
    assert "interval" not in str(result)
    result.save(tmp_path / "result.json")
    assert AlphaSearch.load(tmp_path / "result.json").non_finite == result.non_finite


def test_a_model_that_returns_only_nan_gets_no_verdict() -> None:
    with pytest.warns(UncertainGainWarning, match="no verdict: 200 outputs"):
        result = tune_alpha(small_network(), data(), forward=broken(lambda alpha: True, None))
    assert not result.has_verdict


@pytest.mark.filterwarnings("ignore::betternorm.errors.UncertainGainWarning")
def test_alphas_with_non_finite_outputs_are_not_chosen() -> None:
    expected = tune_alpha(small_network(), data(), grid=[0.01, 0.02], require_significant=False)
    result = tune_alpha(
        small_network(),
        data(),
        grid=[0.01, 0.02, 0.5],
        forward=broken(lambda alpha: alpha == 0.5),
        require_significant=False,
    )
    assert result.has_verdict
    assert result.best["cross_entropy"] == expected.best["cross_entropy"]
    assert result.non_finite == [{"alpha": 0.5, "outputs": 13}]
    assert "outputs are not finite at alpha 0.5, which was excluded" in result.verdict()


@pytest.mark.parametrize(
    ("output", "count"),
    [
        (torch.tensor([[1.0, torch.nan], [1.0, 2.0], [torch.inf, 0.0]]), 2),
        (torch.tensor([[-torch.inf, 1.0], [2.0, -torch.inf]]), 0),  # masked classes
        (torch.full((2, 3), -torch.inf), 2),
        (torch.zeros(3, 2, 4, 4).index_fill_(0, torch.tensor([1]), torch.nan), 1),
        ({"logits": torch.tensor([[torch.nan], [0.0]]), "ids": torch.tensor([1, 2])}, 1),
        ([torch.tensor([0.0, torch.nan])], 1),
        ("text", 0),
    ],
)
def test_rows_with_nan_or_infinity_are_counted(output: Any, count: int) -> None:
    assert non_finite_rows(output) == count
