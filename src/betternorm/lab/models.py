"""The networks of the experiments (section 4.1), with any normalisation.

The paper's ResNet-18 for small images is here, at any width and depth, and the same without shortcuts; the others come
from timm or torchvision. All are built with batch norm and converted, so a norm is one word and some options.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from betternorm.errors import UserError
from betternorm.integrations.checkpoints import load_for_other_classes
from betternorm.integrations.models import load_model
from betternorm.surgery import OPTIONS, convert

# The paper's large networks, by the names they have in timm.
NETWORKS = {
    "inception_v3": "timm:inception_v3",
    "resnet50": "timm:resnet50",
    "resnet152": "timm:resnet152",
    "mobilenet_v2": "timm:mobilenetv2_100",
    "nasnet_a_large": "timm:nasnetalarge",
}

# Words for norms that are another conversion with fixed options. "batch" is the network as it was built.
ALIASES: dict[str, tuple[str, dict[str, Any]]] = {
    "layer": ("group", {"num_groups": 1}),
    "instance": ("group", {"num_groups": 1 << 30}),  # more groups than channels: one channel a group
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
    """A network, with its weights if there are any, and its norm layers swapped.

    Args:
        network: "resnet18", "plain18" (no shortcuts), a name in :data:`NETWORKS`, or what :func:`load_model` takes.
        width, blocks, stem_stride: of these two only; the others have their own.
        norm, norm_options: see :func:`apply_norm`.
        weights: a file with trained weights; a classifier for other classes is left as it was initialised.
    """
    if network in ("resnet18", "plain18"):
        model: nn.Module = ResNet(
            num_classes,
            in_channels=in_channels,
            width=width,
            blocks=blocks,
            stem_stride=stem_stride,
            residual=network == "resnet18",
        )
    elif network in NETWORKS or ":" in network:
        spec = NETWORKS.get(network, network)
        channels = {"in_chans": in_channels} if spec.startswith("timm:") else {}
        model = load_model(spec, num_classes=num_classes, **channels)
    else:
        raise UserError(
            f"network is {network!r}; it has to be resnet18, plain18, {', '.join(NETWORKS)}, timm:NAME, "
            "torchvision:NAME or path/to/file.py:function"
        )
    if weights is not None:
        load_for_other_classes(model, weights)
    return apply_norm(model, norm, norm_options or {})


def apply_norm(model: nn.Module, norm: str, options: Mapping[str, Any]) -> nn.Module:
    """Swap the norm layers, in place.

    ``norm`` is one of :data:`NORMS`, or ``package.module:function`` for one's own: the function gets the model and the
    options, and returns the model.
    """
    if ":" in norm:
        module, _, function = norm.partition(":")
        try:
            own: Callable[..., nn.Module] = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as problem:
            raise UserError(f"norm is {norm!r}, which cannot be imported: {problem}") from problem
        return own(model, **options)
    if norm not in NORMS:
        raise UserError(f"norm is {norm!r}; it has to be one of {', '.join(NORMS)}, or package.module:function")
    if norm == "batch":
        if options:
            raise UserError(f"norm_options is {dict(options)}; batch norm takes none")
        return model
    kind, fixed = ALIASES.get(norm, (norm, {}))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a network without norm layers would be a trial of something else
            return convert(model, kind, **{**options, **fixed})
    except (ValueError, TypeError, UserWarning) as problem:
        raise UserError(f"norm {norm!r} with {dict(options)}: {problem}") from problem


class ResNet(nn.Module):
    """A residual network for small images: pre-activation blocks (He et al. 2016), widths doubling from stage to stage.

    Args:
        width: of the first stage; 64 with ``blocks=(2, 2, 2, 2)`` is the paper's ResNet-18: 64, 128, 256, 512 filters.
        blocks: how many in each stage; every stage after the first halves the side.
        stem_stride: 2 for a network that sees the image at half its side.
        residual: False leaves the shortcuts out, so that only the last norm layer has a path to the output.

    Shape:
        - Input: (N, in_channels, H, W)
        - Output: (N, num_classes)
    """

    def __init__(
        self,
        num_classes: int,
        *,
        in_channels: int = 3,
        width: int = 64,
        blocks: Sequence[int] = (2, 2, 2, 2),
        stem_stride: int = 1,
        residual: bool = True,
    ) -> None:
        super().__init__()
        if width < 1 or not blocks or min(blocks) < 1:
            raise UserError(f"width is {width} and blocks {tuple(blocks)}; both have to be 1 or more")
        self.stem = nn.Conv2d(in_channels, width, 3, stem_stride, 1, bias=False)
        stages, channels = [], width
        for stage, count in enumerate(blocks):
            for block in range(count):
                out = width << stage
                stages.append(PreActivationBlock(channels, out, 2 if stage and not block else 1, residual))
                channels = out
        self.blocks = nn.Sequential(*stages)
        self.norm = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        features = self.norm(self.blocks(self.stem(images))).relu()
        return self.head(features.mean((2, 3)))


class PreActivationBlock(nn.Module):
    """Norm, ReLU, convolution, twice, and a shortcut that is a convolution where the shape changes."""

    def __init__(self, in_channels: int, channels: int, stride: int, residual: bool = True) -> None:
        super().__init__()
        self.residual = residual
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        same = stride == 1 and in_channels == channels
        self.shortcut = None if same or not residual else nn.Conv2d(in_channels, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = self.norm1(x).relu()
        y = self.conv2(self.norm2(self.conv1(active)).relu())
        if not self.residual:
            return y
        return y + (x if self.shortcut is None else self.shortcut(active))
