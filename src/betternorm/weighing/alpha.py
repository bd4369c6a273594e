"""Set and read alpha, the weight of an example's own statistics at inference (section 3.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from betternorm.layers import GroupedBatchNorm
from betternorm.layers.checks import checked_alphas


def set_alpha(model: nn.Module, alpha: float | Tensor | Mapping[str, float | Tensor]) -> None:
    """Set the weight of the example's own statistics at inference, in place.

    Args:
        alpha: one number between 0 and 1 for all layers, or a dict from layer names to numbers or to tensors with one
            value per channel. Layers that the dict does not name keep their alpha.

    Examples::

        >>> model = betternorm.convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), "weighed")
        >>> set_alpha(model, 0.1)
        >>> get_alpha(model)
        0.1
        >>> set_alpha(model, {"1": torch.tensor([0.0, 0.1, 0.3, 0.0])})
    """
    layers = weighed_layers(model)
    if isinstance(alpha, Mapping):
        unknown = [name for name in alpha if name not in layers]
        if unknown:
            raise ValueError(
                f"alpha names {', '.join(map(repr, unknown[:3]))}, which {'is' if len(unknown) == 1 else 'are'} not "
                f"among the layers that have an alpha: {listed(list(layers))}"
            )
        wanted = dict(alpha)
    else:
        if not layers:
            raise ValueError("the model has no layer with an alpha; call betternorm.convert(model, 'weighed') first")
        wanted = dict.fromkeys(layers, alpha)
    for name, value in {name: _checked(name, value, layers[name]) for name, value in wanted.items()}.items():
        layers[name].alpha = value


def get_alpha(model: nn.Module) -> float | dict[str, float | Tensor]:
    """The alpha of the model: one number if all layers share it, otherwise a dict from layer names.

    The dict has a number or, where alpha differs by channel, a tensor for every layer. A model without layers that have
    an alpha returns 0.
    """
    alphas = {name: layer.alpha for name, layer in weighed_layers(model).items()}
    numbers = {alpha for alpha in alphas.values() if not isinstance(alpha, Tensor)}
    if any(isinstance(alpha, Tensor) for alpha in alphas.values()) or len(numbers) > 1:
        return alphas
    return numbers.pop() if numbers else 0.0


def _checked(name: str, value: float | Tensor, layer: GroupedBatchNorm) -> float | Tensor:
    try:
        return checked_alphas(value, layer.num_features)
    except ValueError as error:
        raise ValueError(f"layer {name!r}: {error}") from None


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
    """The alpha of a layer before tuning."""
    return next((value for value in (0.0, 1.0) if layer._alpha_is(value)), float(layer.examples_per_group == 1))


def alpha_as_trained(layers: Mapping[str, GroupedBatchNorm]) -> float:
    return _layer_as_trained(next(iter(layers.values())))


def listed(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "none") + more
