"""The norm layers of a network, and how far decay on their gamma and beta can act (section 3.3 of the paper).

Weight decay on gamma and beta regularises only where no later normalisation undoes it. Two answers are given for
every layer: whether a *path* to the output meets no other normalisation, which is the paper's criterion, and the
measured *effect* of scaling the layer on the output, which is finer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin

from betternorm.display.picture import draw
from betternorm.display.progress import track
from betternorm.display.tables import table

# An effect above this counts as one: what rounding and a layer's eps leave of an exact cancellation is far below.
ACTS = 0.01

# Scaling by either factor moves a proportional output by the same relative amount, |c - 1| / (c + 1).
_FACTORS = (0.5, 2.0)
_FULL_CHANGE = 1 / 3

# Of a layer's eps while measuring: what eps keeps a normalisation from undoing, deep networks amplify.
_EPS_LEFT = 1e-3

# Random directions in the space of outputs, one backward pass for each.
_PROBES = 3

_LARGEST_PICTURE = 80


def norm_report(
    model: nn.Module,
    example_input: Any,
    *,
    batch_size: int | None = None,
    quick: bool = False,
    norm_types: tuple[type[nn.Module], ...] = (),
    progress: bool | None = False,
) -> NormReport:
    r"""Say of every norm layer what it is, whether decay on its gamma and beta can act, and what is advised.

    The *path* is read off the autograd graph of one forward pass, so any model that runs will do, whatever its
    control flow. The *effect* compares the output :math:`y` with the output :math:`y_c` after the gamma and beta of
    one layer were multiplied by :math:`c`:

    .. math:: \frac{\lVert y_c - y \rVert}{\lVert y_c \rVert + \lVert y \rVert} \Big/ \frac{|c - 1|}{c + 1}

    averaged over c = 1/2 and c = 2 and cut off at 1. It is 0 where a later normalisation undoes the scaling and 1
    where the output scales along. With several outputs the largest effect counts. ``joint_effect`` is the same for all
    layers without a path scaled together, as decay at a common rate does: often 0 where none of the single effects is,
    for a normalisation undoes the scaling of a sum whose terms are scaled alike.

    Everything is measured in training mode, with the statistics of the batch and without dropout or stochastic depth,
    and at the present weights. A gamma or a weight matrix that is all zero (the last gamma of a residual branch, a
    fresh classifier) would hide what lies behind it; while measuring, such a gamma is 1 and such a matrix is random,
    and the eps of the norm layers is a thousandth of its value. Parameters, buffers, modes and random state are left
    as they were, bit by bit.

    Args:
        model: any module. Its norm layers are recognised by type: torch's, timm's, those of this library.
        example_input: what the model is called with: a tensor, a tuple of arguments or a dict of keywords.
        batch_size: the batch size of training, for the number of values per group. Default: the example's.
        quick: estimate the effects of all layers at once from three backward passes, instead of measuring each with
            two forward passes. It is the effect of small changes, right to within a factor of about three, and 0 where
            scaling is undone.
        norm_types: further classes to be taken as norm layers, with their gamma in ``weight`` and beta in ``bias``.
        progress: show a bar; None shows it on a terminal.

    Examples::

        >>> net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8))
        >>> report = norm_report(net, torch.randn(16, 8))
        >>> [layer.path for layer in report]
        [False, True]
    """
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be 1 or more")
    model = getattr(model, "_orig_mod", model)  # a compiled module has no modules of its own to look at
    layers = norm_layers(model, norm_types)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no norm layers; classes of your own can be named with norm_types=(...)"
        )
    with _Undisturbed(model) as visit:
        visit.fill_zeros(layers)
        visit.shrink_eps(layers)
        trace = _trace(visit, layers, example_input)
        scaled = _scaled_together(layers, trace)
        if quick:
            effects = _estimate_effects(trace, scaled)
        else:
            base = [output.detach() for output in trace.outputs]
            trace.outputs.clear()  # lets the graph go before the other passes need the memory
            effects = _measure_effects(visit, scaled, example_input, base, progress)
    batch = batch_size or trace.batch_size
    return NormReport(
        [_describe(name, layer, trace, batch, effects.get(name)) for name, layer in layers.items()],
        batch_size=batch,
        joint_effect=effects.get(None),
        edges=trace.edges,
        quick=quick,
    )


@dataclass(frozen=True)
class NormLayer:
    """One row of a :class:`NormReport`.

    ``path`` is None where it cannot be read (the layer was not called, or ran without gradients), ``effect`` is None
    where there is no gamma or beta to scale.
    """

    name: str
    kind: str
    channels: int | None
    groups: str
    values_per_group: int | None
    calls: int
    path: bool | None
    effect: float | None
    advised: str
    why: str

    @property
    def acts(self) -> bool:
        """Whether decay on this layer's gamma and beta can act."""
        return self.effect is not None and self.effect > ACTS


class NormReport:
    """What :func:`norm_report` found: rows to iterate over, a table to print, a picture to draw."""

    def __init__(
        self,
        layers: list[NormLayer],
        batch_size: int,
        joint_effect: float | None,
        edges: list[tuple[str, str]],
        quick: bool,
    ) -> None:
        self.layers, self.batch_size, self.joint_effect = layers, batch_size, joint_effect
        self.edges, self.quick = edges, quick

    def __iter__(self) -> Iterator[NormLayer]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, name: str) -> NormLayer:
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(f"no norm layer {name!r}; there are {', '.join(repr(layer.name) for layer in self.layers)}")

    @property
    def with_path(self) -> list[NormLayer]:
        """The layers with a path to the output that meets no other normalisation."""
        return [layer for layer in self.layers if layer.path]

    @property
    def with_effect(self) -> list[NormLayer]:
        """The layers whose scaling the output feels."""
        return [layer for layer in self.layers if layer.acts]

    def to_dict(self) -> dict[str, Any]:
        """The report as numbers and strings, for JSON."""
        return {
            "batch_size": self.batch_size,
            "quick": self.quick,
            "joint_effect": self.joint_effect,
            "layers": [dataclasses.asdict(layer) for layer in self.layers],
            "edges": [list(edge) for edge in self.edges],
        }

    def __str__(self) -> str:
        head = ("layer", "kind", "channels", "statistics over", "values", "path", "effect", "advised")
        rows = [
            (
                layer.name or "(the model)",
                layer.kind,
                layer.channels,
                layer.groups,
                layer.values_per_group,
                {True: "yes", False: "no", None: None}[layer.path],
                None if layer.effect is None else f"{layer.effect:.3f}",
                layer.advised,
            )
            for layer in self.layers
        ]
        reasons: dict[tuple[str, str], int] = {}
        for layer in self.layers:
            reasons[layer.advised, layer.why] = reasons.get((layer.advised, layer.why), 0) + 1
        return "\n".join(
            [
                table(head, rows),
                "",
                self.summary(),
                *(f"  {advised} ({count}): {why}" for (advised, why), count in reasons.items()),
            ]
        )

    def summary(self) -> str:
        """The counts, in one line."""
        layers, estimated = f"norm layer{'s' * (len(self) != 1)}", "estimated " if self.quick else ""
        text = (
            f"{len(self)} {layers} at batch size {self.batch_size}: {len(self.with_path)} with a path to the output, "
            f"{len(self.with_effect)} whose {estimated}effect is above {ACTS}"
        )
        if self.joint_effect is not None:
            text += f"; effect of those without a path together: {self.joint_effect:.3f}"
        return text

    def to_svg(self) -> str:
        """The norm layers as a graph from input to output, darker where scaling has more effect."""
        if len(self) > _LARGEST_PICTURE:
            raise ValueError(f"{len(self)} norm layers are too many to draw; up to {_LARGEST_PICTURE} can be")
        return draw(self)


def norm_layers(model: nn.Module, norm_types: tuple[type[nn.Module], ...] = ()) -> dict[str, nn.Module]:
    """The norm layers of a model by name, each once; a norm layer inside another belongs to the outer one."""
    types = (*_norm_types(), *norm_types)
    found: dict[str, nn.Module] = {}
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, types) and module not in inside:
            found[name] = module
            inside.update(module.modules())
    return found


def gammas_and_betas(layer: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The scales and the shifts of a norm layer, with those of norm layers inside it."""
    norms = [module for module in layer.modules() if module is layer or isinstance(module, _norm_types())]

    def owned(attribute: str) -> list[nn.Parameter]:
        values = [getattr(module, attribute, None) for module in norms]
        return [value for value in values if isinstance(value, nn.Parameter)]

    return owned("weight"), owned("bias")


def guess_input(model: nn.Module, batch_size: int = 4) -> Tensor:
    """A random batch that the model accepts: by timm's configuration, or by the first layer and usual image sizes."""
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be 1 or more")
    generator = torch.Generator().manual_seed(0)
    first = next((p for p in model.parameters()), torch.empty(0))
    with _Undisturbed(model) as visit:
        for shape in _plausible_shapes(model):
            example = torch.randn(batch_size, *shape, generator=generator).to(first.device, first.dtype)
            try:
                visit.run(example)
            except Exception:
                continue
            return example
    raise ValueError(
        f"no example input could be guessed for {type(model).__name__}: give one, such as "
        f"example_input=torch.randn({batch_size}, 3, 224, 224)"
    )


# --- which modules are norm layers ----------------------------------------------------------------------------------

# Those of timm that are not subclasses of torch's.
_TIMM_NORMS = {
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
_RANDOM_DEPTH = {
    "timm.layers.drop": ("DropPath", "DropBlock2d"),
    "torchvision.ops.stochastic_depth": ("StochasticDepth",),
    "torchvision.ops.drop_block": ("DropBlock2d",),
}


def _norm_types() -> tuple[type[nn.Module], ...]:
    return (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, *_imported(_TIMM_NORMS))


def _imported(names: Mapping[str, Iterable[str]]) -> tuple[type[nn.Module], ...]:
    """The classes of other libraries; one that nobody has imported has no layers in any model."""
    return tuple(
        getattr(sys.modules[module], name)
        for module, classes in names.items()
        if module in sys.modules
        for name in classes
        if hasattr(sys.modules[module], name)
    )


# --- visiting a model without a trace -------------------------------------------------------------------------------


class _Undisturbed:
    """A visit to a model: training mode and gradients for everything inside, and all as before at the end."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        if any(isinstance(m, LazyModuleMixin) and m.has_uninitialized_params() for m in model.modules()):
            raise ValueError(f"{type(model).__name__} has lazy layers without a shape yet; run it once first")
        self._modes = [(module, module.training) for module in model.modules()]
        self._buffers = [(module, dict(module._buffers)) for module in model.modules()]
        self._buffer_values = [
            (buffer, buffer.detach().clone())
            for _, buffers in self._buffers
            for buffer in buffers.values()
            if buffer is not None
        ]
        self._gradients = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        self._filled: list[tuple[nn.Parameter, Tensor]] = []
        self._eps: list[tuple[Any, float]] = []
        self._devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})

    def __enter__(self) -> _Undisturbed:
        self.model.train()
        for module in self.model.modules():
            if isinstance(module, (_DropoutNd, *_imported(_RANDOM_DEPTH))):
                module.training = False
        for parameter, _ in self._gradients:
            if parameter.is_floating_point():
                parameter.requires_grad_(True)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore_buffers()
        with torch.no_grad():
            for parameter, value in self._filled:
                parameter.copy_(value)
        for parameter, requires_grad in self._gradients:
            parameter.requires_grad_(requires_grad)
        for module, training in self._modes:
            module.training = training
        for module, eps in self._eps:
            module.eps = eps

    def run(self, example_input: Any, grad: bool = False) -> Any:
        """One forward pass; every one starts from the same buffers and the same random state."""
        self._restore_buffers()  # before and not after: autograd refuses buffers that changed since the pass
        with torch.set_grad_enabled(grad), _same_randomness(self._devices):
            arguments, keywords = _arguments(example_input, grad)
            return self.model(*arguments, **keywords)

    def fill_zeros(self, layers: Mapping[str, nn.Module]) -> None:
        """Give a value to each gamma and each matrix that is all zero, and so hides what lies behind it."""
        gammas = {gamma for layer in layers.values() for gamma in gammas_and_betas(layer)[0]}
        with torch.no_grad():
            for parameter, _ in self._gradients:
                hides = parameter in gammas or parameter.dim() >= 2
                if not hides or not parameter.is_floating_point() or parameter.any():
                    continue
                self._filled.append((parameter, parameter.clone()))
                if parameter in gammas:
                    parameter.fill_(1.0)
                else:
                    generator = torch.Generator().manual_seed(len(self._filled))
                    deviation = (parameter.numel() / parameter.shape[0]) ** -0.5
                    parameter.copy_(deviation * torch.randn(parameter.shape, generator=generator))

    def shrink_eps(self, layers: Mapping[str, nn.Module]) -> None:
        """Let normalisations undo what they would undo but for their eps."""
        modules: list[Any] = [module for layer in layers.values() for module in layer.modules()]
        self._eps = [(module, module.eps) for module in modules if isinstance(getattr(module, "eps", None), float)]
        for module, eps in self._eps:
            module.eps = eps * _EPS_LEFT

    def _restore_buffers(self) -> None:
        for module, buffers in self._buffers:
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in self._buffer_values:
                buffer.copy_(value)


def _arguments(example_input: Any, grad: bool) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments, copied so that the caller's survive a model that works in place."""

    def fresh(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if grad and value.is_floating_point():
            return value.detach().clone().requires_grad_().clone()  # not a leaf: may be changed in place
        return value.detach().clone()

    if isinstance(example_input, Mapping):
        return [], {key: fresh(value) for key, value in example_input.items()}
    if isinstance(example_input, (tuple, list)):
        return [fresh(value) for value in example_input], {}
    return [fresh(example_input)], {}


@contextlib.contextmanager
def _same_randomness(devices: list[int]) -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)


def _tensors(value: Any) -> list[Tensor]:
    """The floating-point tensors in whatever a model returns."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    if dataclasses.is_dataclass(value):
        return [tensor for item in vars(value).values() for tensor in _tensors(item)]
    return []


def _plausible_shapes(model: nn.Module) -> list[tuple[int, ...]]:
    configuration = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    if isinstance(configuration, Mapping) and configuration.get("input_size"):
        return [tuple(configuration["input_size"])]
    for module in model.modules():
        if isinstance(module, nn.modules.conv._ConvNd):
            dimensions = len(module.kernel_size)
            sides = {1: (64, 256, 1024), 2: (64, 224, 32, 28, 299), 3: (16, 32, 64)}[dimensions]
            return [(module.in_channels, *[side] * dimensions) for side in sides]
        if isinstance(module, nn.Linear):
            return [(module.in_features,), (16, module.in_features)]
    return []


# --- the path, from the autograd graph ------------------------------------------------------------------------------


@dataclass
class _Trace:
    outputs: list[Tensor]
    batch_size: int
    calls: dict[str, int]
    shapes: dict[str, torch.Size]
    unseen: set[str]  # called without gradients, so that the graph does not show them
    reached: set[str]
    edges: list[tuple[str, str]]


def _trace(visit: _Undisturbed, layers: Mapping[str, nn.Module], example_input: Any) -> _Trace:
    """One forward pass, with a copy of each norm layer's output as a mark in the autograd graph.

    The copy is what makes the mark last: an in-place operation on the output itself (a ReLU, often) would replace the
    node that produced it where that output is a view.
    """
    marks: dict[Node, tuple[str, bool]] = {}
    calls = dict.fromkeys(layers, 0)
    shapes: dict[str, torch.Size] = {}
    unseen: set[str] = set()

    def mark(name: str) -> Any:
        def hook(layer: nn.Module, arguments: Any, keywords: Any, output: Any) -> Any:
            calls[name] += 1
            inputs = _tensors(arguments) + _tensors(keywords)
            if inputs:
                shapes.setdefault(name, inputs[0].shape)
            if not isinstance(output, Tensor):
                unseen.add(name)
                return output
            marked = output.clone()
            if marked.grad_fn is None:
                unseen.add(name)
            else:
                marks[marked.grad_fn] = (name, _normalises(layer))
            return marked

        return hook

    hooks = [layer.register_forward_hook(mark(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        returned = visit.run(example_input, grad=True)
    except Exception as error:
        raise ValueError(
            f"the model does not accept example_input ({_shapes_of(example_input)}) in training mode: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    outputs = _tensors(returned)
    if not outputs:
        raise ValueError(
            f"the forward pass returned no floating-point tensor but {type(returned).__name__}: "
            "wrap the model so that it returns its outputs"
        )
    if not all(bool(output.isfinite().all()) for output in outputs):
        raise ValueError("the output has infinities or NaN in it, so no effect can be measured")
    roots = [output.grad_fn for output in outputs if output.grad_fn is not None]
    inputs = _all_tensors(example_input)
    return _Trace(
        outputs=outputs,
        batch_size=inputs[0].shape[0] if inputs and inputs[0].dim() else 1,
        calls=calls,
        shapes=shapes,
        unseen=unseen,
        reached=_reached(roots, marks),
        edges=_edges(roots, marks),
    )


def _normalises(layer: nn.Module) -> bool:
    """A batch norm that its owner keeps in evaluation mode, with moving averages, is a fixed scale and shift."""
    return layer.training or not (isinstance(layer, _NormBase) and layer.running_mean is not None)


def _reached(roots: Iterable[Node], marks: Mapping[Node, tuple[str, bool]]) -> set[str]:
    """The layers with a path to the output that meets no other normalisation."""

    def ends_path(node: Node) -> bool:
        return marks[node][1] if node in marks else _is_functional_norm(node)

    return {marks[node][0] for node in _walk_back(roots, ends_path) if node in marks}


def _edges(roots: list[Node], marks: Mapping[Node, tuple[str, bool]]) -> list[tuple[str, str]]:
    """Pairs of layers, the first entering the second (or ``output``) with no norm layer between them."""
    targets = [("output", roots), *((name, _parents(node)) for node, (name, _) in marks.items())]
    edges = {
        (marks[node][0], target): None
        for target, starts in targets
        for node in _walk_back(starts, marks.__contains__)
        if node in marks
    }
    return list(edges)


def _walk_back(starts: Iterable[Node], ends: Callable[[Node], bool]) -> Iterator[Node]:
    """Every node from the starts toward the inputs, none beyond a node where ``ends`` is true."""
    waiting, seen = list(starts), set[Node]()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        if not ends(node):
            waiting.extend(_parents(node))


def _parents(node: Node) -> list[Node]:
    return [parent for parent, _ in node.next_functions if parent is not None]


def _is_functional_norm(node: Node) -> bool:
    """Whether a node is a normalisation that was called as a function, outside any norm layer."""
    name = node.name()
    if "BatchNorm" in name:
        return bool(getattr(node, "_saved_training", True))
    return "LayerNorm" in name or "GroupNorm" in name or "RmsNorm" in name


def _shapes_of(example_input: Any) -> str:
    shapes = [f"{tuple(tensor.shape)}" for tensor in _all_tensors(example_input)]
    return f"of shape {', '.join(shapes)}" if shapes else f"a {type(example_input).__name__}"


def _all_tensors(value: Any) -> list[Tensor]:
    arguments, keywords = _arguments(value, grad=False)
    return [item for item in (*arguments, *keywords.values()) if isinstance(item, Tensor)]


# --- the effect, measured or estimated --------------------------------------------------------------------------


Scaled = dict[str | None, list[nn.Parameter]]  # by layer; None stands for all layers without a path at once


def _scaled_together(layers: Mapping[str, nn.Module], trace: _Trace) -> Scaled:
    scaled: Scaled = {name: [p for part in gammas_and_betas(layer) for p in part] for name, layer in layers.items()}
    without_path = [name for name in layers if trace.calls[name] and name not in trace.reached | trace.unseen]
    scaled[None] = list(dict.fromkeys(parameter for name in without_path for parameter in scaled[name]))
    return {name: owned for name, owned in scaled.items() if owned}


def _measure_effects(
    visit: _Undisturbed, scaled: Scaled, example_input: Any, base: list[Tensor], progress: bool | None
) -> dict[str | None, float]:
    def effect(parameters: list[nn.Parameter]) -> float:
        changes = [
            _relative_change(base, _outputs_scaled(visit, parameters, factor, example_input)) for factor in _FACTORS
        ]
        return min(1.0, sum(changes) / len(changes) / _FULL_CHANGE)

    return {name: effect(owned) for name, owned in track(list(scaled.items()), "measuring", show=progress)}


def _outputs_scaled(
    visit: _Undisturbed, parameters: list[nn.Parameter], factor: float, example_input: Any
) -> list[Tensor]:
    before = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        try:
            for parameter in parameters:
                parameter.mul_(factor)
            return _tensors(visit.run(example_input))
        finally:
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)


def _relative_change(base: list[Tensor], changed: list[Tensor]) -> float:
    def one(before: Tensor, after: Tensor) -> float:
        before, after = before.double(), after.double()
        size = float(before.norm() + after.norm())
        return float((after - before).norm()) / size if size else 0.0

    return max(one(before, after) for before, after in zip(base, changed, strict=True))


def _estimate_effects(trace: _Trace, scaled: Scaled) -> dict[str | None, float]:
    r"""All effects from a few backward passes.

    For small changes the effect of a layer is :math:`\lVert a \rVert / \lVert y \rVert` with a the derivative of
    the output y by the logarithm of the factor. A backward pass from v . y / ||y|| with a random normal v gives
    gamma . d/dgamma + beta . d/dbeta = v . a / ||y|| for every layer at once, and its square has the wanted mean.
    """
    parameters = list(dict.fromkeys(parameter for owned in scaled.values() for parameter in owned))
    outputs = [output for output in trace.outputs if output.requires_grad and bool(output.any())]
    squares = dict.fromkeys(scaled, 0.0)
    for probe in range(_PROBES if outputs and parameters else 0):
        generator = torch.Generator().manual_seed(probe)
        directions = [
            torch.randn(output.shape, generator=generator).to(output) / output.detach().double().norm().to(output)
            for output in outputs
        ]
        gradients = torch.autograd.grad(outputs, parameters, directions, retain_graph=True, allow_unused=True)
        along = {
            parameter: float((parameter.detach().double() * gradient.double()).sum())
            for parameter, gradient in zip(parameters, gradients, strict=True)
            if gradient is not None
        }
        for name in squares:
            squares[name] += sum(along.get(parameter, 0.0) for parameter in scaled[name]) ** 2
    return {name: min(1.0, math.sqrt(square / _PROBES)) for name, square in squares.items()}


# --- words ------------------------------------------------------------------------------------


def _describe(name: str, layer: nn.Module, trace: _Trace, batch_size: int, effect: float | None) -> NormLayer:
    called = trace.calls[name] > 0
    path: bool | None = name in trace.reached
    if not called or (name in trace.unseen and not path):
        path = None
    if not called:
        effect = None
    groups, values = _grouping(layer, trace.shapes.get(name), batch_size)
    advised, why = _advise_decay(called, path, effect)
    return NormLayer(
        name=name,
        kind=type(layer).__name__,
        channels=_channels(layer),
        groups=groups,
        values_per_group=values,
        calls=trace.calls[name],
        path=path,
        effect=effect,
        advised=advised,
        why=why,
    )


def _advise_decay(called: bool, path: bool | None, effect: float | None) -> tuple[str, str]:
    if not called:
        return "-", "not called with this example input"
    if effect is None:
        return "-", "has no gamma and no beta"
    if effect > ACTS and path:
        return "decay", "a path to the output meets no other normalisation, so decay regularises"
    if effect > ACTS:
        return (
            "decay",
            "every path meets another normalisation, but what joins or bends on the way is not undone by it",
        )
    if path:
        return "no decay", "there is a path to the output, but at the present weights scaling hardly changes it"
    return "no decay", "a later normalisation undoes it, so decay would only change the effective learning rate"


def _channels(layer: nn.Module) -> int | None:
    for attribute in ("num_features", "num_channels"):
        if isinstance(getattr(layer, attribute, None), int):
            return int(getattr(layer, attribute))
    if isinstance(getattr(layer, "normalized_shape", None), tuple):
        return math.prod(layer.normalized_shape)  # type: ignore[arg-type]
    gammas, _ = gammas_and_betas(layer)
    return gammas[0].numel() if gammas else None


def _grouping(layer: nn.Module, shape: torch.Size | None, batch_size: int) -> tuple[str, int | None]:
    """What the statistics are taken over, in words, and how many values that is at this batch size."""
    positions = None if shape is None else math.prod(shape[2:])
    if isinstance(layer, _InstanceNorm):
        return "1 channel, 1 example", positions
    if isinstance(layer, _BatchNorm):
        channels = int(getattr(layer, "channels_per_group", 1))
        examples = getattr(layer, "examples_per_group", None)
        count = min(examples or batch_size, batch_size)
        words = f"{_count(channels, 'channel')}, {_count(examples, 'example') if examples else 'the batch'}"
        return words, None if positions is None else channels * count * positions
    if isinstance(layer, nn.GroupNorm):
        channels = layer.num_channels // layer.num_groups
        words = f"{_count(channels, 'channel')}, 1 example"
        return words, None if positions is None else channels * positions
    if isinstance(getattr(layer, "normalized_shape", None), tuple):
        channels = math.prod(layer.normalized_shape)  # type: ignore[arg-type]
        return f"{_count(channels, 'channel')}, 1 position", channels
    return "-", None


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
