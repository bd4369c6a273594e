"""Which modules are norm layers."""

from __future__ import annotations

import pytest
import torch
from networks_to_inspect import BATCH, WIDTH, linear, norm
from torch import Tensor, nn

from betternorm.decay.norms import norm_layers
from betternorm.decay.report import norm_report


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def test_classes_of_your_own_count_when_named() -> None:
    class Standardise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x / x.pow(2).mean(1, keepdim=True).sqrt()

    net = nn.Sequential(norm(), linear(), Standardise())
    assert norm_report(net, torch.randn(BATCH, WIDTH))["0"].path is True
    report = norm_report(net, torch.randn(BATCH, WIDTH), norm_types=(Standardise,))
    assert [(row.name, row.path) for row in report] == [("0", False), ("2", True)]


def test_norm_layers_are_recognized_by_type() -> None:
    net = nn.ModuleDict(
        {
            "a": nn.BatchNorm2d(2),
            "b": nn.SyncBatchNorm(2),
            "c": nn.RMSNorm(2),
            "norm_by_name_only": nn.Linear(2, 2),
            "d": nn.LayerNorm(2),
            "e": nn.GroupNorm(1, 2),
            "f": nn.InstanceNorm1d(2),
        }
    )
    assert list(norm_layers(net)) == ["a", "b", "c", "d", "e", "f"]


def test_timm_layers_are_recognized_by_type() -> None:
    torchvision = pytest.importorskip("betternorm.integrations.torchvision")
    torchvision.ready()
    layers = pytest.importorskip("timm.layers")
    names = [
        "BatchNormAct2d",
        "GroupNormAct",
        "LayerNorm2d",
        "LayerNormAct2d",
        "RmsNorm",
        "RmsNorm2d",
        "RmsNormAct",
        "SimpleNorm",
        "SimpleNorm2d",
        "EvoNorm2dB0",
        "EvoNorm2dB1",
        "EvoNorm2dB2",
        "EvoNorm2dS0",
        "EvoNorm2dS1",
        "EvoNorm2dS2",
        "FilterResponseNormTlu2d",
        "FilterResponseNormAct2d",
        "SplitBatchNorm2d",
        "GroupNorm1",
    ]
    net = nn.ModuleDict({name: getattr(layers, name)(32) for name in names})
    assert list(norm_layers(net)) == names  # the batch norm inside SplitBatchNorm2d is part of it
