"""Robustness of pretrained models with `fit_alpha`: built-in corruptions, ImageNet-C's fifteen, and a natural shift.

    python -m betternorm_lab.studies.robustness --data DATA --weights WEIGHTS --out docs/results

Alphas are fitted without labels on one part of the test images and evaluated on others. What is finished is kept in
--work, and the same command continues there; --only NAME measures one network. Writes robustness.json, .md and .svg.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from betternorm_lab.data.common_corruptions import TEST, VALIDATION, corrupt
from betternorm_lab.models.cifar_resnets import MEAN, STD, CifarResNet
from betternorm_lab.models.published import GroupNormResNet26, MobileNetV2
from torch import Tensor, nn

import betternorm
from betternorm.integrations.checkpoints import load_checkpoint
from betternorm.weighing.alpha import set_alpha, weighed_layers
from betternorm.weighing.shifts import KINDS, Shift, corruptions

SEVERITY = 3  # of the built-in corruptions in the evaluation
STRENGTHS = (0.125, 0.25, 0.375, 0.5, 0.75, 1.0)
SINGLE = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3)  # candidates for one alpha in the whole model
LEVELS = {"speckle_noise": (1, 3, 5), "gaussian_blur": (1, 3, 5), "spatter": (4, 5), "saturate": (1, 3, 5)}
FOLDS = 3
TUNE = 100  # images, under every validation corruption, for the methods with one alpha


@dataclass(frozen=True)
class Network:
    """A pretrained model, its data, and how much of it is used."""

    build: Callable[[Path], nn.Module]  # from the folder of weights
    dataset: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    split: str = "test"
    fit: int = 300  # images
    judge: int = 500
    batch_size: int = 100
    steps: int = 120
    many: int | None = None  # a second fit on so many images


def _checkpoint(build: Callable[[], nn.Module], file: str, weights: Path) -> nn.Module:
    return load_checkpoint(build(), weights / file)


def _memo(weights: Path) -> nn.Module:
    model = GroupNormResNet26()
    saved = torch.load(weights / "memo_rn26_gn.pth", map_location="cpu", weights_only=False)["net"]
    model.load_state_dict({name.removeprefix("module."): tensor for name, tensor in saved.items()})
    return model


IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


def _cifar100(depth: int, **options: Any) -> Network:
    file = f"cifar100_resnets/resnet{depth}_cifar100.pth"
    return Network(partial(_checkpoint, partial(CifarResNet, depth), file), "cifar100", MEAN, STD, **options)


NETWORKS: dict[str, Network] = {
    "ResNet-20": _cifar100(20, judge=1000, many=2000),
    "MobileNetV2": Network(
        partial(_checkpoint, MobileNetV2, "mobilenet_v2-b0353104.pth"),
        "imagenet",
        *IMAGENET,
        split="val",
        judge=300,
        batch_size=24,
        steps=80,
    ),
    "ResNet-32": _cifar100(32),
    "ResNet-8": _cifar100(8, many=2000),
    "ResNet-14": _cifar100(14),
    "ResNet-26": _cifar100(26),
    "ResNet-20, CIFAR-10": Network(
        partial(_checkpoint, partial(CifarResNet, 20, 10), "resnet20_cifar10.pth"), "cifar10", *CIFAR10
    ),
    "ResNet-26 with GroupNorm, CIFAR-10": Network(_memo, "cifar10", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}


@dataclass
class Part:
    """Images as files have them, in [0, 1], and their labels."""

    pixels: Tensor
    labels: Tensor
    mean: Tensor
    std: Tensor
    images: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.images = self.normalized(self.pixels)

    def normalized(self, pixels: Tensor) -> Tensor:
        return ((pixels - self.mean) / self.std).contiguous(memory_format=torch.channels_last)


def parts(network: Network, data: Path, *counts: int) -> list[Part]:
    """Disjoint random parts of the test images."""
    with np.load(data / f"{network.dataset}.npz") as file:
        images, labels = file[f"{network.split}_images"], file[f"{network.split}_labels"]
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[: sum(counts)]
    mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (network.mean, network.std))
    found = []
    for rows in order.split(list(counts)):
        pixels = torch.from_numpy(images[rows.numpy()]).permute(0, 3, 1, 2).float() / 255
        found.append(Part(pixels, torch.from_numpy(labels[rows.numpy()]).long(), mean, std))
    return found


def converted(network: Network, weights: Path) -> nn.Module:
    model = betternorm.convert(network.build(weights), "weighed").eval().requires_grad_(False)
    return model.to(memory_format=torch.channels_last)


def logits(model: nn.Module, images: Tensor) -> Tensor:
    """Convolutions in bfloat16, which takes half the time."""
    with torch.autocast("cpu", torch.bfloat16):
        output: Tensor = model(images)
    return output.float()


def right(model: nn.Module, images: Tensor, labels: Tensor, size: int) -> np.ndarray:
    with torch.inference_mode():
        answers = [logits(model, x).argmax(1) for x in images.split(size)]
    return (torch.cat(answers) == labels).numpy()


# ---- built-in corruptions, every kind evaluated with alphas fitted without it ----


def fit_files(model: nn.Module, part: Part, network: Network, file: Path, **options: Any) -> dict[str, Any]:
    """Fit with the alphas of every fold kept, and the results by rule."""
    results = {}
    for drop in (None, 0.5, 3.0):  # the fits are read from the file after the first
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results[str(drop)] = betternorm.fit_alpha(
                model, part.images, max_clean_drop=drop, batch_size=network.batch_size, max_examples=None,
                folds=FOLDS, steps=network.steps, require_significant=False, resume=file, forward=logits, **options,
            )  # fmt: skip
    return results


def measure_builtin(name: str, network: Network, images: int, arguments: argparse.Namespace) -> dict[str, np.ndarray]:
    judged, fitted = parts(network, arguments.data, network.judge, images)
    model = converted(network, arguments.weights)
    file = arguments.work / f"builtin-{name}-{images}.pt"
    results = fit_files(model, fitted, network, file, mean=network.mean, std=network.std, progress=arguments.progress)
    found: dict[str, np.ndarray] = {}
    for rule, result in results.items():
        found[f"chosen|{rule}"] = np.array(result.chosen)
    result = results["None"]
    for row in result.curve:
        found[f"estimate|{row['strength']}"] = np.array([row["clean"], row["corrupted"]])
    folds = [_by_layer(parameters, result.fitted) for parameters in torch.load(file, weights_only=True)["fits"]]

    def evaluate(images: Tensor, key: str, fold: int) -> None:
        for strength in STRENGTHS:
            set_alpha(model, {n: result.baseline + strength * (a - result.baseline) for n, a in folds[fold].items()})
            found[f"{key}|{strength}"] = right(model, images, judged.labels, network.batch_size)
        set_alpha(model, result.baseline)
        found[f"{key}|0.0"] = right(model, images, judged.labels, network.batch_size)

    for fold in range(FOLDS):
        evaluate(judged.images, f"clean{fold}", fold)
    for place, kind in enumerate(KINDS):
        shift = corruptions(f"{kind}:{SEVERITY}", network.mean, network.std)[f"{kind}:{SEVERITY}"]
        evaluate(torch.cat([shift(x) for x in judged.images.split(100)]), kind, place % FOLDS)
        print(name, images, kind, flush=True)
    return found


def _by_layer(parameters: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    sizes = [len(alpha) for alpha in like.values()]
    return dict(zip(like, parameters.split(sizes), strict=True))


# ---- the fifteen corruptions, fitted on the four for validation ----


def validation_shifts(network: Network) -> dict[str, Shift]:
    mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (network.mean, network.std))

    def shift(name: str, severity: int, images: Tensor) -> Tensor:
        pixels = (images * std + mean).clamp(0, 1)
        corrupted = corrupt(pixels, name, severity, seed=int(pixels.sum() * 1000) % 2**31)
        return ((corrupted - mean) / std).contiguous(memory_format=torch.channels_last)

    return {f"{n}:{level}": partial(shift, n, level) for n in VALIDATION for level in LEVELS[n]}


def measure_common(name: str, network: Network, arguments: argparse.Namespace) -> dict[str, np.ndarray]:
    size = network.batch_size
    judged, fitted = parts(network, arguments.data, network.judge, network.fit)
    model = converted(network, arguments.weights)
    shifts = validation_shifts(network)
    options = {"shifts": shifts, "progress": arguments.progress}
    found: dict[str, np.ndarray] = {}
    methods: dict[str, Callable[[], Any]] = {}
    results = fit_files(model, fitted, network, arguments.work / f"common-{name}.pt", **options)
    channel = results["None"]
    baseline = channel.baseline
    for rule, result in results.items():
        found[f"chosen|channel|{rule}"] = np.array(result.chosen)
    layer = fit_files(model, fitted, network, arguments.work / f"layer-{name}.pt", per="layer", **options)["None"]
    found["chosen|layer|None"] = np.array(layer.chosen)
    set_alpha(model, baseline)
    methods["baseline"] = partial(_alpha, model, baseline)
    for strength in STRENGTHS:
        methods[f"channel, strength {strength}"] = partial(_alpha, model, _scaled(channel, strength))
    methods["per layer"] = partial(_alpha, model, _scaled(layer, layer.chosen))
    if baseline == 0:
        trained = _affine(model, fitted, shifts, size, network.steps)
        methods["gamma and beta"] = partial(_parameters, model, trained, 1.0)
        methods["gamma and beta, half"] = partial(_parameters, model, trained, 0.5)
        for alpha in (1 / 17, 0.1):
            methods[f"linear {alpha:.4f}"] = partial(changed, model, mixed_linearly(alpha))
    # One alpha for the model: by the mean over clean images and the validation corruptions, with labels.
    few = slice(0, TUNE)
    tuning = [fitted.images[few], *(shift(fitted.images[few]) for shift in shifts.values())]
    ways: dict[str, Callable[[float], Any]] = {"one alpha": lambda a: partial(_alpha, model, abs(baseline - a))}
    if baseline == 0:
        ways["linear, tuned"] = lambda a: partial(changed, model, mixed_linearly(a))
    for way, at in ways.items():
        scores = {}
        for alpha in (0.0, *SINGLE):
            with at(alpha)():
                scores[alpha] = np.mean([right(model, x, fitted.labels[few], size).mean() for x in tuning])
        best = max(scores, key=lambda alpha: scores[alpha])
        found[f"chosen|{way}"] = np.array(best)
        methods[way] = at(best)
    by_class = torch.argsort(judged.labels, stable=True)
    for corruption in ("clean", *TEST):
        pixels = judged.pixels
        if corruption != "clean":
            pixels = torch.cat([
                corrupt(x, corruption, 5, seed=number, frost=arguments.data / "frost")
                for number, x in enumerate(pixels.split(100))
            ])  # fmt: skip
        images = judged.normalized(pixels)
        for method, context in methods.items():
            with context():
                found[f"{method}|{corruption}"] = right(model, images, judged.labels, size)
        if baseline == 0:
            with changed(model, batch_statistics):
                found[f"batch of 64|{corruption}"] = right(model, images, judged.labels, 64)
                rows = right(model, images[by_class], judged.labels[by_class], 10)
                found[f"batch of one class|{corruption}"] = rows[torch.argsort(by_class).numpy()]
        print(name, corruption, flush=True)
    return found


def _scaled(result: Any, strength: float) -> dict[str, Tensor]:
    return {name: result.baseline + strength * (a - result.baseline) for name, a in result.fitted.items()}


@contextmanager
def _alpha(model: nn.Module, alpha: Any) -> Iterator[None]:
    set_alpha(model, alpha)
    yield


Forward = Callable[[Any, Tensor], Tensor]


@contextmanager
def changed(model: nn.Module, forward: Forward) -> Iterator[None]:
    """The norm layers with another forward pass."""
    layers = weighed_layers(model).values()
    for layer in layers:
        layer.forward = forward.__get__(layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def batch_statistics(layer: nn.Module, x: Tensor) -> Tensor:
    """Nado et al., arXiv:2006.10963."""
    return F.batch_norm(x, None, None, layer.weight, layer.bias, True, 0.0, layer.eps)  # type: ignore[arg-type]


def mixed_linearly(alpha: float) -> Forward:
    """As alpha-BN (You et al., arXiv:2110.04065) and with alpha = 1/17 single-point BN (Schneider et al., 2020) do."""

    def forward(layer: Any, x: Tensor) -> Tensor:
        mean = x.mean((2, 3), keepdim=True)
        var = (x.square().mean((2, 3), keepdim=True) - mean.square()).clamp(min=0)
        mean = (1 - alpha) * layer.running_mean[:, None, None] + alpha * mean
        var = (1 - alpha) * layer.running_var[:, None, None] + alpha * var
        scale = layer.weight[:, None, None] * (var + layer.eps).rsqrt()
        return torch.addcmul(layer.bias[:, None, None] - mean * scale, x, scale)

    return forward


@contextmanager
def _parameters(model: nn.Module, fitted: Sequence[Tensor], strength: float) -> Iterator[None]:
    """Gamma and beta part of the way to the fitted ones."""
    set_alpha(model, 0.0)
    own = _gamma_and_beta(model)
    before = [parameter.clone() for parameter in own]
    for parameter, value in zip(own, fitted, strict=True):
        parameter.copy_(parameter + strength * (value - parameter))
    try:
        yield
    finally:
        for parameter, value in zip(own, before, strict=True):
            parameter.copy_(value)


def _gamma_and_beta(model: nn.Module) -> list[Tensor]:
    return [p for layer in weighed_layers(model).values() for p in (layer.weight, layer.bias)]


def _affine(
    model: nn.Module, part: Part, shifts: Mapping[str, Shift], size: int, steps: int, rate: float = 0.01
) -> list[Tensor]:
    """The natural baseline: gamma and beta fitted instead of alpha, with the same loss, batches and optimizer."""
    set_alpha(model, 0.0)
    with torch.inference_mode():
        own = torch.cat([logits(model, x).softmax(1) for x in part.images.split(size)])
    parameters = _gamma_and_beta(model)
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = torch.optim.Adam(parameters, lr=rate)
    functions = list(shifts.values())
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters:
        parameter.requires_grad_()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        rows = torch.randperm(len(part.images), generator=generator)[:size]
        clean, corrupted = rows.tensor_split(2)
        pieces = [part.images[clean]]
        for k, few in enumerate(corrupted.tensor_split(4)):
            pieces.append(functions[(step * 4 + k) % len(functions)](part.images[few]))
        loss = F.cross_entropy(logits(model, torch.cat(pieces)), own[rows].clone())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        optimizer.step()
    model.requires_grad_(False)
    fitted = [parameter.clone() for parameter in parameters]
    for parameter, value in zip(parameters, before, strict=True):
        parameter.grad = None
        parameter.copy_(value)
    return fitted


# ---- running ----


def jobs(names: Iterable[str], arguments: argparse.Namespace) -> dict[str, Callable[[], dict[str, np.ndarray]]]:
    """What is measured, by the name of its file."""
    found: dict[str, Callable[[], dict[str, np.ndarray]]] = {}
    for name in names:
        network = NETWORKS[name]
        for images in (network.fit, network.many):
            if images:
                found[f"builtin-{name}-{images}"] = partial(measure_builtin, name, network, images, arguments)
        found[f"common-{name}"] = partial(measure_common, name, network, arguments)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="cifar100.npz, imagenet.npz, cifar10.npz, frost/")
    parser.add_argument("--weights", type=Path, required=True, help="checkpoints, with a folder cifar100_resnets")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/robustness"), help="where what is measured is kept")
    parser.add_argument("--only", nargs="*", default=list(NETWORKS), help="names of networks")
    parser.add_argument("--what", choices=["builtin", "common"], help="one of the two measurements")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--progress", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(parents=True, exist_ok=True)
    for file, measure in jobs(arguments.only, arguments).items():
        kept = arguments.work / f"{file}.npz"
        if not kept.exists() and (arguments.what is None or file.startswith(arguments.what)):
            np.savez_compressed(kept, **measure())


if __name__ == "__main__":
    main()
