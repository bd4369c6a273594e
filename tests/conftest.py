"""Fixtures that all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from betternorm import kernel

# Several workers with several threads each wait for one another longer than they compute.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder beside the checkout with golden vectors, data and weights."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not on this machine")
    return folder


@pytest.fixture(params=["kernel", "torch operators"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to the same numbers: by the fused kernel, and as on a machine where it cannot be compiled."""
    if request.param == "torch operators":
        monkeypatch.setattr(kernel, "serves", lambda x, channels_per_group=1: False)
    elif not kernel.available():
        pytest.skip(kernel.status())
    return str(request.param)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
