"""A small network, its data, and what is compared."""

from __future__ import annotations

from torch import Tensor, nn

STEPS, DECAY = 50, 0.05


def small_net() -> nn.Sequential:
    """No biases before norms: their gradient is rounding alone, and Adam would blow it up to full size."""
    net = nn.Sequential(
        nn.Linear(4, 6, bias=False),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.Linear(6, 6, bias=False),
        nn.BatchNorm1d(6),
        nn.Linear(6, 2),
    )
    for layer in (net[1], net[4]):
        nn.init.uniform_(layer.weight, 0.5, 2.0)
    return net.double()


def gammas(net: nn.Sequential) -> list[Tensor]:
    return [net[1].weight, net[4].weight]
