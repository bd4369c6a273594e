"""Alpha in the layers of a model: which layers have one, and setting and reading it (section 3.1).

At inference a layer normalises with moving averages and, with weight alpha, with the statistics of the example itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from betternorm.layers import GroupedBatchNorm
from betternorm.layers.checks import checked_alpha


def set_alpha(model: nn.Module, alpha: float | Mapping[str, float]) -> None:
    """Set the weight of the example's own statistics at inference, in place.

    Args:
        alpha: one number between 0 and 1 for all layers, or a dict from the names of layers to numbers; layers that it
            does not name keep theirs.

    Examples::

        >>> model = betternorm.convert(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), "weighed")
        >>> set_alpha(model, 0.1)
        >>> get_alpha(model)
        0.1
        >>> set_alpha(model, {"1": 0.05})
    """
    layers = weighed_layers(model)
    if isinstance(alpha, Mapping):
        unknown = [name for name in alpha if name not in layers]
        if unknown:
            raise ValueError(
                f"alpha names {', '.join(map(repr, unknown[:3]))}, which {'is' if len(unknown) == 1 else 'are'} not "
                f"among the layers that have an alpha: {listed(list(layers))}"
            )
        wanted = {name: checked_alpha(value) for name, value in alpha.items()}
    else:
        if not layers:
            raise ValueError("the model has no layer with an alpha; call betternorm.convert(model, 'weighed') first")
        wanted = dict.fromkeys(layers, checked_alpha(alpha))
    for name, value in wanted.items():
        layers[name].alpha = value


def get_alpha(model: nn.Module) -> float | dict[str, float]:
    """The alpha of the model: one number where all layers have the same, otherwise a dict by layer name.

    A model without such layers is what alpha = 0 stands for.
    """
    alphas = {name: layer.alpha for name, layer in weighed_layers(model).items()}
    values = set(alphas.values()) or {0.0}
    return values.pop() if len(values) == 1 else alphas


def weighed_layers(model: nn.Module) -> dict[str, GroupedBatchNorm]:
    """The layers that have an alpha, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, GroupedBatchNorm)}


def tuned_layers(model: nn.Module) -> dict[str, GroupedBatchNorm]:
    layers = weighed_layers(model)
    if not layers:
        raise ValueError("the model has no BatchNorm, GroupNorm or InstanceNorm layer, so there is no alpha to tune")
    across = {name: layer for name, layer in layers.items() if _layer_as_trained(layer) == 0}
    return across or layers


def _layer_as_trained(layer: GroupedBatchNorm) -> float:
    """The alpha of a layer before anybody tuned it."""
    return layer.alpha if layer.alpha in (0, 1) else float(layer.examples_per_group == 1)


def alpha_as_trained(layers: Mapping[str, GroupedBatchNorm]) -> float:
    return _layer_as_trained(next(iter(layers.values())))


def listed(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "none") + more
