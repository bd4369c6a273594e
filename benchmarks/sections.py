"""What is measured: single layers in training, in float32 and bfloat16, eager and compiled, and a whole network."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import betternorm
from benchmarks.measuring import Ratio, compare, saved_bytes
from benchmarks.peers import FORMS
from betternorm import BatchGroupNorm, GhostBatchNorm, GroupedBatchNorm

SHAPES = [(128, 64, 32, 32), (128, 128, 16, 16), (128, 256, 8, 8), (128, 512, 4, 4), (32, 64, 56, 56)]
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
GROUPS = 32
GHOST_SIZES = (16, 2)
IMAGES = (16, 3, 128, 128)  # of the network's steps

Row = dict[str, Any]


def layers(channels: int, peer_sizes: tuple[int, ...]) -> dict[str, nn.Module]:
    """The baseline first."""
    found: dict[str, nn.Module] = {
        "nn.BatchNorm2d": nn.BatchNorm2d(channels),
        f"nn.GroupNorm({GROUPS})": nn.GroupNorm(GROUPS, channels),
    }
    for size in GHOST_SIZES:
        found[f"GhostBatchNorm({size})"] = GhostBatchNorm(channels, size)
        if size in peer_sizes:
            found |= {f"{name} ({size})": form(channels, size) for name, form in FORMS.items()}
    found[f"BatchGroupNorm({GROUPS})"] = BatchGroupNorm(GROUPS, channels)
    return found


def cases(
    peer_sizes: tuple[int, ...], device: str, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, str, dict[str, nn.Module], Tensor]]:
    """Layers have float32 parameters, as in mixed precision; the input is of the type."""
    for layout, memory_format in LAYOUTS.items():
        for shape in SHAPES:
            x = torch.randn(shape, device=device).to(dtype).contiguous(memory_format=memory_format).requires_grad_()
            found = {name: layer.to(device) for name, layer in layers(shape[1], peer_sizes).items()}
            yield layout, "x".join(map(str, shape)), found, x


def training(module: Callable[[Tensor], Tensor], x: Tensor, parameters: list[nn.Parameter]) -> Callable[[], object]:
    """Forward and backward, with the gradients of the input and of the parameters."""
    dy = torch.randn_like(x)
    return lambda: torch.autograd.grad(module(x), (x, *parameters), dy)


def eager(rounds: int, clock: str, device: str) -> Iterator[Row]:
    for layout, shape, variants, x in cases(GHOST_SIZES, device):
        steps = {name: training(layer, x, list(layer.parameters())) for name, layer in variants.items()}
        yield from rows(compare(steps, rounds, clock), section="eager", layout=layout, case=shape)


def half(rounds: int, clock: str, device: str) -> Iterator[Row]:
    """What a norm layer sees under autocast: activations in bfloat16, parameters in float32."""
    for layout, shape, variants, x in cases(GHOST_SIZES, device, torch.bfloat16):
        steps = {
            name: under_autocast(training(layer, x, list(layer.parameters())), device)
            for name, layer in variants.items()
        }
        yield from rows(compare(steps, rounds, clock), section="bfloat16 under autocast", layout=layout, case=shape)


def under_autocast(step: Callable[[], object], device: str) -> Callable[[], object]:
    def run() -> object:
        with torch.autocast(device, torch.bfloat16):
            return step()

    return run


def call(rounds: int, clock: str, device: str) -> Iterator[Row]:
    """A tiny input, forward and backward: what is left is the way from Python and back. A hundred calls a turn."""
    shape = (2, 8, 4, 4)
    x = torch.randn(shape, device=device).requires_grad_()
    variants = {"nn.BatchNorm2d": nn.BatchNorm2d(8), "GhostBatchNorm(16)": GhostBatchNorm(8, 16)}
    steps = {
        name: repeated(training(layer.to(device), x, list(layer.parameters()))) for name, layer in variants.items()
    }
    yield from rows(compare(steps, rounds, clock), section="call", layout="contiguous", case="x".join(map(str, shape)))


def repeated(step: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        for _ in range(100):
            step()

    return run


def compiled(rounds: int, clock: str, device: str) -> Iterator[Row]:
    # The 64 chunks of ghost size 2 would take longer to compile than all the rest.
    for layout, shape, variants, x in cases((GHOST_SIZES[0],), device):
        torch.compiler.reset()
        steps = {
            name: training(torch.compile(layer, dynamic=False), x, list(layer.parameters()))
            for name, layer in variants.items()
        }
        yield from rows(compare(steps, rounds, clock), section="compiled", layout=layout, case=shape)


def memory(rounds: int, clock: str, device: str) -> Iterator[Row]:
    del rounds, clock  # the same every time
    for layout, shape, variants, x in cases(GHOST_SIZES, device):
        bytes_of = {name: saved_bytes(layer, x) for name, layer in variants.items()}
        baseline = bytes_of["nn.BatchNorm2d"]
        for name, size in bytes_of.items():
            yield {
                "section": "memory",
                "layout": layout,
                "case": shape,
                "variant": name,
                "ratio": size / baseline,
                "bytes": size,
            }


def resnet() -> nn.Module:
    from betternorm.integrations import torchvision

    torchvision.ready()
    from torchvision.models import resnet18

    model: nn.Module = resnet18(weights=None)
    return model


def network(rounds: int, clock: str, device: str) -> Iterator[Row]:
    untouched = resnet()
    ghost = betternorm.convert(copy.deepcopy(untouched), "ghost", ghost_size=IMAGES[0] // 2)
    alpha_0 = betternorm.convert(copy.deepcopy(untouched), "weighed")
    alpha_01 = copy.deepcopy(alpha_0)
    for layer in alpha_01.modules():
        if isinstance(layer, GroupedBatchNorm):
            layer.alpha = 0.1
    for way in ("eager", "compiled"):
        for layout, memory_format in LAYOUTS.items():
            images = torch.randn(IMAGES, device=device).contiguous(memory_format=memory_format)
            torch.compiler.reset()

            def prepared(model: nn.Module, mode: bool, way: str = way, layout: Any = memory_format) -> nn.Module:
                model = copy.deepcopy(model).to(device, memory_format=layout).train(mode)
                return model if way == "eager" else torch.compile(model, dynamic=False)

            trained = {"untouched": untouched, "GhostBatchNorm": ghost}
            steps = {name: training_step(prepared(model, True), images) for name, model in trained.items()}
            yield from rows(
                compare(steps, rounds, clock), section=f"network, training, {way}", layout=layout, case="ResNet-18"
            )

            served = {"untouched": untouched, "alpha 0": alpha_0, "alpha 0.1": alpha_01}
            steps = {name: inference(prepared(model, False), images) for name, model in served.items()}
            yield from rows(
                compare(steps, rounds, clock), section=f"network, inference, {way}", layout=layout, case="ResNet-18"
            )


def forms(rounds: int, clock: str, device: str) -> Iterator[Row]:
    """A compiled network with its layers as operators and in the plain form, by which the library chose."""
    untouched = resnet()
    models = {
        "GhostBatchNorm": betternorm.convert(copy.deepcopy(untouched), "ghost", ghost_size=IMAGES[0] // 2),
        "BatchGroupNorm": betternorm.convert(copy.deepcopy(untouched), "batch_group", num_groups=GROUPS),
    }
    for layout, memory_format in LAYOUTS.items():
        images = torch.randn(IMAGES, device=device).contiguous(memory_format=memory_format)
        torch.compiler.reset()

        def step_of(model: nn.Module, layout: Any = memory_format, images: Tensor = images) -> Callable[[], object]:
            model = copy.deepcopy(model).to(device, memory_format=layout).train()
            return training_step(torch.compile(model, dynamic=False), images)

        steps = {"untouched": step_of(untouched)}
        for name, model in models.items():
            steps[f"{name}, operator"] = as_plain_form(False, step_of(model))
            steps[f"{name}, plain form"] = as_plain_form(True, step_of(model))
        yield from rows(compare(steps, rounds, clock), section="forms", layout=layout, case="ResNet-18")


def as_plain_form(wanted: bool, step: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with patch("betternorm.functional._left_to_compiler", always if wanted else never):
            return step()

    return run


def never(channels_per_group: int) -> bool:
    return False


def always(channels_per_group: int) -> bool:
    return True


def training_step(model: nn.Module, images: Tensor) -> Callable[[], object]:
    labels = torch.arange(images.shape[0], device=images.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def inference(model: nn.Module, images: Tensor) -> Callable[[], object]:
    @torch.no_grad()
    def step() -> Tensor:
        return model(images)

    return step


def rows(measured: dict[str, Ratio], **where: str) -> Iterator[Row]:
    for name, ratio in measured.items():
        yield where | {"variant": name} | vars(ratio)


SECTIONS = {
    "eager": eager,
    "half": half,
    "call": call,
    "compiled": compiled,
    "memory": memory,
    "network": network,
    "forms": forms,
}
