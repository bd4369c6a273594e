"""The operators that the compiled backends implement: schemas, shape functions and gradients.

They are registered with torch's dispatcher, so that tools that inspect a model see them. `forward` and `backward` are
training; `forward_and_track` also updates the moving averages and the counter; `infer` is inference with alpha, and
`infer_backward` computes its gradients (CPUs only). `cpu/operators.cpp` registers the CPU kernels.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from betternorm.backends import plain

Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

_TRAINING = "Tensor x, Tensor? weight, Tensor? bias, SymInt groups, int channels_per_group, float eps"
_AVERAGES = "Tensor(a!) running_mean, Tensor(b!) running_var, float momentum, Tensor(c!)? batches"
_library = torch.library.Library("betternorm", "DEF")
for _schema in (
    f"forward({_TRAINING}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    f"forward_and_track({_TRAINING}, {_AVERAGES}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "backward(Tensor dy, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, bool need_dx) -> (Tensor, Tensor, Tensor)",
    "infer(Tensor x, Tensor running_mean, Tensor running_var, Tensor? weight, Tensor? bias, Tensor alpha,"
    " int channels_per_group, float eps) -> Tensor",
    "infer_backward(Tensor dy, Tensor x, Tensor running_mean, Tensor running_var, Tensor? weight, Tensor alpha,"
    " int channels_per_group, float eps, bool need_dx) -> (Tensor, Tensor, Tensor, Tensor)",
):
    # Without this tag, the compiler copies inputs whose layout it has changed since tracing.
    _library.define(_schema, tags=(torch.Tag.flexible_layout,))

_forward = torch.ops.betternorm.forward.default
_forward_and_track = torch.ops.betternorm.forward_and_track.default
_backward = torch.ops.betternorm.backward.default
_infer = torch.ops.betternorm.infer.default
_infer_backward = torch.ops.betternorm.infer_backward.default


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    channels_per_group: int,
    eps: float,
    *averages: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Training: the output, and the mean and biased variance of every channel over the batch.

    ``averages``: running_mean, running_var, momentum and num_batches_tracked, which may be None; or nothing.
    """
    in_place = averages if averages and _default_types(averages) else ()
    if torch.is_grad_enabled():
        y, mean, var = _Normalize.apply(x, weight, bias, (groups, channels_per_group, eps), in_place)  # type: ignore[no-untyped-call]
    else:
        y, _, _, mean, var = _run(x, weight, bias, (groups, channels_per_group, eps), in_place)
    if averages and not in_place:
        plain.track(mean, var, *averages)
    return y, mean, var


def normalize_in_graph(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, channels_per_group: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`normalize` as one operator of a compiled graph.

    torch.compile makes every gradient that it hands to an autograd function contiguous, which for channels_last is a
    copy there and a copy back.
    """
    y, _, _, mean, var = _forward(x, weight, bias, groups, channels_per_group, eps)
    return y, mean, var


def _default_types(averages: tuple[Any, ...]) -> bool:
    """Whether the kernels can update these averages and this counter, which have the types that torch creates."""
    running_mean, running_var, _, batches = averages
    floats = running_mean.dtype == running_var.dtype == torch.float32
    return floats and (batches is None or batches.dtype == torch.int64)


def infer(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    alpha: Tensor,
    channels_per_group: int,
    eps: float,
) -> Tensor:
    """Inference with weight ``alpha`` on the example's own statistics."""
    inputs = (x, running_mean, running_var, weight, bias, alpha, channels_per_group, eps)
    y: Tensor = _Infer.apply(*inputs) if torch.is_grad_enabled() else _infer(*inputs)  # type: ignore[no-untyped-call]
    return y


# ---- gradients ----


class _Normalize(torch.autograd.Function):
    """Saves x, weight and two numbers per group for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        groups: tuple[int, int, float],
        averages: tuple[Any, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, mean, rstd, batch_mean, batch_var = _run(x, weight, bias, groups, averages)
        _keep(ctx, x, weight, bias, groups, mean, rstd)
        ctx.mark_non_differentiable(batch_mean, batch_var)
        return y, batch_mean, batch_var

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
        return (*_gradients(ctx, dy), None, None)


def _run(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: tuple[int, int, float], averages: tuple[Any, ...]
) -> Five:
    if not averages:
        results: Five = _forward(x, weight, bias, *groups)
        return results
    results = _forward_and_track(x, weight, bias, *groups, *averages)
    torch.autograd.graph.increment_version([t for t in averages if isinstance(t, Tensor)])
    return results


def _keep(
    ctx: Any,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: tuple[int, int, float],
    mean: Tensor,
    rstd: Tensor,
) -> None:
    ctx.save_for_backward(x, weight, mean, rstd)
    ctx.groups, ctx.bias_type = groups, None if bias is None else bias.dtype
    ctx.set_materialize_grads(False)


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: Five) -> None:
    x, weight, bias, *groups = inputs
    _keep(ctx, x, weight, bias, tuple(groups), output[1], output[2])
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of x, weight and bias."""
    if dy is None:
        return None, None, None
    x, weight, mean, rstd = ctx.saved_tensors
    need_dx, need_dweight, need_dbias = ctx.needs_input_grad[:3]
    if torch.is_grad_enabled():
        return _differentiable_gradients(ctx, dy, x, weight)
    dx, dweight, dbias = _backward(dy, x, weight, mean, rstd, need_dx)
    if weight is not None and weight.dtype != dweight.dtype:
        dweight = dweight.to(weight.dtype)
    if need_dbias and ctx.bias_type != dbias.dtype:
        dbias = dbias.to(ctx.bias_type)
    return dx if need_dx else None, dweight if need_dweight else None, dbias if need_dbias else None


def _differentiable_gradients(
    ctx: Any, dy: Tensor, x: Tensor, weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients that can be differentiated again, computed by autograd through the reference implementation."""
    y, _, _ = plain.normalize(x, weight, None, *ctx.groups)
    need_dx, need_dweight, need_dbias = ctx.needs_input_grad[:3]
    wanted = [t for t, need in ((x, need_dx), (weight, need_dweight)) if need and t is not None]
    found = list(torch.autograd.grad(y, wanted, dy, create_graph=True)) if wanted else []
    dbias = dy.sum((0, *range(2, dy.dim()))).to(ctx.bias_type) if need_dbias else None
    return found.pop(0) if need_dx else None, found.pop(0) if need_dweight else None, dbias


def _operator_gradients(ctx: Any, dy: Tensor | None, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
    with torch.no_grad():  # compiled graphs are differentiated once
        return (*_gradients(ctx, dy), None, None, None)


torch.library.register_autograd("betternorm::forward", _operator_gradients, setup_context=_set_up, lib=_library)


class _Infer(torch.autograd.Function):
    """Fused gradients of x, alpha, weight and bias on CPUs.

    Gradients of the moving averages, gradients on GPUs and second derivatives are left to autograd and the plain form.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, ctx.channels_per_group, ctx.eps = inputs
        ctx.save_for_backward(*tensors)
        y: Tensor = _infer(*inputs)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        create_graph = torch.is_grad_enabled()
        given = ctx.saved_tensors
        if dy.device.type == "cpu" and not create_graph and not any(ctx.needs_input_grad[1:3]):
            return _Infer._fused_backward(ctx, dy)
        with torch.enable_grad():
            tensors = given if create_graph else [t if t is None else t.detach() for t in given]
            wanted = [t for t, need in zip(tensors, ctx.needs_input_grad, strict=False) if need and t is not None]
            if not create_graph:
                for t in wanted:
                    t.requires_grad_()
            y = plain.infer(*tensors, ctx.channels_per_group, ctx.eps)  # type: ignore[call-arg]
            found = list(torch.autograd.grad(y, wanted, dy, create_graph=create_graph))
        return (*(found.pop(0) if need else None for need in ctx.needs_input_grad),)

    @staticmethod
    def _fused_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, var, weight, bias, alpha = ctx.saved_tensors
        need_dx, _, _, need_dweight, need_dbias, need_dalpha, *_ = ctx.needs_input_grad
        dx, dalpha, dweight, dbias = _infer_backward(
            dy, x, mean, var, weight, alpha, ctx.channels_per_group, ctx.eps, need_dx
        )
        return (
            dx if need_dx else None,
            None,
            None,
            dweight.to(weight.dtype) if need_dweight else None,
            dbias.to(bias.dtype) if need_dbias else None,
            dalpha.sum_to_size(alpha.shape).to(alpha.dtype) if need_dalpha else None,
            None,
            None,
        )


# ---- shapes ----


def dense(x: Tensor) -> Tensor:
    """x itself if it is contiguous or channels_last, of any rank, otherwise a contiguous copy.

    Kernels compute on this, and outputs like x have its strides. `cpu/operators.cpp` has the same rule.
    """
    return x if x.is_contiguous() or x.movedim(1, -1).is_contiguous() else x.contiguous()


def _forward_shapes(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, channels_per_group: int, eps: float
) -> Five:
    channels = x.shape[1]
    table = (groups, channels // channels_per_group)
    mean, rstd, batch_mean, batch_var = (
        x.new_empty(size, dtype=torch.float32) for size in (table, table, channels, channels)
    )
    return torch.empty_like(dense(x)), mean, rstd, batch_mean, batch_var


def _forward_and_track_shapes(*inputs: Any) -> Five:
    return _forward_shapes(*inputs[:6])


def _backward_shapes(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, need_dx: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(dense(x)) if need_dx else x.new_empty(0, dtype=torch.float32)
    return dx, mean.new_empty(x.shape[1]), mean.new_empty(x.shape[1])


def _infer_shapes(x: Tensor, *unused: Any) -> Tensor:
    return torch.empty_like(dense(x))


def _infer_backward_shapes(dy: Tensor, x: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_alpha, of_weight, of_bias = (x.new_empty(x.shape[1], dtype=torch.float32) for _ in range(3))
    dx = torch.empty_like(dense(x)) if others[-1] else x.new_empty(0, dtype=torch.float32)
    return dx, of_alpha, of_weight, of_bias


for _name, _shapes in (
    ("forward", _forward_shapes),
    ("forward_and_track", _forward_and_track_shapes),
    ("backward", _backward_shapes),
    ("infer", _infer_shapes),
    ("infer_backward", _infer_backward_shapes),
):
    torch.library.register_fake(f"betternorm::{_name}", _shapes, lib=_library)


# ---- GPUs ----


def _triton() -> Any:
    """Imported on first use: CPU builds of torch do not include triton."""
    return import_module("betternorm.backends.triton")


def _cuda_forward(*inputs: Any) -> Five:
    found: Five = _triton().forward(*inputs)
    return found


def _cuda_forward_and_track(*inputs: Any) -> Five:
    *inputs, batches = inputs  # type: ignore[assignment]
    if batches is not None:
        batches.add_(1)
    return _cuda_forward(*inputs)


def _cuda_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, need_dx: bool
) -> tuple[Tensor, Tensor, Tensor]:
    _check_statistics(dy, x, mean, rstd)
    groups, channels_per_group = mean.shape[0], x.shape[1] // mean.shape[1]
    dx, dweight, dbias = _triton().backward(dy, x, weight, mean, rstd, groups, channels_per_group, need_dx)
    return x.new_empty(0, dtype=torch.float32) if dx is None else dx, dweight, dbias


def _check_statistics(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> None:
    """Reject statistics that would make a kernel read out of bounds, as `cpu/operators.cpp` does."""
    if dy.shape != x.shape:
        raise ValueError(f"dy has shape {tuple(dy.shape)} and the input {tuple(x.shape)}")
    for name, t in (("mean", mean), ("rstd", rstd)):
        if t.dim() != 2 or t.dtype != torch.float32 or not t.is_contiguous() or t.shape != mean.shape:
            raise ValueError(f"{name} has to be a contiguous float32 table (groups, channel groups)")
    groups, channel_groups = mean.shape
    if not 1 <= groups <= x.shape[0] or channel_groups < 1 or x.shape[1] % channel_groups:
        raise ValueError(f"mean has shape {tuple(mean.shape)}, which does not fit an input of {tuple(x.shape)}")


def _cuda_infer(*inputs: Any) -> Tensor:
    found: Tensor = _triton().infer(*inputs)
    return found


_library.impl("forward", _cuda_forward, "CUDA")
_library.impl("forward_and_track", _cuda_forward_and_track, "CUDA")
_library.impl("backward", _cuda_backward, "CUDA")
_library.impl("infer", _cuda_infer, "CUDA")
