"""Norm layers for experiments only: the negative results of the paper (appendix C), and Switchable Normalization.

Each has a function that swaps the batch norm layers of a new network, for ``norm="betternorm_lab.norms:NAME"``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from betternorm.functional import grouped_batch_norm
from betternorm.layers import GroupedBatchNorm
from betternorm.layers.checks import channels_in_group


class GroupNormBase(GroupedBatchNorm):
    """Group Norm with moving averages, which subclasses perturb in training; at inference it is Group Norm.

    Args:
        num_groups: of channels; more than there are means one channel per group.
    """

    momentum: float

    def __init__(self, num_features: int, num_groups: int = 8) -> None:
        super().__init__(num_features, channels_in_group(num_groups, num_features), 1, alpha=1.0)


class NoisyGroupNorm(GroupNormBase):
    """Gaussian noise on a group's mean and log variance: their standard deviation between examples times ``strength``.

    The standard deviation is a moving average, so the noise does not depend on the current batch.
    """

    spread: Tensor

    def __init__(self, num_features: int, num_groups: int = 8, strength: float = 0.25) -> None:
        super().__init__(num_features, num_groups)
        self.strength = strength
        groups = num_features // self.channels_per_group
        self.register_buffer("spread", torch.zeros(2, groups))

    def _normalize_batch(self, input: Tensor, momentum: float | None) -> Tensor:
        grouped = input.unflatten(1, (-1, self.channels_per_group))
        var, mean = torch.var_mean(grouped, tuple(range(2, grouped.dim())), correction=0, keepdim=True)
        deviation = (var + self.eps).sqrt()
        with torch.no_grad():
            found = torch.stack([mean, deviation.log()]).flatten(2).std(1, correction=0)
            self.spread.lerp_(found, 1.0 if not self.num_batches_tracked else self.momentum)
            noise = torch.randn(2, *mean.shape, device=input.device) * self.strength
            noise *= self.spread.view(2, 1, -1, *(1,) * (mean.dim() - 2))
        normal = ((grouped - mean - noise[0]) / (deviation * noise[1].exp())).flatten(1, 2)
        shape = (-1, *(1,) * (input.dim() - 2))
        var, mean = torch.var_mean(input.detach(), (0, *range(2, input.dim())), correction=0)
        self._track(mean, var, momentum)
        output: Tensor = normal * self.weight.view(shape) + self.bias.view(shape)
        return output


class RandomGroupNorm(GroupNormBase):
    """Channels are assigned to groups at random, in a ``share`` of the steps."""

    def __init__(self, num_features: int, num_groups: int = 8, share: float = 1.0) -> None:
        super().__init__(num_features, num_groups)
        self.share = share

    def _normalize_batch(self, input: Tensor, momentum: float | None) -> Tensor:
        if torch.rand(()) >= self.share:
            return super()._normalize_batch(input, momentum)
        order = torch.randperm(self.num_features, device=input.device)
        back = order.argsort()
        output, mean, var = grouped_batch_norm(
            input[:, order], self.weight[order], self.bias[order], self.channels_per_group, 1, self.eps
        )
        self._track(mean[back], var[back], momentum)
        return output[:, back]


class ChangingGroupNorm(GroupNormBase):
    """The number of groups goes from ``first`` to ``last`` over ``steps``, doubling or halving at equal intervals."""

    def __init__(self, num_features: int, first: int = 2, last: int = 16, steps: int = 1000) -> None:
        super().__init__(num_features, first)
        self.first, self.last, self.steps = first, last, steps

    def _normalize_batch(self, input: Tensor, momentum: float | None) -> Tensor:
        part = min(1.0, int(self.num_batches_tracked) / self.steps)
        groups = 2 ** round((1 - part) * (self.first.bit_length() - 1) + part * (self.last.bit_length() - 1))
        self.channels_per_group = channels_in_group(groups, self.num_features)
        return super()._normalize_batch(input, momentum)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        if int(self.num_batches_tracked) >= self.steps:
            self.channels_per_group = channels_in_group(self.last, self.num_features)


class EvenGroupNorm(GroupNormBase):
    """Groups of about ``elements`` values (height x width x channels); the number of channels is a divisor."""

    def __init__(self, num_features: int, elements: int = 1024) -> None:
        super().__init__(num_features, 1)
        self.elements = elements

    def forward(self, input: Tensor) -> Tensor:
        wanted = self.elements / input[0, 0].numel()
        divisors = [size for size in range(1, self.num_features + 1) if self.num_features % size == 0]
        self.channels_per_group = min(divisors, key=lambda size: abs(size - wanted))
        return super().forward(input)


class SwitchableNorm(nn.BatchNorm2d):
    """Batch, instance and layer statistics mixed by learned weights (Luo et al. 2019, arXiv:1806.10779).

    Means and variances have weights of their own, a softmax over three numbers per layer. At inference the batch's part
    comes from moving averages.
    """

    momentum: float
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.mean_weight = nn.Parameter(torch.ones(3))
        self.var_weight = nn.Parameter(torch.ones(3))

    def forward(self, input: Tensor) -> Tensor:
        var, mean = torch.var_mean(input, (2, 3), correction=0, keepdim=True)
        second = var + mean.square()
        layer_mean = mean.mean(1, keepdim=True)
        layer_var = second.mean(1, keepdim=True) - layer_mean.square()
        if self.training:
            batch_mean = mean.mean(0, keepdim=True)
            batch_var = second.mean(0, keepdim=True) - batch_mean.square()
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                self.running_mean.lerp_(batch_mean.flatten(), self.momentum)
                self.running_var.lerp_(batch_var.flatten(), self.momentum)
        else:
            batch_mean, batch_var = (table.view(1, -1, 1, 1) for table in (self.running_mean, self.running_var))
        means, variances = self.mean_weight.softmax(0), self.var_weight.softmax(0)
        mean = means[0] * batch_mean + means[1] * mean + means[2] * layer_mean
        var = variances[0] * batch_var + variances[1] * var + variances[2] * layer_var
        normal = (input - mean) * (var.clamp_min(0) + self.eps).rsqrt()
        return torch.addcmul(self.bias.view(-1, 1, 1), normal, self.weight.view(-1, 1, 1))


def noisy_group(model: nn.Module, **options: Any) -> nn.Module:
    return _swap(model, lambda channels: NoisyGroupNorm(channels, **options))


def random_group(model: nn.Module, **options: Any) -> nn.Module:
    return _swap(model, lambda channels: RandomGroupNorm(channels, **options))


def changing_group(model: nn.Module, **options: int) -> nn.Module:
    return _swap(model, lambda channels: ChangingGroupNorm(channels, **options))


def even_group(model: nn.Module, **options: int) -> nn.Module:
    return _swap(model, lambda channels: EvenGroupNorm(channels, **options))


def switchable(model: nn.Module) -> nn.Module:
    return _swap(model, SwitchableNorm)


def _swap(model: nn.Module, make: Callable[[int], nn.Module]) -> nn.Module:
    """Replace every batch norm layer of an untrained model."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, make(child.num_features))
    return model
