"""The scale on which alpha is searched: alpha = sin²(pi u / 2), with u from 0 to 1.

It is dense near 0, where the best alpha of a BatchNorm network lies, and near 1, where that of a GroupNorm one lies.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def alpha_of(u: Tensor) -> Tensor:
    """Gradients flow through it. At both ends its derivative is zero."""
    return (u * (math.pi / 2)).sin().square()


def u_of(alpha: Tensor) -> Tensor:
    return alpha.clamp(0, 1).sqrt().asin() * (2 / math.pi)


def alpha_at(u: float) -> float:
    """Alpha as a number to be written down: six digits."""
    return float(f"{float(from_u(u)):.6g}")


def to_u(alpha: Any) -> Any:
    """`u_of` for numbers and arrays, as an array."""
    return u_of(torch.as_tensor(alpha, dtype=torch.float64)).numpy()


def from_u(u: Any) -> Any:
    """`alpha_of` for numbers and arrays, as an array."""
    return alpha_of(torch.as_tensor(u, dtype=torch.float64).clamp(0, 1)).numpy()
