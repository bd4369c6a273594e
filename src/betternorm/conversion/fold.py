"""Folding norm layers into the convolution or linear layer before them, for serving.

At inference batch norm multiplies every channel by a number and adds another, which the weights of the preceding layer
can absorb. A layer with alpha depends on the example and stays.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_map

from betternorm import example, third_party
from betternorm.conversion.convert import Change, Changes, _called, _check_stored_methods, _describe
from betternorm.conversion.preceding import TRANSPOSED, UNUSED, layers_before, optional_arguments, run
from betternorm.layers import GroupedBatchNorm
from betternorm.layers.checks import alpha_text

M = TypeVar("M", bound=nn.Module)

_NAMED_IN_WARNING = 3
# The largest difference that rounding may cause, relative to the largest output.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


def fold(model: M, example_input: Any = None, *, verbose: bool = False) -> M:
    """Fold norm layers without alpha into the convolution or linear layer before them, in place, for serving.

    The outputs stay the same up to rounding. A norm layer is folded only if nothing else uses the output or the
    parameters of the layer before it. Layers with a nonzero alpha, layers with channel groups and layers for which this
    cannot be shown are left unchanged; a warning names the latter.

    - Without ``example_input``, the model has to be traceable as a whole by ``torch.fx``.
    - With ``example_input``, the model is run in evaluation mode, and a norm layer is folded if it and the layer before
      it are called exactly once, one on the output of the other, and no other operation uses this output or the
      parameters of either layer. Afterwards the outputs are compared with those before; if they differ, the model is
      restored and an error is raised.

    Neither sees code that does not run: other methods than ``forward``, branches that are taken for other input values,
    and flags that are changed later. Layers that another method of their parent uses alone are left unchanged, flags of
    a module are tried with both values, and optional arguments of ``forward`` have to be the same as in the example, or
    the folded model raises an error. What remains is up to you: do not fold a model whose forward pass depends on the
    values of its input.

    The model is left in evaluation mode and cannot be trained any more; keep the original. Activations inside a norm
    layer (timm's BatchNormAct2d) are kept.

    Args:
        model: the model.
        example_input: what the model is called with: a tensor, a tuple of arguments or a dict of keyword arguments.
        verbose: print a table of what was folded and why the rest was not.

    Returns:
        ``model``.

    Raises:
        ValueError: if there is nothing to fold, or if the outputs for the example differ afterwards.

    Examples::

        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        >>> fold(model)
        Sequential(
          (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
          (1): Folded()
          (2): ReLU()
        )
    """
    third_party.check_not_wrapped(model)
    names = {module: name for name, module in model.named_modules()}
    norms = [module for module in names if isinstance(module, _BatchNorm)]
    if not norms:
        raise ValueError("nothing to fold: the model has no batch norm layer")
    if all(_alpha_is_nonzero(norm) for norm in norms):
        raise ValueError(
            f"nothing to fold: all {len(norms)} batch norm layers have alpha > 0, and such layers depend on the "
            "example; export the model directly, or tune with tune_alpha(model, loader, layers=3) and fold the others"
        )
    modes = {module: module.training for module in names}
    model.eval()
    # Everything is planned before anything is changed: an error leaves the model as it was.
    try:
        before = layers_before(model, example_input)
        shared = _shared(model)
        reasons = {norm: _cannot_fold(norm, before[norm], shared) for norm in norms}
        folded = [norm for norm in norms if reasons[norm] is None]
        if not folded:
            raise ValueError(f"nothing to fold: {_listed({names[norm]: str(reasons[norm]) for norm in norms})}")
        report = [
            Change(
                names[norm], _describe(norm), f"in {names[before[norm]]}" if norm in folded else "", reasons[norm] or ""
            )
            for norm in norms
        ]
        _check_stored_methods(model, dict.fromkeys(folded, Folded))
        _replace(model, {norm: before[norm] for norm in folded}, example_input)  # type: ignore[misc]
    except BaseException:
        for module, training in modes.items():
            module.training = training
        raise
    if verbose:
        print(Changes(report))
    unexpected = {
        names[norm]: str(reasons[norm])
        for norm in norms
        if reasons[norm] not in (None, UNUSED) and not (isinstance(norm, GroupedBatchNorm) and _stays(norm))
    }
    if unexpected and not verbose:
        warnings.warn(f"folded {len(folded)} of {len(norms)} layers; not {_listed(unexpected)}", stacklevel=2)
    return model


class Folded(nn.Module):
    """A norm layer after it was folded into the layer before it. Its dropout and activation still run."""

    _then: tuple[str, ...] = ()

    def forward(self, input: Tensor) -> Tensor:
        for name in self._then:
            input = getattr(self, name)(input)
        return input

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias", "running_mean", "running_var", "eps"):
            raise AttributeError(
                f"no attribute {name!r}: betternorm.fold has folded this norm layer into the layer before it; "
                "functions that fuse or reparameterize have to be called before betternorm.fold"
            )
        return super().__getattr__(name)


class FoldedIntoLinear(Folded):
    """A norm layer after it was folded into a linear layer, which is correct for inputs (N, C) only."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() != 2:
            raise ValueError(
                "a norm layer was folded into a linear layer, which is correct for an input (N, C) only, and this one "
                f"has shape {tuple(input.shape)}; serve this model without betternorm.fold"
            )
        return super().forward(input)


# ---- which layers can be folded ----


def _alpha_is_nonzero(norm: nn.Module) -> bool:
    return isinstance(norm, GroupedBatchNorm) and not norm._alpha_is(0)


def _stays(norm: GroupedBatchNorm) -> str | None:
    """Why this layer depends on the example."""
    if not norm._alpha_is(0):
        return f"it has alpha {alpha_text(norm.alpha)}"
    if norm.channels_per_group > 1:
        return f"it has groups of {norm.channels_per_group} channels"
    return None


def _cannot_fold(norm: _BatchNorm, before: nn.Module | str, shared: set[nn.Module]) -> str | None:
    if isinstance(norm, GroupedBatchNorm) and _stays(norm):
        return _stays(norm)
    if norm.running_mean is None or norm.running_var is None:
        return "it has no moving averages"
    if isinstance(before, str):
        return before
    for module, called in ((norm, "it"), (before, "the layer before it")):
        if module in shared:
            return f"{called} shares parameters, or is used in two places"
        own = third_party.own_behavior(module, (*third_party.TIMM_NORMS, *third_party.TIMM_CONVOLUTIONS))
        if is_parametrized(module) or third_party.is_fully_sharded(module):
            return f"{called} is parametrized or sharded"
        if own is not None:
            return own if module is norm else f"of the layer before it: {own}"
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{called} has hooks"
    channels = before.out_features if isinstance(before, nn.Linear) else before.out_channels
    if norm.num_features != channels:
        return f"the layer before it has {channels} channels, and it has {norm.num_features}"
    return None


def _shared(model: nn.Module) -> set[nn.Module]:
    """Modules that have two names, and those that share a parameter with another."""
    names = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    tied = {module for modules in owners.values() if len(modules) > 1 for module in modules}
    return tied | {module for module, count in names.items() if count > 1}


class _SameArguments:
    """A forward pre-hook of a folded model: arguments that may select layers have to be those that it was folded with.

    These are optional arguments, also in ``*args`` and ``**kwargs``, and required ones that are plain values. Tensors
    may have other values.
    """

    def __init__(self, model: nn.Module, example_input: Any) -> None:
        parameters = inspect.signature(model.forward).parameters.values()
        self.defaults = optional_arguments(model)
        self.positions = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.required = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)} - {
            *self.defaults
        }
        self.values = self._values(*example.copied_arguments(example_input))
        self.needed = bool(self.values) or any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)

    def _values(self, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        names = [*self.positions, *(f"argument {number}" for number in range(len(self.positions) + 1, len(args) + 1))]
        passed = {**self.defaults, **dict(zip(names, args, strict=False)), **kwargs}
        return {
            name: tree_map(_without_values, value)
            for name, value in passed.items()
            if name not in self.required or isinstance(value, (bool, int, float, str, type(None)))
        }

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        values = self._values(args, kwargs)
        for name in {**self.values, **values}:
            now, then = (f"{name}={of[name]!r}" if name in of else f"no {name}" for of in (values, self.values))
            if now != then and (name not in values or name not in self.values or values[name] != self.values[name]):
                raise ValueError(
                    f"{now}: this model was folded with {then}, and another value may "
                    "use layers that are gone; fold it with an example_input that has this value"
                )


def _without_values(value: Any) -> Any:
    return "a tensor" if isinstance(value, Tensor) else value


# ---- folding ----


def _replace(model: nn.Module, before: dict[nn.Module, nn.Module], example_input: Any) -> None:
    """Fold all pairs; with an example input, restore them if the outputs differ."""
    if example_input is None:
        for norm, layer in before.items():
            _fold(layer, norm)
        return
    expected = example.tensors_in(run(model, example_input))
    saved = [(norm, type(norm), dict(norm.__dict__), layer, dict(layer._parameters)) for norm, layer in before.items()]
    for norm, layer in before.items():
        _fold(layer, norm)
    try:
        error = _largest_error(expected, example.tensors_in(run(model, example_input)))
    except BaseException:
        _restore(saved)
        raise
    tolerance = max((_TOLERANCE.get(tensor.dtype, 1e-3) for tensor in expected), default=0.0)
    if not error <= tolerance:  # true for NaN too
        folded = [
            (norm, type(norm), dict(norm.__dict__), layer, dict(layer._parameters)) for norm, _, _, layer, _ in saved
        ]
        _restore(saved)
        # A model that amplifies rounding differs as much for an input that is rounded in another way.
        rounding = _largest_error(expected, example.tensors_in(run(model, tree_map(_rounded, example_input))))
        if not error <= 10 * rounding < 1:
            raise ValueError(
                f"the outputs for example_input differ by {error:.1e} of the largest value after folding, so the model "
                "was restored; it uses its layers in a way that one call does not show, or its outputs are random"
            )
        _restore(folded)
    same_arguments = _SameArguments(model, example_input)
    if same_arguments.needed:
        model.register_forward_pre_hook(same_arguments, with_kwargs=True)


def _restore(saved: list[tuple[nn.Module, type[nn.Module], dict[str, Any], nn.Module, dict[str, Any]]]) -> None:
    for norm, kind, attributes, layer, parameters in saved:
        norm.__dict__.clear()
        norm.__dict__.update(attributes)
        norm.__class__ = kind
        layer._parameters.update(parameters)


def _rounded(value: Any) -> Any:
    """An input that differs by rounding."""
    if not (isinstance(value, Tensor) and value.is_floating_point()):
        return value
    return value * (1 + 4 * torch.finfo(value.dtype).eps)


def _largest_error(expected: list[Tensor], actual: list[Tensor]) -> float:
    """The largest difference, relative to the largest value of the output."""
    if [tensor.shape for tensor in expected] != [tensor.shape for tensor in actual]:
        return float("inf")
    largest = 0.0
    for before, after in zip(expected, actual, strict=True):
        if before.numel() and not torch.equal(before, after):
            difference = (before.double() - after.double()).abs().max()
            error = float(difference / before.abs().max().double().clamp(min=1e-30))
            largest = error if not error <= largest else largest  # NaN is the largest
    return largest


def _fold(layer: nn.Module, norm: nn.Module) -> None:
    """Change the weights of ``layer``, and turn ``norm`` into :class:`Folded`, the same object."""
    assert isinstance(norm, _BatchNorm)
    buffers = norm._buffers
    weight, bias, mean, var = layer.weight, layer.bias, buffers["running_mean"], buffers["running_var"]
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    assert mean is not None
    assert var is not None
    with torch.no_grad():
        scale = (var.double() + norm.eps).rsqrt()
        scale = scale if norm.weight is None else scale * norm.weight.double()
        shift = -mean.double() * scale if bias is None else (bias.double() - mean.double()) * scale
        shift = shift if norm.bias is None else shift + norm.bias.double()
        if isinstance(layer, TRANSPOSED):  # (in, out / groups, *)
            by_group = weight.double().unflatten(0, (layer.groups, -1))
            folded = by_group * scale.view(layer.groups, 1, -1, *(1,) * (weight.dim() - 2))
            folded = folded.flatten(0, 1)
        else:
            folded = weight.double() * scale.view(-1, *(1,) * (weight.dim() - 1))
    layer._parameters["weight"] = _parameter(folded, weight)
    layer._parameters["bias"] = _parameter(shift, weight)
    then = norm._then if isinstance(norm, GroupedBatchNorm) else tuple(n for n in ("drop", "act") if n in norm._modules)
    state = nn.Module().eval().__dict__ | {"_modules": norm._modules}
    norm.__dict__.clear()
    norm.__dict__.update(state)
    norm.__class__ = FoldedIntoLinear if isinstance(layer, nn.Linear) else Folded  # type: ignore[assignment]
    if then:
        norm.__dict__["_then"] = then


def _parameter(value: Tensor, like: Tensor) -> nn.Parameter:
    value = value.to(like.dtype)
    if value.dim() == like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last):
        value = value.contiguous(memory_format=torch.channels_last)
    return nn.Parameter(value, like.requires_grad)


def _listed(reasons: dict[str, str]) -> str:
    items = list(reasons.items())
    more = f"; and {len(items) - _NAMED_IN_WARNING} more" if len(items) > _NAMED_IN_WARNING else ""
    return "; ".join(f"{_called(name)} ({reason})" for name, reason in items[:_NAMED_IN_WARNING]) + more
