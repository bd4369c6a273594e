"""Ghost batch norm in the three forms in which it is found elsewhere, each as short as it can be."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ChunkLoop(nn.Module):
    """Batch norm on one chunk after another, and a concatenation."""

    def __init__(self, num_features: int, ghost_size: int) -> None:
        super().__init__()
        self.ghost_size = ghost_size
        self.norm = nn.BatchNorm2d(num_features)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.norm(chunk) for chunk in x.split(self.ghost_size)])


class StridedView(nn.Module):
    """Batch norm of a view with more channels: every k-th example is in the same ghost batch.

    Views of this kind exist for contiguous tensors only; channels_last input is copied into one.
    """

    def __init__(self, num_features: int, ghost_size: int) -> None:
        super().__init__()
        self.ghost_size = ghost_size
        self.weight, self.bias = nn.Parameter(torch.ones(num_features)), nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, x: Tensor) -> Tensor:
        splits = x.shape[0] // self.ghost_size
        mean, var = self.running_mean.repeat(splits), self.running_var.repeat(splits)
        y = nn.functional.batch_norm(
            x.reshape(-1, x.shape[1] * splits, *x.shape[2:]),
            mean,
            var,
            self.weight.repeat(splits),
            self.bias.repeat(splits),
            training=True,
        )
        self.running_mean.copy_(mean.view(splits, -1).mean(0))
        self.running_var.copy_(var.view(splits, -1).mean(0))
        return y.view(x.shape)


class FiveDimensions(nn.Module):
    """The formula on a view (groups, ghost_size, C, H, W), left to autograd."""

    def __init__(self, num_features: int, ghost_size: int) -> None:
        super().__init__()
        self.ghost_size = ghost_size
        self.weight, self.bias = nn.Parameter(torch.ones(num_features)), nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(0, (-1, self.ghost_size))
        var, mean = torch.var_mean(groups, (1, 3, 4), correction=0, keepdim=True)
        with torch.no_grad():
            self.running_mean.lerp_(mean.mean(0).flatten().to(self.running_mean.dtype), 0.1)
            self.running_var.lerp_(var.mean(0).flatten().to(self.running_var.dtype), 0.1)
        y = (groups - mean) * torch.rsqrt(var + 1e-5)
        return (y * self.weight[:, None, None] + self.bias[:, None, None]).flatten(0, 1)


FORMS = {"chunk loop": ChunkLoop, "strided view": StridedView, "5-D view": FiveDimensions}
