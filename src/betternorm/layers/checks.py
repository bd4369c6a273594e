"""Checks of arguments that the layers share."""

from __future__ import annotations

import torch
from torch import Tensor


def check_group_size(name: str, value: int, alternative: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be a whole number of 1 or more{alternative}")
    if value < 1:
        raise ValueError(f"{name}={value} must be 1 or more{alternative}")


def channels_in_group(num_groups: int, num_channels: int) -> int:
    """How many channels a group has; one where there are more groups than channels."""
    check_group_size("num_groups", num_groups)
    if num_groups >= num_channels:
        return 1
    if num_channels % num_groups:
        raise ValueError(
            f"num_groups={num_groups} does not divide the {num_channels} channels; {divisors_text(num_channels)} would"
        )
    return num_channels // num_groups


def checked_alpha(value: float) -> float:
    value = float(value)
    if not 0 <= value <= 1:  # also false for NaN
        raise ValueError(f"alpha={value} must lie between 0 (moving averages alone) and 1 (the example alone)")
    return value


def checked_alphas(value: float | Tensor, channels: int) -> float | Tensor:
    """Validate the alpha of one layer: a number, or a vector with one value per channel.

    A vector is returned as a float32 copy, or as 0.0 if all of its values are zero.
    """
    if not isinstance(value, Tensor) and (isinstance(value, str) or not hasattr(value, "__len__")):
        return checked_alpha(value)
    vector = torch.as_tensor(value).detach()
    if vector.dim() == 0 or (vector.numel() == 1 and channels != 1):
        return checked_alpha(vector.item())
    if vector.shape != (channels,):
        size = f"{vector.numel()} values" if vector.dim() == 1 else f"shape {tuple(vector.shape)}"
        raise ValueError(
            f"alpha has {size} and the layer has {channels} channels; give one number, or one value per channel"
        )
    outside = vector[~((vector >= 0) & (vector <= 1))]
    if outside.numel():
        raise ValueError(
            f"alpha has {outside.numel()} of {channels} values outside [0, 1], the first is {outside[0].item()}; "
            "0 uses moving averages alone, 1 the example alone"
        )
    return vector.to(torch.float32, copy=True) if vector.any() else 0.0


def alpha_text(alpha: float | Tensor) -> str:
    """Alpha for messages: a number as it is, a vector by its range."""
    if not isinstance(alpha, Tensor):
        return f"{alpha:.4g}"
    return f"{float(alpha.min()):.4g} to {float(alpha.max()):.4g} ({alpha.numel()} channels)"


def divisors_text(number: int) -> str:
    found = [str(d) for d in range(1, number + 1) if number % d == 0]
    return ", ".join(found[:-1]) + f" or {found[-1]}" if len(found) > 1 else found[0]
