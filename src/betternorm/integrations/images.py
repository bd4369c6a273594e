"""Labelled images from files: one folder per class, or an .npz with images and labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from betternorm.errors import UserError
from betternorm.integrations.preprocessing import Preprocessing

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff", ".gif")
SPLITS = ("", "val_", "validation_", "test_", "train_")  # before "images" and "labels" in an .npz, in order of choice


# ---- files ----


def class_names(folder: Path) -> list[str]:
    """The names of the folders in a folder, sorted: one per class."""
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def images_by_class(folder: Path, names: Sequence[str]) -> tuple[list[Path], list[int]]:
    """The image files under the folder of each class, and their labels.

    The names are given, so that every split numbers its classes alike; a class that this folder lacks has no images.
    """
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        found = sorted(path for path in (folder / name).rglob("*") if is_image(path))
        paths += found
        labels += [label] * len(found)
    return paths, labels


def is_image(path: Path) -> bool:
    return path.suffix.lower() in EXTENSIONS


def open_image(path: Path) -> Any:
    """An image, decoded, as PIL has it."""
    from PIL import Image

    try:
        with Image.open(path) as picture:
            return picture.copy()
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{path} cannot be read as an image; replace or remove it") from error


@contextmanager
def open_npz(path: Path) -> Iterator[Mapping[str, np.ndarray]]:
    """The arrays of a file by name, each read when it is asked for."""
    if not path.is_file():
        raise UserError(f"data {path}: there is no such file")
    try:
        with np.load(path, allow_pickle=False) as file:
            yield file
    except UserError:
        raise
    except Exception as error:  # a damaged archive can fail in any way
        raise UserError(f"data {path} cannot be read as .npz: {str(error).splitlines()[0]}") from error


def labelled_arrays(path: Path, file: Mapping[str, np.ndarray], split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of a split, such as "test_" or "" for those without a name."""
    if f"{split}labels" not in file:
        raise UserError(f"data {path} has {split}images and no {split}labels: unlabelled images cannot be used")
    images, labels = file[f"{split}images"], file[f"{split}labels"]
    if len(images) != len(labels) or labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(
            f"data {path}: labels are {labels.dtype} {labels.shape}; wanted is a whole number for each of the "
            f"{len(images)} images"
        )
    return images, labels


# ---- datasets ----


def read_images(path: Path, how: Preprocessing) -> Labelled:
    """A folder with one folder per class, or an .npz with images and labels."""
    if path.is_dir():
        return _folder(path, how)
    if path.suffix == ".npz":
        return _arrays(path, how)
    raise UserError(f"data {path}: it has to be a folder with one folder per class, or an .npz with images and labels")


def read_unlabeled(path: Path, how: Preprocessing) -> Labelled:
    """All images below a folder, or those of an .npz, with 0 as the label of each."""
    if path.suffix == ".npz":
        with open_npz(path) as file:
            name = next((f"{split}images" for split in SPLITS if f"{split}images" in file), None)
            pictures: Any = [] if name is None else file[name]
        if len(pictures) and not (pictures.dtype == np.uint8 and pictures.ndim == 4 and pictures.shape[-1] == 3):
            raise UserError(f"images {path}: {pictures.dtype} {pictures.shape}; expected bytes (N, H, W, 3)")
    elif path.is_dir():
        pictures = sorted(entry for entry in path.rglob("*") if is_image(entry))
    else:
        raise UserError(f"images {path}: there is no such folder; pass a folder of images, or an .npz")
    if not len(pictures):
        raise UserError(f"images {path}: there are no images ({', '.join(EXTENSIONS)}) in it")
    return Labelled(pictures, [0] * len(pictures), how, f"images {path}")


class Labelled(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Images and labels, prepared one by one."""

    def __init__(
        self,
        pictures: Sequence[Any] | np.ndarray,
        labels: Sequence[int] | np.ndarray,
        how: Preprocessing | None,
        source: str,
    ) -> None:
        self.pictures, self.labels, self.how, self.source = pictures, [int(label) for label in labels], how, source

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        picture, label = self.pictures[row], self.labels[row]
        if self.how is None:  # prepared already
            return torch.as_tensor(picture), label
        from PIL import Image

        if isinstance(picture, Path):
            return self.how(open_image(picture)), label
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


def _folder(path: Path, how: Preprocessing) -> Labelled:
    names = class_names(path)
    if "val" in names and set(names) <= {"train", "val", "test"}:
        return _folder(path / "val", how)
    loose = [entry for entry in path.iterdir() if is_image(entry)]
    if loose:
        raise UserError(
            f"data {path}: {loose[0].name} {'and others lie' if len(loose) > 1 else 'lies'} outside any class; images "
            "are labelled by the folder they are in, one folder per class"
        )
    pictures, labels = images_by_class(path, names)
    if not pictures:
        raise UserError(f"data {path}: there are no images ({', '.join(EXTENSIONS)}) in one folder per class")
    return Labelled(pictures, labels, how, f"data {path}, {len(names)} folders")


def _arrays(path: Path, how: Preprocessing) -> Labelled:
    with open_npz(path) as file:
        split = next((split for split in SPLITS if f"{split}images" in file), None)
        if split is None:
            raise UserError(f"data {path} has {', '.join(file) or 'nothing'}; it needs images and labels")
        images, labels = labelled_arrays(path, file, split)
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
