"""Images and labels for a small network."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor


@pytest.fixture
def images() -> Tensor:
    return torch.randn(61, 3, 8, 8)


@pytest.fixture
def labels() -> Tensor:
    return torch.randint(10, (61,))
