"""Replacing the norm layers of a model in place, and undoing it.

A converted layer is the same object with another class. Parents, lists, closures, hooks and optimizers that refer to it
stay valid.
"""

from __future__ import annotations

import fnmatch
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, Literal, TypeVar, overload

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin

from betternorm import third_party
from betternorm.backends.distributed import ProcessGroup
from betternorm.display.tables import table
from betternorm.layers import BatchGroupNorm, BatchRenorm, FrozenBatchNorm, GhostBatchNorm, GroupedBatchNorm
from betternorm.layers.checks import channels_in_group

M = TypeVar("M", bound=nn.Module)
Where = Callable[[str, nn.Module], bool] | str | Sequence[str]


def _default(layer: type[nn.Module], option: str) -> Any:
    return inspect.signature(layer).parameters[option].default


GROUPS = 32  # the default of the Group Norm paper
# The other defaults are those of the layers themselves.
GHOST_SIZE: int = _default(GhostBatchNorm, "ghost_size")
EXAMPLES_PER_GROUP: int = _default(BatchGroupNorm, "examples_per_group")
RENORM_SCHEDULE: dict[str, float] = {
    option: _default(BatchRenorm, option) for option in ("r_max", "d_max", "warmup_steps", "r_steps", "d_steps")
}

# The options of each conversion.
OPTIONS: dict[str, tuple[str, ...]] = {
    "weighed": (),
    "ghost": ("ghost_size",),
    "batch_group": ("num_groups", "examples_per_group"),
    "group": ("num_groups",),
    "renorm": tuple(RENORM_SCHEDULE),
}


@overload
def convert(
    model: M,
    to: Literal["weighed"],
    *,
    where: Where | None = ...,
    process_group: ProcessGroup | None = ...,
    verbose: bool = ...,
) -> M: ...
@overload
def convert(
    model: M,
    to: Literal["ghost"],
    *,
    where: Where | None = ...,
    process_group: ProcessGroup | None = ...,
    verbose: bool = ...,
    ghost_size: int = ...,
) -> M: ...
@overload
def convert(
    model: M,
    to: Literal["batch_group"],
    *,
    where: Where | None = ...,
    process_group: ProcessGroup | None = ...,
    verbose: bool = ...,
    num_groups: int = ...,
    examples_per_group: int | None = ...,
) -> M: ...
@overload
def convert(
    model: M,
    to: Literal["group"],
    *,
    where: Where | None = ...,
    process_group: ProcessGroup | None = ...,
    verbose: bool = ...,
    num_groups: int = ...,
) -> M: ...
@overload
def convert(
    model: M,
    to: Literal["renorm"],
    *,
    where: Where | None = ...,
    process_group: ProcessGroup | None = ...,
    verbose: bool = ...,
    r_max: float = ...,
    d_max: float = ...,
    warmup_steps: int = ...,
    r_steps: int = ...,
    d_steps: int = ...,
) -> M: ...
def convert(
    model: M,
    to: str,
    *,
    where: Where | None = None,
    process_group: ProcessGroup | None = None,
    verbose: bool = False,
    **options: Any,
) -> M:
    """Replace the norm layers of ``model`` by another kind, in place.

    ===============  =================================================  ==========================================
    ``to``           new layer                                          options (default)
    ===============  =================================================  ==========================================
    ``weighed``      the same in training, with ``alpha`` at inference  none
    ``ghost``        :class:`~betternorm.GhostBatchNorm`                ``ghost_size`` (16)
    ``batch_group``  :class:`~betternorm.BatchGroupNorm`                ``num_groups`` (32), ``examples_per_group`` (2)
    ``group``        Group Norm that also keeps moving averages         ``num_groups`` (32)
    ``renorm``       :class:`~betternorm.BatchRenorm`                   ``r_max``, ``d_max`` and its schedule
    ===============  =================================================  ==========================================

    ``alpha`` is the weight of an example's own statistics at inference; the moving averages have the rest.

    Supported layers are torch's BatchNorm1d/2d/3d, SyncBatchNorm (statistics stay synchronized), timm's BatchNormAct2d
    and its variants (the activation is kept), and the layers of this package. "weighed" and "batch_group" also convert
    GroupNorm. "weighed" also converts InstanceNorm and torchvision's FrozenBatchNorm2d. GroupNorm and InstanceNorm have
    no moving averages: "weighed" sets their alpha to 1, which leaves the output unchanged, and `betternorm.calibrate`
    collects the averages that other alphas need. "weighed" skips layers of this package, which already have an alpha.
    The other conversions change training, so they reset alpha: to 1 for "group", to 0 otherwise.

    Every layer stays the same object and only its class changes, as with ``torch.nn.utils.parametrize``. References to
    it from lists, closures, hooks and optimizers stay valid, and parameters, buffers, mode, device, dtype and
    ``state_dict`` keys are kept.

    Args:
        model: the model, or a norm layer.
        to: the kind of layer, see the table.
        where: which layers to convert: a function of name and module that returns a bool, or name patterns
            (``"layer3.*"``). Patterns that begin with ``!`` exclude layers (``"!bn1"`` keeps the stem).
        process_group: compute statistics over the processes of this group; ``"world"`` for all processes.
        verbose: print a table of converted and skipped layers.
        **options: see the table.

    Returns:
        ``model``.

    Raises:
        ValueError: if a layer cannot be converted correctly and you can fix it: the model is wrapped for distributed
            training, a layer has no shape yet, a layer was sharded by ``fully_shard``, or a bound method of a layer is
            stored somewhere (``self.norm_fn = self.bn.forward``) and would keep running the original code.

    Warns:
        UserWarning: for layers that are skipped, with the reason: subclasses that override methods, instances with a
            replaced ``forward``, layers without moving averages. Also if there is nothing to convert, and for norm
            layers that a module keeps in a plain list or dict only, where ``model.modules()`` does not find them.

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
    third_party.check_not_wrapped(model)
    selected = _selector(where)
    templates: dict[nn.Module, GroupedBatchNorm] = {}
    skipped: list[Change] = []
    already = False
    # All templates are built before anything is changed: an error leaves the model as it was.
    for name, module in model.named_modules():
        if isinstance(module, GroupedBatchNorm) and to == "weighed":
            already = True
        elif _is_norm(module, to) and selected(name, module):
            reason = _cannot_convert(name, module, to)
            if reason is None:
                templates[module] = _template(name, module, to, options, process_group)
            else:
                skipped.append(Change(name, _describe(module), "", reason))
    _check_stored_methods(model, {module: type(template) for module, template in templates.items()})
    _warn_of_unregistered(model, to)
    if skipped:
        reasons = "; ".join(f"{_called(change.name)} ({change.reason})" for change in skipped)
        warnings.warn(f"not converted: {reasons}", stacklevel=2)
    elif not templates and not already:
        chosen = "" if where is None else f" among the layers that where={where!r} selects"
        warnings.warn(f"nothing to convert to {to!r}{chosen}", stacklevel=2)
    for module, template in templates.items():
        _become(module, template)
    if verbose:
        print(Changes([*changes(model), *skipped]))
    return model


def revert(model: M) -> M:
    """Undo every `convert` of ``model``, in place.

    Layers get their original class back and keep their parameters and moving averages. Alphas are dropped, and so are
    moving averages that the original layer did not have. Layers that were not converted are left unchanged.

    Args:
        model: the model, or a converted layer.

    Returns:
        ``model``.
    """
    third_party.check_not_wrapped(model)
    records = {name: (module, _record(module)) for name, module in model.named_modules()}
    converted = {name: (module, record) for name, (module, record) in records.items() if record is not None}
    if not converted:
        warnings.warn("nothing to revert: no layer of this model was converted", stacklevel=2)
    for name, (module, record) in converted.items():
        if type(module) is not record.converted:
            raise ValueError(
                f"{_called(name)} was parametrized, sharded or otherwise changed after its conversion (its class is "
                f"now {type(module).__name__}), and reverting it would undo that; remove the parametrization "
                "(torch.nn.utils.parametrize.remove_parametrizations) or the wrapper first"
            )
    _check_stored_methods(model, {module: record.kind for module, record in converted.values()})
    for module, record in converted.values():
        assert isinstance(module, GroupedBatchNorm)
        module.alpha = 0.0
        if not issubclass(record.kind, GroupedBatchNorm):
            module._buffers.pop("_no_alpha")
            module._non_persistent_buffers_set.discard("_no_alpha")
        for name, was_there in record.buffers.items():
            module._buffers[name] = None
            if not was_there:
                del module._buffers[name]
        _restore_attributes(module, record)
        del module.__dict__["_original"]
        module.__class__ = record.kind  # type: ignore[assignment]
    return model


@dataclass(frozen=True)
class Change:
    """One layer: what it was, what it is now, and why it was skipped."""

    name: str
    was: str
    now: str
    reason: str = ""


class Changes(list[Change]):
    """A list that prints as a table."""

    def __str__(self) -> str:
        rows = [(c.name or "(itself)", c.was, c.now or f"unchanged: {c.reason}") for c in self]
        return table(["layer", "was", "is"], rows)


def changes(model: nn.Module) -> Changes:
    """The converted layers of ``model``, as a list that prints as a table."""
    records = ((name, module, _record(module)) for name, module in model.named_modules())
    return Changes(Change(name, record.was, _describe(module)) for name, module, record in records if record)


# ---- which layers can be converted ----


def _is_norm(module: nn.Module, to: str) -> bool:
    kinds: tuple[type[nn.Module], ...] = (_BatchNorm,)
    if to in ("weighed", "batch_group"):
        kinds += (nn.GroupNorm,)
    if to == "weighed":
        kinds += (_InstanceNorm,)
    return isinstance(module, kinds) or third_party.is_frozen(module)


def _cannot_convert(name: str, module: nn.Module, to: str) -> str | None:
    """Why this layer is skipped. What the user can fix at once is an error instead."""
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        raise ValueError(
            f"{_called(name)} is a {type(module).__name__} whose size is not known yet; "
            "run one batch through the model before converting it"
        )
    if third_party.is_fully_sharded(module):
        raise ValueError(
            f"{_called(name)} is a {type(module).__name__}: fully_shard has changed its class; "
            "convert the model before calling fully_shard"
        )
    if third_party.is_frozen(module) or isinstance(module, FrozenBatchNorm):
        return None if to == "weighed" else 'its statistics are frozen; only "weighed" applies'
    if torch.nn.utils.parametrize.is_parametrized(module):
        return "its parameters are parametrized; remove the parametrization first"
    if isinstance(module, _BatchNorm) and module.running_mean is None:
        return "it keeps no moving averages (track_running_stats=False) and uses batch statistics at inference"
    return third_party.own_behavior(module, third_party.TIMM_NORMS)


def _selector(where: Where | None) -> Callable[[str, nn.Module], bool]:
    if where is None:
        return lambda name, module: True
    if callable(where):
        return where
    patterns = [where] if isinstance(where, str) else list(where)
    excluded = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    included = [pattern for pattern in patterns if not pattern.startswith("!")] or ["*"]

    def selected(name: str, module: nn.Module) -> bool:
        return _matches(name, included) and not _matches(name, excluded)

    return selected


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


# ---- references that torch does not see ----


def _check_stored_methods(model: nn.Module, new_classes: Mapping[nn.Module, type[nn.Module]]) -> None:
    """Reject bound methods that would keep running the code of the class before the change."""
    for place, value in _stored_objects(model):
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module) and value.__self__ in new_classes:
            new, method = new_classes[value.__self__], value.__func__.__name__
            if getattr(new, method, None) is not value.__func__:
                raise ValueError(
                    f"{place!r} stores the bound method {method!r} of a {type(value.__self__).__name__}, which would "
                    f"keep running the code of that class after the layer becomes {new.__name__}; store the layer and "
                    "call it instead"
                )


def _warn_of_unregistered(model: nn.Module, to: str) -> None:
    registered = set(model.modules())
    places = {
        place: None
        for place, value in _stored_objects(model)
        if isinstance(value, nn.Module) and value not in registered
        for module in value.modules()
        if module not in registered and _is_norm(module, to) and not isinstance(module, GroupedBatchNorm)
    }
    if places:
        warnings.warn(
            f"not converted: norm layers stored in {', '.join(map(repr, places))}, which model.modules() does not "
            "list; keep them in attributes or in an nn.ModuleList",
            stacklevel=3,
        )


def _stored_objects(model: nn.Module) -> Iterator[tuple[str, object]]:
    """What modules store outside of their parameters, buffers and children: in attributes, containers and closures."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        for attribute, stored in module.__dict__.items():
            if attribute in ("_parameters", "_buffers", "_modules", "_original", "_origin"):
                continue
            waiting = [stored]
            while waiting:
                value = waiting.pop()
                if id(value) in seen:
                    continue
                seen.add(id(value))
                yield (f"{name}.{attribute}" if name else attribute), value
                if isinstance(value, Mapping):
                    waiting.extend(value.values())
                elif isinstance(value, (list, tuple, set, frozenset)):
                    waiting.extend(value)
                elif isinstance(value, functools.partial):
                    waiting.extend((value.func, *value.args, *value.keywords.values()))
                elif isinstance(value, FunctionType):
                    waiting.extend(value.__defaults__ or ())
                    waiting.extend(c.cell_contents for c in value.__closure__ or () if not _is_empty(c))


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


# ---- changing a layer ----


@dataclass(frozen=True)
class _Original:
    """What `revert` needs, stored in the converted layer as ``_original``."""

    kind: type[nn.Module]
    was: str
    converted: type[nn.Module]
    attributes: dict[str, Any]  # those of the original that conversion replaced
    added: tuple[str, ...]  # attributes that the original does not have
    buffers: dict[str, bool]  # moving averages that the original lacks: whether it has them as None


def _record(module: nn.Module) -> _Original | None:
    old = module.__dict__.pop("_origin", None)
    if old is not None:  # pickled by version 0.1, where the original layer was another object
        own = {name: value for name, value in old.__dict__.items() if name not in _MODULE_STATE}
        module.__dict__["_original"] = _Original(
            type(old),
            _describe(old),
            type(module),
            {name: value for name, value in own.items() if name not in _shared_attributes(type(old))},
            tuple(module.__dict__.keys() - own.keys() - _MODULE_STATE - {"weight", "bias"}),
            {name: there for name, there in module.__dict__.pop("_added_buffers").items() if name in _AVERAGES},
        )
    record: _Original | None = module.__dict__.get("_original")
    return record


def _template(
    name: str, module: nn.Module, to: str, options: dict[str, Any], process_group: ProcessGroup | None
) -> GroupedBatchNorm:
    """A layer without tensors, whose class and attributes ``module`` is to get."""
    record = _record(module)
    kind = record.kind if record else type(module)
    if process_group is None:
        synchronized = isinstance(module, nn.SyncBatchNorm)
        process_group = module.__dict__.get("process_group") or ("world" if synchronized else None)
    shared: dict[str, Any] = {
        "eps": module.eps,
        "momentum": module.__dict__.get("momentum", _default(GroupedBatchNorm, "momentum")),
        "affine": module.weight is not None,
        "process_group": process_group,
        "device": "meta",
    }
    channels = _channels(module)
    groups_before = record.attributes if record else module.__dict__
    groups = options.get("num_groups", groups_before.get("num_groups", GROUPS))
    template: GroupedBatchNorm
    try:
        if to == "ghost":
            template = GhostBatchNorm(channels, **options, **shared)
        elif to == "renorm":
            template = BatchRenorm(channels, **options, **shared)
        elif to == "batch_group":
            template = BatchGroupNorm(groups, channels, options.get("examples_per_group", EXAMPLES_PER_GROUP), **shared)
        elif to == "group" or issubclass(kind, nn.GroupNorm):
            template = GroupedBatchNorm(channels, channels_in_group(groups, channels), 1, **shared)
        elif third_party.is_frozen(module):
            template = FrozenBatchNorm(channels, **shared)
        else:
            template = GroupedBatchNorm(channels, 1, 1 if issubclass(kind, _InstanceNorm) else None, **shared)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{_called(name)}: {error}") from None
    template._ranks, template._unbatched_rank = (
        (module._ranks, module._unbatched_rank) if isinstance(module, GroupedBatchNorm) else _ranks_of_input(module)
    )
    if third_party.is_from_timm(kind, (*third_party.TIMM_NORMS, *third_party.FROZEN_NORMS)):
        template._then = tuple(name for name in ("drop", "act") if name in module._modules)
    template.track_running_stats = not third_party.is_frozen(module)
    uses_example = isinstance(module, nn.GroupNorm) or (
        isinstance(module, _InstanceNorm) and not module.track_running_stats
    )
    template._alpha_if_absent = float(to == "group" or (to == "weighed" and uses_example))
    return template


def _channels(module: nn.Module) -> int:
    channels: int = module.num_channels if isinstance(module, nn.GroupNorm) else module.__dict__.get("num_features", 0)
    return channels or int(module._buffers["running_mean"].numel())  # type: ignore[union-attr]


def _ranks_of_input(module: nn.Module) -> tuple[tuple[int, ...] | None, int | None]:
    """The input ranks that a layer accepts (None means any), and the rank of an unbatched input."""
    if isinstance(module, _InstanceNorm):
        unbatched = int(module._get_no_batch_dim())
        return (unbatched + 1,), unbatched
    for kind, ranks in ((nn.BatchNorm1d, (2, 3)), (nn.BatchNorm2d, (4,)), (nn.BatchNorm3d, (5,))):
        if isinstance(module, kind) and type(module)._check_input_dim is kind._check_input_dim:
            return ranks, None
    return None, None


_MODULE_STATE = frozenset(nn.Module().__dict__)  # parameters, buffers, children, hooks, mode
_AVERAGES = ("running_mean", "running_var", "num_batches_tracked")


def _shared_attributes(kind: type[nn.Module]) -> set[str]:
    """Attributes that mean the same before and after a conversion, so that changes of them last."""
    return {"eps", "momentum", *(["track_running_stats"] if issubclass(kind, _BatchNorm) else [])}


def _become(module: nn.Module, template: GroupedBatchNorm) -> None:
    """Give ``module`` the class and the attributes of ``template``, and the buffers that it lacks."""
    record = _record(module)
    kind, was = (record.kind, record.was) if record else (type(module), _describe(module))
    lacking = {name: name in module._buffers for name in _AVERAGES if module._buffers.get(name) is None}
    if record:
        _restore_attributes(module, record)
    own = module.__dict__
    keep = _shared_attributes(kind) & own.keys()
    attributes = {n: value for n, value in template.__dict__.items() if n not in _MODULE_STATE and n not in keep}
    own["_original"] = _Original(
        kind,
        was,
        type(template),
        {name: own[name] for name in attributes if name in own},
        tuple(name for name in attributes if name not in own),
        record.buffers if record else lacking,
    )
    own.update(attributes)
    module.__class__ = type(template)
    assert isinstance(module, GroupedBatchNorm)
    if "running_mean" in lacking:
        like = module.weight if module.weight is not None else torch.empty(0)
        module._buffers["running_mean"] = like.new_zeros(module.num_features)
        module._buffers["running_var"] = like.new_ones(module.num_features)
        module._buffers["num_batches_tracked"] = torch.tensor(0, device=like.device)
    module._buffers.setdefault("num_batches_tracked", None)
    if isinstance(module, FrozenBatchNorm):
        module.training = False
    module.alpha = module._alpha_if_absent


def _restore_attributes(module: nn.Module, record: _Original) -> None:
    for name in record.added:
        module.__dict__.pop(name, None)
    module.__dict__.update(record.attributes)


# ---- messages ----


def _called(name: str) -> str:
    return f"layer {name!r}" if name else "the model itself"


def _describe(module: nn.Module) -> str:
    return f"{type(module).__name__}({module.extra_repr()})"
