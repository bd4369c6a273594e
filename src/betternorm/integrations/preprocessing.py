"""How images are preprocessed: as the model declares, or as the user specifies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from betternorm.errors import UserError

CENTER = 0.875  # share of the short side that is cropped, if the model does not declare it


@dataclass(frozen=True)
class Preprocessing:
    """Resize the short side to ``resize``, crop the center ``size``, then (pixels / 255 - mean) / std.

    Without a size, images are neither resized nor cropped.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: tuple[int, int] | None = None
    resize: int | None = None
    interpolation: str = "bilinear"
    source: str = "as specified"

    def __str__(self) -> str:
        shape = f"{self.size[0]}x{self.size[1]}, " if self.size else ""
        return f"{shape}mean {_numbers(self.mean)}, std {_numbers(self.std)} ({self.source})"

    def __call__(self, picture: Any) -> Tensor:
        """Preprocess a PIL image."""
        import numpy as np
        from PIL import Image

        picture = picture.convert("L" if len(self.mean) == 1 else "RGB")
        if self.size is not None:
            scale = (self.resize or round(min(self.size) / CENTER)) / min(picture.size)
            wide, high = (max(1, round(side * scale)) for side in picture.size)
            picture = picture.resize((wide, high), getattr(Image.Resampling, self.interpolation.upper()))
            left, top = round((wide - self.size[1]) / 2), round((high - self.size[0]) / 2)
            picture = picture.crop((left, top, left + self.size[1], top + self.size[0]))
        pixels = torch.from_numpy(np.array(picture))
        return self.normalize(pixels[None] if pixels.dim() == 2 else pixels.permute(2, 0, 1))

    def normalize(self, pixels: Tensor) -> Tensor:
        """Normalize bytes (C, H, W), which must have the right size already."""
        if len(pixels) != len(self.mean) or (self.size is not None and pixels.shape[1:] != self.size):
            expected = (len(self.mean), *(self.size or pixels.shape[1:]))
            raise UserError(
                f"images have shape {tuple(pixels.shape)} and the model expects {expected}; resize them, or pass --size"
            )
        return ((pixels.float().div_(255) - _column(self.mean)) / _column(self.std)).contiguous()


def declared_preprocessing(spec: str, model: nn.Module) -> Preprocessing | None:
    """The preprocessing that timm or torchvision declare for a model, or the model itself in ``pretrained_cfg``."""
    source, _, name = spec.rpartition(":")
    if source == "torchvision":
        from torchvision.models import get_model_weights

        weights = list(get_model_weights(name))
        if not weights:
            return None
        how = get_model_weights(name).DEFAULT.transforms()
        size, resize = how.crop_size[0], how.resize_size[0]
        return Preprocessing(
            tuple(how.mean), tuple(how.std), (size, size), resize, how.interpolation.value, "torchvision"
        )
    config = getattr(model, "pretrained_cfg", None)
    if not isinstance(config, dict) or not config.get("mean"):
        return None
    size = tuple(config["input_size"][1:]) if config.get("input_size") else None
    resize = round(min(size) / (config.get("crop_pct") or CENTER)) if size else None
    interpolation = config.get("interpolation") or "bilinear"
    return Preprocessing(
        tuple(config["mean"]),
        tuple(config["std"]),
        size,
        resize,
        interpolation if interpolation in ("bilinear", "bicubic", "nearest", "lanczos") else "bicubic",
        "timm" if source == "timm" else "the model",
    )


def preprocessing(
    spec: str,
    model: nn.Module,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    size: int | None = None,
) -> Preprocessing:
    """The preprocessing that the model declares, with the values that are given instead."""
    declared = declared_preprocessing(spec, model)
    if declared is None and (mean is None or std is None):
        raise UserError(
            f"model {spec!r} does not declare its preprocessing: pass --mean and --std for pixels between 0 and 1, "
            "like --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225"
        )
    how = declared or Preprocessing((), ())
    if mean is not None or std is not None:
        how = replace(how, mean=tuple(mean or how.mean), std=tuple(std or how.std), source="as specified")
    if len(how.mean) != len(how.std) or len(how.mean) not in (1, 3):
        raise UserError(
            f"--mean has {len(how.mean)} numbers and --std {len(how.std)}; both need 3, or 1 for grayscale images"
        )
    for name, values in (("mean", mean), ("std", std)):
        if values is not None and not 0 <= min(values) <= max(values) <= 1:
            raise UserError(
                f"--{name} is {_numbers(values)}; it applies to pixels between 0 and 1, so values for pixels between 0 "
                "and 255 have to be divided by 255"
            )
    if min(how.std) <= 0:
        raise UserError(f"--std is {_numbers(how.std)}; every number must be above 0")
    if size is not None:
        if size < 1:
            raise UserError(f"--size is {size}; it must be a number of pixels, like 224")
        how = replace(how, size=(size, size), resize=None if declared is None else _same_center(declared, size))
    return how


def _same_center(declared: Preprocessing, size: int) -> int | None:
    if declared.size is None or declared.resize is None:
        return None
    return math.floor(size * declared.resize / min(declared.size) + 0.5)


def _column(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32).view(-1, 1, 1)


def _numbers(numbers: Sequence[float]) -> str:
    return ",".join(f"{number:g}" for number in numbers)
