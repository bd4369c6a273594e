"""The scale on which alpha is searched: alpha = sin²(pi u / 2), with u from 0 to 1.

It is dense near 0, where the best alpha of a BatchNorm model usually lies, and near 1, the baseline of GroupNorm.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def alpha_of(u: Tensor) -> Tensor:
    """Alpha as a differentiable function of u. The derivative is zero at both ends."""
    return (u * (math.pi / 2)).sin().square()


def u_of(alpha: Tensor) -> Tensor:
    """The inverse of `alpha_of`."""
    return alpha.clamp(0, 1).sqrt().asin() * (2 / math.pi)


def alpha_at(u: float) -> float:
    """Alpha as a float, rounded to six digits."""
    return float(f"{float(alpha_of(torch.tensor(u, dtype=torch.float64).clamp(0, 1))):.6g}")


def to_u(alpha: Any) -> Any:
    """`u_of` for NumPy arrays: the scale of a plot's axis."""
    return u_of(torch.as_tensor(alpha, dtype=torch.float64)).numpy()


def from_u(u: Any) -> Any:
    """`alpha_of` for NumPy arrays: the scale of a plot's axis."""
    return alpha_of(torch.as_tensor(u, dtype=torch.float64).clamp(0, 1)).numpy()
