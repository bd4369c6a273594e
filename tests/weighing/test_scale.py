"""The scale on which alpha is searched."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from betternorm.weighing.scale import alpha_at, alpha_of, from_u, to_u


@pytest.mark.parametrize("u", [0.0, 0.01, 0.25, 0.5, 0.9, 1.0])
def test_alpha_is_the_squared_sine(u: float) -> None:
    expected = math.sin(math.pi * u / 2) ** 2
    assert alpha_at(u) == pytest.approx(expected, rel=1e-5)
    assert float(alpha_of(torch.tensor(u, dtype=torch.float64))) == pytest.approx(expected)
    assert float(to_u(expected)) == pytest.approx(u)


def test_arrays_go_there_and_back() -> None:
    alphas = np.linspace(0, 1, 33)
    np.testing.assert_allclose(from_u(to_u(alphas)), alphas, atol=1e-15)
