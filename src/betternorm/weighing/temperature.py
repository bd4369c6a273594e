"""A temperature: one number that the logits are divided by, which softens a network that is too sure of itself.

It changes no answer, and part of what alpha does to the cross-entropy is the same softening (Guo et al., On Calibration
of Modern Neural Networks, arXiv:1706.04599). So alpha is judged after it.

A temperature has to be fitted for every alpha and every fold, without running the network again. Keeping the logits
would take a thousand numbers for an image of ImageNet and an alpha. Kept instead is the cross-entropy at 26 fixed
temperatures: it is a smooth, convex function of the inverse temperature, and six points about a place give it to 1e-4.
"""

from __future__ import annotations

import bisect
import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Inverse temperatures: 0, where all classes are equally likely, and 1/16 to 16. The one at NONE is 1: no temperature.
_NODES = [0.0, *(2 ** (k / 3) for k in range(-12, 13))]
INVERSES = torch.tensor(_NODES, dtype=torch.float64)
NONE = 13
_NEIGHBOURS = 6
_PARTS = 16  # of the way from one to the next, when the lowest point is looked for


def cross_entropy_curve(logits: Tensor, target: Tensor) -> Tensor:
    """The cross-entropy of every example at all of `INVERSES`."""
    logits = logits.float()
    curve = torch.stack([F.cross_entropy(logits * float(b), target, reduction="none") for b in INVERSES], 1)
    return torch.where(curve.isnan(), torch.inf, curve)


def at_temperature_of_best_fit(curves: Tensor, counts: Tensor, fitted_on: Tensor | None = None) -> Tensor:
    """The cross-entropy of every example at the one temperature that fits best, on all of them or on some."""
    chosen = slice(None) if fitted_on is None else fitted_on
    return at_inverse(curves, best_inverse(curves[chosen], counts[chosen]))


def best_inverse(curves: Tensor, counts: Tensor) -> float:
    """The inverse temperature with the lowest mean cross-entropy."""
    mean = (curves.double() * counts[:, None]).sum(0) / counts.sum()
    if not bool(mean.isfinite().all()):
        return 1.0  # a network that answers with what is not a number gets no temperature
    places, weights = _fine()
    values = weights @ mean
    low = int(values.argmin())
    if not 0 < low < len(values) - 1:
        return float(places[low])
    a, b, c = (float(value) for value in values[low - 1 : low + 2])
    x, y, z = (float(place) for place in places[low - 1 : low + 2])
    before, after = (b - a) / (y - x), (c - b) / (z - y)
    return y if before == after else (x + y) / 2 - before * (z - x) / (after - before) / 2


def is_at_the_end(inverse: float) -> bool:
    """Whether the cross-entropy still falls where the temperatures end: nothing fits."""
    return inverse >= float(INVERSES[-1]) * 0.999


def at_inverse(curves: Tensor, inverse: float) -> Tensor:
    """The cross-entropy of every example at an inverse temperature between those of `INVERSES`."""
    first, weights = _between(inverse)
    found = curves[:, first : first + len(weights)].double() @ weights
    return torch.where(found.isnan(), torch.inf, found)


def divide_last_linear(model: nn.Module, temperature: float) -> str:
    """Divide the last linear layer by a temperature, in place; returns its name.

    Whether that layer gives the network's output is for the caller to see.
    """
    found: tuple[str, nn.Linear] | None = None
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            found = name, module
    if found is None:
        raise ValueError("fold_temperature=True wants a linear layer at the end of the network, and it has none")
    with torch.no_grad():
        for parameter in found[1].parameters(recurse=False):
            parameter.div_(temperature)
    return found[0]


def _between(inverse: float) -> tuple[int, Tensor]:
    """The neighbours among `INVERSES`, and the weights of the polynomial through them."""
    after = bisect.bisect_left(_NODES, inverse)
    first = min(max(after - _NEIGHBOURS // 2, 0), len(_NODES) - _NEIGHBOURS)
    nodes = _NODES[first : first + _NEIGHBOURS]
    weights = [math.prod((inverse - other) / (node - other) for other in nodes if other != node) for node in nodes]
    return first, torch.tensor(weights, dtype=torch.float64)


@cache
def _fine() -> tuple[Tensor, Tensor]:
    """Many inverse temperatures, and the weights that give their cross-entropy from that at `INVERSES`."""
    steps = torch.arange(_PARTS, dtype=torch.float64) / _PARTS
    places = torch.cat([(INVERSES[:-1, None] + steps * INVERSES.diff()[:, None]).flatten(), INVERSES[-1:]])
    weights = torch.zeros(len(places), len(INVERSES), dtype=torch.float64)
    for row, place in enumerate(places.tolist()):
        first, of_neighbours = _between(place)
        weights[row, first : first + _NEIGHBOURS] = of_neighbours
    return places, weights
