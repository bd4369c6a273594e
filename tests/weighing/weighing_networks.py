"""Networks, metrics and data whose best alpha is known."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from betternorm.conversion.convert import convert
from betternorm.weighing.metrics import Metric


def small_network(norm: type[nn.Module] | Any = nn.BatchNorm2d) -> nn.Sequential:
    """Three norm layers, with averages that have seen other data than the tests show."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        norm(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        norm(8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 3, padding=1),
        norm(4),
        nn.Flatten(),
        nn.Linear(4 * 16, 10),
    )
    for _ in range(5):
        model(torch.randn(16, 3, 8, 8) * 2 + 1)
    return model.eval()


def group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(2, channels)


def batches(x: Tensor, y: Tensor, size: int = 16) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


def known() -> nn.Sequential:
    """Its `answer` is its own alpha, so a squared error to numbers is least at their mean."""
    return convert(nn.Sequential(nn.BatchNorm1d(1)), "weighed").eval()


def answer(model: nn.Sequential, batch: Any) -> tuple[Tensor, Tensor]:
    return torch.full((len(batch[0]),), model[0].alpha), batch[1]


squared_error = Metric("squared_error", lambda output, target: (output - target).square(), higher_is_better=False)


def noisy(target: float, count: int = 400, spread: float = 0.05, size: int = 64) -> list[tuple[Tensor, Tensor]]:
    noise = torch.randn(count, generator=torch.Generator().manual_seed(3)) * spread
    return batches(
        torch.randn(count, 1, generator=torch.Generator().manual_seed(4)), target + noise - noise.mean(), size
    )


def calling_answer(model: nn.Sequential, batch: Any) -> tuple[Tensor, Tensor]:
    model(batch[0])
    return answer(model, batch)


def two_answers(model: nn.Sequential, batch: Any) -> tuple[Tensor, Tensor]:
    alphas = [torch.zeros(()) if layer._alpha is None else layer._alpha for layer in model]
    return torch.stack(alphas).expand(len(batch[0]), 2), batch[1]


def two_targets(first: float, second: float) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(400, 2, generator=generator) * 0.03
    return batches(torch.randn(400, 1, generator=generator), torch.tensor([first, second]) + noise, 20)


distance = Metric("distance", lambda output, target: (output - target).square().sum(1), higher_is_better=False)


def two_layers() -> nn.Sequential:
    return convert(nn.Sequential(nn.BatchNorm1d(1), nn.BatchNorm1d(1)), "weighed").eval()
