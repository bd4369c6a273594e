"""Folding norm layers into the convolution or linear layer before them, for serving.

At inference batch norm multiplies every channel by a number and adds another, which the weights of the preceding layer
can absorb. A layer with alpha depends on the example and stays.
"""

from __future__ import annotations

import contextlib
import dis
import gc
import inspect
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node, Tracer
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from betternorm import example, third_party
from betternorm.conversion.convert import Change, Changes, _called, _check_stored_methods, _describe
from betternorm.layers import GroupedBatchNorm
from betternorm.layers.checks import alpha_text

M = TypeVar("M", bound=nn.Module)

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
UNUSED = "it is not used at inference"
_ABSORBING = (*CONVOLUTIONS, *TRANSPOSED, nn.Linear)
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
        before = _layers_before(model, example_input)
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


# ---- which layer comes before ----

Before = dict[nn.Module, nn.Module | str]  # for every norm layer: the layer whose output it alone uses, or a reason


@dataclass(frozen=True)
class _Evidence:
    """What one trace or one call of a model shows."""

    before: Before
    called: set[nn.Module]
    executed: set[CodeType]


def _layers_before(model: nn.Module, example_input: Any) -> Before:
    """For every norm layer the layer whose output it alone uses, or why there is none."""

    def observe() -> _Evidence:
        return _by_trace(model) if example_input is None else _by_call(model, example_input)

    if example_input is None:
        reason = _not_traceable(model)
        if reason is not None:
            return dict.fromkeys(_norms(model), f"{reason}; pass example_input")
    evidence = observe()
    return evidence.before | _used_by_methods(model, evidence) | _dependent_on_flags(model, evidence, observe)


def _norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


class _Tracer(Tracer):
    """Records calls of layers without tracing into them."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, (_BatchNorm, *_ABSORBING)) or super().is_leaf_module(m, module_qualified_name)


def _not_traceable(model: nn.Module) -> str | None:
    optional = _optional_arguments(model)
    if "forward" in model.__dict__:
        return "the forward of the model was replaced on the instance"
    if optional:
        return f"forward has optional arguments ({', '.join(optional)})"
    try:
        _traced(model)
    except Exception as error:  # whatever a forward pass does with something that is not a tensor
        return f"torch.fx cannot trace the model as a whole ({type(error).__name__})"
    return None


def _traced(model: nn.Module) -> Graph:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _Tracer().trace(model)


def _by_trace(model: nn.Module) -> _Evidence:
    """What tracing the whole model shows."""
    with _executed_code() as executed:
        graph = _traced(model)
    modules = dict(model.named_modules())
    called = Counter(modules[str(node.target)] for node in graph.nodes if node.op == "call_module")
    read = {str(node.target).rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}
    before: Before = dict.fromkeys(_norms(model), UNUSED)
    for node in graph.nodes:
        if node.op == "call_module" and isinstance(modules[str(node.target)], _BatchNorm):
            before[modules[str(node.target)]] = _before_node(node, modules, called, read)
    return _Evidence(before, set(called), executed)


def _before_node(
    node: Node, modules: dict[str, nn.Module], called: Counter[nn.Module], read: set[str]
) -> nn.Module | str:
    source = node.args[0] if node.args else next(iter(node.kwargs.values()), None)
    if not isinstance(source, Node) or source.op == "placeholder":
        return "it comes first"
    if source.op != "call_module":
        return f"it follows {getattr(source.target, '__name__', source.target)!r}"
    layer = modules[str(source.target)]
    if not isinstance(layer, _ABSORBING):
        return f"it follows a {type(layer).__name__}"
    if len(source.users) > 1:
        return "the output of the layer before it is used elsewhere too"
    if called[layer] > 1 or called[modules[str(node.target)]] > 1:
        return "it, or the layer before it, is used twice"
    if str(source.target) in read or str(node.target) in read:
        return "its parameters, or those of the layer before it, are read elsewhere too"
    return layer


def _by_call(model: nn.Module, example_input: Any) -> _Evidence:
    """What one call of the model shows."""
    with _executed_code() as executed, _Calls(model) as calls:
        output = _run(model, example_input)
    return _Evidence(calls.layers_before(output), set(calls.calls), executed)


def _run(model: nn.Module, example_input: Any) -> Any:
    try:
        return example.run(model, example_input)
    except Exception as error:
        first_line = (str(error).splitlines() or ["no message"])[0]
        raise ValueError(
            f"the model does not accept example_input in evaluation mode: {type(error).__name__}: {first_line}"
        ) from error


@contextlib.contextmanager
def _executed_code() -> Iterator[set[CodeType]]:
    """The code of all Python functions that are called inside."""
    executed: set[CodeType] = set()
    previous = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: executed.add(frame.f_code) if event == "call" else None)
    try:
        yield executed
    finally:
        sys.setprofile(previous)


class _Calls(TorchDispatchMode):
    """Records which layer's output a norm layer gets, and every other use of that output and of the parameters.

    Hooks record the calls of layers. Operations are recorded by a dispatch mode, which also sees those that do not go
    through a layer.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers = [m for m in model.modules() if isinstance(m, (_BatchNorm, *_ABSORBING))]
        self.owners = {
            id(tensor): module
            for module in self.layers
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None
        }
        self.calls: Counter[nn.Module] = Counter()
        self.running: list[nn.Module] = []
        self.outputs: dict[int, tuple[nn.Module, weakref.ref[Tensor]]] = {}
        self.before: Before = {}
        self.used_elsewhere: set[nn.Module] = set()
        self.read_elsewhere: set[nn.Module] = set()
        self.hooks: list[Any] = []

    def __enter__(self) -> _Calls:
        for layer in self.layers:
            self.hooks += [
                layer.register_forward_pre_hook(self._enter_layer, with_kwargs=True),
                layer.register_forward_hook(self._leave_layer),
            ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self.hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                owner = self.owners.get(id(tensor))
                if owner is not None and owner not in self.running:
                    self.read_elsewhere.add(owner)
                source = self._source(tensor)
                if source is not None and not (self.running and self.before.get(self.running[-1]) is source):
                    self.used_elsewhere.add(source)
        return func(*args, **(kwargs or {}))

    def _source(self, tensor: Tensor) -> nn.Module | None:
        """The layer that returned this tensor."""
        layer, reference = self.outputs.get(id(tensor), (None, None))
        return layer if reference is not None and reference() is tensor else None

    def _enter_layer(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        self.calls[layer] += 1
        self.running.append(layer)
        if isinstance(layer, _BatchNorm):
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            source = self._source(tensors[0]) if tensors else None
            self.before[layer] = source or "it does not get the output of a convolution or linear layer"

    def _leave_layer(self, layer: nn.Module, args: Any, output: Any) -> None:
        self.running.pop()
        if isinstance(layer, _ABSORBING) and isinstance(output, Tensor):
            self.outputs[id(output)] = (layer, weakref.ref(output))

    def layers_before(self, output: Any) -> Before:
        """The result. ``output``, of the model, keeps the tensors alive that it contains."""
        gc.collect()
        kept = {layer for layer, reference in self.outputs.values() if reference() is not None}
        del output
        receivers = Counter(source for source in self.before.values() if isinstance(source, nn.Module))
        found: Before = {}
        for norm in (module for module in self.layers if isinstance(module, _BatchNorm)):
            layer = self.before.get(norm, UNUSED)
            if isinstance(layer, nn.Module):
                if layer in self.used_elsewhere or layer in kept or receivers[layer] > 1:
                    layer = "the output of the layer before it is used elsewhere too"
                elif self.calls[layer] > 1 or self.calls[norm] > 1:
                    layer = "it, or the layer before it, is used twice"
                elif layer in self.read_elsewhere or norm in self.read_elsewhere:
                    layer = "its parameters, or those of the layer before it, are read elsewhere too"
            found[norm] = layer
        return found


# ---- what one trace or call does not show ----


def _used_by_methods(model: nn.Module, evidence: _Evidence) -> Before:
    """Norm layers whose preceding layer is used without them by a method that did not run."""
    reasons: Before = {}
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, []).append((parent, name))
    uses: dict[FunctionType, set[str]] = {}
    for norm, layer in evidence.before.items():
        for parent, name in places.get(layer, []) if isinstance(layer, nn.Module) else []:
            own_names = {other for other, child in parent._modules.items() if child is norm}
            for function in _methods(parent):
                if function.__name__ == "forward" or function.__code__ in evidence.executed:
                    continue
                if function not in uses:
                    uses[function] = _used_attributes(function)
                names = uses[function]
                if name in names and not own_names & names:
                    reasons[norm] = (
                        f"{type(parent).__name__}.{function.__name__}, which forward does not call, uses the layer "
                        "before it without it"
                    )
    return reasons


def _methods(module: nn.Module) -> list[FunctionType]:
    """The methods of a class that is not torch's, except for those that set up or load."""
    setup = ("__", "init", "_init", "reset", "_reset", "load", "_load", "set", "_set")
    return [
        inspect.unwrap(value)
        for kind in type(module).__mro__
        if not kind.__module__.startswith(("torch.nn.modules", "betternorm.layers"))
        for name, value in vars(kind).items()
        if isinstance(value, FunctionType) and not name.startswith(setup)
    ]


def _used_attributes(function: FunctionType) -> set[str]:
    """Attributes that are called or passed on, or whose parameters are read; not those of which a size is read."""
    instructions = [i for i in dis.get_instructions(function) if i.opname not in ("CACHE", "NOP")]
    followed = zip(instructions, [*instructions[1:], instructions[-1]], strict=True)
    return {
        str(one.argval)
        for one, after in followed
        if one.opname in _ATTRIBUTE
        and (after.opname not in _ATTRIBUTE or after.argval in ("weight", "bias", "forward"))
    }


_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")


def _dependent_on_flags(model: nn.Module, evidence: _Evidence, observe: Callable[[], _Evidence]) -> Before:
    """Norm layers that are used in another way if a bool attribute of a module has the other value."""
    flags: dict[tuple[type[nn.Module], str], list[nn.Module]] = {}
    for module in model.modules():
        if any(isinstance(child, _BatchNorm) for child in module.modules()):
            names = {n for f in _methods(module) if f.__code__ in evidence.executed for n in f.__code__.co_names}
            for name in names - {"training"}:
                if isinstance(module.__dict__.get(name), bool):
                    flags.setdefault((type(module), name), []).append(module)
    reasons: Before = {}
    for (kind, name), modules in flags.items():
        values = [module.__dict__[name] for module in modules]
        try:
            for module, value in zip(modules, values, strict=True):
                module.__dict__[name] = not value
            other = observe()
        except Exception:  # the model does not run in this way
            continue
        finally:
            for module, value in zip(modules, values, strict=True):
                module.__dict__[name] = value
        for norm, layer in evidence.before.items():
            if isinstance(layer, nn.Module) and other.before[norm] is not layer and {norm, layer} & other.called:
                reasons[norm] = f"{kind.__name__}.{name}={values[0]} decides whether it follows the layer before it"
    return reasons


def _optional_arguments(model: nn.Module) -> dict[str, Any]:
    parameters = inspect.signature(model.forward).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


class _SameArguments:
    """A forward pre-hook of a folded model: optional arguments have to be those that it was folded with."""

    def __init__(self, model: nn.Module, example_input: Any) -> None:
        self.defaults = _optional_arguments(model)
        self.positions = [*inspect.signature(model.forward).parameters]
        self.values = self._values(*example.copied_arguments(example_input))

    def _values(self, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        passed = {**dict(zip(self.positions, args, strict=False)), **kwargs}
        values = {name: passed.get(name, default) for name, default in self.defaults.items()}
        return {name: "a tensor" if isinstance(value, Tensor) else value for name, value in values.items()}

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        for name, value in self._values(args, kwargs).items():
            if value != self.values[name]:
                raise ValueError(
                    f"{name}={value!r}: this model was folded with {name}={self.values[name]!r}, and another value may "
                    "use layers that are gone; fold it with an example_input that has this value"
                )


# ---- folding ----


def _replace(model: nn.Module, before: dict[nn.Module, nn.Module], example_input: Any) -> None:
    """Fold all pairs; with an example input, restore them if the outputs differ."""
    if example_input is None:
        for norm, layer in before.items():
            _fold(layer, norm)
        return
    expected = example.tensors_in(_run(model, example_input))
    saved = [(norm, type(norm), dict(norm.__dict__), layer, dict(layer._parameters)) for norm, layer in before.items()]
    for norm, layer in before.items():
        _fold(layer, norm)
    error = _largest_error(expected, example.tensors_in(_run(model, example_input)))
    tolerance = max((_TOLERANCE.get(tensor.dtype, 1e-3) for tensor in expected), default=0.0)
    if not error <= tolerance:  # true for NaN too
        folded = [
            (norm, type(norm), dict(norm.__dict__), layer, dict(layer._parameters)) for norm, _, _, layer, _ in saved
        ]
        _restore(saved)
        # A model that amplifies rounding differs as much for an input that is rounded in another way.
        rounding = _largest_error(expected, example.tensors_in(_run(model, tree_map(_rounded, example_input))))
        if not error <= 10 * rounding < 1:
            raise ValueError(
                f"the outputs for example_input differ by {error:.1e} of the largest value after folding, so the model "
                "was restored; it uses its layers in a way that one call does not show, or its outputs are random"
            )
        _restore(folded)
    if _optional_arguments(model):
        model.register_forward_pre_hook(_SameArguments(model, example_input), with_kwargs=True)


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
