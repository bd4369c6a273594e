"""Which modules are norm layers, and their gammas and betas."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from torch import nn
from torch.nn.modules.batchnorm import _NormBase


def norm_layers(model: nn.Module, norm_types: tuple[type[nn.Module], ...] = ()) -> dict[str, nn.Module]:
    """The norm layers of a model by name, each once; a norm layer inside another belongs to the outer one."""
    types = (*known_norm_types(), *norm_types)
    found: dict[str, nn.Module] = {}
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, types) and module not in inside:
            found[name] = module
            inside.update(module.modules())
    return found


def gammas_and_betas(layer: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The scales and the shifts of a norm layer, with those of norm layers inside it."""
    norms = [module for module in layer.modules() if module is layer or isinstance(module, known_norm_types())]

    def owned(attribute: str) -> list[nn.Parameter]:
        values = [getattr(module, attribute, None) for module in norms]
        return [value for value in values if isinstance(value, nn.Parameter)]

    return owned("weight"), owned("bias")


# Those of timm that are not subclasses of torch's.
_TIMM_NORMS = {
    "timm.layers.norm": (
        "RmsNorm",
        "RmsNormFp32",
        "RmsNorm2d",
        "RmsNorm2dFp32",
        "SimpleNorm",
        "SimpleNormFp32",
        "SimpleNorm2d",
        "SimpleNorm2dFp32",
    ),
    "timm.layers.evo_norm": (
        "EvoNorm2dB0",
        "EvoNorm2dB1",
        "EvoNorm2dB2",
        "EvoNorm2dS0",
        "EvoNorm2dS1",
        "EvoNorm2dS2",
    ),
    "timm.layers.filter_response_norm": ("FilterResponseNormTlu2d", "FilterResponseNormAct2d"),
}


def known_norm_types() -> tuple[type[nn.Module], ...]:
    return (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, *imported_classes(_TIMM_NORMS))


def imported_classes(names: Mapping[str, Iterable[str]]) -> tuple[type[nn.Module], ...]:
    """The classes of other libraries; one that nobody has imported has no layers in any model."""
    return tuple(
        getattr(sys.modules[module], name)
        for module, classes in names.items()
        if module in sys.modules
        for name in classes
        if hasattr(sys.modules[module], name)
    )
