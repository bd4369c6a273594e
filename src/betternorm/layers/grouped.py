"""`GroupedBatchNorm`, the base class of all layers (sections 3.1, 3.2 and 3.4 of the paper)."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from betternorm import functional, third_party
from betternorm.backends import plain
from betternorm.backends.distributed import ProcessGroup
from betternorm.backends.routing import compiling, tracing
from betternorm.layers.checks import alpha_text, check_group_size, checked_alphas, divisors_text


class GroupedBatchNorm(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
    r"""Batch normalization with statistics over groups of channels and groups of examples.

    .. math::
        y = \gamma \frac{x - \mu_g}{\sqrt{\sigma_g^2 + \epsilon}} + \beta

    In training, :math:`\mu_g` and :math:`\sigma_g^2` are the mean and the (biased) variance over a group:
    ``examples_per_group`` consecutive examples, ``channels_per_group`` consecutive channels, and the spatial
    dimensions. Special cases are well-known layers:

    ==================  ====================  ===================  =====================================
    channels_per_group  examples_per_group    in training          name
    ==================  ====================  ===================  =====================================
    1                   None (all)            Batch Norm           ``nn.BatchNorm2d``
    1                   16                    Ghost Batch Norm     :class:`GhostBatchNorm`
    C / 32              2                     Batch Group Norm     :class:`BatchGroupNorm`
    C / 32              1                     Group Norm           ``nn.GroupNorm(32, C)``
    1                   1                     Instance Norm        ``nn.InstanceNorm2d``
    ==================  ====================  ===================  =====================================

    At inference, the statistics are a weighted average of the moving averages and, with weight :attr:`alpha`, the
    statistics of the example itself (see :func:`betternorm.functional.weighed_batch_norm`). They never depend on the
    other examples in the batch. ``alpha=0`` is bit for bit ``nn.BatchNorm2d``; ``alpha=1`` uses the example alone.

    If ``examples_per_group`` does not divide the batch size, the sizes of the groups differ by at most one: 33 examples
    with a size of 32 are split into 17 and 16. A smaller batch is one group.

    The moving averages are those of x and x² over the whole batch, independent of the groups, with one update per step.
    They are stored as ``running_mean`` and ``running_var``. Unlike in torch, the biased variance is tracked, plus the
    squared distance between the batch mean and the moving mean. A forward pass inside a backward pass is assumed to be
    activation checkpointing, which repeats a batch, and does not update the averages. An empty batch is counted and
    updates nothing, as in torch.

    The layer accepts inputs of any rank and is an instance of BatchNorm1d, BatchNorm2d and BatchNorm3d.

    Args:
        num_features: C of an input (N, C, *).
        channels_per_group: number of channels normalized together; must divide ``num_features``.
        examples_per_group: number of examples normalized together in training; None is the whole batch.
        eps: added to the variance for numerical stability.
        momentum: weight of the current batch in the moving averages; None computes the cumulative average.
        affine: if True, the layer has learnable gamma (``weight``) and beta (``bias``).
        alpha: weight of the example's own statistics at inference: a number in [0, 1], or a tensor of one value per
            channel. If nonzero, it is saved in the ``state_dict`` under one additional key, ``alpha``.
        process_group: a ``torch.distributed`` process group, or ``"world"``; the batches of its processes are
            normalized as one batch. By default, statistics are per process.

    Shape:
        - Input: (N, C), (N, C, L), (N, C, H, W), (N, C, D, H, W): any rank from 2 on
        - Output: same shape, dtype and memory format as the input

    Examples::

        >>> layer = GroupedBatchNorm(64, channels_per_group=2, examples_per_group=4)
        >>> layer(torch.randn(32, 64, 8, 8)).shape
        torch.Size([32, 64, 8, 8])
        >>> layer.eval().alpha = 0.1
        >>> layer(torch.randn(1, 64, 8, 8)).shape
        torch.Size([1, 64, 8, 8])
    """

    running_var: Tensor
    num_batches_tracked: Tensor
    channels_per_group: int
    examples_per_group: int | None
    process_group: ProcessGroup | None
    # Set by `convert`: accepted input ranks (None means any), the rank of an unbatched input, and the child modules
    # applied after normalization.
    _ranks: tuple[int, ...] | None = None
    _unbatched_rank: int | None = None
    _then: tuple[str, ...] = ()
    # The alpha to set if a checkpoint has none. For a layer converted from GroupNorm it is 1, also for weights of a
    # BatchNorm; its own checkpoints then contain the key even if alpha is 0.
    _alpha_if_absent: float = 0.0

    def __init__(
        self,
        num_features: int,
        channels_per_group: int = 1,
        examples_per_group: int | None = None,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        *,
        alpha: float | Tensor = 0.0,
        process_group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, True, device=device, dtype=dtype)
        self._set_groups(channels_per_group, examples_per_group)
        self.process_group = process_group
        self.alpha = alpha

    def _set_groups(self, channels_per_group: int, examples_per_group: int | None) -> None:
        check_group_size("channels_per_group", channels_per_group)
        if examples_per_group is not None:
            check_group_size("examples_per_group", examples_per_group, " or None for the whole batch")
        if self.num_features % channels_per_group:
            raise ValueError(
                f"channels_per_group={channels_per_group} does not divide the {self.num_features} channels; "
                f"{divisors_text(self.num_features)} would"
            )
        self.channels_per_group, self.examples_per_group = channels_per_group, examples_per_group

    @property
    def alpha(self) -> float | Tensor:
        """The weight of the example's own statistics at inference: a float, or a tensor with one value per channel.

        The tensor is a copy. Assign a number or a tensor of ``num_features`` values to change alpha.
        """
        alpha = self._alpha
        if alpha is None:
            return 0.0
        if alpha.dim() == 0:
            return float(f"{alpha.item():.6g}")  # float32 has six digits: 0.1 reads back as 0.1
        return alpha.detach().clone()

    @alpha.setter
    def alpha(self, value: float | Tensor) -> None:
        value, current = checked_alphas(value, self.num_features), self._alpha
        shape = value.shape if isinstance(value, Tensor) else torch.Size()
        if not isinstance(value, Tensor) and value == 0:
            self._alpha = None
            return
        if current is None or current.device != self._device() or current.shape != shape:
            with torch.inference_mode(False):  # a tensor created in inference mode cannot be modified outside of it
                self._alpha = current = torch.empty(shape, dtype=torch.float32, device=self._device())
        current.copy_(torch.as_tensor(value))  # in place, so that a compiled model is not compiled again

    def _alpha_is(self, value: float) -> bool:
        """Whether alpha is 0 (or 1) in all channels."""
        return value == 0 if self._alpha is None else bool((self._alpha == value).all())

    @property
    def _alpha(self) -> Tensor | None:
        """Alpha as a tensor, or None for 0. A model is compiled once for 0, once for numbers, once for vectors."""
        return self._buffers.get("alpha")

    @_alpha.setter
    def _alpha(self, value: Tensor | None) -> None:
        # A buffer, so that torch moves, copies, saves and swaps it. If alpha is 0, an empty buffer that is not saved
        # takes its place: AveragedModel and similar tools pair the buffers of two models by position.
        self._buffers.pop("alpha" if value is None else "_no_alpha", None)
        if value is None:
            self._buffers["_no_alpha"] = torch.empty(0, device=self._device())
            self._non_persistent_buffers_set.add("_no_alpha")
        else:
            self._buffers["alpha"] = value

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if "_alpha" in self._buffers:  # pickled by version 0.1
            self._alpha, self._then = self._buffers.pop("_alpha"), tuple(self._modules)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "alpha":
            object.__setattr__(self, name, value)  # nn.Module rejects numbers for buffers
        else:
            super().__setattr__(name, value)

    @property
    def running_mean(self) -> Tensor:  # type: ignore[override]
        """The moving average of the mean.

        Functions that read it to replace the layer by one that does less get an error, see
        :func:`betternorm.third_party.check_reader`.
        """
        if not compiling():
            only_other_ranks = self._ranks is not None and 4 not in self._ranks
            third_party.check_reader(sys._getframe(1), type(self).__name__, self._lost_by_torch, only_other_ranks)
        try:
            return self._buffers["running_mean"]  # type: ignore[return-value]  # None as in torch's, where nobody tracks
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no attribute 'running_mean'") from None

    def _lost_by_torch(self) -> list[str]:
        """What torch's batch norm with the same parameters and averages would not compute at inference."""
        then = [name for name in self._then if not isinstance(self._modules[name], nn.Identity)]
        lost = {
            f"alpha={alpha_text(self.alpha)}": not self._alpha_is(0),
            f"channels_per_group={self.channels_per_group}": self.channels_per_group != 1,
            f"what runs after it ({', '.join(then)})": bool(then),
        }
        return [name for name, is_lost in lost.items() if is_lost]

    def _device(self) -> torch.device | None:
        tensors = (*self._buffers.values(), *self._parameters.values())
        return next((t.device for t in tensors if t is not None), None)

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, torch.fx.Proxy):  # whole in a graph, as torch's own layers are
            tracer = input.tracer
            return tracer.create_proxy("call_module", tracer.path_of_module(self), (input,), {})
        if input.dim() == self._unbatched_rank:
            return self.forward(input.unsqueeze(0)).squeeze(0)
        self._check_input(input)
        buffers = self._buffers
        running_mean, running_var = buffers.get("running_mean"), buffers.get("running_var")
        if self.training or running_mean is None or running_var is None:
            self._check_group_has_values(input)
            output = self._normalize_batch(input, self._weight_of_batch())
        else:
            output = functional.weighed_batch_norm(
                input,
                running_mean,
                running_var,
                self.weight,
                self.bias,
                self._alpha,
                self.channels_per_group,
                self.eps,
            )
        for name in self._then:
            output = getattr(self, name)(output)
        return output

    def _normalize_batch(self, input: Tensor, momentum: float | None) -> Tensor:
        """The output in training. Updates the moving averages and the counter unless ``momentum`` is None."""
        return functional.grouped_batch_norm(
            input,
            self.weight,
            self.bias,
            self.channels_per_group,
            self.examples_per_group,
            self.eps,
            self._processes(),
            *self._averages(momentum),
        )[0]

    def _averages(self, momentum: float | None) -> tuple[Any, ...]:
        if momentum is None:
            return ()
        buffers = self._buffers
        return buffers["running_mean"], buffers["running_var"], momentum, buffers.get("num_batches_tracked")

    def _track(self, mean: Tensor, var: Tensor, momentum: float | None) -> None:
        """Update the moving averages and the counter, for subclasses that compute the statistics themselves."""
        if momentum is not None:
            plain.track(mean, var, *self._averages(momentum))

    def _weight_of_batch(self) -> float | None:
        """The weight of this batch in the moving averages; None if they are fixed or already include this batch."""
        tracks = self.training and self.track_running_stats and self._buffers.get("running_mean") is not None
        if not tracks or runs_again_for_backward():
            return None
        if self.momentum is not None:
            return self.momentum
        # Without a counter, torch's layer does not update the cumulative average.
        return 0.0 if self.num_batches_tracked is None else 1.0 / (float(self.num_batches_tracked) + 1)

    def _processes(self) -> ProcessGroup | None:
        """The process group to reduce statistics over; None for a single process."""
        group = self.process_group
        if group == "world":
            ready = torch.distributed.is_available() and torch.distributed.is_initialized()
            group = torch.distributed.group.WORLD if ready else None
        return None if group is None or torch.distributed.get_world_size(group) == 1 else group

    def _check_input(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input (N, C, *) of rank 2 or more, got shape {tuple(input.shape)}")
        if self._ranks is not None and input.dim() not in self._ranks:
            expected = " or ".join(f"{rank}D" for rank in self._ranks)
            raise ValueError(f"expected {expected} input (got {input.dim()}D input)")
        if not tracing() and input.shape[1] != self.num_features:  # sizes in a trace are tensors
            raise ValueError(
                f"expected {self.num_features} channels in dimension 1 (num_features={self.num_features}), "
                f"got {input.shape[1]} in an input of shape {tuple(input.shape)}"
            )
        if not input.is_floating_point():
            raise TypeError(f"expected a floating-point input, got {input.dtype}; convert it with input.float()")

    def _check_group_has_values(self, input: Tensor) -> None:
        if input.numel() > input.shape[0] * self.num_features or input.numel() == 0:
            return  # two values or more of each example, or none at all
        if self._processes() is not None:
            return  # the batch is larger than what this process sees
        smallest = input.shape[0] // functional.number_of_groups(input.shape[0], self.examples_per_group)
        if smallest * self.channels_per_group * math.prod(input.shape[2:]) == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.size()}")

    def _check_input_dim(self, input: Tensor) -> None:
        self._check_input(input)

    def __prepare_scriptable__(self) -> Any:
        raise RuntimeError(
            f"torch.jit.script cannot compile {type(self).__name__}, whose forward pass is not TorchScript; "
            "torch.jit.trace(model.eval(), example), torch.export and torch.compile take it"
        )

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._alpha is None and self._alpha_if_absent != 0:
            destination[prefix + "alpha"] = torch.zeros((), device=self._device())

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + "alpha"
        saved = state_dict.pop(key, None)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if key in missing_keys:
            missing_keys.remove(key)
        # A checkpoint without moving averages comes from GroupNorm or InstanceNorm, and says nothing about alpha.
        # Alpha is set last because loading with assign=True may have moved the layer to another device.
        if saved is not None or prefix + "running_mean" in state_dict:
            try:
                self.alpha = self._alpha_if_absent if saved is None else saved
            except ValueError as error:
                error_msgs.append(f"{key}: {error}")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        alpha = self._alpha
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if alpha is not None and not alpha.is_meta:
            # Alpha moves with the layer but stays float32: in half precision 0.1 would be rounded.
            self._alpha = alpha.to(self._buffers["alpha"].device)  # type: ignore[union-attr]
        return self

    def extra_repr(self) -> str:
        return (
            f"{self._repr_of_groups()}, eps={self.eps}, momentum={self.momentum}, affine={self.weight is not None}"
            + (f", alpha={alpha_text(self.alpha)}" if self._alpha is not None and not self._alpha.is_meta else "")
            + (", process_group=..." if self.process_group is not None else "")
        )

    def _repr_of_groups(self) -> str:
        return (
            f"{self.num_features}, channels_per_group={self.channels_per_group}, "
            f"examples_per_group={self.examples_per_group}"
        )


def runs_again_for_backward() -> bool:
    """Whether activation checkpointing repeats this forward pass, so that the batch has already been counted.

    Any forward pass inside a backward pass is assumed to be one, including that of a custom autograd function which
    runs other data through the layer (documented). Compiled graphs cannot detect it.
    """
    return not compiling() and torch._C._current_graph_task_id() != -1
