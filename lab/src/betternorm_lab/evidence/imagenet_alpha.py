"""Experiment 1: alpha on MobileNetV2 pretrained on ImageNet (Figure 1, section 3.1), on 5,000 validation images.

Nothing is trained. The logits of all images are computed once per setting and kept outside the repository; what
follows from them (which setting is chosen, the temperature, gains) takes seconds.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import betternorm
from betternorm_lab.data.facts import IMAGENET_MEAN, IMAGENET_STD
from betternorm_lab.evidence.rows import pack, read_arrays, write_arrays
from betternorm_lab.evidence.runs import Places
from betternorm_lab.trials import code_version

NAME = "imagenet-alpha"
FIXED_ALPHA = 1 / 17  # a prior of 16 examples, as in Schneider et al. 2020 (arXiv:2006.16971), for one test example
ALPHAS = (0.0, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, FIXED_ALPHA, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5)
LINEAR_ALPHAS = (0.005, 0.01, 0.02, 0.04, FIXED_ALPHA, 0.1, 0.2)
BATCH = 4  # fastest on one core; examples are processed independently
WEIGHTS = "mobilenet_v2-b0353104.pth"


class LinearMixing(nn.Module):
    """Batch norm whose mean and variance are both mixed linearly with the example's own (no term for the means)."""

    def __init__(self, layer: nn.BatchNorm2d, alpha: float) -> None:
        super().__init__()
        self.layer, self.alpha = layer, alpha

    def forward(self, x: Tensor) -> Tensor:
        layer, alpha = self.layer, self.alpha
        assert layer.running_mean is not None
        assert layer.running_var is not None
        own_var, own_mean = torch.var_mean(x, (2, 3), correction=0)
        mean = (1 - alpha) * layer.running_mean + alpha * own_mean
        var = (1 - alpha) * layer.running_var + alpha * own_var
        scale = layer.weight * (var + layer.eps).rsqrt()
        shift = layer.bias - mean * scale
        return x * scale[:, :, None, None] + shift[:, :, None, None]


class Pointwise(nn.Module):
    """A 1x1 convolution as a matrix product over channels_last memory: the same numbers, a third faster on one core."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.weight = convolution.weight.detach()[:, :, 0, 0].contiguous()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.permute(0, 2, 3, 1), self.weight).permute(0, 3, 1, 2)


def settings() -> list[tuple[str, float]]:
    """(mixing, alpha), the most informative first."""
    ours = sorted(ALPHAS, key=lambda alpha: (alpha != 0, abs(alpha - 0.03)))
    return [("moments", alpha) for alpha in ours] + [("linear", alpha) for alpha in LINEAR_ALPHAS]


def logits_file(places: Places, mixing: str, alpha: float) -> Path:
    return places.work / NAME / f"{mixing}-{alpha:.4f}.npz"


def compute(places: Places) -> None:
    """The logits of every setting that are not there yet."""
    todo = [setting for setting in settings() if not logits_file(places, *setting).exists()]
    if not todo:
        return
    with np.load(places.data / "imagenet.npz") as file:
        pixels, labels = file["val_images"], file["val_labels"]
    for mixing, alpha in todo:
        logits = evaluate(model_with(places, mixing, alpha), pixels)
        meta = {"mixing": mixing, "alpha": alpha, "commit": code_version(), "images": len(labels)}
        write_arrays(logits_file(places, mixing, alpha), meta, logits=logits, labels=labels)
        print(f"{mixing} alpha={alpha:.4f} top-1 {100 * float((logits.argmax(1) == labels).mean()):.2f}", flush=True)


def model_with(places: Places, mixing: str, alpha: float) -> nn.Module:
    from betternorm.integrations.torchvision import ready

    ready()
    import torchvision

    model: nn.Module = torchvision.models.mobilenet_v2()
    model.load_state_dict(torch.load(places.weights / WEIGHTS, weights_only=True))
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d) and mixing == "linear":
                setattr(parent, name, LinearMixing(child, alpha))
            elif isinstance(child, nn.Conv2d) and child.kernel_size == (1, 1):
                setattr(parent, name, Pointwise(child))
            elif isinstance(child, nn.ReLU6):
                child.inplace = True
    if mixing != "linear":
        betternorm.convert(model, "weighed")
        betternorm.set_alpha(model, alpha)
    return model.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # in none of its types


def evaluate(model: nn.Module, pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in (IMAGENET_MEAN, IMAGENET_STD))
    parts = []
    with torch.inference_mode():
        for number in range(math.ceil(len(pixels) / BATCH)):
            images = torch.from_numpy(pixels[number * BATCH : (number + 1) * BATCH]).permute(0, 3, 1, 2)
            images = ((images / 255 - mean) / std).contiguous(memory_format=torch.channels_last)
            parts.append(model(images).numpy().copy())
    return np.concatenate(parts)


# ---- from logits to the row: choices on one half, gains on the other ----

SPLITS = 10
TEMPERATURES = tuple(2 ** (k / 24) for k in range(-12, 25))
METRICS = ("top-1", "top-5", "cross-entropy", "cross-entropy after temperature")
ZERO = ("moments", 0.0)
FIXED = {"fixed 1/17": ("moments", FIXED_ALPHA), "fixed 1/17, linear mixing": ("linear", FIXED_ALPHA)}
Setting = tuple[str, float]


def candidates() -> dict[str, list[Setting]]:
    """What each way of choosing chooses from; of equals the first."""
    return {
        "chosen": [("moments", alpha) for alpha in ALPHAS],
        "chosen of seven": [ZERO, *(("moments", alpha) for alpha in LINEAR_ALPHAS)],
        "chosen of seven, linear mixing": [ZERO, *(("linear", alpha) for alpha in LINEAR_ALPHAS)],
        **{name: [setting] for name, setting in FIXED.items()},
    }


def analyze(places: Places) -> None:
    """Write the row: bits and losses per image and setting, and the gain of every image for each way of choosing."""
    done = [setting for setting in settings() if logits_file(places, *setting).exists()]
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    scores: dict[str, dict[Setting, np.ndarray[Any, Any]]] = {name: {} for name in METRICS[:3]}
    by_temperature: dict[Setting, np.ndarray[Any, Any]] = {}
    commits = set()
    for setting in done:
        meta, file = read_arrays(logits_file(places, *setting))
        commits.add(meta["commit"])
        logits, labels = torch.from_numpy(file["logits"]), torch.from_numpy(file["labels"])
        right = logits.gather(1, labels[:, None])
        rank = (logits > right).sum(1).numpy()  # ties are vanishingly rare in float32
        scaled = [torch.nn.functional.cross_entropy(logits / t, labels, reduction="none") for t in TEMPERATURES]
        by_temperature[setting] = torch.stack(scaled).numpy()
        scores["top-1"][setting], scores["top-5"][setting] = 100.0 * (rank < 1), 100.0 * (rank < 5)
        losses = by_temperature[setting][TEMPERATURES.index(1.0)]
        scores["cross-entropy"][setting] = -losses
        label = f"{setting[0]}-{setting[1]:.4f}"
        arrays |= {f"top-1/{label}": pack(rank < 1), f"top-5/{label}": pack(rank < 5)}
        if setting[0] == "moments":
            arrays[f"loss/{label}"] = losses.astype(np.float16)
    chosen: dict[str, dict[str, list[float]]] = {}
    for name, options in candidates().items():
        if not all(option in done for option in options):
            continue
        chosen[name] = {}
        for metric in METRICS:
            gains, alphas = cross_fitted(metric, options, scores, by_temperature)
            arrays[f"gain/{name}/{metric}"] = gains.astype(np.float32 if metric.startswith("top") else np.float16)
            chosen[name][metric] = alphas
    meta = {
        "images": len(labels),
        "commits": sorted(commits),
        "weights": WEIGHTS,
        "chosen": chosen,
        "curve": [[*setting, *curve_point(setting, scores, by_temperature)] for setting in done],
    }
    write_arrays(places.out / "rows" / f"{NAME}.npz", meta, **arrays)


def halves(images: int, split: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    order = np.random.RandomState(split).permutation(images)
    return order[: images // 2], order[images // 2 :]


def cross_fitted(
    metric: str,
    options: list[Setting],
    scores: dict[str, dict[Setting, np.ndarray[Any, Any]]],
    by_temperature: dict[Setting, np.ndarray[Any, Any]],
) -> tuple[np.ndarray[Any, Any], list[float]]:
    """The gain of every image over alpha 0, mean over the splits, and the alphas chosen (two per split)."""
    images = by_temperature[ZERO].shape[1]
    gains, alphas = np.zeros(images), []
    for split in range(SPLITS):
        pair = halves(images, split)
        for choose, evaluate_on in (pair, pair[::-1]):
            values = {
                setting: scores[metric][setting] if metric in scores else -at_best(by_temperature[setting], choose)
                for setting in {ZERO, *options}
            }
            best = max(options, key=lambda setting: float(values[setting][choose].mean()))
            gains[evaluate_on] += (values[best] - values[ZERO])[evaluate_on] / SPLITS
            alphas.append(best[1])
    return gains, alphas


def at_best(losses: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Losses of all images at the temperature that is best for some of them."""
    result: np.ndarray[Any, Any] = losses[losses[:, rows].mean(1).argmin()]
    return result


def curve_point(
    setting: Setting,
    scores: dict[str, dict[Setting, np.ndarray[Any, Any]]],
    by_temperature: dict[Setting, np.ndarray[Any, Any]],
) -> list[float]:
    """All images, every metric; the temperature fitted to the same images, so for the figure alone."""
    calibrated = at_best(by_temperature[setting], np.arange(by_temperature[setting].shape[1]))
    shares = [float(scores[name][setting].mean()) for name in ("top-1", "top-5")]
    return [*shares, -float(scores["cross-entropy"][setting].mean()), float(calibrated.mean())]
