"""The form for graphs that others run: torch.compile, torch.export, torch.jit.trace and ONNX."""

from __future__ import annotations

import torch
from torch import Tensor

from betternorm.backends import plain
from betternorm.backends.plain import along_space, at_least_float32, over_channels, total
from betternorm.backends.routing import exporting_to_onnx, tracing


def normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, channels_per_group: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`plain.normalize` without the gradient of torch.var.

    With image sizes that vary, Inductor cannot compile it (torch 2.13: "Cannot convert expression to float").
    """
    wide = at_least_float32(x)
    if x.dim() == 2:
        return plain.normalize(x, weight, bias, groups, channels_per_group, eps)
    space = tuple(range(2, x.dim()))
    mean = wide.mean(space)
    var = (wide - along_space(mean, x)).square().mean(space)
    return plain.normalize_with(mean, var, x, weight, bias, groups, channels_per_group, eps)


def infer(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    alpha: Tensor | None,
    channels_per_group: int,
    eps: float,
) -> Tensor:
    """`plain.infer` as two reductions and one multiply-add, with few other operations.

    With d the distance from the moving mean, the mixed variance is (1 - a) V + a E[d²] - a² E[d]². That loses at most a
    factor of 1 / (1 - a) in precision, whatever the input: E[d²] is never less than E[d]². Only for an alpha near 1,
    and an example whose mean lies many standard deviations from the moving one, is `plain.infer` more accurate.

    With a single alpha, d is multiplied by the root of a. Runtimes fold the addition and the multiplication into the
    preceding convolution, so that a E[d²] costs no extra operation. A vector may contain zeros, so dividing by its root
    is not possible: there the (N, C) table of E[d²] is multiplied by a.
    """
    if alpha is None:
        return plain.infer(x, running_mean, running_var, weight, bias, None, channels_per_group, eps)
    narrow = x.dtype in (torch.float16, torch.bfloat16)
    running_mean, running_var = (along_space(at_least_float32(t), x) for t in (running_mean, running_var))
    alpha = alpha.to(running_mean.dtype)
    distance = (x.float() if narrow else x) + -running_mean
    gamma = None if weight is None else along_space(weight, x)
    root = None
    if alpha.dim() == 0 and not alpha.requires_grad:
        # At 0 the output would be NaN. In a trace alpha is a constant, which layers have only if it is not 0.
        root = (alpha if tracing() else alpha.clamp_min(2.0**-80)).sqrt()
        distance = distance * root
        gamma = 1 / root if gamma is None else gamma / root
    else:
        alpha = along_space(alpha.reshape(-1), x)
    own_mean, own_square = _mean_over_space(distance), _mean_over_space(distance * distance)
    mean = alpha * own_mean
    own_part = torch.relu(own_square - own_mean * mean)  # for alpha = 1, where rounding could make it negative
    var = (1 - alpha) * running_var + eps + (own_part if root is not None else alpha * own_part)
    if channels_per_group > 1:
        moved = (mean if root is None else mean / root) + running_mean
        moved, var = total(moved, var, lambda table: over_channels(table, channels_per_group))
        mean = moved - running_mean if root is None else (moved - running_mean) * root
    scale = torch.rsqrt(var) if gamma is None else gamma / var.sqrt()
    shift = -mean * scale if bias is None else along_space(bias, x) - mean * scale
    y = distance * scale + shift
    return y.to(x.dtype) if narrow else y


def _mean_over_space(x: Tensor) -> Tensor:
    """(N, C, *) to (N, C, 1, ...); in ONNX, the operator that onnxruntime runs in the layout of its convolutions."""
    if x.dim() == 2:
        return x
    if exporting_to_onnx() and hasattr(torch.onnx, "ops") and x.dtype == torch.float32:
        shape = (*x.shape[:2], *(1,) * (x.dim() - 2))
        pooled: Tensor = torch.onnx.ops.symbolic("GlobalAveragePool", (x,), dtype=x.dtype, shape=shape)
        return pooled
    return x.mean(tuple(range(2, x.dim())), keepdim=True)
