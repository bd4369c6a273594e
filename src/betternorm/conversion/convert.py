"""Swapping the normalisation layers of a model, in place, and back.

A converted layer shares the dictionaries of parameters, buffers, children and hooks with the layer it replaces. So an
optimizer that holds the parameters, a handle that removes a hook, and whatever moves the model to another device all
stay right, and `revert` only has to put the old layer back.
"""

from __future__ import annotations

import fnmatch
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin

from betternorm.display.tables import table
from betternorm.layers import BatchGroupNorm, BatchRenorm, FrozenBatchNorm, GhostBatchNorm, GroupedBatchNorm
from betternorm.layers.checks import channels_in_group

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
    planned: dict[nn.Module, GroupedBatchNorm] = {}
    left: list[Change] = []
    already = False
    # All are built before anything is touched: an error leaves the model as it was.
    for name, module in model.named_modules():
        if isinstance(module, GroupedBatchNorm) and to == "weighed":
            already = True
        elif _is_norm(module, to) and wanted(name, module):
            reason = _cannot_convert(name, module, to)
            if reason is None:
                planned[module] = _new_layer(name, module, to, options, process_group)
            else:
                left.append(Change(name, _describe(module), "", reason))
    if left:
        reasons = "; ".join(f"{_called(change.name)} ({change.reason})" for change in left)
        warnings.warn(f"left as they were: {reasons}", stacklevel=2)
    elif not planned and not already:
        chosen = "" if where is None else f" among the layers that where={where!r} selects"
        warnings.warn(f"nothing to convert to {to!r}{chosen}", stacklevel=2)
    for module, layer in planned.items():
        _take_over(layer, module)
        alone = to == "group" or (to == "weighed" and _uses_example_at_inference(module))
        layer.alpha = layer._alpha_if_absent = 1.0 if alone else 0.0
    model = _swap(model, planned)
    if verbose:
        print(Changes([*changes(model), *left]))
    return model


def revert(model: M) -> M:
    """Undo every `convert` of ``model``, in place: the original layers, with parameters and averages as they are now.

    Alphas are dropped, and moving averages where the original layer had none. Layers that were built as they are, and
    not converted, stay.
    """
    _refuse_wrapped(model)
    converted = {name: module for name, module in model.named_modules() if "_origin" in module.__dict__}
    for name, module in converted.items():
        if torch.nn.utils.parametrize.is_parametrized(module):
            raise ValueError(
                f"{_called(name)} was parametrised after its conversion, and the original layer would lose that; "
                "remove the parametrisation first (torch.nn.utils.parametrize.remove_parametrizations)"
            )
    if not converted:
        warnings.warn("nothing to revert: no layer of this model was converted", stacklevel=2)
    return _swap(model, {module: _restored(module) for module in converted.values()})


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
    return isinstance(module, kinds) or is_frozen(module)


def is_frozen(module: nn.Module) -> bool:
    """torchvision's FrozenBatchNorm2d and timm's FrozenBatchNormAct2d, without importing either."""
    return type(module).__name__ in ("FrozenBatchNorm2d", "FrozenBatchNormAct2d") and hasattr(module, "running_var")


def _cannot_convert(name: str, module: nn.Module, to: str) -> str | None:
    """Why this layer has to stay as it is. What the user can mend at once is an error instead."""
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        raise ValueError(
            f"{_called(name)} is a {type(module).__name__} whose size is not known yet; "
            "run one batch through the model before converting it"
        )
    if is_frozen(_origin(module)):
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


def _new_layer(name: str, module: nn.Module, to: str, options: dict[str, Any], process_group: Any) -> GroupedBatchNorm:
    """The layer that takes the place of ``module``, with nothing of its own yet but its settings."""
    origin: Any = _origin(module)
    if process_group is None:
        synchronised = isinstance(module, nn.SyncBatchNorm)
        process_group = module.__dict__.get("process_group") or ("world" if synchronised else None)
    channels = _channels(module)
    shared: dict[str, Any] = {
        "eps": module.eps,
        "momentum": module.__dict__.get("momentum", _default(GroupedBatchNorm, "momentum")),
        "affine": module.weight is not None,
        "process_group": process_group,
        "device": "meta",  # tensors come from the original
    }
    groups = options.get("num_groups", origin.num_groups if isinstance(origin, nn.GroupNorm) else GROUPS)
    try:
        if to == "ghost":
            return GhostBatchNorm(channels, **options, **shared)
        if to == "renorm":
            return BatchRenorm(channels, **options, **shared)
        if to == "batch_group":
            examples = options.get("examples_per_group", EXAMPLES_PER_GROUP)
            return BatchGroupNorm(groups, channels, examples, **shared)
        if to == "group" or isinstance(origin, nn.GroupNorm):
            return GroupedBatchNorm(channels, channels_in_group(groups, channels), 1, **shared)
        kind = FrozenBatchNorm if is_frozen(origin) else GroupedBatchNorm
        return kind(channels, 1, 1 if isinstance(origin, _InstanceNorm) else None, **shared)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{_called(name)}: {error}") from None


def _channels(module: nn.Module) -> int:
    channels: int = module.num_channels if isinstance(module, nn.GroupNorm) else module.__dict__.get("num_features", 0)
    return channels or int(module._buffers["running_mean"].numel())  # type: ignore[union-attr]


_MODULE_STATE = frozenset(nn.Module().__dict__)  # parameters, buffers, children, hooks, mode


def _take_over(layer: GroupedBatchNorm, module: nn.Module) -> None:
    """Let ``layer`` share all that ``module`` holds, and complete it with the buffers that ``module`` lacks."""
    origin = _origin(module)
    settings = {name: value for name, value in layer.__dict__.items() if name not in _MODULE_STATE}
    layer.__dict__.update(module.__dict__)
    layer.__dict__.update(settings)
    layer.__dict__["_origin"] = origin  # past nn.Module.__setattr__, which would make it a child
    if isinstance(layer, FrozenBatchNorm):
        layer.training = False
    layer._ranks, layer._unbatched_rank = _ranks_of_input(origin)
    of_timm = type(origin).__module__.startswith("timm.layers")
    layer._then = tuple(name for name in ("drop", "act") if of_timm and name in origin._modules)
    layer.track_running_stats = not is_frozen(origin) and (
        not isinstance(module, _BatchNorm) or module.track_running_stats
    )
    lacking = {name for name in _BUFFERS if module._buffers.get(name) is None}
    layer.__dict__.setdefault(
        "_added_buffers", {name: name in module._buffers for name in (*lacking, "alpha", "_no_alpha")}
    )
    if "running_mean" in lacking:
        like = layer.weight if layer.weight is not None else torch.empty(0)
        layer._buffers["running_mean"] = like.new_zeros(layer.num_features)
        layer._buffers["running_var"] = like.new_ones(layer.num_features)
        layer._buffers["num_batches_tracked"] = torch.tensor(0, device=like.device)
    layer._buffers.setdefault("num_batches_tracked", None)


_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def _ranks_of_input(origin: nn.Module) -> tuple[tuple[int, ...] | None, int | None]:
    """The ranks that the original layer takes (None is any), and the one that is an example without a batch to it."""
    if isinstance(origin, _InstanceNorm):
        unbatched = int(origin._get_no_batch_dim())
        return (unbatched + 1,), unbatched
    known: dict[type[nn.Module], tuple[int, ...]] = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}
    if isinstance(origin, GroupedBatchNorm):
        return None, None
    return next((ranks for kind, ranks in known.items() if isinstance(origin, kind)), None), None


def _uses_example_at_inference(module: nn.Module) -> bool:
    return isinstance(module, nn.GroupNorm) or (isinstance(module, _InstanceNorm) and not module.track_running_stats)


def _restored(layer: nn.Module) -> nn.Module:
    origin = _origin(layer)
    for name, was_there in layer.__dict__["_added_buffers"].items():  # the dictionary is the origin's too
        if was_there:
            layer._buffers[name] = None
        else:
            layer._buffers.pop(name, None)
        layer._non_persistent_buffers_set.discard(name)
    if isinstance(origin, GroupedBatchNorm):
        origin.alpha = 0.0
    kept = {"training", "eps", "momentum"} | ({"track_running_stats"} if isinstance(origin, _BatchNorm) else set())
    pruned = {"weight", "bias"} & layer.__dict__.keys()  # torch.nn.utils.prune makes a plain tensor of a parameter
    for name in (kept & origin.__dict__.keys()) | pruned:
        origin.__dict__[name] = layer.__dict__[name]
    return origin


def _origin(module: nn.Module) -> nn.Module:
    origin: nn.Module = module.__dict__.get("_origin", module)
    return origin


def _swap(model: M, replacements: Mapping[nn.Module, nn.Module]) -> M:
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in replacements:
                parent._modules[name] = replacements[child]
    return replacements.get(model, model)  # type: ignore[return-value]


def _called(name: str) -> str:
    return f"layer {name!r}" if name else "the model itself"


def _describe(module: nn.Module) -> str:
    return f"{type(module).__name__}({module.extra_repr()})"
