"""What the layers must compute, in float64 and by other means: NumPy for values, torch's GroupNorm for gradients."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, channels_per_group: int, sizes: list[int], eps: float = 1e-5
) -> Tensor:
    """Groups of ``sizes`` examples: the examples of a group moved into space are one example to Group Norm."""
    channels = x.shape[1]
    outputs = []
    for part in x.double().split(sizes):
        side_by_side = part.transpose(0, 1).reshape(1, channels, -1)
        y = F.group_norm(side_by_side, channels // channels_per_group, eps=eps)
        outputs.append(y.reshape(channels, part.shape[0], *part.shape[2:]).transpose(0, 1))
    gamma, beta = (None if t is None else t.double().view(-1, *(1,) * (x.dim() - 2)) for t in (weight, bias))
    y = torch.cat(outputs)
    y = y if gamma is None else y * gamma
    return y if beta is None else y + beta


def infer(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    alpha: float | Tensor,
    channels_per_group: int = 1,
    eps: float = 1e-5,
) -> np.ndarray:
    """Inference as the paper has it: first and second moments are mixed, then averaged over the channel group."""
    data = numpy(x)
    alpha = numpy(alpha) if isinstance(alpha, Tensor) else alpha
    space = tuple(range(2, data.ndim))
    moving_first, moving_second = numpy(running_mean), numpy(running_var) + numpy(running_mean) ** 2
    first = (1 - alpha) * moving_first + alpha * data.mean(space)
    second = (1 - alpha) * moving_second + alpha * (data**2).mean(space)
    mean, square = (over_channel_groups(table, channels_per_group) for table in (first, second))
    broadcast = (..., *(None,) * len(space))
    y = (data - mean[broadcast]) / np.sqrt(square - mean**2 + eps)[broadcast]
    gamma = 1.0 if weight is None else numpy(weight)[broadcast]
    beta = 0.0 if bias is None else numpy(bias)[broadcast]
    return y * gamma + beta


def infer_with_gradient(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    alpha: float | Tensor,
    channels_per_group: int,
    eps: float,
) -> Tensor:
    """:func:`infer` in float64 and left to autograd, moments about zero as there."""
    space = tuple(range(2, x.dim()))
    x = x.double()
    first = (1 - alpha) * running_mean + alpha * (x.mean(space) if space else x)
    second = (1 - alpha) * (running_var + running_mean**2) + alpha * (x.square().mean(space) if space else x.square())
    shape = (x.shape[0], -1, channels_per_group)
    mean, square = (table.reshape(shape).mean(2).repeat_interleave(channels_per_group, 1) for table in (first, second))
    spread = (..., *(None,) * len(space))
    y = (x - mean[spread]) / torch.sqrt(square - mean**2 + eps)[spread]
    y = y if weight is None else y * weight[spread]
    return y if bias is None else y + bias[spread]


def over_channel_groups(table: np.ndarray, channels_per_group: int) -> np.ndarray:
    grouped = table.reshape(table.shape[0], -1, channels_per_group)
    return np.repeat(grouped.mean(2), channels_per_group, 1)


def moving_averages(batches: list[Tensor], momentum: float | None = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance from moving averages of x and x², which begin at 0 and 1."""
    channels = batches[0].shape[1]
    first, second = np.zeros(channels), np.ones(channels)
    for step, batch in enumerate(batches, 1):
        data = numpy(batch)
        over = (0, *range(2, data.ndim))
        newest = 1 / step if momentum is None else momentum
        first = (1 - newest) * first + newest * data.mean(over)
        second = (1 - newest) * second + newest * (data**2).mean(over)
    return first, second - first**2


def numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()
