"""Which convolution or linear layer comes before each norm layer, and whether the norm layer alone uses its output."""

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
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph, Node, Tracer
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from betternorm import example

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
UNUSED = "it is not used at inference"
_ABSORBING = (*CONVOLUTIONS, *TRANSPOSED, nn.Linear)

Before = dict[nn.Module, nn.Module | str]  # for every norm layer: the layer whose output it alone uses, or a reason


@dataclass(frozen=True)
class _Evidence:
    """What one trace or one call of a model shows."""

    before: Before
    called: set[nn.Module]
    executed: set[CodeType]


def layers_before(model: nn.Module, example_input: Any) -> Before:
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
    optional = optional_arguments(model)
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
        output = run(model, example_input)
    return _Evidence(calls.result(output), set(calls.calls), executed)


def run(model: nn.Module, example_input: Any) -> Any:
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
            if isinstance(source, nn.Linear) and tensors[0].dim() > 2:
                self.before[layer] = "the outputs of the linear layer before it are not its channels"
            else:
                self.before[layer] = source or "it does not get the output of a convolution or linear layer"

    def _leave_layer(self, layer: nn.Module, args: Any, output: Any) -> None:
        self.running.pop()
        if isinstance(layer, _ABSORBING) and isinstance(output, Tensor):
            self.outputs[id(output)] = (layer, weakref.ref(output))

    def result(self, output: Any) -> Before:
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


def optional_arguments(model: nn.Module) -> dict[str, Any]:
    parameters = inspect.signature(model.forward).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
