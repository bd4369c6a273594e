"""Labeled images from files: one folder per class, an .npz, or a .pt, which needs neither NumPy nor Pillow."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from betternorm.errors import UserError
from betternorm.integrations.preprocessing import Preprocessing
from betternorm.weighing.batches import INPUT_KEYS, TARGET_KEYS

if TYPE_CHECKING:
    import numpy as np

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff", ".gif")
SPLITS = ("", "val_", "validation_", "test_", "train_")  # prefixes of "images" and "labels" in an .npz, by preference
FORMATS = "a folder with one folder per class, an .npz with images and labels, or a .pt of both"


# ---- files ----


def class_names(folder: Path) -> list[str]:
    """The names of the subfolders, one per class: sorted as numbers if all of them are, as text otherwise."""
    names = [entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    numeric = all(name.isdecimal() for name in names)
    return sorted(names, key=lambda name: (int(name), name) if numeric else (0, name))


def read_class_map(path: Path) -> list[str]:
    """Class names in the order of the model's outputs: one per line, or JSON (a list, or a dict from or to indices)."""
    try:
        text = path.read_text(encoding="utf-8")
        content: Any = json.loads(text) if path.suffix == ".json" else [line.strip() for line in text.splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"--class-map {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if isinstance(content, dict):
        if all(isinstance(value, int) for value in content.values()):  # {"tench": 0}
            content = {str(index): name for name, index in content.items()}
        first = {key: value[0] if isinstance(value, list) else value for key, value in content.items()}
        if set(first) != {str(index) for index in range(len(first))}:
            raise UserError(f"--class-map {path}: the indices must be 0 to {len(first) - 1}, one per class")
        content = [first[str(index)] for index in range(len(first))]  # {"0": "tench"} or {"0": ["n01440764", "tench"]}
    names = [str(name) for name in content if name != ""]
    if len(set(names)) < len(names) or not names:
        raise UserError(f"--class-map {path} must contain every class name once, in the order of the model's outputs")
    return names


def images_by_class(folder: Path, names: Sequence[str]) -> tuple[list[Path], list[int]]:
    """The image files in the folder of each class, and their labels: positions in ``names``."""
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        files = sorted(path for path in (folder / name).rglob("*") if is_image(path))
        paths += files
        labels += [label] * len(files)
    return paths, labels


def is_image(path: Path) -> bool:
    return path.suffix.lower() in EXTENSIONS


def open_image(path: Path) -> Any:
    """A decoded PIL image with 8 bits per channel."""
    from PIL import Image

    try:
        with Image.open(path) as picture:
            loaded = picture.copy()
    except Image.DecompressionBombError as error:
        raise UserError(f"{path} is too large to be decoded safely; resize or remove it ({error})") from error
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{path} cannot be read as an image; replace or remove it") from error
    if loaded.mode.startswith(("I", "F")):
        raise UserError(
            f"{path} has 16-bit, 32-bit or floating-point pixels (mode {loaded.mode}), which would be clipped; convert "
            "it to 8 bits per channel"
        )
    return loaded


@contextmanager
def open_npz(path: Path) -> Iterator[Mapping[str, np.ndarray]]:
    """The arrays of a file by name, each read on access."""
    import numpy as np

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
    """Images and labels of a split, such as "test_", or "" for those without a prefix."""
    if f"{split}labels" not in file:
        raise UserError(f"data {path} has {split}images and no {split}labels: unlabeled images cannot be used")
    images, labels = file[f"{split}images"], file[f"{split}labels"]
    if len(images) != len(labels) or labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise UserError(
            f"data {path}: labels are {labels.dtype} {labels.shape}; expected one integer for each of the "
            f"{len(images)} images"
        )
    return images, labels


# ---- datasets ----


def read_images(path: Path, how: Preprocessing, class_map: Sequence[str] | None = None) -> LabeledImages:
    """A folder with one folder per class, an .npz with images and labels, or a .pt of both."""
    if path.is_dir():
        return _folder(path, how, class_map)
    if path.suffix == ".npz":
        with open_npz(path) as file:
            split = next((split for split in SPLITS if f"{split}images" in file), None)
            if split is None:
                raise UserError(f"data {path} has {', '.join(file) or 'nothing'}; it needs images and labels")
            images, labels = labelled_arrays(path, file, split)
        return _from_arrays(path, images, labels, how)
    if path.suffix in (".pt", ".pth"):
        return _from_arrays(path, *_tensors(path), how)
    raise UserError(f"data {path}: expected {FORMATS}")


def read_unlabeled(path: Path, how: Preprocessing) -> LabeledImages:
    """All images in a folder and its subfolders, or those of an .npz, with 0 as the label of each."""
    if path.suffix == ".npz":
        with open_npz(path) as file:
            name = next((f"{split}images" for split in SPLITS if f"{split}images" in file), None)
            pictures: Any = [] if name is None else file[name]
        if len(pictures) and not (pictures.dtype.name == "uint8" and pictures.ndim == 4 and pictures.shape[-1] == 3):
            raise UserError(f"images {path}: {pictures.dtype} {pictures.shape}; expected bytes (N, H, W, 3)")
    elif path.is_dir():
        pictures = sorted(entry for entry in path.rglob("*") if is_image(entry))
    else:
        raise UserError(f"images {path}: there is no such folder; pass a folder of images, or an .npz")
    if not len(pictures):
        raise UserError(f"images {path}: there are no images ({', '.join(EXTENSIONS)}) in it")
    return LabeledImages(pictures, [0] * len(pictures), how, f"images {path}")


class LabeledImages(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Images and labels, preprocessed one by one; ``how=None`` means that they are preprocessed already.

    ``folders`` is the number of class folders that defined the labels, if any did.
    """

    def __init__(self, pictures: Any, labels: Any, how: Preprocessing | None, source: str, folders: int = 0) -> None:
        self.pictures, self.labels, self.how = pictures, [int(label) for label in labels], how
        self.source, self.folders = source, folders

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        picture, label = self.pictures[row], self.labels[row]
        if self.how is None:
            return torch.as_tensor(picture), label
        if isinstance(picture, Path):
            return self.how(open_image(picture)), label
        if isinstance(picture, Tensor):
            return self.how.normalize(picture), label
        from PIL import Image

        return self.how(Image.fromarray(picture)), label

    def limited(self, count: int) -> LabeledImages:
        """At most so many images, evenly spaced, because folders are read class by class."""
        if count >= len(self):
            return self
        rows = torch.linspace(0, len(self) - 1, count, dtype=torch.float64).round().long().tolist()
        pictures, labels = [self.pictures[row] for row in rows], [self.labels[row] for row in rows]
        return LabeledImages(pictures, labels, self.how, self.source, self.folders)

    def check_labels(self, classes: int) -> None:
        """Check the labels against the number of outputs of the model."""
        low, high = min(self.labels), max(self.labels)
        if low < 0 or high >= classes:
            raise UserError(
                f"{self.source}: labels run from {low} to {high}, and the model has {classes} outputs: they must lie "
                f"between 0 and {classes - 1}"
            )
        if self.folders and self.folders < classes:
            raise UserError(
                f"{self.source}: {self.folders} class folders for a model with {classes} outputs; name the class of "
                "every output with --class-map FILE (one folder name per line), so that images get the right labels"
            )


def _folder(path: Path, how: Preprocessing, class_map: Sequence[str] | None) -> LabeledImages:
    names = class_names(path)
    if "val" in names and set(names) <= {"train", "val", "test"}:
        return _folder(path / "val", how, class_map)
    loose = [entry for entry in path.iterdir() if is_image(entry)]
    if loose:
        raise UserError(
            f"data {path}: {loose[0].name} {'and others are' if len(loose) > 1 else 'is'} outside of any class folder; "
            "images are labeled by the folder they are in, one folder per class"
        )
    if class_map is not None and (unknown := [name for name in names if name not in class_map]):
        raise UserError(f"data {path}: the folder {unknown[0]!r} is not a class of --class-map")
    pictures, labels = images_by_class(path, names if class_map is None else class_map)
    if not pictures:
        raise UserError(f"data {path}: there are no images ({', '.join(EXTENSIONS)}) in one folder per class")
    folders = len(names) if class_map is None else 0
    return LabeledImages(pictures, labels, how, f"data {path}", folders)


def _tensors(path: Path) -> tuple[Tensor, Tensor]:
    """Images and labels from a dict or a pair saved with torch.save."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise UserError(f"data {path}: there is no such file") from error
    except Exception as error:
        raise UserError(f"data {path} cannot be read: {str(error).strip().splitlines()[0]}") from error
    pair = content if isinstance(content, (list, tuple)) else ()
    if isinstance(content, Mapping):
        keys = (next((key for key in names if key in content), None) for names in (INPUT_KEYS, TARGET_KEYS))
        pair = [content[key] for key in keys if key is not None]
    if len(pair) != 2 or not all(isinstance(part, Tensor) for part in pair):
        raise UserError(
            f"data {path}: expected a pair of tensors (images, labels), or a dict with 'images' and 'labels', saved "
            "with torch.save"
        )
    images, labels = pair
    if labels.dim() != 1 or labels.is_floating_point() or len(labels) != len(images):
        raise UserError(
            f"data {path}: labels are {labels.dtype} {tuple(labels.shape)}; expected one integer for each of the "
            f"{len(images)} images"
        )
    return images, labels


def _from_arrays(path: Path, images: Any, labels: Any, how: Preprocessing) -> LabeledImages:
    """NumPy arrays or tensors: bytes to be preprocessed, or preprocessed floats."""
    kind, source = str(images.dtype).removeprefix("torch."), f"data {path}"
    if not len(images):
        raise UserError(f"{source}: there are no images in it")
    if kind == "uint8" and images.ndim == 3:
        return LabeledImages(images[:, None] if isinstance(images, Tensor) else images, labels, how, source)
    if kind == "uint8" and images.ndim == 4 and images.shape[-1] in (1, 3):
        if isinstance(images, Tensor):
            return LabeledImages(images.permute(0, 3, 1, 2), labels, how, source)
        return LabeledImages(images[..., 0] if images.shape[-1] == 1 else images, labels, how, source)
    if kind == "uint8" and images.ndim == 4 and isinstance(images, Tensor) and images.shape[1] in (1, 3):
        return LabeledImages(images, labels, how, source)
    if kind in ("float16", "float32", "float64") and images.ndim == 4:
        images = images.float() if isinstance(images, Tensor) else images.astype("float32")
        return LabeledImages(images, labels, None, source)
    raise UserError(
        f"{source}: images are {kind} {tuple(images.shape)}; expected bytes (N, H, W, C), or preprocessed floats "
        "(N, C, H, W)"
    )
