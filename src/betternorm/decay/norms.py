"""Norm layers of a model, and their gammas and betas."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from betternorm.third_party import OTHER_NORMS, imported_classes


def norm_layers(model: nn.Module, norm_types: tuple[type[nn.Module], ...] = ()) -> dict[str, nn.Module]:
    """The norm layers of a model by name, each once. A norm layer inside another one is part of it."""
    types = (*known_norm_types(), *norm_types)
    layers: dict[str, nn.Module] = {}
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, types) and module not in inside:
            layers[name] = module
            inside.update(module.modules())
    return layers


def gammas_and_betas(layer: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The gammas and the betas of a norm layer, including those of norm layers inside it."""
    norms = [module for module in layer.modules() if module is layer or isinstance(module, known_norm_types())]

    def owned(attribute: str) -> list[nn.Parameter]:
        values = [getattr(module, attribute, None) for module in norms]
        return [value for value in values if isinstance(value, nn.Parameter)]

    return owned("weight"), owned("bias")


def known_norm_types() -> tuple[type[nn.Module], ...]:
    return (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, *imported_classes(OTHER_NORMS))
