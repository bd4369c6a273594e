"""Setting and reading alpha."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from weighing_networks import group_norm, small_network

from betternorm.conversion.convert import convert
from betternorm.layers import GhostBatchNorm
from betternorm.weighing.alpha import get_alpha, set_alpha
from betternorm.weighing.calibration import calibrate


def test_one_number_is_set_on_every_layer() -> None:
    model = convert(small_network(), "weighed")
    set_alpha(model, 0.1)
    assert get_alpha(model) == 0.1
    assert [model[i].alpha for i in (1, 4, 7)] == [0.1] * 3


def test_numbers_by_name_leave_the_other_layers_alone() -> None:
    model = convert(small_network(), "weighed")
    set_alpha(model, {"4": 0.25})
    assert get_alpha(model) == {"1": 0.0, "4": 0.25, "7": 0.0}


def test_a_model_without_such_layers_has_alpha_0() -> None:
    assert get_alpha(small_network()) == 0.0


@pytest.mark.parametrize(
    ("alpha", "message"),
    [
        (1.5, "alpha=1.5 must lie between 0"),
        (-0.1, "alpha=-0.1 must lie between 0"),
        (float("nan"), "alpha=nan must lie between 0"),
        ({"9": 0.1}, "alpha names '9', which is not among the layers that have an alpha: 1, 4, 7"),
        ({"1": 0.5, "4": 2}, "alpha=2.0 must lie between 0"),
    ],
)
def test_an_alpha_that_cannot_be_says_why_and_changes_nothing(alpha: Any, message: str) -> None:
    model = convert(small_network(), "weighed")
    set_alpha(model, 0.3)
    with pytest.raises(ValueError, match=message):
        set_alpha(model, alpha)
    assert get_alpha(model) == 0.3


def test_a_plain_model_has_no_alpha_to_set() -> None:
    with pytest.raises(ValueError, match="convert"):
        set_alpha(small_network(), 0.1)


def test_alphas_travel_with_the_state_dict(tmp_path: Path, images: Tensor) -> None:
    model = convert(small_network(), "weighed")
    set_alpha(model, {"1": 0.1, "7": 0.4})
    torch.save(model.state_dict(), tmp_path / "tuned.pt")
    other = convert(small_network(), "weighed")
    other.load_state_dict(torch.load(tmp_path / "tuned.pt", weights_only=True))
    assert get_alpha(other) == {"1": 0.1, "4": 0.0, "7": 0.4}
    assert torch.equal(other(images), model(images))


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, group_norm, GhostBatchNorm])
def test_an_image_gets_the_same_answer_alone_and_in_any_batch(norm: Any) -> None:
    model = convert(small_network(norm), "weighed")
    calibrate(model, [torch.randn(64, 3, 8, 8)])
    set_alpha(model, 0.2)
    x = torch.randn(256, 3, 8, 8)
    together = model(x)
    for size in (1, 7):
        parts = torch.cat([model(part) for part in x[:21].split(size)])
        torch.testing.assert_close(parts, together[:21], rtol=0, atol=1e-5)
