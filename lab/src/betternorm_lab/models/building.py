"""Models by name, with any norm layer: they are built with batch norm and converted."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from betternorm.conversion.convert import OPTIONS, convert
from betternorm.errors import UserError
from betternorm.integrations.checkpoints import load_for_other_classes
from betternorm.integrations.models import load_model
from betternorm_lab.models.cifar_resnets import CIFAR_RESNETS, CifarResNet
from betternorm_lab.models.resnet import PostActivationResNet, ResNet

# The paper's large models, by their names in timm.
NETWORKS = {
    "inception_v3": "timm:inception_v3",
    "resnet50": "timm:resnet50",
    "resnet152": "timm:resnet152",
    "mobilenet_v2": "timm:mobilenetv2_100",
    "nasnet_a_large": "timm:nasnetalarge",
}

# Our own, with and without shortcuts.
RESIDUAL = {"resnet18": ResNet, "post_resnet": PostActivationResNet}
PLAIN = {"plain18": ResNet, "post_plain": PostActivationResNet}

# Names for conversions with fixed options. "batch" leaves the model as it was built.
ALIASES: dict[str, tuple[str, dict[str, Any]]] = {
    "layer": ("group", {"num_groups": 1}),
    "instance": ("group", {"num_groups": 1 << 30}),  # more groups than channels: one channel per group
}
NORMS = ("batch", *OPTIONS, *ALIASES)


def build(
    network: str,
    num_classes: int,
    *,
    in_channels: int = 3,
    width: int = 64,
    blocks: Sequence[int] = (2, 2, 2, 2),
    stem_stride: int = 1,
    norm: str = "batch",
    norm_options: Mapping[str, Any] | None = None,
    weights: str | Path | None = None,
) -> nn.Module:
    """A model with its norm layers converted, and with its weights if there are any.

    Args:
        network: "resnet18", "post_resnet" (post-activation), the same without shortcuts as "plain18" and "post_plain",
            a name in :data:`NETWORKS` or :data:`CIFAR_RESNETS`, or what :func:`load_model` takes.
        width, blocks, stem_stride: of the first four only; the others have their own.
        norm, norm_options: see :func:`apply_norm`.
        weights: a file with trained weights; a classifier for other classes is left as it was initialised.
    """
    if network in RESIDUAL | PLAIN:
        model: nn.Module = (RESIDUAL | PLAIN)[network](
            num_classes,
            in_channels=in_channels,
            width=width,
            blocks=blocks,
            stem_stride=stem_stride,
            residual=network in RESIDUAL,
        )
    elif network in CIFAR_RESNETS:
        model = CifarResNet(CIFAR_RESNETS[network], num_classes)
    elif network in NETWORKS or ":" in network:
        spec = NETWORKS.get(network, network)
        channels = {"in_chans": in_channels} if spec.startswith("timm:") else {}
        model = load_model(spec, num_classes=num_classes, **channels)
    else:
        raise UserError(
            f"network is {network!r}; it must be {', '.join((*RESIDUAL, *PLAIN, *NETWORKS, *CIFAR_RESNETS))}, "
            "timm:NAME, torchvision:NAME or path/to/file.py:function"
        )
    if weights is not None:
        load_for_other_classes(model, weights)
    return apply_norm(model, norm, norm_options or {})


def apply_norm(model: nn.Module, norm: str, options: Mapping[str, Any]) -> nn.Module:
    """Replace the norm layers, in place.

    ``norm`` is one of :data:`NORMS`, or ``package.module:function`` for one's own: the function gets the model and the
    options, and returns the model.
    """
    if ":" in norm:
        module, _, function = norm.partition(":")
        # The keys of rows contain the name that the lab had when it was part of the library.
        module = re.sub(r"^betternorm\.lab\b", "betternorm_lab", module)
        try:
            own: Callable[..., nn.Module] = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as problem:
            raise UserError(f"norm is {norm!r}, which cannot be imported: {problem}") from problem
        return own(model, **options)
    if norm not in NORMS:
        raise UserError(f"norm is {norm!r}; it must be one of {', '.join(NORMS)}, or package.module:function")
    if norm == "batch":
        if options:
            raise UserError(f"norm_options is {dict(options)}; batch norm takes none")
        return model
    kind, fixed = ALIASES.get(norm, (norm, {}))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # such as that of a model without norm layers
            return convert(model, kind, **{**options, **fixed})  # type: ignore[call-overload, no-any-return]
    except (ValueError, TypeError, UserWarning) as problem:
        raise UserError(f"norm {norm!r} with {dict(options)}: {problem}") from problem
