"""Calibration: moving averages from data, the mean and variance of the input of each norm layer (section 3.1)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from betternorm.conversion.convert import convert
from betternorm.deprecation import renamed_parameters
from betternorm.display.progress import Bar
from betternorm.layers import GroupedBatchNorm
from betternorm.weighing.alpha import weighed_layers
from betternorm.weighing.batches import (
    Forward,
    check_max_examples,
    device_of,
    evaluating,
    iterate,
    length_of,
    output_of,
    random_state_kept,
)


@renamed_parameters(limit="max_examples")
def calibrate(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    max_examples: int | None = None,
    passes: int | None = None,
    tolerance: float = 1e-3,
    forward: Forward | None = None,
    progress: bool | None = None,
) -> int:
    """Set the moving averages to the mean and variance of the layers' inputs over the data, in place.

    GroupNorm and InstanceNorm layers have no moving averages until then; one pass over the data computes them exactly.
    Models without converted layers are converted first (``convert(model, "weighed")``).

    The input of a BatchNorm layer depends on the averages of the layers before it. Each pass uses the averages of the
    pass before, as at inference, so that the result depends neither on the batch size nor on the order of the data; a
    layer is exact once all layers before it are. Passes are repeated until no average changes by more than
    ``tolerance`` (in standard deviations of its channel), at most as many as there are layers plus one. The result are
    the statistics of one batch of all the data. All examples have the same weight. A loader that shuffles does it the
    same way in every pass.

    Args:
        model: the model to calibrate.
        loader: batches as for `tune_alpha`; labels are ignored.
        max_examples: use only the first so many examples.
        passes: the exact number of passes. Fewer than there are layers can be far from the result in a deep model.
        tolerance: see above.
        forward: ``forward(model, batch)``, for other formats of batches.
        progress: show a progress bar; None shows it on a terminal.

    Returns:
        The number of passes.
    """
    if passes is not None and passes < 1:
        raise ValueError(f"passes={passes} must be 1 or more")
    check_max_examples(max_examples)
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not layers:
        convert(model, "weighed")
        layers = list(weighed_layers(model).values())
    if not layers:
        raise ValueError("the model has no layer with moving averages to calibrate")
    # The averages of a layer with alpha = 1 do not affect other layers.
    alone = all(isinstance(layer, GroupedBatchNorm) and layer._alpha_is(1) for layer in layers)
    most = passes or (1 if alone else len(layers) + 1)
    run = forward or output_of
    for done in range(1, most + 1):
        moments = {layer: _Moments() for layer in layers}
        hooks = [layer.register_forward_pre_hook(moments[layer].observe) for layer in layers]
        batches = 0
        try:
            label, length = f"calibrating, pass {done}", length_of(loader, max_examples)
            # Passes on different examples do not converge, and errors grow from layer to layer.
            with (
                random_state_kept(loader),
                evaluating(model),
                torch.inference_mode(),
                Bar(label, length, progress) as bar,
            ):
                for batch in iterate(loader, max_examples, device_of(model)):
                    run(model, batch)
                    batches += 1
                    bar.advance()
        finally:
            for hook in hooks:
                hook.remove()
        if not batches:
            raise ValueError("the loader yields no batches: nothing to calibrate on")
        change = max(moments[layer].write_to(layer, batches) for layer in layers)
        if passes is None and change <= tolerance:
            break
    return done


def has_no_averages(layer: GroupedBatchNorm) -> bool:
    """Whether the layer was converted from GroupNorm or InstanceNorm and has no averages yet."""
    return layer._alpha_is(1) and layer.num_batches_tracked is not None and int(layer.num_batches_tracked) == 0


class _Moments:
    """Mean and variance of the inputs of a layer over all batches, in float64."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tensor | None = None
        self.var: Tensor | None = None

    def observe(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].detach()
        examples = x.shape[0]
        kind = torch.float32 if x.device.type == "mps" else torch.float64  # which has no float64
        var, mean = torch.var_mean(x.to(kind), (0, *range(2, x.dim())), correction=0)
        if self.mean is None or self.var is None:
            self.count, self.mean, self.var = examples, mean, var
            return
        share = examples / (self.count + examples)
        step = mean - self.mean
        self.var = self.var + share * (var - self.var) + share * (1 - share) * step.square()
        self.mean = self.mean + share * step
        self.count += examples

    def write_to(self, layer: _BatchNorm, batches: int) -> float:
        """Write the averages into the layer; returns the largest change, in standard deviations."""
        if self.mean is None or self.var is None:  # the layer was not called
            return 0.0
        assert layer.running_mean is not None
        assert layer.running_var is not None
        deviation = (self.var + layer.eps).sqrt()
        change = torch.maximum(
            (self.mean - layer.running_mean).abs() / deviation,
            ((layer.running_var.clamp(min=0) + layer.eps).sqrt() / deviation - 1).abs(),
        )
        with torch.no_grad():
            layer.running_mean.copy_(self.mean)
            layer.running_var.copy_(self.var)
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked.fill_(batches)
        return float(change.max())
