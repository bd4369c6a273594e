"""Paths from norm layers to the output without another normalization: the paper's criterion (section 3.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _NormBase

from betternorm.decay.visit import Visit
from betternorm.example import input_tensors, tensors_in


@dataclass
class Trace:
    """What one forward pass shows."""

    outputs: list[Tensor]
    batch_size: int
    calls: dict[str, int]
    shapes: dict[str, torch.Size]
    unseen: set[str]  # called without gradients, so that the graph does not show them
    reached: set[str]
    edges: list[tuple[str, str]]


def trace_paths(visit: Visit, layers: Mapping[str, nn.Module], example_input: Any) -> Trace:
    """Run one forward pass, and mark each norm layer in the autograd graph by a copy of its output.

    Without the copy, an in-place operation on the output (often a ReLU) would replace the node that produced it if the
    output is a view.
    """
    marks: dict[Node, tuple[str, bool]] = {}
    calls = dict.fromkeys(layers, 0)
    shapes: dict[str, torch.Size] = {}
    unseen: set[str] = set()

    def mark(name: str) -> Any:
        def hook(layer: nn.Module, arguments: Any, keywords: Any, output: Any) -> Any:
            calls[name] += 1
            inputs = tensors_in(arguments) + tensors_in(keywords)
            if inputs:
                shapes.setdefault(name, inputs[0].shape)
            if not isinstance(output, Tensor):
                unseen.add(name)
                return output
            marked = output.clone()
            if marked.grad_fn is None:
                unseen.add(name)
            else:
                marks[marked.grad_fn] = (name, _normalizes(layer))
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
    outputs = tensors_in(returned)
    if not outputs:
        raise ValueError(
            f"the forward pass returned no floating-point tensor but {type(returned).__name__}: "
            "wrap the model so that it returns its outputs"
        )
    if not all(bool(output.isfinite().all()) for output in outputs):
        raise ValueError("the output contains NaN or infinity, so effects cannot be measured")
    roots = [output.grad_fn for output in outputs if output.grad_fn is not None]
    inputs = input_tensors(example_input)
    return Trace(
        outputs=outputs,
        batch_size=inputs[0].shape[0] if inputs and inputs[0].dim() else 1,
        calls=calls,
        shapes=shapes,
        unseen=unseen,
        reached=_reached(roots, marks),
        edges=_edges(roots, marks),
    )


def _normalizes(layer: nn.Module) -> bool:
    """A batch norm with moving averages that is kept in evaluation mode is a fixed scale and shift."""
    return layer.training or not (isinstance(layer, _NormBase) and layer.running_mean is not None)


def _reached(roots: Iterable[Node], marks: Mapping[Node, tuple[str, bool]]) -> set[str]:
    """The layers with a path to the output without another normalization."""

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
    """Whether a node is a normalization called as a function, outside of norm layers."""
    name = node.name()
    if "BatchNorm" in name:
        return bool(getattr(node, "_saved_training", True))
    return "LayerNorm" in name or "GroupNorm" in name or "RmsNorm" in name


def _shapes_of(example_input: Any) -> str:
    shapes = [f"{tuple(tensor.shape)}" for tensor in input_tensors(example_input)]
    return f"of shape {', '.join(shapes)}" if shapes else f"a {type(example_input).__name__}"
