"""Folding for serving: a norm layer without alpha goes into the convolution or linear layer before it.

At inference batch norm is a multiplication and an addition for every channel, which the weights of the layer before can
take over. A layer with an alpha looks at the example, and has to stay.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node, Tracer
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights
from torch.nn.utils.parametrize import is_parametrized

from betternorm.conversion.convert import Change, Changes, _called, _describe, _refuse_wrapped
from betternorm.layers import BatchRenorm, GroupedBatchNorm
from betternorm.layers.checks import alpha_text

M = TypeVar("M", bound=nn.Module)

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# Forward passes that use weight and bias as they are. A subclass with another one does something we do not know.
_KNOWN_FORWARDS = {kind.forward for kind in (*CONVOLUTIONS, *TRANSPOSED, nn.Linear, _BatchNorm, nn.SyncBatchNorm)} | {
    GroupedBatchNorm.forward
}
_KNOWN_TIMM = {"Conv2dSame", "BatchNormAct2d", "SyncBatchNormAct"}
UNUSED = "it is not used at inference"
_NAMED_IN_WARNING = 3


def fold(model: M, *, verbose: bool = False) -> M:
    """Fold norm layers that have no alpha into the convolution or linear layer before them, in place, for serving.

    The outputs stay the same, to rounding (1e-5). Layers with an alpha or with channel groups stay as they are. So do
    those for which it cannot be shown that they alone use what the layer before puts out; a warning names them. It is
    shown by tracing the model (``torch.fx``). Where it cannot be traced as a whole, its parts are, each by itself.

    The model is left in evaluation mode, and cannot be trained any more: keep the original. Activations inside a norm
    layer (timm's BatchNormAct2d) stay.

    Args:
        verbose: print a table of what was folded and why the rest was not.

    Returns:
        ``model``.

    Raises:
        ValueError: where there is nothing to fold.

    Examples::

        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        >>> fold(model)
        Sequential(
          (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
          (1): Folded()
          (2): ReLU()
        )
    """
    _refuse_wrapped(model)
    names = {module: name for name, module in model.named_modules()}
    norms = [module for module in names if isinstance(module, _BatchNorm)]
    if not norms:
        raise ValueError("nothing to fold: the model has no batch norm layer")
    modes = {module: module.training for module in names}
    model.eval()
    shared = _shared(model)
    before = _layers_before(model)
    # Planned in full before anything is touched: an error leaves the model as it was.
    reasons = {norm: _cannot_fold(norm, before.get(norm), shared) for norm in norms}
    folded = [norm for norm in norms if reasons[norm] is None]
    if not folded:
        for module, training in modes.items():
            module.training = training
        raise ValueError(f"nothing to fold: {_listed({names[norm]: str(reasons[norm]) for norm in norms})}")
    report = [
        Change(names[norm], _describe(norm), f"in {names[before[norm]]}" if norm in folded else "", reasons[norm] or "")
        for norm in norms
    ]
    replacements = {norm: _fold(before[norm], norm) for norm in folded}  # type: ignore[arg-type]
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in replacements:
                parent._modules[name] = replacements[child]
    unexpected = {
        names[norm]: str(reasons[norm])
        for norm in norms
        if reasons[norm] not in (None, UNUSED) and _stays(norm) is None
    }
    if verbose:
        print(Changes(report))
    elif unexpected:
        warnings.warn(f"folded {len(folded)} of {len(norms)} layers; not {_listed(unexpected)}", stacklevel=2)
    return model


class Folded(nn.Identity):
    """Where a norm layer was, until it was folded into the layer before."""


class FoldedIntoLinear(Folded):
    """Where a norm layer was, until it was folded into a linear layer: true only of input (N, C)."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() != 2:
            raise ValueError(
                "a norm layer was folded into a linear layer, which is right for an input (N, C) alone, and this one "
                f"has shape {tuple(input.shape)}; serve this model without betternorm.fold"
            )
        return input


# ---- what can be folded ----


def _stays(norm: _BatchNorm) -> str | None:
    """Why a layer is not to be folded at all."""
    if isinstance(norm, GroupedBatchNorm):
        if not norm._alpha_is(0):
            return f"it has alpha {alpha_text(norm.alpha)}"
        if norm.channels_per_group > 1:
            return f"it has groups of {norm.channels_per_group} channels"
    return None


def _cannot_fold(norm: _BatchNorm, before: nn.Module | str | None, shared: set[nn.Module]) -> str | None:
    reason = _stays(norm)
    if reason is not None:
        return reason
    if norm.running_mean is None or norm.running_var is None:
        return "it has no moving averages"
    if before is None:
        return "torch.fx cannot trace the code around it"
    if isinstance(before, str):
        return before
    for module, called in ((norm, "it"), (before, "the layer before it")):
        if module in shared:
            return f"{called} shares parameters, or is used in two places"
        if not _is_known(module):
            return f"{called} is a {type(module).__name__}, whose forward pass is its own"
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{called} has hooks"
        if is_parametrized(module):
            return f"{called} is parametrised"
    if isinstance(before, TRANSPOSED) and before.groups > 1:
        return "the transposed convolution before it has groups"
    channels = before.out_features if isinstance(before, nn.Linear) else before.out_channels
    if norm.num_features != channels:
        return f"the layer before it has {channels} channels, and it has {norm.num_features}"
    return None


def _is_known(module: nn.Module) -> bool:
    kind = type(module)
    timm = kind.__module__.startswith("timm.layers") and kind.__name__ in _KNOWN_TIMM
    return timm or kind.forward in _KNOWN_FORWARDS or isinstance(module, BatchRenorm)


def _shared(model: nn.Module) -> set[nn.Module]:
    """Modules that have two names, and those that share a parameter with another."""
    names = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    tied = {module for modules in owners.values() if len(modules) > 1 for module in modules}
    return tied | {module for module, count in names.items() if count > 1}


# ---- what comes before a layer ----


class _Tracer(Tracer):
    """Records calls of layers, and does not look into them."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        kinds = (_BatchNorm, *CONVOLUTIONS, *TRANSPOSED, nn.Linear)
        return isinstance(m, kinds) or super().is_leaf_module(m, module_qualified_name)


def _layers_before(model: nn.Module) -> dict[nn.Module, nn.Module | str]:
    """For every norm layer that is seen, the layer whose output it alone uses, or why there is none."""
    found: dict[nn.Module, nn.Module | str] = {}
    for part, graph in _graphs(model):
        modules = dict(part.named_modules())
        called = Counter(modules[str(node.target)] for node in graph.nodes if node.op == "call_module")
        read = {str(node.target).rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}
        found |= {module: UNUSED for module in part.modules() if isinstance(module, _BatchNorm)}
        for node in graph.nodes:
            if node.op == "call_module" and isinstance(modules[str(node.target)], _BatchNorm):
                found[modules[str(node.target)]] = _layer_before(node, modules, called, read)
    return found


def _layer_before(
    node: Node, modules: dict[str, nn.Module], called: Counter[nn.Module], read: set[str]
) -> nn.Module | str:
    given = node.args[0] if node.args else next(iter(node.kwargs.values()), None)
    if not isinstance(given, Node) or given.op == "placeholder":
        return "it comes first"
    if given.op != "call_module":
        return f"it follows {getattr(given.target, '__name__', given.target)!r}"
    layer = modules[str(given.target)]
    if not isinstance(layer, (*CONVOLUTIONS, *TRANSPOSED, nn.Linear)):
        return f"it follows a {type(layer).__name__}"
    if len(given.users) > 1:
        return "the output of the layer before it is used elsewhere too"
    if called[layer] > 1 or called[modules[str(node.target)]] > 1:
        return "it, or the layer before it, is used twice"
    if str(given.target) in read or str(node.target) in read:
        return "its parameters, or those of the layer before it, are read elsewhere too"
    return layer


def _graphs(module: nn.Module) -> Iterator[tuple[nn.Module, Graph]]:
    """The graph of a module, or of the largest of its parts that can be traced."""
    if not any(isinstance(inner, _BatchNorm) for inner in module.modules()) or isinstance(module, _BatchNorm):
        return
    try:
        parameters = inspect.signature(module.forward).parameters.values()
        given = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield module, _Tracer().trace(module, given)
    except Exception:  # whatever a forward pass does with something that is not a tensor
        for child in module.children():
            yield from _graphs(child)


# ---- the new layers ----


def _fold(layer: nn.Module, norm: _BatchNorm) -> nn.Module:
    """Change the weights of ``layer``, and return what takes the place of ``norm``."""
    assert isinstance(layer.weight, Tensor)
    bias = layer.bias
    assert bias is None or isinstance(bias, Tensor)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    statistics = (norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias)
    with torch.no_grad():
        if isinstance(layer, nn.Linear):
            layer.weight, layer.bias = fuse_linear_bn_weights(layer.weight, bias, *statistics)
        else:
            layer.weight, layer.bias = fuse_conv_bn_weights(
                layer.weight, bias, *statistics, transpose=isinstance(layer, TRANSPOSED)
            )
    folded = FoldedIntoLinear() if isinstance(layer, nn.Linear) else Folded()
    # A norm layer has children only in timm: dropout and activation.
    children = [child for child in norm.children() if not isinstance(child, nn.Identity)]
    return nn.Sequential(folded, *children).eval() if children else folded.eval()


def _listed(reasons: dict[str, str]) -> str:
    items = list(reasons.items())
    more = f"; and {len(items) - _NAMED_IN_WARNING} more" if len(items) > _NAMED_IN_WARNING else ""
    return "; ".join(f"{_called(name)} ({reason})" for name, reason in items[:_NAMED_IN_WARNING]) + more
