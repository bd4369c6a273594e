"""The layers: one, `GroupedBatchNorm`, and three that are it or build on it (sections 3.1, 3.2 and 3.4 of the paper).

They are torch's batch norm to everything that handles one: `isinstance` says so, a `state_dict` has the same keys and
shapes, `num_batches_tracked` counts the steps, `track_running_stats = False` stops the moving averages, and
`torch.optim.swa_utils.update_bn` refreshes them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from betternorm import functional
from betternorm.backends import plain, tracing
from betternorm.backends.distributed import ProcessGroup

# Functions of torch and of other libraries that put a layer of theirs in the place of a batch norm, or take it into the
# convolution before it. They read its moving averages, and know nothing of alpha and groups.
_REPLACERS = {
    "convert_frozen_batchnorm": "detectron2's convert_frozen_batchnorm",
    "convert_splitbn_model": "timm's convert_splitbn_model",
    "convert_sync_batchnorm": "SyncBatchNorm.convert_sync_batchnorm",
    "freeze_batch_norm_2d": "timm's freeze_batch_norm_2d",
    "fuse_conv_and_bn": "fuse_conv_and_bn",
    "fuse_conv_bn_eval": "torch's fuse_conv_bn_eval",
    "fuse_linear_bn_eval": "torch's fuse_linear_bn_eval",
}
# What these make trains in another way, whatever the alpha.
_REPLACERS_FOR_TRAINING = {
    "convert_sync_batchnorm": 'for statistics across processes call convert(model, ..., process_group="world")',
    "convert_splitbn_model": "split the original layers, before converting the rest",
}


class GroupedBatchNorm(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
    r"""Batch normalisation with statistics over groups of channels and groups of examples.

    .. math::
        y = \gamma \frac{x - \mu_g}{\sqrt{\sigma_g^2 + \epsilon}} + \beta

    In training :math:`\mu_g` and :math:`\sigma_g^2` are the mean and the (biased) variance over a group:
    ``examples_per_group`` consecutive examples, ``channels_per_group`` consecutive channels, and space. The corners are
    well-known layers:

    ==================  ====================  ===================  =====================================
    channels_per_group  examples_per_group    in training          name
    ==================  ====================  ===================  =====================================
    1                   None (all)            Batch Norm           ``nn.BatchNorm2d``
    1                   16                    Ghost Batch Norm     :class:`GhostBatchNorm`
    C / 32              2                     Batch Group Norm     :class:`BatchGroupNorm`
    C / 32              1                     Group Norm           ``nn.GroupNorm(32, C)``
    1                   1                     Instance Norm        ``nn.InstanceNorm2d``
    ==================  ====================  ===================  =====================================

    At inference the statistics are those of the moving averages and, with weight :attr:`alpha`, of the example itself
    (see :func:`betternorm.functional.weighed_batch_norm`). They never depend on the other examples of the batch.
    ``alpha=0`` is ``nn.BatchNorm2d`` to the bit; ``alpha=1`` uses the example alone.

    A batch that ``examples_per_group`` does not divide falls into groups whose sizes differ by at most one: 33 examples
    with a size of 32 are 17 and 16. A smaller batch is one group.

    The moving averages are those of x and x² over the whole batch, whatever the groups, one update per step. They are
    kept as ``running_mean`` and ``running_var``. Unlike torch's, the variance that enters is the biased one, and takes
    up how far the batch's mean was from the moving one. A forward pass inside a backward pass is taken for activation
    checkpointing, which repeats a batch, and leaves the averages alone.

    The layer takes inputs of any rank, and so is a BatchNorm1d, 2d and 3d to whoever asks with ``isinstance``.

    Args:
        num_features: C of an input (N, C, *).
        channels_per_group: must divide ``num_features``.
        examples_per_group: None is the whole batch.
        eps: added to the variance.
        momentum: weight of the newest batch in the moving averages; None is the cumulative average.
        affine: whether there are learnable gamma (``weight``) and beta (``bias``).
        alpha: weight of the example's own statistics at inference, 0 to 1. It is kept in the ``state_dict``, under one
            key more, where it is not 0.
        process_group: a ``torch.distributed`` group whose processes' batches are normalised as one batch; ``"world"``
            for all processes. Without it statistics are per process.

    Shape:
        - Input: (N, C), (N, C, L), (N, C, H, W), (N, C, D, H, W): any rank from 2 on
        - Output: as the input, in its dtype and memory format

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
    # Of a converted layer: the ranks of input that the original takes (None is any), the one that it takes for an
    # example without a batch, and those of its children that run after the normalisation.
    _ranks: tuple[int, ...] | None = None
    _unbatched_rank: int | None = None
    _then: tuple[str, ...] = ()
    # What a checkpoint without an alpha means. A layer that was made to be Group Norm stays at 1 when it is given the
    # weights of BatchNorm; its own checkpoints then have the key at 0 too.
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
        alpha: float = 0.0,
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
    def alpha(self) -> float:
        """The weight of the example's own statistics at inference."""
        # To six digits, which is what float32 holds: 0.1 is 0.1.
        return 0.0 if self._alpha is None else float(f"{self._alpha.item():.6g}")

    @alpha.setter
    def alpha(self, value: float) -> None:
        value, held = checked_alpha(value), self._alpha
        if value == 0:
            self._alpha = None
        elif held is not None and held.device == self._device():
            held.fill_(value)
        else:
            with torch.inference_mode(False):  # a tensor made inside could not be changed outside
                self._alpha = torch.tensor(value, dtype=torch.float32, device=self._device())

    @property
    def _alpha(self) -> Tensor | None:
        """Alpha as a tensor, None for 0: a compiled model is compiled once for 0 and once for all other values."""
        return self._buffers.get("alpha")

    @_alpha.setter
    def _alpha(self, value: Tensor | None) -> None:
        # A buffer, so that torch moves, copies, saves and swaps it. For 0 an empty one that is not saved stands in its
        # place: tools that pair the buffers of two networks by position, as AveragedModel does, find as many in both.
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
            object.__setattr__(self, name, value)  # a number, which torch would refuse for a buffer
        else:
            super().__setattr__(name, value)

    @property
    def running_mean(self) -> Tensor:  # type: ignore[override]
        """The moving average of the mean. Those who read it to replace the layer by one that does less are stopped."""
        if not torch.compiler.is_compiling():
            caller = sys._getframe(1).f_code.co_name
            if caller in _REPLACERS:
                self._refuse_loss(caller)
        try:
            return self._buffers["running_mean"]  # type: ignore[return-value]  # None as in torch's, where nobody tracks
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no attribute 'running_mean'") from None

    def _refuse_loss(self, caller: str) -> None:
        """Raise unless what ``caller`` makes of this layer computes the same."""
        lost = {
            f"alpha={self.alpha}": self.alpha != 0,
            f"channels_per_group={self.channels_per_group}": self.channels_per_group != 1,
            "what runs after it ({})".format(", ".join(self._then)): self._then != (),
            "inputs that are not images": "freeze" in caller and self._ranks is not None and 4 not in self._ranks,
        }
        dropped = ", ".join(name for name, is_lost in lost.items() if is_lost)
        if not dropped and caller not in _REPLACERS_FOR_TRAINING:
            return
        instead = "call betternorm.revert(model) first, or leave the layer as it is"
        if caller.startswith("fuse"):
            instead = "betternorm.fold(model) folds the layers for which that is exact"
        raise RuntimeError(
            f"{_REPLACERS[caller]} would replace {type(self).__name__} and drop {dropped or 'its groups and alpha'}; "
            + _REPLACERS_FOR_TRAINING.get(caller, instead)
        )

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
            output = self._normalise_batch(input, self._weight_of_batch())
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

    def _normalise_batch(self, input: Tensor, momentum: float | None) -> Tensor:
        """The output in training; counts the batch and moves the averages by ``momentum`` toward it, where given."""
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
        """Count the batch and move the averages; for subclasses that have its statistics from elsewhere."""
        if momentum is not None:
            plain.track(mean, var, *self._averages(momentum))

    def _weight_of_batch(self) -> float | None:
        """The weight of this batch in the moving averages; None where they stay, or the batch was counted before."""
        tracks = self.training and self.track_running_stats and self._buffers.get("running_mean") is not None
        if not tracks or _runs_again_for_backward():
            return None
        if self.momentum is not None:
            return self.momentum
        # Without a count torch's layer leaves the cumulative average where it is.
        return 0.0 if self.num_batches_tracked is None else 1.0 / (float(self.num_batches_tracked) + 1)

    def _processes(self) -> ProcessGroup | None:
        """The group whose processes have the batch in common; None where there is but one."""
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
        if input.numel() > input.shape[0] * self.num_features:
            return  # two values or more of each example
        if self._processes() is not None:
            return  # the batch is larger than what this process sees
        if input.numel() == 0:
            raise ValueError(
                f"an empty batch has no statistics to train on, got an input of shape {tuple(input.shape)}; "
                "skip it, or call eval()"
            )
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
        # A checkpoint without moving averages is one of Group or Instance Norm, which know nothing of alpha.
        # Last, because loading with assign=True may have moved the layer to another device.
        if saved is not None or prefix + "running_mean" in state_dict:
            try:
                self.alpha = self._alpha_if_absent if saved is None else float(saved)
            except ValueError as error:
                error_msgs.append(f"{key}: {error}")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        alpha = self._alpha
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if alpha is not None and not alpha.is_meta:
            # It moves with the layer but keeps its type: in half precision 0.1 would become another number.
            self._alpha = alpha.to(self._buffers["alpha"].device)  # type: ignore[union-attr]
        return self

    def extra_repr(self) -> str:
        return (
            f"{self._repr_of_groups()}, eps={self.eps}, momentum={self.momentum}, affine={self.weight is not None}"
            + (f", alpha={self.alpha}" if self._alpha is not None and not self._alpha.is_meta else "")
            + (", process_group=..." if self.process_group is not None else "")
        )

    def _repr_of_groups(self) -> str:
        return (
            f"{self.num_features}, channels_per_group={self.channels_per_group}, "
            f"examples_per_group={self.examples_per_group}"
        )


class GhostBatchNorm(GroupedBatchNorm):
    r"""Batch normalisation with the statistics of small "ghost" batches (section 3.2).

    The batch falls into runs of ``ghost_size`` examples, each normalised by itself in training, which regularises. What
    happens at inference, the moving averages and the handling of uneven batches are those of :class:`GroupedBatchNorm`.

    The ghost size is a hyperparameter. In the paper accuracy rises and falls once over it, and 16 is the best in its
    table of ghost sizes (section 4.4, a batch of 128, alpha tuned). Where a model does not overfit, expect nothing.

    Args:
        num_features: C of an input (N, C, *).
        ghost_size: examples normalised together.
        eps, momentum, affine, alpha, process_group: as in :class:`GroupedBatchNorm`.

    Examples::

        >>> layer = GhostBatchNorm(64, ghost_size=8)
        >>> layer(torch.randn(128, 64, 8, 8)).shape
        torch.Size([128, 64, 8, 8])
    """

    def __init__(
        self,
        num_features: int,
        ghost_size: int = 16,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        *,
        alpha: float = 0.0,
        process_group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_group_size("ghost_size", ghost_size)
        super().__init__(
            num_features,
            1,
            ghost_size,
            eps,
            momentum,
            affine,
            alpha=alpha,
            process_group=process_group,
            device=device,
            dtype=dtype,
        )

    @property
    def ghost_size(self) -> int | None:
        return self.examples_per_group

    def _repr_of_groups(self) -> str:
        return f"{self.num_features}, ghost_size={self.ghost_size}"


class BatchGroupNorm(GroupedBatchNorm):
    r"""Group normalisation that also looks across examples: for batches of two or three (section 3.4).

    Statistics are taken over groups of channels, as in ``nn.GroupNorm``, and over ``examples_per_group`` examples. From
    a batch size of about 4 on, :class:`GhostBatchNorm` is the better choice.

    Not to be confused with the method of the same name of arXiv:2012.02782.

    Args:
        num_groups: groups of channels, as in ``nn.GroupNorm``; must divide ``num_channels``. More groups than
            channels means one channel per group.
        num_channels: C of an input (N, C, *).
        examples_per_group: examples normalised together; None is the whole batch.
        eps, momentum, affine, alpha, process_group: as in :class:`GroupedBatchNorm`.

    Examples::

        >>> layer = BatchGroupNorm(32, 64)
        >>> layer(torch.randn(2, 64, 8, 8)).shape
        torch.Size([2, 64, 8, 8])
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        examples_per_group: int | None = 2,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        *,
        alpha: float = 0.0,
        process_group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_channels,
            channels_in_group(num_groups, num_channels),
            examples_per_group,
            eps,
            momentum,
            affine,
            alpha=alpha,
            process_group=process_group,
            device=device,
            dtype=dtype,
        )

    @property
    def num_groups(self) -> int:
        return self.num_features // self.channels_per_group

    def _repr_of_groups(self) -> str:
        return f"{self.num_groups}, {self.num_features}, examples_per_group={self.examples_per_group}"


class BatchRenorm(GroupedBatchNorm):
    r"""Batch Renormalization (Ioffe, arXiv:1702.03275): the paper's baseline for batches that are not i.i.d.

    In training the output of batch norm is corrected toward what the moving averages would give,

    .. math::
        y = \gamma \left( \frac{x - \mu_B}{\sigma_B} r + d \right) + \beta, \quad
        r = \mathrm{clip}\left(\frac{\sigma_B}{\sigma}, \frac{1}{r_{max}}, r_{max}\right), \quad
        d = \mathrm{clip}\left(\frac{\mu_B - \mu}{\sigma}, -d_{max}, d_{max}\right)

    with r and d held constant in the gradient. The limits begin at 1 and 0, which is batch norm, and after
    ``warmup_steps`` rise linearly: to ``r_max`` at ``r_steps``, to ``d_max`` at ``d_steps``. The defaults are those of
    its paper, for runs of more than 100,000 steps; scale the three down with the run.

    Activation checkpointing of this layer is refused: when it runs the layer again the moving averages have gone on,
    and r and d would be others.

    Args:
        num_features: C of an input (N, C, *).
        r_max, d_max: the final limits.
        warmup_steps, r_steps, d_steps: the schedule, in training steps (``num_batches_tracked``).
        eps, momentum, affine, alpha, process_group: as in :class:`GroupedBatchNorm`.

    Examples::

        >>> layer = BatchRenorm(64, warmup_steps=100, r_steps=800, d_steps=500)
        >>> layer(torch.randn(32, 64, 8, 8)).shape
        torch.Size([32, 64, 8, 8])
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        *,
        r_max: float = 3.0,
        d_max: float = 5.0,
        warmup_steps: int = 5_000,
        r_steps: int = 40_000,
        d_steps: int = 25_000,
        alpha: float = 0.0,
        process_group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features,
            1,
            None,
            eps,
            momentum,
            affine,
            alpha=alpha,
            process_group=process_group,
            device=device,
            dtype=dtype,
        )
        self._set_schedule(r_max, d_max, warmup_steps, r_steps, d_steps)

    def _set_schedule(
        self,
        r_max: float,
        d_max: float,
        warmup_steps: int,
        r_steps: int,
        d_steps: int,
    ) -> None:
        if not r_max >= 1:
            raise ValueError(f"r_max={r_max} must be 1 or more; 1 with d_max=0 is batch norm")
        if not d_max >= 0:
            raise ValueError(f"d_max={d_max} must be 0 or more; 0 with r_max=1 is batch norm")
        if not 0 <= warmup_steps <= min(r_steps, d_steps):
            raise ValueError(
                f"warmup_steps={warmup_steps} must lie between 0 and the smaller of r_steps={r_steps} "
                f"and d_steps={d_steps}"
            )
        self.r_max, self.d_max = r_max, d_max
        self.warmup_steps, self.r_steps, self.d_steps = warmup_steps, r_steps, d_steps

    def limits(self) -> tuple[Tensor, Tensor]:
        """r_max and d_max at the present step."""
        if self.num_batches_tracked is None:
            raise ValueError("num_batches_tracked=None: BatchRenorm has to count the steps of its schedule")
        step = self.num_batches_tracked.float()

        def progress(end: int) -> Tensor:
            return ((step - self.warmup_steps) / max(end - self.warmup_steps, 1)).clamp(0, 1)

        return 1 + (self.r_max - 1) * progress(self.r_steps), self.d_max * progress(self.d_steps)

    def _normalise_batch(self, input: Tensor, momentum: float | None) -> Tensor:
        if self.track_running_stats and _runs_again_for_backward():
            raise RuntimeError(
                "BatchRenorm cannot be checkpointed: its moving averages have gone on since the forward pass, so that "
                "it would be differentiated with other r and d; leave this layer outside of the checkpointed part"
            )
        running_mean, running_var = self.running_mean, self.running_var
        if running_mean is None or running_var is None:
            raise ValueError("BatchRenorm corrects toward its moving averages, and running_mean is None")
        output, mean, var = functional.grouped_batch_norm(input, eps=self.eps, process_group=self._processes())
        r_max, d_max = self.limits()
        moving_std = torch.sqrt(running_var + self.eps)
        r = (torch.sqrt(var + self.eps) / moving_std).clamp(1 / r_max, r_max)
        d = ((mean - running_mean) / moving_std).clamp(-d_max, d_max)
        self._track(mean, var, momentum)
        scale = r if self.weight is None else r * self.weight
        shift = d if self.weight is None else d * self.weight
        if self.bias is not None:
            shift = shift + self.bias
        shape = (1, -1, *(1,) * (input.dim() - 2))
        return (output * scale.view(shape) + shift.view(shape)).to(input.dtype)

    def _repr_of_groups(self) -> str:
        return f"{self.num_features}, r_max={self.r_max}, d_max={self.d_max}"


class FrozenBatchNorm(GroupedBatchNorm):
    """What `betternorm.convert` makes of torchvision's FrozenBatchNorm2d: weight, bias and averages are all buffers.

    It stays in evaluation mode, and so never takes statistics of a batch.
    """

    def train(self, mode: bool = True) -> FrozenBatchNorm:
        super().train(False)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        state_dict.pop(prefix + "num_batches_tracked", None)  # of a layer that was not frozen yet
        super()._load_from_state_dict(state_dict, prefix, *rest)


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
    if not 0 <= value <= 1:  # false for NaN too
        raise ValueError(f"alpha={value} must lie between 0 (moving averages alone) and 1 (the example alone)")
    return value


def divisors_text(number: int) -> str:
    found = [str(d) for d in range(1, number + 1) if number % d == 0]
    return ", ".join(found[:-1]) + f" or {found[-1]}" if len(found) > 1 else found[0]


def _runs_again_for_backward() -> bool:
    """Whether activation checkpointing repeats this forward pass: its batch has been counted already.

    A forward pass inside a backward pass is taken for that. An autograd function of the user's own that runs other data
    through the layer in its backward pass is not counted either; the docs say so. A compiled graph cannot ask.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
