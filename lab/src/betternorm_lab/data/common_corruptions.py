"""The corruptions of Hendrycks and Dietterich (arXiv:1903.12261) with their published constants, in PyTorch.

Fifteen for evaluation and four for validation, at severities 1 to 5, for images of 32x32 (CIFAR-C) and 224x224
(ImageNet-C). Written for batches of images in [0, 1]. What differs in detail: the water drops of spatter (severities 1
to 3) have no edges by Canny's detector, blurs run in PyTorch instead of OpenCV and ImageMagick, and random numbers are
others. Frost overlays photographs, which are read from a folder: ImageNet-C/create_c/frost*.* of the public repository
hendrycks/robustness.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

TEST = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
)  # fmt: skip
VALIDATION = ("speckle_noise", "gaussian_blur", "spatter", "saturate")

# By corruption and severity, for CIFAR-C and for ImageNet-C.
CONSTANTS: dict[str, tuple[Sequence[Any], Sequence[Any]]] = {
    "gaussian_noise": ((0.04, 0.06, 0.08, 0.09, 0.10), (0.08, 0.12, 0.18, 0.26, 0.38)),
    "shot_noise": ((500, 250, 100, 75, 50), (60, 25, 12, 5, 3)),
    "impulse_noise": ((0.01, 0.02, 0.03, 0.05, 0.07), (0.03, 0.06, 0.09, 0.17, 0.27)),
    "speckle_noise": ((0.06, 0.1, 0.12, 0.16, 0.2), (0.15, 0.2, 0.35, 0.45, 0.6)),
    "gaussian_blur": ((0.4, 0.6, 0.7, 0.8, 1), (1, 2, 3, 4, 6)),
    "glass_blur": (  # sigma, largest displacement, iterations
        ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
        ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    ),
    "defocus_blur": (  # radius, sigma of the kernel's antialiasing
        ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
        ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
    ),
    "motion_blur": (  # radius, sigma
        ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
        ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
    ),
    "zoom_blur": (  # largest zoom (excluded), step
        ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
        ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
    ),
    "fog": (  # weight, decay of the fractal
        ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
        ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
    ),
    "frost": (  # weights of image and frost
        ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
        ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
    ),
    "snow": (  # mean, std, zoom, threshold, radius, sigma, weight of the image
        (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95), (0.1, 0.2, 1, 0.5, 10, 4, 0.9), (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85), (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
        (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8), (0.2, 0.3, 2, 0.5, 12, 4, 0.7), (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65), (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
    ),
    "spatter": (  # mean, std, sigma, threshold, sigma of mud or weight of water, mud
        (
            (0.62, 0.1, 0.7, 0.7, 0.5, 0), (0.65, 0.1, 0.8, 0.7, 0.5, 0), (0.65, 0.3, 1, 0.69, 0.5, 0),
            (0.65, 0.1, 0.7, 0.69, 0.6, 1), (0.65, 0.1, 0.5, 0.68, 0.6, 1),
        ),
        (
            (0.65, 0.3, 4, 0.69, 0.6, 0), (0.65, 0.3, 3, 0.68, 0.6, 0), (0.65, 0.3, 2, 0.68, 0.5, 0),
            (0.65, 0.3, 1, 0.65, 1.5, 1), (0.67, 0.4, 1, 0.65, 1.5, 1),
        ),
    ),
    "contrast": ((0.75, 0.5, 0.4, 0.3, 0.15), (0.4, 0.3, 0.2, 0.1, 0.05)),
    "brightness": ((0.05, 0.1, 0.15, 0.2, 0.3), (0.1, 0.2, 0.3, 0.4, 0.5)),
    "saturate": (
        ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),
        ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)),
    ),
    "jpeg_compression": ((80, 65, 58, 50, 40), (25, 18, 15, 10, 7)),  # quality
    "pixelate": ((0.95, 0.9, 0.85, 0.75, 0.65), (0.6, 0.5, 0.4, 0.3, 0.25)),
    "elastic_transform": (  # displacement, its sigma, affine displacement
        tuple((32 * a, 32 * b, 32 * c) for a, b, c in
              ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03))),
        tuple((244 * a, 244 * b, 244 * c) for a, b, c in
              ((2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02))),
    ),
}  # fmt: skip


def corrupt(pixels: Tensor, name: str, severity: int, seed: int = 0, frost: Path | None = None) -> Tensor:
    """Images (N, 3, H, W) in [0, 1], corrupted and rounded to the 256 values of a file."""
    constants = CONSTANTS[name][pixels.shape[-1] > 64][severity - 1]
    random = torch.Generator().manual_seed(seed + 1000 * (TEST + VALIDATION).index(name) + severity)
    corrupted = (
        FUNCTIONS[name](pixels, constants, random) if name != "frost" else _frost(pixels, constants, random, frost)
    )
    return (corrupted.clamp(0, 1) * 255).floor() / 255


# ---- noise ----


def _gaussian_noise(x: Tensor, scale: float, random: torch.Generator) -> Tensor:
    return x + scale * torch.randn(x.shape, generator=random)


def _shot_noise(x: Tensor, photons: float, random: torch.Generator) -> Tensor:
    return torch.poisson(x * photons, generator=random) / photons


def _impulse_noise(x: Tensor, amount: float, random: torch.Generator) -> Tensor:
    flipped, salt = torch.rand(2, *x.shape, generator=random)
    return torch.where(flipped < amount, (salt < 0.5).float(), x)


def _speckle_noise(x: Tensor, scale: float, random: torch.Generator) -> Tensor:
    return x + x * scale * torch.randn(x.shape, generator=random)


# ---- blur ----


def _gaussian_blur(x: Tensor, sigma: float, random: torch.Generator | None = None, truncate: float = 4.0) -> Tensor:
    radius = int(truncate * sigma + 0.5)
    if radius == 0:
        return x
    offsets = torch.arange(-radius, radius + 1).float()
    kernel = (-offsets.square() / (2 * sigma**2)).exp()
    kernel = (kernel / kernel.sum()).expand(x.shape[1], 1, -1)
    x = F.pad(x, (radius,) * 4, mode="replicate")
    x = F.conv2d(x, kernel[:, :, None, :], groups=x.shape[1])
    return F.conv2d(x, kernel[:, :, :, None], groups=x.shape[1])


def _defocus_blur(x: Tensor, constants: tuple[float, float], random: torch.Generator) -> Tensor:
    radius, sigma = constants
    reach = max(8, math.ceil(radius))
    line = torch.arange(-reach, reach + 1).float()
    disk = (line[:, None].square() + line.square() <= radius**2).float()
    disk = disk / disk.sum()
    size = 1 if radius <= 8 else 2  # of the antialiasing kernel: 3 or 5 wide
    bell = (-torch.arange(-size, size + 1).float().square() / (2 * sigma**2)).exp()
    bell = bell / bell.sum()
    disk = F.conv2d(disk[None, None], (bell[:, None] * bell)[None, None], padding=size)
    padded = F.pad(x, (reach,) * 4, mode="reflect")
    return F.conv2d(padded, disk.expand(x.shape[1], 1, -1, -1), groups=x.shape[1])


def _glass_blur(x: Tensor, constants: tuple[float, int, int], random: torch.Generator) -> Tensor:
    """Pixels take the value of a neighbor, one after another. As published: a copy, and no exchange."""
    sigma, reach, iterations = constants
    x = (_gaussian_blur(x, sigma) * 255).floor() / 255
    side, images = x.shape[-1], torch.arange(len(x))
    x = x.permute(2, 3, 0, 1).clone()
    for _ in range(iterations):
        for h in range(side - reach, reach, -1):
            moves = torch.randint(-reach, reach, (2, side, len(x[0, 0])), generator=random)
            for w in range(side - reach, reach, -1):
                x[h, w] = x[h + moves[0, w - 1], w + moves[1, w - 1], images]
    return _gaussian_blur(x.permute(2, 3, 0, 1), sigma)


def _motion_blur(x: Tensor, constants: tuple[float, float], angles: Tensor) -> Tensor:
    """A one-sided Gaussian along a direction, one angle (degrees) per image; borders repeat."""
    radius, sigma = constants
    width = 2 * int(radius) + 1
    kernel = (-torch.arange(width).float().square() / (2 * sigma**2)).exp()
    kernel = kernel / kernel.sum()
    height, side = x.shape[-2:]
    rows, columns, images = torch.arange(height), torch.arange(side), torch.arange(len(x))
    blurred = torch.zeros_like(x)
    for step in range(width):
        down = torch.ceil(step * torch.sin(torch.deg2rad(angles)) - 0.5).long()
        right = torch.ceil(step * torch.cos(torch.deg2rad(angles)) - 0.5).long()
        h = (rows[None] + down[:, None]).clamp(0, height - 1)
        w = (columns[None] + right[:, None]).clamp(0, side - 1)
        blurred += kernel[step] * x[images[:, None, None], :, h[:, :, None], w[:, None, :]].permute(0, 3, 1, 2)
    return blurred


def _motion_blur_any(x: Tensor, constants: tuple[float, float], random: torch.Generator) -> Tensor:
    return _motion_blur(x, constants, torch.rand(len(x), generator=random) * 90 - 45)


def _zoom_blur(x: Tensor, constants: tuple[float, float], random: torch.Generator) -> Tensor:
    factors = np.arange(1, *constants)
    return (x + sum(_zoomed(x, float(factor)) for factor in factors)) / (len(factors) + 1)


def _zoomed(x: Tensor, factor: float) -> Tensor:
    """The center, enlarged to the size of the image."""
    side = x.shape[-1]
    crop = math.ceil(side / factor)
    top = (side - crop) // 2
    size = round(crop * factor)
    x = F.interpolate(x[..., top : top + crop, top : top + crop], (size, size), mode="bilinear", align_corners=True)
    trim = (size - side) // 2
    return x[..., trim : trim + side, trim : trim + side]


# ---- weather ----


def _fog(x: Tensor, constants: tuple[float, float], random: torch.Generator) -> Tensor:
    weight, decay = constants
    brightest = x.amax((1, 2, 3), keepdim=True)
    side = 32 if x.shape[-1] <= 32 else 256
    plasma = _plasma(len(x), side, decay, random)[:, None, : x.shape[-2], : x.shape[-1]]
    return (x + weight * plasma) * brightest / (brightest + weight)


def _plasma(count: int, side: int, decay: float, random: torch.Generator) -> Tensor:
    """Height maps by the diamond-square algorithm, in [0, 1], wrapping around."""
    heights = torch.zeros(count, side, side, dtype=torch.float64)
    step, wobble = side, 100.0

    def noisy(total: Tensor) -> Tensor:
        return total / 4 + wobble * wobble * (torch.rand(total.shape, generator=random, dtype=torch.float64) * 2 - 1)

    while step >= 2:
        half = step // 2
        corners = heights[:, ::step, ::step]
        squares = corners + corners.roll(-1, 1)
        squares = squares + squares.roll(-1, 2)
        heights[:, half::step, half::step] = noisy(squares)
        centers = heights[:, half::step, half::step]
        corners = heights[:, ::step, ::step].clone()
        heights[:, ::step, half::step] = noisy(centers + centers.roll(1, 1) + corners + corners.roll(-1, 2))
        heights[:, half::step, ::step] = noisy(centers + centers.roll(1, 2) + corners + corners.roll(-1, 1))
        step, wobble = half, wobble / decay
    heights -= heights.amin((1, 2), keepdim=True)
    return (heights / heights.amax((1, 2), keepdim=True)).float()


def _frost(x: Tensor, constants: tuple[float, float], random: torch.Generator, folder: Path | None) -> Tensor:
    if folder is None:
        raise ValueError("frost needs the folder with the photographs frost1.png to frost5.jpg")
    photographs = _photographs(folder, x.shape[-1] <= 32)
    side = x.shape[-1]
    crops = []
    for _ in range(len(x)):
        photograph = photographs[int(torch.randint(5, (1,), generator=random))]
        top, left = (int(torch.randint(size - side, (1,), generator=random)) for size in photograph.shape[-2:])
        crops.append(photograph[:, top : top + side, left : left + side])
    return constants[0] * x + constants[1] * torch.stack(crops)


@cache
def _photographs(folder: Path, small: bool) -> list[Tensor]:
    from PIL import Image

    found = []
    for name in ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg"):
        with Image.open(folder / name) as picture:
            photograph = torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1).float() / 255
        found.append(F.interpolate(photograph[None], scale_factor=0.2, mode="bilinear")[0] if small else photograph)
    return found


def _snow(x: Tensor, constants: tuple[float, ...], random: torch.Generator) -> Tensor:
    mean, std, zoom, threshold, radius, sigma, weight = constants
    flakes = mean + std * torch.randn(len(x), 1, *x.shape[-2:], generator=random)
    flakes = _zoomed(flakes, zoom)
    flakes = torch.where(flakes < threshold, 0.0, flakes).clamp(0, 1)
    flakes = _motion_blur(flakes, (radius, sigma), torch.rand(len(x), generator=random) * 90 - 135)
    gray = torch.einsum("c,nchw->nhw", torch.tensor([0.299, 0.587, 0.114]), x)[:, None]
    x = weight * x + (1 - weight) * torch.maximum(x, gray * 1.5 + 0.5)
    return x + flakes + flakes.rot90(2, (2, 3))


def _spatter(x: Tensor, constants: tuple[float, ...], random: torch.Generator) -> Tensor:
    mean, std, sigma, threshold, last, mud = constants
    liquid = _gaussian_blur(mean + std * torch.randn(len(x), 1, *x.shape[-2:], generator=random), sigma)
    if mud:
        mask = _gaussian_blur((liquid > threshold).float(), last)
        mask = torch.where(mask < 0.8, 0.0, mask)
        return x * (1 - mask) + mask * torch.tensor([63.0, 42.0, 20.0]).view(3, 1, 1) / 255
    drops = torch.where(liquid < threshold, 0.0, liquid)
    drops = drops / drops.amax((1, 2, 3), keepdim=True).clamp(min=1e-6)
    return x + last * drops * torch.tensor([175.0, 238.0, 238.0]).view(3, 1, 1) / 255


# ---- color and digital ----


def _contrast(x: Tensor, factor: float, random: torch.Generator) -> Tensor:
    mean = x.mean((2, 3), keepdim=True)
    return mean + factor * (x - mean)


def _brightness(x: Tensor, amount: float, random: torch.Generator) -> Tensor:
    hue, saturation, value = _to_hsv(x)
    return _from_hsv(hue, saturation, (value + amount).clamp(0, 1))


def _saturate(x: Tensor, constants: tuple[float, float], random: torch.Generator) -> Tensor:
    hue, saturation, value = _to_hsv(x)
    return _from_hsv(hue, (saturation * constants[0] + constants[1]).clamp(0, 1), value)


def _to_hsv(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    value, largest = x.max(1)
    spread = value - x.amin(1)
    safe = spread.clamp(min=1e-12)
    red, green, blue = x.unbind(1)
    sixths = torch.stack([(green - blue) / safe, 2 + (blue - red) / safe, 4 + (red - green) / safe], 1)
    hue = (sixths.gather(1, largest[:, None])[:, 0] / 6) % 1
    return torch.where(spread == 0, 0.0, hue), spread / value.clamp(min=1e-12), value


def _from_hsv(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    channels = []
    for offset in (5, 3, 1):
        k = (offset + hue * 6) % 6
        channels.append(value - value * saturation * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(channels, 1)


def _jpeg_compression(x: Tensor, quality: int, random: torch.Generator) -> Tensor:
    from PIL import Image

    out = []
    for image in (x * 255).round().byte().permute(0, 2, 3, 1).numpy():
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "JPEG", quality=quality)
        with Image.open(buffer) as picture:
            out.append(torch.from_numpy(np.array(picture)))
    return torch.stack(out).permute(0, 3, 1, 2).float() / 255


def _pixelate(x: Tensor, factor: float, random: torch.Generator) -> Tensor:
    from PIL import Image

    side = x.shape[-1]
    out = []
    for image in (x * 255).round().byte().permute(0, 2, 3, 1).numpy():
        small = Image.fromarray(image).resize((int(side * factor), int(side * factor)), Image.Resampling.BOX)
        out.append(torch.from_numpy(np.array(small.resize((side, side), Image.Resampling.BOX))))
    return torch.stack(out).permute(0, 3, 1, 2).float() / 255


def _elastic_transform(x: Tensor, constants: tuple[float, float, float], random: torch.Generator) -> Tensor:
    """A random affine map of three points, then a smooth random displacement."""
    reach, sigma, affine = constants
    side = x.shape[-1]
    center, arm = side // 2, side // 3
    corners = torch.tensor(
        [[center + arm, center + arm], [center + arm, center - arm], [center - arm, center - arm]]
    ).float()
    moved = corners + (torch.rand(len(x), 3, 2, generator=random) * 2 - 1) * affine
    # From places (x, y, 1) in the result to places in the image: the inverse of the map from corners to moved.
    ones = torch.ones(len(x), 3, 1)
    matrix = torch.linalg.solve(torch.cat([moved, ones], 2), corners.expand(len(x), -1, -1))
    down, right = torch.meshgrid(torch.arange(side).float(), torch.arange(side).float(), indexing="ij")
    places = torch.stack([right, down, torch.ones_like(right)], -1)
    x = _sampled(x, torch.einsum("hwk,nkd->nhwd", places, matrix))
    shift = torch.rand(len(x), 2, side, side, generator=random) * 2 - 1
    shift = _gaussian_blur(shift, sigma, truncate=3) * reach
    return _sampled(x, torch.stack([right + shift[:, 0], down + shift[:, 1]], -1))


def _sampled(x: Tensor, places: Tensor) -> Tensor:
    """Bilinear, at places (x, y) in pixels; borders are reflected."""
    grid = (places * 2 + 1) / x.shape[-1] - 1
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


FUNCTIONS: dict[str, Callable[[Tensor, Any, torch.Generator], Tensor]] = {
    "gaussian_noise": _gaussian_noise,
    "shot_noise": _shot_noise,
    "impulse_noise": _impulse_noise,
    "defocus_blur": _defocus_blur,
    "glass_blur": _glass_blur,
    "motion_blur": _motion_blur_any,
    "zoom_blur": _zoom_blur,
    "snow": _snow,
    "fog": _fog,
    "brightness": _brightness,
    "contrast": _contrast,
    "elastic_transform": _elastic_transform,
    "pixelate": _pixelate,
    "jpeg_compression": _jpeg_compression,
    "speckle_noise": _speckle_noise,
    "gaussian_blur": _gaussian_blur,
    "spatter": _spatter,
    "saturate": _saturate,
}
