"""Sources of images and labels: torchvision's datasets, folders with one folder per class, .npz, stand-ins.

A reader returns splits by name: "train", "val" and "test", or "all" where nothing is split yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from betternorm.errors import UserError
from betternorm.integrations.images import (
    EXTENSIONS,
    class_names,
    images_by_class,
    labelled_arrays,
    open_image,
    open_npz,
)
from betternorm_lab.data.facts import DATASETS, Facts
from betternorm_lab.data.splits import SPLIT_SEED, Split, own_split, paper_split


def read(name: str, root: Path, download: bool) -> tuple[Facts, dict[str, Split]]:
    kind, _, model = name.partition(":")
    if kind == "stand-in" and model in DATASETS:
        return DATASETS[model], _stand_in(DATASETS[model])
    if name.endswith(".npz"):
        return _own_npz(Path(name))
    if name not in DATASETS:
        if Path(name).is_dir():
            return _own_folder(Path(name))
        raise UserError(
            f"dataset is {name!r}; it must be one of {', '.join(DATASETS)}, "
            "a folder with one folder per class, or a .npz file"
        )
    facts = DATASETS[name]
    archive = root / f"{name}.npz"
    if archive.is_file():
        size, splits, _ = _npz(archive)
        return replace(facts, size=size), paper_split(name, splits)
    try:
        return facts, paper_split(name, READERS[name](root, download))
    except (RuntimeError, OSError, KeyError) as problem:
        said = (str(problem).splitlines() or [""])[0]
        if download and facts.fetched:
            raise UserError(f"dataset {name} could not be fetched into {root.resolve()}: {said}") from problem
        fetch = ", or fetch it with --download" if facts.fetched else ""
        raise UserError(
            f"dataset {name} ({facts.title}) is missing or incomplete in {root.resolve()}: "
            f"put {facts.layout} or {name}.npz there, or set --data-root or BETTERNORM_DATA{fetch}"
        ) from problem


def _npz(path: Path) -> tuple[int, dict[str, Split], int]:
    """Image size, splits and number of classes of an .npz file."""
    splits = {}
    with open_npz(path) as file:
        for part in ("train", "val", "test", "all"):
            if f"{part}_images" not in file:
                continue
            images, labels = labelled_arrays(path, file, f"{part}_")
            if images.dtype != np.uint8 or images.ndim not in (3, 4):
                raise UserError(
                    f"data {path}: {part}_images is {images.dtype} {images.shape}; it must be uint8 (N, H, W, C)"
                )
            images = images[..., None] if images.ndim == 3 else images
            splits[part] = Split(_labels(labels), torch.from_numpy(images).permute(0, 3, 1, 2).contiguous())
        if not splits:
            raise UserError(f"data {path} has {sorted(file)}; it needs train_images and train_labels")
        known = len(file["classes"]) if "classes" in file else 0
    return next(iter(splits.values())).pixels.shape[-1], splits, known


def _own_npz(path: Path) -> tuple[Facts, dict[str, Split]]:
    size, splits, classes = _npz(path)
    classes = classes or max(int(split.labels.max()) for split in splits.values()) + 1
    channels = next(iter(splits.values())).pixels.shape[1]
    _need_two_classes(path, classes)
    return Facts(str(path), classes, size, str(path), None, None, channels), own_split(splits)


def _own_folder(path: Path) -> tuple[Facts, dict[str, Split]]:
    parts = [part for part in ("train", "val", "test") if (path / part).is_dir()]
    if "train" not in parts:
        parts = []
    folders = {part: path / part for part in parts} or {"all": path}
    names = class_names(next(iter(folders.values())))
    _need_two_classes(path, len(names))
    splits = {part: _folder(folder, names) for part, folder in folders.items()}
    for part, split in splits.items():
        if not len(split):
            raise UserError(f"{folders[part]} has no images ({', '.join(EXTENSIONS)}) in its folders, one per class")
    return Facts(str(path), len(names), 224, str(path)), own_split(splits)


def _need_two_classes(path: Path, classes: int) -> None:
    if classes < 2:
        raise UserError(f"{path} has {classes} class{'' if classes == 1 else 'es'}; a classifier needs at least 2")


def _folder(folder: Path, names: Sequence[str]) -> Split:
    paths, labels = images_by_class(folder, names)
    return Split(_labels(labels), source=_Pictures(paths))


class _Pictures:
    """Files that are opened on access."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        return open_image(self.paths[row]), 0


def _labels(labels: Any) -> Tensor:
    return torch.as_tensor(np.asarray(labels), dtype=torch.int64)


def _digits(root: Path, download: bool) -> dict[str, Split]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # 17 gray levels in the file
    return {"all": Split(_labels(digits.target), torch.from_numpy(pixels)[:, None])}


def _torchvision() -> Any:
    from betternorm.integrations.torchvision import ready

    ready()
    from torchvision import datasets

    return datasets


def _cifar(kind: str) -> Any:
    def read(root: Path, download: bool) -> dict[str, Split]:
        splits = {}
        for part in ("train", "test"):
            found = getattr(_torchvision(), kind)(root, train=part == "train", download=download)
            splits[part] = Split(_labels(found.targets), torch.from_numpy(found.data).permute(0, 3, 1, 2).contiguous())
        return splits

    return read


def _fashion_mnist(root: Path, download: bool) -> dict[str, Split]:
    splits = {}
    for part in ("train", "test"):
        found = _torchvision().FashionMNIST(root, train=part == "train", download=download)
        splits[part] = Split(_labels(found.targets), found.data[:, None])
    return splits


def _svhn(root: Path, download: bool) -> dict[str, Split]:
    parts = {part: _torchvision().SVHN(root, split=part, download=download) for part in ("train", "extra", "test")}

    def joined(*names: str) -> Split:
        return Split(
            _labels(np.concatenate([parts[name].labels for name in names])),
            torch.from_numpy(np.concatenate([parts[name].data for name in names])),
        )

    return {"train": joined("train", "extra"), "test": joined("test")}


def _caltech101(root: Path, download: bool) -> dict[str, Split]:
    found = _torchvision().Caltech101(root, download=download)
    return {"all": Split(_labels(found.y), source=found)}


def _caltech256(root: Path, download: bool) -> dict[str, Split]:
    found = _torchvision().Caltech256(root, download=download)
    whole = Split(_labels(found.y), source=found)
    clutter = [label for label, name in enumerate(found.categories) if name.endswith("clutter")]
    return {"all": whole.take(np.flatnonzero(~np.isin(found.y, clutter)))}


def _flowers102(root: Path, download: bool) -> dict[str, Split]:
    splits = {}
    for part in ("train", "val", "test"):
        found = _torchvision().Flowers102(root, split=part, download=download)
        splits[part] = Split(_labels(found._labels), source=found)
    return splits


def _imagenet(root: Path, download: bool) -> dict[str, Split]:
    splits = {}
    for part in ("train", "val"):
        found = _torchvision().ImageNet(root, split=part)
        splits[part] = Split(_labels(found.targets), source=found)
    return splits


def _cub2011(root: Path, download: bool) -> dict[str, Split]:
    """torchvision has no CUB-200-2011; it is read from its index files."""
    folder = root / "CUB_200_2011"

    def column(file: str) -> list[str]:
        return [line.split()[1] for line in (folder / file).read_text().splitlines() if line.strip()]

    paths = [folder / "images" / name for name in column("images.txt")]
    labels = np.array([int(label) - 1 for label in column("image_class_labels.txt")])
    is_train = np.array([flag == "1" for flag in column("train_test_split.txt")])
    whole = Split(_labels(labels), source=_Pictures(paths))
    return {"train": whole.take(np.flatnonzero(is_train)), "test": whole.take(np.flatnonzero(~is_train))}


READERS = {
    "digits": _digits,
    "cifar10": _cifar("CIFAR10"),
    "cifar100": _cifar("CIFAR100"),
    "svhn": _svhn,
    "fashion-mnist": _fashion_mnist,
    "caltech101": _caltech101,
    "caltech256": _caltech256,
    "flowers102": _flowers102,
    "cub2011": _cub2011,
    "imagenet": _imagenet,
}


def _stand_in(facts: Facts) -> dict[str, Split]:
    """One prototype per class with noise: learnable data in the shape of a dataset."""
    generator = torch.Generator().manual_seed(SPLIT_SEED)
    shape = (facts.channels, facts.size, facts.size)
    prototypes = torch.rand(facts.classes, facts.channels, 2, 2, generator=generator) * 160
    count = max(64, min(512, (1 << 24) // (3 * facts.size**2)))
    splits = {}
    for part, share in (("train", 1), ("val", 4), ("test", 4)):
        labels = torch.randint(0, facts.classes, (count // share,), generator=generator)
        images = F.interpolate(prototypes[labels], size=shape[1:])
        images += torch.rand(images.shape, generator=generator) * 95
        splits[part] = Split(labels, images.to(torch.uint8))
    return splits
