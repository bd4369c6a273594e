"""Temperature scaling: dividing the logits by one number, which softens overconfident outputs.

It does not change predictions, and part of the effect of alpha on the cross-entropy is the same softening (Guo et al.,
On Calibration of Modern Neural Networks, arXiv:1706.04599). Alpha is therefore judged after temperature scaling.

A temperature is fitted for every alpha and every fold without running the model again. Storing the logits would take a
thousand numbers per ImageNet image and alpha. Instead, the cross-entropy at 26 fixed temperatures is stored. It is a
smooth, convex function of the inverse temperature, and interpolation through six points is accurate to 1e-4.
"""

from __future__ import annotations

import bisect
import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Inverse temperatures: 0 (all classes equally likely), and 1/16 to 16. The one at index NONE is 1: no scaling.
_NODES = [0.0, *(2 ** (k / 3) for k in range(-12, 13))]
INVERSES = torch.tensor(_NODES, dtype=torch.float64)
NONE = 13
_NEIGHBORS = 6
_PARTS = 16  # subdivisions between two of them in the search for the minimum


def cross_entropy_curve(logits: Tensor, target: Tensor) -> Tensor:
    """The cross-entropy of every example at all of `INVERSES`."""
    logits = logits.float()
    curve = torch.stack([F.cross_entropy(logits * float(b), target, reduction="none") for b in INVERSES], 1)
    return torch.where(curve.isnan(), torch.inf, curve)


def at_temperature_of_best_fit(curves: Tensor, counts: Tensor, fitted_on: Tensor | None = None) -> Tensor:
    """The cross-entropy of every example at the best temperature, fitted on all examples or on some."""
    chosen = slice(None) if fitted_on is None else fitted_on
    return at_inverse(curves, best_inverse(curves[chosen], counts[chosen]))


def best_inverse(curves: Tensor, counts: Tensor) -> float:
    """The inverse temperature with the lowest mean cross-entropy."""
    mean = (curves.double() * counts[:, None]).sum(0) / counts.sum()
    if not bool(mean.isfinite().all()):
        return 1.0  # no temperature for outputs that are not finite
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
    """Whether the cross-entropy still decreases at the largest inverse temperature, so that none is best."""
    return inverse >= float(INVERSES[-1]) * 0.999


def at_inverse(curves: Tensor, inverse: float) -> Tensor:
    """The cross-entropy of every example at an inverse temperature, interpolated."""
    first, weights = _between(inverse)
    values = curves[:, first : first + len(weights)].double() @ weights
    return torch.where(values.isnan(), torch.inf, values)


def divide_last_linear(model: nn.Module, temperature: float) -> str:
    """Divide the last linear layer by a temperature, in place; returns its name.

    The caller must check that this layer computes the model's output.
    """
    names: list[str] = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not names:
        raise ValueError("fold_temperature=True needs a linear layer at the end of the model, and it has none")
    with torch.no_grad():
        for parameter in model.get_submodule(names[-1]).parameters(recurse=False):
            parameter.div_(temperature)
    return names[-1]


def _between(inverse: float) -> tuple[int, Tensor]:
    """The neighbors in `INVERSES`, and the weights of the interpolating polynomial."""
    after = bisect.bisect_left(_NODES, inverse)
    first = min(max(after - _NEIGHBORS // 2, 0), len(_NODES) - _NEIGHBORS)
    nodes = _NODES[first : first + _NEIGHBORS]
    weights = [math.prod((inverse - other) / (node - other) for other in nodes if other != node) for node in nodes]
    return first, torch.tensor(weights, dtype=torch.float64)


@cache
def _fine() -> tuple[Tensor, Tensor]:
    """A fine grid of inverse temperatures, and the interpolation weights for it."""
    steps = torch.arange(_PARTS, dtype=torch.float64) / _PARTS
    places = torch.cat([(INVERSES[:-1, None] + steps * INVERSES.diff()[:, None]).flatten(), INVERSES[-1:]])
    weights = torch.zeros(len(places), len(INVERSES), dtype=torch.float64)
    for row, place in enumerate(places.tolist()):
        first, of_neighbors = _between(place)
        weights[row, first : first + _NEIGHBORS] = of_neighbors
    return places, weights
