"""Published architectures by the names that their checkpoints use: MobileNetV2 and MEMO's ResNet-26 with GroupNorm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Expansion, channels, blocks and first stride of each stage (Sandler et al., arXiv:1801.04381, table 2).
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def _conv_norm(channels_in: int, channels: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU6(inplace=True),
    )


class InvertedResidual(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = channels_in * expansion
        widen = [] if expansion == 1 else [_conv_norm(channels_in, wide, 1)]
        depthwise = _conv_norm(wide, wide, 3, stride, groups=wide)
        self.conv = nn.Sequential(*widen, depthwise, nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels))
        self.residual = stride == 1 and channels_in == channels

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return x + y if self.residual else y


class MobileNetV2(nn.Module):
    """With torchvision's names."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv_norm(3, 32, 3, 2)]
        channels_in = 32
        for expansion, channels, blocks, first_stride in STAGES:
            for block in range(blocks):
                layers.append(InvertedResidual(channels_in, channels, first_stride if block == 0 else 1, expansion))
                channels_in = channels
        self.features = nn.Sequential(*layers, _conv_norm(channels_in, 1280, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).mean((2, 3)))
        return logits


class PreactivationBlock(nn.Module):
    """Without a convolution in the shortcut: it is averaged, and padded with zero channels."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.bn2 = nn.GroupNorm(8, channels_in), nn.GroupNorm(8, channels)
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.stride, self.padding = stride, channels - channels_in

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv2(F.relu(self.bn2(self.conv1(F.relu(self.bn1(x))))))
        if self.padding:
            x = F.avg_pool2d(x, self.stride)
            x = torch.cat([x, x.new_zeros(len(x), self.padding, *x.shape[2:])], 1)
        return x + y


class GroupNormResNet26(nn.Module):
    """The model of MEMO (Zhang et al., arXiv:2110.09506), with the names of its repository."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        stages = []
        for channels_in, channels, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2)):
            first = PreactivationBlock(channels_in, channels, stride)
            stages.append(nn.Sequential(first, *(PreactivationBlock(channels, channels, 1) for _ in range(3))))
        self.layer1, self.layer2, self.layer3 = stages
        self.bn = nn.GroupNorm(8, 64)
        self.fc = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.conv1(x))))
        logits: Tensor = self.fc(F.avg_pool2d(F.relu(self.bn(x)), 8).flatten(1))
        return logits
