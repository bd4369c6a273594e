"""Effect on the output of scaling a norm layer, measured or estimated from a few backward passes (section 3.3)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from betternorm.decay.norms import gammas_and_betas
from betternorm.decay.paths import Trace
from betternorm.decay.visit import Visit
from betternorm.display.progress import track
from betternorm.example import tensors_in

# Effects above this count. Rounding and eps leave far less if a scaling is undone.
ACTS = 0.01

# Both factors change an output that is proportional to them by the same relative amount, |c - 1| / (c + 1).
_FACTORS = (0.5, 2.0)
_FULL_CHANGE = 1 / 3

# An output is mostly a constant if its variation over the examples is a smaller part of it; below the other, rounding.
_CONSTANT, _ROUNDING = 0.1, 1e-5

# Random directions in output space, with one backward pass each.
_PROBES = 3

Scaled = dict[str | None, list[nn.Parameter]]  # by layer; None is all layers without a path together


def scaled_together(layers: Mapping[str, nn.Module], trace: Trace) -> Scaled:
    scaled: Scaled = {name: [p for part in gammas_and_betas(layer) for p in part] for name, layer in layers.items()}
    without_path = [name for name in layers if trace.calls[name] and name not in trace.reached | trace.unseen]
    scaled[None] = list(dict.fromkeys(parameter for name in without_path for parameter in scaled[name]))
    return {name: owned for name, owned in scaled.items() if owned}


def measure_effects(
    visit: Visit, scaled: Scaled, example_input: Any, base: list[Tensor], progress: bool | None
) -> dict[str | None, float]:
    def effect(parameters: list[nn.Parameter]) -> float:
        changes = [
            _relative_change(base, _outputs_scaled(visit, parameters, factor, example_input)) for factor in _FACTORS
        ]
        return min(1.0, sum(changes) / len(changes) / _FULL_CHANGE)

    return {name: effect(owned) for name, owned in track(list(scaled.items()), "measuring", show=progress)}


def _outputs_scaled(visit: Visit, parameters: list[nn.Parameter], factor: float, example_input: Any) -> list[Tensor]:
    before = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        try:
            for parameter in parameters:
                parameter.mul_(factor)
            return tensors_in(visit.run(example_input))
        finally:
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)


def _relative_change(base: list[Tensor], changed: list[Tensor]) -> float:
    def one(before: Tensor, after: Tensor) -> float:
        before, after = before.double(), after.double()
        if _is_mostly_constant(before):
            before, after = _centered(before), _centered(after)
        size = float(before.norm() + after.norm())
        return float((after - before).norm()) / size if size else 0.0

    return max(one(before, after) for before, after in zip(base, changed, strict=True))


def _is_mostly_constant(output: Tensor) -> bool:
    """Whether an output hardly depends on the example, as in a regression with a large bias.

    Its effect is then measured on what does depend on the example.
    """
    if output.dim() == 0 or output.shape[0] < 2:
        return False
    size, varying = float(output.norm()), float(_centered(output).norm())
    return _ROUNDING * size < varying < _CONSTANT * size


def _centered(output: Tensor) -> Tensor:
    return output - output.mean(0)


def estimate_effects(trace: Trace, scaled: Scaled) -> dict[str | None, float]:
    r"""Estimate all effects from a few backward passes.

    For small changes, the effect of a layer is :math:`\lVert a \rVert / \lVert y \rVert`, where a is the derivative of
    the output y with respect to the logarithm of the factor. A backward pass from v . y / ||y|| with a random normal v
    gives gamma . d/dgamma + beta . d/dbeta = v . a / ||y|| for all layers at once. The mean of its square is the square
    of the effect.
    """
    parameters = list(dict.fromkeys(parameter for owned in scaled.values() for parameter in owned))
    outputs = [output for output in trace.outputs if output.requires_grad and bool(output.any())]
    squares = dict.fromkeys(scaled, 0.0)
    for probe in range(_PROBES if outputs and parameters else 0):
        generator = torch.Generator().manual_seed(probe)
        directions = [_direction(output.detach(), generator) for output in outputs]
        gradients = torch.autograd.grad(outputs, parameters, directions, retain_graph=True, allow_unused=True)
        along = {
            parameter: float((parameter.detach().double() * gradient.double()).sum())
            for parameter, gradient in zip(parameters, gradients, strict=True)
            if gradient is not None
        }
        for name in squares:
            squares[name] += sum(along.get(parameter, 0.0) for parameter in scaled[name]) ** 2
    return {name: min(1.0, math.sqrt(square / _PROBES)) for name, square in squares.items()}


def _direction(output: Tensor, generator: torch.Generator) -> Tensor:
    direction, reference = torch.randn(output.shape, generator=generator).to(output), output.double()
    if _is_mostly_constant(reference):
        direction, reference = _centered(direction), _centered(reference)
    return torch.div(direction, reference.norm().to(direction))
