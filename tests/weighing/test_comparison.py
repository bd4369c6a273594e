"""Two settings of alpha on the same data."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from weighing_networks import batches, small_network

from betternorm.conversion.convert import convert
from betternorm.weighing.alpha import get_alpha, set_alpha
from betternorm.weighing.comparison import compare_alpha


def test_two_settings_are_compared_on_other_data(images: Tensor) -> None:
    model = convert(small_network(), "weighed")
    set_alpha(model, 0.3)
    labels = torch.randint(10, (61,))
    gains = compare_alpha(model, batches(images, labels), {"4": 0.5}, against=0.0, metrics="cross_entropy")
    expected = []
    for alphas in ({"1": 0.0, "4": 0.0, "7": 0.0}, {"1": 0.3, "4": 0.5, "7": 0.3}):
        other = convert(small_network(), "weighed")
        set_alpha(other, alphas)
        expected.append(nn.functional.cross_entropy(other(images), labels).item())
    gain = gains["cross_entropy"]
    assert (gain.before, gain.after) == pytest.approx(tuple(expected), rel=1e-5)
    assert gain.low < gain.difference < gain.high
    assert get_alpha(model) == 0.3
