"""The CIFAR-100 ResNets of the public repository karanchahal/distiller, described by their shape, to load its weights.

Unlike the ResNets of He et al. the stem has 64 channels, ReLU follows a stage and not a block's addition, and every
first block of a stage has a shortcut with a convolution.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

MEAN, STD = (0.507, 0.487, 0.441), (0.267, 0.256, 0.276)  # of the pixels / 255 that the networks were trained on
DEPTHS = (8, 14, 20, 26, 32)
CIFAR_RESNETS = {f"cifar100_resnet{depth}": depth for depth in DEPTHS}


class Block(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        shortcut: Tensor = self.shortcut(x)
        return y + shortcut


class CifarResNet(nn.Module):
    def __init__(self, depth: int, num_classes: int = 100) -> None:
        super().__init__()
        if depth % 6 != 2 or depth < 8:
            raise ValueError(f"depth={depth} must be 6 n + 2: 8, 14, 20, ...")
        self.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        widths = (64, 16, 32, 64)
        stages = []
        for before, channels, stride in zip(widths, widths[1:], (1, 2, 2), strict=False):
            first = Block(before, channels, stride)
            stages.append(nn.Sequential(first, *(Block(channels, channels, 1) for _ in range((depth - 2) // 6 - 1))))
        self.layer1, self.layer2, self.layer3 = stages
        self.linear = nn.Linear(256, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        for stage in (self.layer1, self.layer2, self.layer3):
            x = F.relu(stage(x))
        logits: Tensor = self.linear(F.avg_pool2d(x, 4).flatten(1))
        return logits
