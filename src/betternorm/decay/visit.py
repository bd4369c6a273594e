"""Running a model in training mode and restoring it exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.lazy import LazyModuleMixin

from betternorm import example
from betternorm.decay.norms import gammas_and_betas
from betternorm.third_party import RANDOM_DEPTH, imported_classes

# Factor for eps while measuring. eps keeps a normalization from undoing a scaling completely, and deep models amplify
# this.
_EPS_LEFT = 1e-3

# Layer scales are initialized with 1e-6 to 1e-4, and ReZero's with 0.
_SMALL_SCALE = 1e-3
_NOT_SCALES = ("bias", "beta", "token", "pos", "embed", "query")


class Visit:
    """A context in which a model is in training mode with gradients for all parameters. It is restored at the end."""

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

    def __enter__(self) -> Visit:
        self.model.train()
        for module in self.model.modules():
            if isinstance(module, (_DropoutNd, *imported_classes(RANDOM_DEPTH))):
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
        """Run one forward pass. Each starts from the same buffers and the same random state."""
        self._restore_buffers()  # before and not after: autograd refuses buffers that changed since the pass
        return example.run(self.model, example_input, grad)

    def fill_zeros(self, layers: Mapping[str, nn.Module]) -> None:
        """Give a value to gammas and matrices that are all zero, and to layer scales that are close to it.

        They would hide what lies behind them, and training changes them.
        """
        gammas = {gamma for layer in layers.values() for gamma in gammas_and_betas(layer)[0]}
        scales = _layer_scales(self.model)
        with torch.no_grad():
            for parameter, _ in self._gradients:
                if not parameter.is_floating_point() or parameter.numel() == 0:
                    continue
                largest = float(parameter.abs().max())
                if (largest == 0 and parameter in gammas) or (largest <= _SMALL_SCALE and parameter in scales):
                    value = torch.ones_like(parameter)
                elif largest == 0 and parameter.dim() >= 2:
                    generator = torch.Generator().manual_seed(len(self._filled))
                    deviation = (parameter.numel() / parameter.shape[0]) ** -0.5
                    value = deviation * torch.randn(parameter.shape, generator=generator)
                else:
                    continue
                self._filled.append((parameter, parameter.clone()))
                parameter.copy_(value)

    def shrink_eps(self, layers: Mapping[str, nn.Module]) -> None:
        """Reduce eps, so that normalizations undo scalings almost completely."""
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


def _layer_scales(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that may scale a residual branch: ConvNeXt's layer scale, ReZero's alpha, SkipInit's gain.

    They have no dedicated type, so these are all vectors and scalars that a module outside of torch has and whose
    name does not say that they are something else.
    """
    return {
        parameter
        for module in model.modules()
        if not type(module).__module__.startswith("torch.nn.modules")
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.numel() == max(parameter.shape, default=1) and not any(word in name for word in _NOT_SCALES)
    }


def guess_input(model: nn.Module, batch_size: int = 4) -> Tensor:
    """Return a random batch that the model accepts, from timm's configuration or the first layer and common sizes."""
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be 1 or more")
    generator = torch.Generator().manual_seed(0)
    first = next((p for p in model.parameters()), torch.empty(0))
    with Visit(model) as visit:
        for shape in _plausible_shapes(model):
            guess = torch.randn(batch_size, *shape, generator=generator).to(first.device, first.dtype)
            try:
                visit.run(guess)
            except Exception:
                continue
            return guess
    raise ValueError(
        f"no example input could be guessed for {type(model).__name__}; pass one, for example "
        f"example_input=torch.randn({batch_size}, 3, 224, 224)"
    )


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
