"""Labelled images from folders and arrays, prepared as a network wants them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from betternorm.errors import UserError
from betternorm.integrations.loading import ImageLoader

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff", ".gif")
SPLITS = ("", "val_", "validation_", "test_", "train_")  # before "images" and "labels" in an .npz, in order of choice
CENTRE = 0.875  # of the short side, where a model does not say


@dataclass(frozen=True)
class Preprocessing:
    """Short side to ``resize``, the centre ``size``, then (pixels / 255 - mean) / std. No size: images as they are."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: tuple[int, int] | None = None
    resize: int | None = None
    interpolation: str = "bilinear"
    source: str = "given"

    def __str__(self) -> str:
        shape = f"{self.size[0]}x{self.size[1]}, " if self.size else ""
        return f"{shape}mean {_numbers(self.mean)}, std {_numbers(self.std)} ({self.source})"

    def __call__(self, picture: Any) -> Tensor:
        from PIL import Image

        picture = picture.convert("L" if len(self.mean) == 1 else "RGB")
        if self.size is not None:
            scale = (self.resize or round(min(self.size) / CENTRE)) / min(picture.size)
            wide, high = (max(1, round(side * scale)) for side in picture.size)
            picture = picture.resize((wide, high), getattr(Image.Resampling, self.interpolation.upper()))
            left, top = round((wide - self.size[1]) / 2), round((high - self.size[0]) / 2)
            picture = picture.crop((left, top, left + self.size[1], top + self.size[0]))
        pixels = torch.from_numpy(np.array(picture, dtype=np.float32)).div_(255)
        pixels = pixels[None] if pixels.dim() == 2 else pixels.permute(2, 0, 1)
        return ((pixels - _column(self.mean)) / _column(self.std)).contiguous()


def declared_preprocessing(spec: str, model: nn.Module) -> Preprocessing | None:
    """What timm or torchvision say about a model, or a model of the user's own in ``pretrained_cfg`` as timm's do."""
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
    said = getattr(model, "pretrained_cfg", None)
    if not isinstance(said, dict) or not said.get("mean"):
        return None
    size = tuple(said["input_size"][1:]) if said.get("input_size") else None
    resize = round(min(size) / (said.get("crop_pct") or CENTRE)) if size else None
    interpolation = said.get("interpolation") or "bilinear"
    return Preprocessing(
        tuple(said["mean"]),
        tuple(said["std"]),
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
    """What the model declares, with what is given instead."""
    declared = declared_preprocessing(spec, model)
    if declared is None and (mean is None or std is None):
        raise UserError(
            f"model {spec!r} does not say how its images are prepared: give --mean and --std, of pixels between 0 and "
            "1, like --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225"
        )
    how = declared or Preprocessing((), ())
    if mean is not None or std is not None:
        how = replace(how, mean=tuple(mean or how.mean), std=tuple(std or how.std), source="given")
    if len(how.mean) != len(how.std) or len(how.mean) not in (1, 3):
        raise UserError(
            f"--mean has {len(how.mean)} numbers and --std {len(how.std)}; both need 3, or 1 for grey images"
        )
    if min(how.std) <= 0:
        raise UserError(f"--std is {_numbers(how.std)}; every number must be above 0")
    if size is not None:
        if size < 1:
            raise UserError(f"--size is {size}; it must be a side in pixels, like 224")
        how = replace(how, size=(size, size), resize=None if declared is None else _same_centre(declared, size))
    return how


class Labelled(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Images and labels, prepared one by one."""

    def __init__(self, pictures: Sequence[Any], labels: Sequence[int], how: Preprocessing | None, source: str) -> None:
        self.pictures, self.labels, self.how, self.source = pictures, [int(label) for label in labels], how, source

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        picture, label = self.pictures[row], self.labels[row]
        if self.how is None:  # prepared already
            return torch.as_tensor(picture), label
        from PIL import Image

        if isinstance(picture, Path):
            try:
                with Image.open(picture) as opened:
                    return self.how(opened), label
            except (OSError, SyntaxError, ValueError) as error:
                raise UserError(f"{picture} cannot be read as an image; replace or remove it") from error
        return self.how(Image.fromarray(picture)), label

    def limited(self, limit: int) -> Labelled:
        """So many, evenly spread: folders come class by class."""
        if limit >= len(self):
            return self
        rows = np.linspace(0, len(self) - 1, limit).round().astype(int)
        return Labelled([self.pictures[row] for row in rows], [self.labels[row] for row in rows], self.how, self.source)

    def check_labels(self, classes: int) -> None:
        low, high = min(self.labels), max(self.labels)
        if low < 0 or high >= classes:
            raise UserError(
                f"{self.source}: labels run from {low} to {high}, and the network has {classes} classes: they must lie "
                f"between 0 and {classes - 1}"
            )


def read_images(path: Path, how: Preprocessing) -> Labelled:
    """A folder with a folder a class, or an .npz with images and labels."""
    if path.is_dir():
        return _folder(path, how)
    if path.suffix == ".npz":
        return _arrays(path, how)
    raise UserError(f"data {path}: it has to be a folder with a folder a class, or an .npz with images and labels")


class Batches:
    """Batches of a dataset in their order; errors of workers come as one line."""

    def __init__(self, images: Labelled, batch_size: int, workers: int, pin: bool) -> None:
        self.batch_size = batch_size
        self._loader = ImageLoader(
            images, batch_size=batch_size, num_workers=workers, pin_memory=pin, persistent_workers=workers > 0
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from self._loader


def _folder(path: Path, how: Preprocessing) -> Labelled:
    classes = sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    names = {entry.name for entry in classes}
    if "val" in names and names <= {"train", "val", "test"}:
        return _folder(path / "val", how)
    loose = [entry for entry in path.iterdir() if entry.suffix.lower() in EXTENSIONS]
    if loose:
        raise UserError(
            f"data {path}: {loose[0].name} {'and others lie' if len(loose) > 1 else 'lies'} outside any class; images "
            "are labelled by the folder they are in, a folder a class"
        )
    pictures, labels = [], []
    for label, folder in enumerate(classes):
        found = sorted(entry for entry in folder.rglob("*") if entry.suffix.lower() in EXTENSIONS)
        pictures += found
        labels += [label] * len(found)
    if not pictures:
        raise UserError(f"data {path}: there are no images ({', '.join(EXTENSIONS)}) in folders a class")
    return Labelled(pictures, labels, how, f"data {path}, {len(classes)} folders")


def _arrays(path: Path, how: Preprocessing) -> Labelled:
    if not path.is_file():
        raise UserError(f"data {path}: there is no such file")
    try:
        with np.load(path, allow_pickle=False) as file:
            part = next((part for part in SPLITS if f"{part}images" in file.files), None)
            if part is None:
                raise UserError(f"data {path} has {', '.join(file.files) or 'nothing'}; it needs images and labels")
            if f"{part}labels" not in file.files:
                raise UserError(
                    f"data {path} has {part}images and no {part}labels: unlabelled images cannot tune alpha"
                )
            images, labels = file[f"{part}images"], file[f"{part}labels"]
    except UserError:
        raise
    except Exception as error:  # a damaged archive can fail in any way
        raise UserError(f"data {path} cannot be read as .npz: {str(error).splitlines()[0]}") from error
    if len(images) != len(labels) or labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(
            f"data {path}: labels are {labels.dtype} {labels.shape}; wanted is a whole number for each of the "
            f"{len(images)} images"
        )
    if not len(images):
        raise UserError(f"data {path}: there are no images in it")
    if images.dtype == np.uint8 and (images.ndim == 3 or (images.ndim == 4 and images.shape[-1] in (1, 3))):
        images = images[..., 0] if images.ndim == 4 and images.shape[-1] == 1 else images
        return Labelled(images, labels, how, f"data {path}")
    if images.dtype in (np.float16, np.float32, np.float64) and images.ndim == 4:
        return Labelled(images.astype(np.float32), labels, None, f"data {path}")
    raise UserError(
        f"data {path}: images are {images.dtype} {images.shape}; wanted are bytes (N, H, W, C), "
        "or prepared floats (N, C, H, W)"
    )


def _same_centre(declared: Preprocessing, size: int) -> int | None:
    if declared.size is None or declared.resize is None:
        return None
    return math.floor(size * declared.resize / min(declared.size) + 0.5)


def _column(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32).view(-1, 1, 1)


def _numbers(numbers: Sequence[float]) -> str:
    return ",".join(f"{number:g}" for number in numbers)
