"""The study of injected faults on little data: `python -m betternorm_lab.studies.diagnose_faults` runs all of it."""

from __future__ import annotations

import copy

import pytest
import torch
from betternorm_lab.studies import diagnose_faults as study
from torch import Tensor

# Those that need no long training; the others are in tests/advice/test_diagnose.py and in the study.
FAST = ("lagging averages", "averages from other data", "dead channels", "train mode left on", "overconfidence only")


@pytest.fixture(scope="module")
def bench() -> study.Bench:
    torch.set_num_threads(1)
    model, loaders = study.simulated(0)
    data: dict[str, study.Data] = {name: loader.dataset for name, loader in loaders.items()}
    rows = torch.randperm(600, generator=torch.Generator().manual_seed(0))
    images, labels = data["loader"].tensors
    parts = [study.TensorDataset(images[part], labels[part]) for part in rows.split(300)]
    other = 10 * torch.randn(1280, 3, 8, 8, generator=torch.Generator().manual_seed(1)) + 20

    def darker(images: Tensor) -> Tensor:
        return images - 2

    return study.Bench(model, data["stats_loader"], *parts, other, darker, more=40)


@pytest.mark.parametrize("fault", FAST)
def test_the_right_cause_is_first(fault: str, bench: study.Bench) -> None:
    cause, inject = study.FAULTS[fault]
    _, result = study.examine(inject(copy.copy(bench)), bench)
    assert result["causes"][0] == cause
    assert result["passes"] <= 25


@pytest.mark.parametrize("seed", range(1, 4))
def test_simulated_networks_are_healthy(seed: int) -> None:
    torch.set_num_threads(1)
    model, loaders = study.simulated(seed)
    diagnosis = study.betternorm.diagnose(model, **loaders, progress=False)
    assert diagnosis.is_healthy, str(diagnosis)


def test_the_page_counts_what_was_right() -> None:
    gain = {"top1": [0.05, 0.01, 0.09], "loss": [-0.1, -0.2, -0.05]}
    kept = {"causes": ["mismatched_averages"], "gain": gain, "fresh": {"top1": 0.04, "loss": -0.1}, "passes": 12}
    missed = {"causes": [], "passes": 8}
    broken = kept | {"fresh": {"top1": 0.2, "loss": -0.1}}
    faults = {("plain", fault): kept for fault in ("averages after SWA", "averages from other data")}
    faults |= {("plain", "dead channels"): missed, ("plain", "shifted data"): broken}
    page = study.page(faults, {"one": {"causes": [], "passes": 8}, "two": {"causes": ["shifted_data"], "passes": 9}})
    assert "| the right cause first | 2 of 4 |" in page
    assert "promised interval | 2 of 3 |" in page
    assert "| the same for the loss | 3 of 3 |" in page
    assert "| no finding for healthy networks | 1 of 2 (with a finding: two: shifted_data) |" in page
    assert "| averages after SWA | plain | mismatched_averages | +1.0 to +9.0 | +4.0 | 12 |" in page
