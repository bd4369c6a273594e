"""Report of norm layers and of where weight decay on gamma and beta has an effect (section 3.3 of the paper).

Weight decay on gamma and beta regularizes only if no later normalization undoes it. Two criteria are reported for each
layer: whether it has a *path* to the output without another normalization, as in the paper, and the measured *effect*
on the output of scaling the layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from betternorm.decay.effects import ACTS, estimate_effects, measure_effects, scaled_together
from betternorm.decay.norms import gammas_and_betas, norm_layers
from betternorm.decay.paths import Trace, trace_paths
from betternorm.decay.visit import Visit
from betternorm.display.picture import draw
from betternorm.display.tables import table

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
    r"""List the norm layers of a model, whether weight decay on gamma and beta has an effect, and a recommendation.

    The *path* is read from the autograd graph of one forward pass, which works for any control flow. The *effect*
    compares the output :math:`y` with the output :math:`y_c` after multiplying gamma and beta of one layer by
    :math:`c`:

    .. math:: \frac{\lVert y_c - y \rVert}{\lVert y_c \rVert + \lVert y \rVert} \Big/ \frac{|c - 1|}{c + 1}

    averaged over c = 1/2 and c = 2 and clipped at 1. It is 0 if a later normalization undoes the scaling, and 1 if the
    output is proportional to c. For several outputs it is the largest of their effects. If an output is mostly a
    constant, as in a regression with a large bias, the constant is subtracted. ``joint_effect`` is the effect of
    scaling all layers without a path together, as weight decay does. It is often 0 even if the single effects are not,
    because a normalization undoes the scaling of a sum whose terms are all scaled by the same factor.

    Everything is measured in training mode at the current weights, with batch statistics and without dropout or
    stochastic depth. Gammas and weight matrices that are all zero (the last gamma of a residual branch, a new
    classifier) and layer scales that are close to zero (ConvNeXt, ReZero) would hide the layers before them. While
    measuring, these gammas and scales are set to 1, these matrices are random, and eps is reduced to a thousandth.
    Parameters, buffers, modes and random state are restored exactly.

    Args:
        model: any module. Norm layers are recognized by type: those of torch, timm and this library.
        example_input: what the model is called with: a tensor, a tuple of arguments or a dict of keyword arguments.
        batch_size: the training batch size, for the number of values per group. Default: that of the example.
        quick: estimate the effects of all layers from three backward passes, instead of measuring each with two forward
            passes. This is the effect of small changes. It is accurate to a factor of about three, and 0 if the scaling
            is undone.
        norm_types: additional classes of norm layers, with gamma in ``weight`` and beta in ``bias``.
        progress: whether to show a progress bar; None shows it on a terminal.

    Returns:
        The report: iterate over it for the rows, print it for a table, or draw it with ``to_svg()``.

    Examples::

        >>> net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8))
        >>> report = norm_report(net, torch.randn(16, 8))
        >>> [layer.path for layer in report]
        [False, True]
    """
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be 1 or more")
    model = getattr(model, "_orig_mod", model)  # the model inside a compiled module
    layers = norm_layers(model, norm_types)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no norm layers; pass additional classes with norm_types=(...)")
    with Visit(model) as visit:
        visit.fill_zeros(layers)
        visit.shrink_eps(layers)
        trace = trace_paths(visit, layers, example_input)
        scaled = scaled_together(layers, trace)
        if quick:
            effects = estimate_effects(trace, scaled)
        else:
            base = [output.detach() for output in trace.outputs]
            trace.outputs.clear()  # frees the graph before the other passes need the memory
            effects = measure_effects(visit, scaled, example_input, base, progress)
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

    ``path`` is None if it is unknown (the layer was not called, or ran without gradients), and ``effect`` is None if
    the layer has no gamma or beta.
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
        """Whether weight decay on gamma and beta of this layer has an effect."""
        return self.effect is not None and self.effect > ACTS


class NormReport:
    """The result of :func:`norm_report`: an iterable of rows that prints as a table."""

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
        """The layers with a path to the output without another normalization."""
        return [layer for layer in self.layers if layer.path]

    @property
    def with_effect(self) -> list[NormLayer]:
        """The layers whose scaling has an effect on the output."""
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
        """A one-line summary."""
        layers, estimated = f"norm layer{'s' * (len(self) != 1)}", "estimated " if self.quick else ""
        text = (
            f"{len(self)} {layers} at batch size {self.batch_size}: {len(self.with_path)} with a path to the output, "
            f"{len(self.with_effect)} with an {estimated}effect above {ACTS}"
        )
        if self.joint_effect is not None:
            text += f"; joint effect of those without a path: {self.joint_effect:.3f}"
        return text

    def to_svg(self) -> str:
        """Draw the norm layers as a graph from input to output; darker layers have a larger effect."""
        if len(self) > _LARGEST_PICTURE:
            raise ValueError(f"{len(self)} norm layers are too many to draw; the limit is {_LARGEST_PICTURE}")
        return draw(self)


def _describe(name: str, layer: nn.Module, trace: Trace, batch_size: int, effect: float | None) -> NormLayer:
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
        return "decay", "has a path to the output without another normalization, so weight decay regularizes"
    if effect > ACTS:
        return (
            "decay",
            "every path has another normalization, which does not undo the scaling completely",
        )
    if path:
        return "no decay", "has a path to the output, but scaling hardly changes it at the current weights"
    return "no decay", "a later normalization undoes it; weight decay would only change the effective learning rate"


def _channels(layer: nn.Module) -> int | None:
    for attribute in ("num_features", "num_channels"):
        if isinstance(getattr(layer, attribute, None), int):
            return int(getattr(layer, attribute))
    if isinstance(getattr(layer, "normalized_shape", None), tuple):
        return math.prod(layer.normalized_shape)  # type: ignore[arg-type]
    gammas, _ = gammas_and_betas(layer)
    return gammas[0].numel() if gammas else None


def _grouping(layer: nn.Module, shape: torch.Size | None, batch_size: int) -> tuple[str, int | None]:
    """What the statistics are computed over, as text, and the number of values at this batch size."""
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
