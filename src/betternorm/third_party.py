"""What the library knows about the classes and functions of other libraries, without importing any of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FrameType

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

# ---- classes ----

# timm's norm layers with dropout and activation as children, which run after the normalization.
TIMM_NORMS = ("BatchNormAct2d", "SyncBatchNormAct", "GroupNorm", "GroupNorm1", "GroupNormAct", "GroupNorm1Act")
TIMM_CONVOLUTIONS = ("Conv2dSame",)  # it pads its input, and uses weight and bias as they are
FROZEN_NORMS = ("FrozenBatchNorm2d", "FrozenBatchNormAct2d")  # torchvision's, detectron2's and timm's

# timm's norm layers that are not subclasses of torch's.
OTHER_NORMS = {
    "timm.layers.norm": (
        "RmsNorm",
        "RmsNormFp32",
        "RmsNorm2d",
        "RmsNorm2dFp32",
        "SimpleNorm",
        "SimpleNormFp32",
        "SimpleNorm2d",
        "SimpleNorm2dFp32",
    ),
    "timm.layers.evo_norm": (
        "EvoNorm2dB0",
        "EvoNorm2dB1",
        "EvoNorm2dB2",
        "EvoNorm2dS0",
        "EvoNorm2dS1",
        "EvoNorm2dS2",
    ),
    "timm.layers.filter_response_norm": ("FilterResponseNormTlu2d", "FilterResponseNormAct2d"),
}
RANDOM_DEPTH = {
    "timm.layers.drop": ("DropPath", "DropBlock2d"),
    "torchvision.ops.stochastic_depth": ("StochasticDepth",),
    "torchvision.ops.drop_block": ("DropBlock2d",),
}


def imported_classes(names: Mapping[str, Iterable[str]]) -> tuple[type[nn.Module], ...]:
    """The classes of these modules. A module that has not been imported has no layers in any model."""
    return tuple(
        getattr(sys.modules[module], name)
        for module, classes in names.items()
        if module in sys.modules
        for name in classes
        if hasattr(sys.modules[module], name)
    )


def is_from_timm(module_type: type[nn.Module], names: Iterable[str]) -> bool:
    return module_type.__module__.startswith("timm.layers") and module_type.__name__ in names


def is_frozen(module: nn.Module) -> bool:
    """Whether a module is a batch norm with frozen statistics and parameters."""
    return type(module).__name__ in FROZEN_NORMS and hasattr(module, "running_var")


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` (FSDP2) has replaced the class of this module by a subclass of its own."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def check_not_wrapped(model: nn.Module) -> None:
    """Raise an error for models whose wrapper has recorded the parameters and buffers of its layers."""
    for module in model.modules():
        kind = type(module).__name__
        if kind in ("DistributedDataParallel", "FullyShardedDataParallel"):
            raise ValueError(
                f"the model is wrapped in {kind}, which has recorded its parameters and buffers; "
                "change the model first and then wrap it (the inner model is .module)"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError("a TorchScript model cannot be changed; convert or fold it before scripting or tracing")


# ---- whether a subclass behaves as its base class does ----

_HARMLESS = {"extra_repr", "reset_parameters", "_check_input_dim", "cls_to_become", "_get_name"}
_SPECIAL = {"__call__", "__getattr__", "__getattribute__", "__setattr__"}


def own_behavior(module: nn.Module, timm_classes: Iterable[str] = ()) -> str | None:
    """Why a module may compute something other than the class of torch or of this library that it is derived from."""
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    if is_frozen(module):
        return None
    classes = [kind for kind in type(module).__mro__ if kind is not LazyModuleMixin]
    known = ("torch.nn.modules.", "betternorm.layers")
    base = next(k for k in classes if k.__module__.startswith(known) or is_from_timm(k, timm_classes))
    for kind in classes[: classes.index(base)]:
        for name, value in vars(kind).items():
            can_matter = name in _SPECIAL if name.startswith("__") else name not in _HARMLESS
            if can_matter and (callable(value) or isinstance(value, property)) and hasattr(base, name):
                return f"its class {type(module).__name__} overrides {name}"
    return None


# ---- functions that replace a batch norm layer ----

# These replace the layer for training, where groups of examples matter even if alpha is 0.
_REPLACE_FOR_TRAINING = {
    "convert_sync_batchnorm": 'for statistics across processes call convert(model, ..., process_group="world")',
    "convert_syncbn_model": 'for statistics across processes call convert(model, ..., process_group="world")',
    "convert_splitbn_model": "split the original layers before converting the rest",
}
# These copy weight, bias and statistics and drop even eps, so that the general rule does not recognize them.
_REPLACE_WITHOUT_EPS = {"replace_batch_norm"}  # DETR and its relatives in Transformers
# Code that mentions one of these was written for the layers of this library.
_KNOWN_TO_CALLER = {"alpha", "channels_per_group", "examples_per_group"}
_REPLACE_BY_IMAGE_NORM = ("freeze", "frozen", "replace_batch_norm")


def check_reader(frame: FrameType, layer: str, lost: Callable[[], list[str]], only_images: bool) -> None:
    """Raise an error if the function that reads ``running_mean`` is about to replace the layer by one that does less.

    Such functions compute ``weight / sqrt(running_var + eps)`` and fold it into a convolution, or copy all of these
    into a layer of another class. They are recognized by the names in their code: it reads ``running_mean`` and also
    mentions ``running_var`` and ``eps``. This covers torch's ``fuse_conv_bn_eval`` and ``to_mkldnn``, everything that
    timm's ``reparameterize_model`` calls, detectron2, Ultralytics and code that follows the same pattern.

    Args:
        frame: of the function that reads ``running_mean``.
        layer: the name of the layer's class.
        lost: returns what the replacement would lose, nothing if it would be exact.
        only_images: whether the layer rejects inputs (N, C, H, W), which the frozen layers require.
    """
    code = frame.f_code
    caller, module = code.co_name, str(frame.f_globals.get("__name__", ""))
    for_training = caller in _REPLACE_FOR_TRAINING
    if module.partition(".")[0] in ("betternorm", "betternorm_lab") or not (for_training or _replaces(code)):
        return
    dropped = lost()
    if only_images and any(word in caller for word in _REPLACE_BY_IMAGE_NORM):
        dropped.append("inputs that are not images")
    if not dropped and not for_training:
        return
    instead = "betternorm.fold(model) folds the layers for which that is exact; betternorm.revert(model) drops alpha"
    raise RuntimeError(
        f"{module}.{getattr(code, 'co_qualname', caller)} would replace {layer} and drop "
        f"{', '.join(dropped) or 'its groups and alpha'}; {_REPLACE_FOR_TRAINING.get(caller, instead)}"
    )


def _replaces(code: CodeType) -> bool:
    names = {*code.co_names}
    for constant in code.co_consts:  # names of attributes in a loop over them
        names |= {constant} if isinstance(constant, str) else {*constant} if isinstance(constant, tuple) else set()
    if names & _KNOWN_TO_CALLER:
        return False
    return {"running_var", "eps"} <= names or code.co_name in _REPLACE_WITHOUT_EPS
