"""Shifted data: standard corruptions of images, in pure torch, and the rule that chooses alpha under them.

The kinds follow Hendrycks and Dietterich, Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations (arXiv:1903.12261); the strengths are our own, from 1 to 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from betternorm.weighing.batches import example_keys

Shift = Callable[[Tensor], Tensor]

STRENGTHS = (1, 3, 5)  # if none is specified
_ROUNDING = 0.01  # tolerance for pixels outside of [0, 1], as resizing may produce


def corruptions(
    names: str | Iterable[str] | None = None,
    mean: float | Sequence[float] = 0.0,
    std: float | Sequence[float] = 1.0,
) -> dict[str, Shift]:
    """Standard corruptions of images, by name, for ``tune_alpha(..., shifts=...)``.

    The corruption of an image depends only on its content, so that alphas are compared on the same images.

    Args:
        names: "noise", "blur", "contrast", "brightness", "fog", "compression", each at strengths 1, 3 and 5, or with
            one strength from 1 to 5, as "blur:2"; None is all of them.
        mean, std: of the normalization that the loader applies to pixels between 0 and 1.

    Examples::

        >>> list(corruptions("blur"))
        ['blur:1', 'blur:3', 'blur:5']
        >>> shift = corruptions(["fog:2"])["fog:2"]
        >>> shift(torch.rand(4, 3, 32, 32)).shape
        torch.Size([4, 3, 32, 32])
    """
    found: dict[str, Shift] = {}
    for name in KINDS if names is None else [names] if isinstance(names, str) else names:
        kind, given, strength = name.partition(":")
        strengths = [str(number) for number in STRENGTHS] if not given else [strength]
        if kind not in KINDS or any(part not in ("1", "2", "3", "4", "5") for part in strengths):
            raise ValueError(
                f"shift {name!r} is not known; known are {', '.join(KINDS)}, alone or with a strength from 1 to 5, "
                "as in 'blur:2'"
            )
        found |= {f"{kind}:{part}": Corruption(kind, int(part), _numbers(mean), _numbers(std)) for part in strengths}
    if not found:
        raise ValueError(f"shifts names no corruption; known are {', '.join(KINDS)}")
    return found


def functions_by_kind(
    shifts: Any, model: nn.Module, mean: float | Sequence[float] | None, std: float | Sequence[float] | None
) -> dict[str, list[Shift]]:
    """For `fit_alpha`: functions of a batch of images by kind, a list of levels each."""
    if isinstance(shifts, Mapping):
        for name, shift in shifts.items():
            if not callable(shift):
                raise ValueError(f"shifts[{name!r}] is a {type(shift).__name__}; fit_alpha needs functions of images")
        functions = dict(shifts)
    else:
        if mean is None or std is None:
            declared = _declared_statistics(model)
            if declared is None:
                raise ValueError(
                    "fit_alpha needs mean=... and std=... of the normalization of the images to corrupt them, and this "
                    "model does not declare them; or pass shifts={'name': function}"
                )
            mean, std = declared[0] if mean is None else mean, declared[1] if std is None else std
        functions = dict(corruptions(shifts, mean, std))
    kinds: dict[str, list[Shift]] = {}
    for name, shift in functions.items():
        kinds.setdefault(name.partition(":")[0], []).append(shift)
    if not kinds or kinds.keys() & {"clean", "corrupted"}:
        raise ValueError("shifts must name at least one kind of corruption, and none 'clean' or 'corrupted'")
    return kinds


def _declared_statistics(model: nn.Module) -> tuple[Sequence[float], Sequence[float]] | None:
    """Mean and std by timm's configuration of the model; torchvision's classifiers share those of ImageNet."""
    declared = getattr(model, "pretrained_cfg", None)
    if isinstance(declared, dict) and declared.get("mean") and declared.get("std"):
        return declared["mean"], declared["std"]
    if type(model).__module__.startswith("torchvision.models"):
        return (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    return None


@dataclass(frozen=True)
class Corruption:
    """A corruption of a batch of normalized images (N, C, H, W)."""

    kind: str
    strength: int
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __call__(self, images: Tensor) -> Tensor:
        if images.dim() != 4 or not images.is_floating_point():
            raise ValueError(
                f"corruptions take images (N, C, H, W) in floating point, got {images.dtype} {tuple(images.shape)}; "
                "for other data pass shifts={'name': function or loader}"
            )
        mean, std = (images.new_tensor(part).view(-1, 1, 1) for part in (self.mean, self.std))
        pixels = images * std + mean
        low, high = (float(bound) for bound in pixels.aminmax())
        if low < -_ROUNDING or high > 1 + _ROUNDING:
            raise ValueError(
                f"pixels run from {low:.3g} to {high:.3g} instead of 0 to 1: pass the mean and std that the images "
                "were normalized with, corruptions(names, mean=..., std=...)"
            )
        corrupted = KINDS[self.kind](pixels.clamp(0, 1), self.strength - 1, images)
        return ((corrupted.clamp(0, 1) - mean) / std).contiguous(
            memory_format=torch.channels_last
            if images.is_contiguous(memory_format=torch.channels_last)
            else torch.contiguous_format
        )

    def check_normalized(self, images: Tensor) -> None:
        """Raise if many images lie between 0 and 1 although a mean was to be subtracted from them."""
        low, high = (float(bound) for bound in images.aminmax())
        if low >= 0 and high <= 1 and max(self.mean) > 0:
            raise ValueError(
                f"images look unnormalized: they lie between {low:.3g} and {high:.3g}. Normalize them with mean "
                f"{self.mean} and std {self.std}, or pass mean=0.0, std=1.0 if the model expects pixels from 0 to 1"
            )


def _numbers(given: float | Sequence[float]) -> tuple[float, ...]:
    return (float(given),) if isinstance(given, (int, float)) else tuple(float(number) for number in given)


# ---- the corruptions: of pixels between 0 and 1, at strength 0 to 4 ----


def _noise(pixels: Tensor, strength: int, images: Tensor) -> Tensor:
    return pixels + (0.03, 0.05, 0.08, 0.12, 0.18)[strength] * _normal(images, pixels.shape[1:])


def _blur(pixels: Tensor, strength: int, images: Tensor) -> Tensor:
    # Wider on larger images, but less than in proportion: they contain finer details too.
    sigma = (0.4, 0.6, 0.8, 1.0, 1.3)[strength] * math.sqrt(min(pixels.shape[-2:]) / 32)
    return _smooth(pixels, sigma)


def _contrast(pixels: Tensor, strength: int, images: Tensor) -> Tensor:
    middle = pixels.mean((1, 2, 3), keepdim=True)
    return middle + (0.75, 0.5, 0.4, 0.3, 0.15)[strength] * (pixels - middle)


def _brightness(pixels: Tensor, strength: int, images: Tensor) -> Tensor:
    return pixels + (0.05, 0.1, 0.15, 0.2, 0.3)[strength]


def _fog(pixels: Tensor, strength: int, images: Tensor) -> Tensor:
    """A white cloud: octaves of noise, each twice as fine and half as strong, blended with the image."""
    height, width = pixels.shape[-2:]
    cloud = pixels.new_zeros(len(pixels), 1, height, width)
    side, weight = 2, 1.0
    while side <= min(height, width):
        rough = _normal(images, (1, side, side), salt=side)
        cloud += weight * F.interpolate(rough, (height, width), mode="bicubic", align_corners=False)
        side, weight = side * 2, weight / 2
    cloud = (cloud - cloud.amin((2, 3), keepdim=True)) / (
        cloud.amax((2, 3), keepdim=True) - cloud.amin((2, 3), keepdim=True)
    )
    share = (0.3, 0.45, 0.6, 0.7, 0.8)[strength]
    return pixels * (1 - share) + share * (0.5 + 0.5 * cloud)


def _compression(pixels: Tensor, strength: int, images: Tensor) -> Tensor:
    """The loss of JPEG: the cosine transform of 8 x 8 blocks, quantized for a quality."""
    quality = (80, 50, 30, 20, 10)[strength]
    scale = 50 / quality if quality < 50 else 2 - quality / 50
    height, width = pixels.shape[-2:]
    padded = F.pad(pixels, (0, -width % 8, 0, -height % 8), mode="replicate") * 255 - 128
    color = pixels.shape[1] == 3
    if color:
        padded = torch.einsum("dc,nchw->ndhw", padded.new_tensor(_TO_YCBCR), padded)
    rows, columns = padded.shape[-2] // 8, padded.shape[-1] // 8
    blocks = padded.unflatten(3, (columns, 8)).unflatten(2, (rows, 8)).transpose(3, 4)
    cosine = padded.new_tensor(_COSINES)
    luma, chroma = (padded.new_tensor(steps).view(8, 8) for steps in (_LUMA_STEPS, _CHROMA_STEPS))
    steps = torch.stack([luma, chroma, chroma] if color else [luma] * pixels.shape[1])
    steps = (steps * scale).round().clamp(1, 255)[None, :, None, None]
    blocks = cosine.T @ ((cosine @ blocks @ cosine.T / steps).round() * steps) @ cosine
    image = blocks.transpose(3, 4).flatten(4, 5).flatten(2, 3)
    if color:
        image = torch.einsum("dc,nchw->ndhw", torch.linalg.inv(padded.new_tensor(_TO_YCBCR)), image)
    restored: Tensor = (image + 128) / 255
    return restored[..., :height, :width]


KINDS: dict[str, Callable[[Tensor, int, Tensor], Tensor]] = {
    "noise": _noise,
    "blur": _blur,
    "contrast": _contrast,
    "brightness": _brightness,
    "fog": _fog,
    "compression": _compression,
}


def _normal(images: Tensor, shape: Sequence[int], salt: int = 0) -> Tensor:
    """Normal noise for every image that depends only on its content."""
    generator = torch.Generator()
    drawn = []
    for key in example_keys(images).tolist():
        generator.manual_seed((key + salt) % 2**63)
        drawn.append(torch.randn(*shape, generator=generator))
    return torch.stack(drawn).to(images)


def _smooth(pixels: Tensor, sigma: float) -> Tensor:
    radius = min(math.ceil(3 * sigma), min(pixels.shape[-2:]) - 1)
    offsets = torch.arange(-radius, radius + 1, dtype=pixels.dtype, device=pixels.device)
    bell = (-offsets.square() / (2 * sigma**2)).exp()
    bell = (bell / bell.sum()).expand(pixels.shape[1], 1, -1)
    padded = F.pad(pixels, (radius,) * 4, mode="reflect")
    across = F.conv2d(padded, bell[:, :, None, :], groups=pixels.shape[1])
    return F.conv2d(across, bell[:, :, :, None], groups=pixels.shape[1])


_COSINES = [
    [math.sqrt((1 if k == 0 else 2) / 8) * math.cos(math.pi * k * (2 * n + 1) / 16) for n in range(8)] for k in range(8)
]
_TO_YCBCR = [[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]]  # JFIF
# Quantization tables of the JPEG standard, annex K.
_LUMA_STEPS = [
    16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55, 14, 13, 16, 24, 40, 57, 69, 56, 14, 17, 22, 29, 51,
    87, 80, 62, 18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92, 49, 64, 78, 87, 103, 121, 120, 101,
    72, 92, 95, 98, 112, 100, 103, 99,
]  # fmt: skip
_CHROMA_STEPS = [
    17, 18, 24, 47, 99, 99, 99, 99, 18, 21, 26, 66, 99, 99, 99, 99, 24, 26, 56, 99, 99, 99, 99, 99, 47, 66, 99, 99, 99,
    99, 99, 99, *([99] * 32),
]  # fmt: skip


# ---- the rule ----


@dataclass(frozen=True)
class Rule:
    """How a setting of alpha is chosen from its scores on clean data and on every shift.

    Attributes:
        max_clean_drop: None for the best mean over the clean data and the shifts, all with the same weight. A number
            for the best mean over the shifts with a drop on clean data of at most this much.
    """

    higher_is_better: bool
    max_clean_drop: float | None = None

    def choose(self, clean: Mapping[Any, float], shifted: Sequence[Mapping[Any, float]], baseline: float) -> Any:
        """The best setting, given the scores by setting; of equals the one nearest to the baseline.

        A setting is a number, or a tuple with one per layer.
        """
        sign = 1 if self.higher_is_better else -1

        def distance(alpha: float | tuple[float, ...]) -> float:
            alphas = alpha if isinstance(alpha, tuple) else (alpha,)
            return sum(abs(one - baseline) for one in alphas) / len(alphas)

        allowed = [
            alpha
            for alpha in sorted(clean, key=distance)
            if self.max_clean_drop is None or sign * (clean[baseline] - clean[alpha]) <= self.max_clean_drop + 1e-12
        ]
        return max(allowed, key=lambda alpha: sign * self.score(alpha, clean, shifted))

    def score(self, alpha: Any, clean: Mapping[Any, float], shifted: Sequence[Mapping[Any, float]]) -> float:
        scores = [part[alpha] for part in shifted]
        if self.max_clean_drop is None:
            scores.append(clean[alpha])
        return sum(scores) / len(scores)
