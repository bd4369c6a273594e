"""Small networks whose paths and effects are known."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, BATCH = 6, 10


def norm(width: int = WIDTH) -> nn.BatchNorm1d:
    """A batch norm whose eps does not blur the exact cancellation, with a gamma and beta of its own."""
    layer = nn.BatchNorm1d(width, eps=1e-12)
    nn.init.uniform_(layer.weight, 0.5, 1.5)
    nn.init.normal_(layer.bias)
    return layer


def linear(inputs: int = WIDTH, outputs: int = WIDTH) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Net(nn.Module):
    """The small networks below: named layers, and a forward pass given as a function."""

    def __init__(self, forward: Callable[..., object], **layers: nn.Module) -> None:
        super().__init__()
        self._forward = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> object:
        return self._forward(self, x)


def plain_chain() -> nn.Module:
    return nn.Sequential(linear(), norm(), nn.ReLU(), linear(), norm(), nn.ReLU(), linear())


def residual_projection() -> nn.Module:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = F.relu(net.stem(net.l0(x)))
        return net.n_branch(net.l1(h)) + net.n_projection(net.l2(h))

    return Net(forward, l0=linear(), stem=norm(), l1=linear(), n_branch=norm(), l2=linear(), n_projection=norm())


def preactivation() -> nn.Module:
    def forward(net: Net, x: Tensor) -> Tensor:
        h = x + net.l1(F.relu(net.n1(x)))
        h = h + net.l2(F.relu(net.n2(h)))
        return net.head(F.relu(net.n_final(h)))

    return Net(forward, n1=norm(), l1=linear(), n2=norm(), l2=linear(), n_final=norm(), head=linear())


def loop() -> nn.Module:
    """As many turns as the data asks for, and a norm after the loop."""

    def forward(net: Net, x: Tensor) -> Tensor:
        h, turns = x, 0
        while turns < 3 or (h.norm() < 1 and turns < 9):
            h, turns = h + net.n(net.l(h)), turns + 1
        return net.n_after(net.l_after(h)) + h

    return Net(forward, n=norm(), l=linear(), n_after=norm(), l_after=linear())


def two_outputs() -> nn.Module:
    def forward(net: Net, x: Tensor) -> dict[str, Tensor]:
        h = net.n1(net.l1(x))
        g = net.n2(net.l2(F.relu(h)))
        return {"main": net.n3(net.l3(F.relu(g))), "auxiliary": net.side(h)}

    return Net(forward, l1=linear(), n1=norm(), l2=linear(), n2=norm(), l3=linear(), n3=norm(), side=linear())
