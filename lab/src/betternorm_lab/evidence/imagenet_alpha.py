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
from betternorm_lab.evidence.rows import write_arrays
from betternorm_lab.evidence.runs import Places
from betternorm_lab.trials import code_version

NAME = "imagenet-alpha"
FIXED_ALPHA = 1 / 17  # a prior of 16 examples, as in Schneider et al. 2020 (arXiv:2006.16971), for one test example
ALPHAS = (0.0, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, FIXED_ALPHA, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5)
LINEAR_ALPHAS = (0.005, 0.01, 0.02, 0.04, FIXED_ALPHA, 0.1, 0.2)
BATCH = 8  # fastest on one core; examples are processed independently
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
    if mixing == "linear":
        for parent in list(model.modules()):
            for name, child in parent.named_children():
                if isinstance(child, nn.BatchNorm2d):
                    setattr(parent, name, LinearMixing(child, alpha))
    else:
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
