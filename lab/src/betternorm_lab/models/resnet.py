"""Residual networks for small images, at any width and depth, and the same without shortcuts.

:class:`ResNet` is the paper's ResNet-18 (section 4.1). It ends in a norm, so that only this one has a path to the
output that passes no other. :class:`PostActivationResNet` is for what depends on such paths (section 3.3).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from betternorm.errors import UserError


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
            raise UserError(f"width is {width} and blocks {tuple(blocks)}; both must be 1 or more")
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
        logits: Tensor = self.head(features.mean((2, 3)))
        return logits


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
        y: Tensor = self.conv2(self.norm2(self.conv1(active)).relu())
        if not self.residual:
            return y
        shortcut: Tensor = x if self.shortcut is None else self.shortcut(active)
        return y + shortcut


class PostActivationResNet(nn.Module):
    """A residual network of post-activation blocks (He et al. 2015) whose shortcuts have neither norm nor weights.

    So the stem's norm and the second norm of every block have paths to the output that pass no other norm. Without
    shortcuts only the last has one.

    Args:
        num_classes, in_channels, width, blocks, stem_stride, residual: as in :class:`ResNet`.

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
        blocks: Sequence[int] = (2, 2, 2),
        stem_stride: int = 1,
        residual: bool = True,
    ) -> None:
        super().__init__()
        if width < 1 or not blocks or min(blocks) < 1:
            raise UserError(f"width is {width} and blocks {tuple(blocks)}; both must be 1 or more")
        self.stem = nn.Conv2d(in_channels, width, 3, stem_stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        stages, channels = [], width
        for stage, count in enumerate(blocks):
            for block in range(count):
                out = width << stage
                stages.append(PostActivationBlock(channels, out, 2 if stage and not block else 1, residual))
                channels = out
        self.blocks = nn.Sequential(*stages)
        self.head = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        features = self.blocks(self.norm(self.stem(images)).relu())
        logits: Tensor = self.head(features.mean((2, 3)))
        return logits


class PostActivationBlock(nn.Module):
    """Convolution, norm, ReLU, convolution, norm, the sum with the shortcut, ReLU.

    Where the shape changes the shortcut takes the mean over each patch, and the new channels are zeros.
    """

    def __init__(self, in_channels: int, channels: int, stride: int, residual: bool = True) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.residual, self.stride, self.new_channels = residual, stride, channels - in_channels

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (y + self._shortcut(x)).relu() if self.residual else y.relu()

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.stride > 1:
            x = F.avg_pool2d(x, self.stride, ceil_mode=True)
        return F.pad(x, (0, 0, 0, 0, 0, self.new_channels)) if self.new_channels else x
