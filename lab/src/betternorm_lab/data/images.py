"""Images of a split: read, cropped to squares and resized."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from betternorm.errors import UserError
from betternorm_lab.data.facts import Facts
from betternorm_lab.data.splits import Split


def in_memory(name: str, split: Split, facts: Facts) -> Split:
    """The split as bytes, in square images of the given side."""
    if split.images is None:
        pictures = [square(picture_at(name, split, row), facts.size) for row in range(len(split))]
        return Split(split.labels, torch.stack(pictures))
    return Split(split.labels, resized(split.images, facts.size))


def resized(images: Tensor, size: int) -> Tensor:
    """Resize bytes: block means if the sides divide, otherwise bilinear with antialiasing."""
    if images.shape[-2:] == (size, size):
        return images
    parts = []
    for part in images.split(4096):  # floats need four times the memory
        if part.shape[-1] == part.shape[-2] and part.shape[-1] % size == 0:
            part = F.avg_pool2d(part.float(), part.shape[-1] // size)
        else:
            part = F.interpolate(part.float(), size=(size, size), mode="bilinear", antialias=True)
        parts.append(part.round_().clamp_(0, 255).to(torch.uint8))
    return torch.cat(parts)


def picture_at(name: str, split: Split, row: int) -> Any:
    number = int(split.rows[row]) if split.rows is not None else row
    try:
        return split.source[number][0].convert("RGB")
    except UserError:
        raise
    except (OSError, SyntaxError, ValueError) as problem:
        raise UserError(f"image {number} of {name} cannot be read: {problem}; replace or remove it") from problem


def square(picture: Any, size: int) -> Tensor:
    """Resize the short side to ``size``, then crop the center."""
    width, height = picture.size
    scale = size / min(width, height)
    picture = picture.resize((max(size, round(width * scale)), max(size, round(height * scale))))
    left, top = (picture.width - size) // 2, (picture.height - size) // 2
    pixels = np.asarray(picture.crop((left, top, left + size, top + size)))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)
