"""Swapping the normalisation layers of a model, in place, and back.

A converted layer shares the dictionaries of parameters, buffers, children and hooks with the layer it replaces. So an
optimizer that holds the parameters, a handle that removes a hook, and whatever moves the model to another device all
stay right, and `revert` only has to put the old layer back.
"""

from __future__ import annotations

import fnmatch
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin

from betternorm.display.tables import table
from betternorm.layers import (
    BatchGroupNorm,
    BatchRenorm,
    FrozenBatchNorm,
    GhostBatchNorm,
    GroupedBatchNorm,
    channels_in_group,
    check_group_size,
)

M = TypeVar("M", bound=nn.Module)
Where = Callable[[str, nn.Module], bool] | str | Sequence[str]


def _default(layer: type[nn.Module], option: str) -> Any:
    return inspect.signature(layer).parameters[option].default


GROUPS = 32  # Group Norm's own default
# The other defaults are those of the layers themselves.
GHOST_SIZE: int = _default(GhostBatchNorm, "ghost_size")
EXAMPLES_PER_GROUP: int = _default(BatchGroupNorm, "examples_per_group")
RENORM_SCHEDULE: dict[str, float] = {
    option: _default(BatchRenorm, option) for option in ("r_max", "d_max", "warmup_steps", "r_steps", "d_steps")
}

# What each conversion can be told.
OPTIONS: dict[str, tuple[str, ...]] = {
    "weighed": (),
    "ghost": ("ghost_size",),
    "batch_group": ("num_groups", "examples_per_group"),
    "group": ("num_groups",),
    "renorm": tuple(RENORM_SCHEDULE),
}


def convert(
    model: M,
    to: str,
    *,
    where: Where | None = None,
    process_group: Any = None,
    verbose: bool = False,
    **options: Any,
) -> M:
    """Swap the normalisation layers of ``model`` for another kind, in place.

    ===============  =================================================  ==========================================
    ``to``           becomes                                            options (default)
    ===============  =================================================  ==========================================
    ``weighed``      the same in training, with ``alpha`` at inference  none
    ``ghost``        :class:`~betternorm.GhostBatchNorm`                ``ghost_size`` (16)
    ``batch_group``  :class:`~betternorm.BatchGroupNorm`                ``num_groups`` (32), ``examples_per_group`` (2)
    ``group``        Group Norm that keeps moving averages, alpha = 1   ``num_groups`` (32)
    ``renorm``       :class:`~betternorm.BatchRenorm`                   ``r_max``, ``d_max`` and its schedule
    ===============  =================================================  ==========================================

    Understood are torch's BatchNorm1d/2d/3d, SyncBatchNorm (statistics go on to reach across processes), timm's
    BatchNormAct2d and its kin (the activation stays), and the layers of this package. "weighed" and "batch_group" take
    GroupNorm too, and "weighed" InstanceNorm and torchvision's FrozenBatchNorm2d. GroupNorm and InstanceNorm have no
    moving averages: "weighed" gives them alpha = 1, which is what they did before; `betternorm.calibrate` collects the
    averages that any other alpha needs. "weighed" leaves layers of this package as they are: they have an alpha. The
    others change what is trained, so they set alpha back: to 1 for "group", to 0 for the rest.

    Parameters, buffers, hooks, mode, device and dtype are kept, and so are the keys of the ``state_dict``.

    Args:
        where: which layers: a predicate of name and module, or patterns for names (``"layer3.*"``); a pattern that
            begins with ``!`` leaves layers out (``"!bn1"`` leaves the stem alone).
        process_group: makes statistics reach across its processes; ``"world"`` stands for all.
        verbose: print a table of what was changed and what was left.

    Returns:
        ``model``, or the new layer where ``model`` is itself a normalisation layer.

    Examples::

        >>> model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU())
        >>> model = convert(model, "ghost", ghost_size=8)
        >>> model[1]
        GhostBatchNorm(64, ghost_size=8, eps=1e-05, momentum=0.1, affine=True)
        >>> revert(model)[1]
        BatchNorm2d(64, eps=1e-05, momentum=0.1, affine=True, ...)
    """
    if to not in OPTIONS:
        raise ValueError(f"to={to!r} is not a kind of layer; known are {', '.join(map(repr, OPTIONS))}")
    for option in options:
        if option not in OPTIONS[to]:
            known = ", ".join(OPTIONS[to]) or "no options"
            raise TypeError(f"convert(..., {to!r}) has no option {option!r}; it takes {known}")
    _refuse_wrapped(model)
    wanted = _selector(where)
    sizes: dict[nn.Module, tuple[int, int | None]] = {}
    left: list[Change] = []
    already = False
    # Planned in full before anything is touched: an error leaves the model as it was.
    for name, module in model.named_modules():
        if isinstance(module, GroupedBatchNorm) and to == "weighed":
            already = True
        elif _is_norm(module, to) and wanted(name, module):
            reason = _cannot_convert(name, module, to)
            if reason is None:
                sizes[module] = _group_sizes(name, module, to, options)
            else:
                left.append(Change(name, _describe(module), "", reason))
    if left:
        reasons = "; ".join(f"{_called(change.name)} ({change.reason})" for change in left)
        warnings.warn(f"left as they were: {reasons}", stacklevel=2)
    elif not sizes and not already:
        chosen = "" if where is None else f" among the layers that where={where!r} selects"
        warnings.warn(f"nothing to convert to {to!r}{chosen}", stacklevel=2)
    model = _swap(model, {m: _converted(m, to, groups, options, process_group) for m, groups in sizes.items()})
    if verbose:
        print(Changes([*changes(model), *left]))
    return model


def revert(model: M) -> M:
    """Undo every `convert` of ``model``, in place: the original layers, with parameters and averages as they are now.

    Alphas are dropped, and moving averages where the original layer had none. Layers that were built as they are, and
    not converted, stay.
    """
    _refuse_wrapped(model)
    replacements = {module: _restored(module) for module in model.modules() if "_origin" in module.__dict__}
    if not replacements:
        warnings.warn("nothing to revert: no layer of this model was converted", stacklevel=2)
    return _swap(model, replacements)


@dataclass(frozen=True)
class Change:
    """One layer: what it was, what it is, and why it was left where it was."""

    name: str
    was: str
    now: str
    reason: str = ""


class Changes(list[Change]):
    """Prints as a table."""

    def __str__(self) -> str:
        rows = [(c.name or "(itself)", c.was, c.now or f"unchanged: {c.reason}") for c in self]
        return table(["layer", "was", "is"], rows)


def changes(model: nn.Module) -> Changes:
    """The layers of ``model`` that were converted, as a list that prints as a table."""
    return Changes(
        Change(name, _describe(_origin(module)), _describe(module))
        for name, module in model.named_modules()
        if "_origin" in module.__dict__
    )


# ---- what can be converted ----

# The forward passes that the new layers stand in for. A subclass with another one does something we do not know.
_KNOWN_FORWARDS = {
    _BatchNorm.forward,
    nn.SyncBatchNorm.forward,
    nn.GroupNorm.forward,
    _InstanceNorm.forward,
    GroupedBatchNorm.forward,
}
# timm's layers, whose dropout and activation are children that run after the normalisation.
_KNOWN_TIMM = {"BatchNormAct2d", "SyncBatchNormAct", "GroupNorm", "GroupNorm1", "GroupNormAct", "GroupNorm1Act"}


def _is_norm(module: nn.Module, to: str) -> bool:
    kinds: tuple[type[nn.Module], ...] = (_BatchNorm,)
    if to in ("weighed", "batch_group"):
        kinds += (nn.GroupNorm,)
    if to == "weighed":
        kinds += (_InstanceNorm,)
    return isinstance(module, kinds) or _is_frozen(module)


def _is_frozen(module: nn.Module) -> bool:
    """torchvision's FrozenBatchNorm2d and timm's FrozenBatchNormAct2d, without importing either."""
    return type(module).__name__ in ("FrozenBatchNorm2d", "FrozenBatchNormAct2d") and hasattr(module, "running_var")


def _cannot_convert(name: str, module: nn.Module, to: str) -> str | None:
    """Why this layer has to stay as it is. What the user can mend at once is an error instead."""
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        raise ValueError(
            f"{_called(name)} is a {type(module).__name__} whose size is not known yet; "
            "run one batch through the model before converting it"
        )
    if _is_frozen(_origin(module)):
        return None if to == "weighed" else 'its statistics are frozen; only "weighed" applies'
    if torch.nn.utils.parametrize.is_parametrized(module):
        return "its parameters are parametrised; remove the parametrisation first"
    timm = type(module).__module__.startswith("timm.layers") and type(module).__name__ in _KNOWN_TIMM
    if not timm and type(module).forward not in _KNOWN_FORWARDS:
        return f"its class {type(module).__name__} has a forward pass of its own"
    if isinstance(module, _BatchNorm) and module.running_mean is None:
        return "it keeps no moving averages (track_running_stats=False) and normalises by the batch at inference"
    return None


def _refuse_wrapped(model: nn.Module) -> None:
    for module in model.modules():
        kind = type(module).__name__
        if kind in ("DistributedDataParallel", "FullyShardedDataParallel"):
            raise ValueError(
                f"the model is wrapped in {kind}, which has registered its layers' buffers and hooks; "
                "convert the model first and wrap it then (the inner model is .module)"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError("a TorchScript model cannot be changed; convert it before scripting or tracing")


def _selector(where: Where | None) -> Callable[[str, nn.Module], bool]:
    if where is None:
        return lambda name, module: True
    if callable(where):
        return where
    patterns = [where] if isinstance(where, str) else list(where)
    out = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    into = [pattern for pattern in patterns if not pattern.startswith("!")] or ["*"]

    def chosen(name: str, module: nn.Module) -> bool:
        return any(fnmatch.fnmatchcase(name, p) for p in into) and not any(fnmatch.fnmatchcase(name, p) for p in out)

    return chosen


# ---- the new layer ----


def _group_sizes(name: str, module: nn.Module, to: str, options: dict[str, Any]) -> tuple[int, int | None]:
    """channels_per_group and examples_per_group of the new layer."""
    origin = _origin(module)
    own = origin.num_groups if isinstance(origin, nn.GroupNorm) else None
    try:
        if to == "weighed":
            alone = own is not None or isinstance(origin, _InstanceNorm)
            return _channels(module) // own if own else 1, 1 if alone else None
        if to == "ghost":
            ghost_size = options.get("ghost_size", GHOST_SIZE)
            check_group_size("ghost_size", ghost_size)
            return 1, ghost_size
        if to == "renorm":
            BatchRenorm(1, **options)  # for what it says about its options
            return 1, None
        examples = 1 if to == "group" else options.get("examples_per_group", EXAMPLES_PER_GROUP)
        if examples is not None:
            check_group_size("examples_per_group", examples)
        return channels_in_group(options.get("num_groups", own or GROUPS), _channels(module)), examples
    except (TypeError, ValueError) as error:
        raise type(error)(f"{_called(name)}: {error}") from None


def _channels(module: nn.Module) -> int:
    channels: int = module.num_channels if isinstance(module, nn.GroupNorm) else module.__dict__.get("num_features", 0)
    return channels or int(module._buffers["running_mean"].numel())  # type: ignore[union-attr]


def _converted(
    module: nn.Module, to: str, groups: tuple[int, int | None], options: dict[str, Any], process_group: Any
) -> GroupedBatchNorm:
    kinds = {"ghost": GhostBatchNorm, "batch_group": BatchGroupNorm, "renorm": BatchRenorm}
    kind: type[GroupedBatchNorm] = FrozenBatchNorm if _is_frozen(module) else kinds.get(to, GroupedBatchNorm)
    layer = kind.__new__(kind)
    layer.__dict__.update(module.__dict__)
    layer.__dict__["_origin"] = _origin(module)  # past nn.Module.__setattr__, which would make it a child
    _complete(layer, module)
    layer.channels_per_group, layer.examples_per_group = groups
    if isinstance(layer, BatchRenorm):
        layer._set_schedule(**{**RENORM_SCHEDULE, **options})
    if process_group is None:
        synchronised = isinstance(module, nn.SyncBatchNorm)
        process_group = layer.__dict__.get("process_group") or ("world" if synchronised else None)
    layer.process_group = process_group
    layer.alpha = 1.0 if to == "group" or (to == "weighed" and _uses_example_at_inference(module)) else 0.0
    return layer


def _complete(layer: GroupedBatchNorm, module: nn.Module) -> None:
    """Give the layer what ours have and the original may lack, and note what the original had, for `revert`."""
    layer.__dict__.setdefault("_had_buffers", {name: value is not None for name, value in module._buffers.items()})
    layer.__dict__.setdefault("momentum", 0.1)
    layer.num_features = _channels(module)
    layer.affine, layer.track_running_stats = layer.weight is not None, not _is_frozen(module)
    if module._buffers.get("running_mean") is None:
        like = layer.weight if layer.weight is not None else torch.empty(0)
        layer.register_buffer("running_mean", like.new_zeros(layer.num_features))
        layer.register_buffer("running_var", like.new_ones(layer.num_features))
        layer.register_buffer("num_batches_tracked", torch.tensor(0, device=like.device))
    if "num_batches_tracked" not in layer._buffers:
        layer.register_buffer("num_batches_tracked", None)
    if "_alpha" not in layer._buffers:
        layer.register_buffer("_alpha", None, persistent=False)


def _uses_example_at_inference(module: nn.Module) -> bool:
    return isinstance(module, nn.GroupNorm) or (isinstance(module, _InstanceNorm) and not module.track_running_stats)


def _restored(layer: nn.Module) -> nn.Module:
    origin, had = _origin(layer), layer.__dict__["_had_buffers"]
    for name in list(layer._buffers):  # the dictionary is the origin's too
        if name not in had:
            del layer._buffers[name]
            layer._non_persistent_buffers_set.discard(name)
        elif not had[name]:
            layer._buffers[name] = None
    for name in ("training", "eps", "momentum"):
        if name in origin.__dict__:
            origin.__dict__[name] = layer.__dict__[name]
    return origin


def _origin(module: nn.Module) -> nn.Module:
    origin: nn.Module = module.__dict__.get("_origin", module)
    return origin


def _swap(model: M, replacements: dict[nn.Module, nn.Module]) -> M:
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in replacements:
                parent._modules[name] = replacements[child]
    return replacements.get(model, model)  # type: ignore[return-value]


def _called(name: str) -> str:
    return f"layer {name!r}" if name else "the model itself"


def _describe(module: nn.Module) -> str:
    return f"{type(module).__name__}({module.extra_repr()})"
