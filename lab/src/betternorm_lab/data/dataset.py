"""Datasets by name, ready for training: split as in the paper, and in memory if they fit."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from betternorm.errors import UserError
from betternorm_lab.data.facts import Facts
from betternorm_lab.data.images import in_memory
from betternorm_lab.data.readers import read
from betternorm_lab.data.splits import Split, shuffled

MEMORY_LIMIT = 4 << 30  # bytes; larger datasets are streamed
STREAM_ABOVE = 96  # larger images are decoded when they are read, with crops of random scale


@dataclass(frozen=True, eq=False)
class Data:
    """A dataset ready for training. ``test`` is None if its labels are not public (ImageNet)."""

    name: str
    facts: Facts
    train: Split
    validation: Split
    test: Split | None

    @property
    def num_classes(self) -> int:
        return self.facts.classes


def load(
    name: str = "digits",
    root: str | os.PathLike[str] | None = None,
    *,
    image_size: int | None = None,
    classes: int | None = None,
    train_examples: int | None = None,
    download: bool = False,
) -> Data:
    """Read a dataset and split it as in the paper.

    Args:
        name: one of :data:`DATASETS`; a folder with one folder per class (or train/, val/ and test/ of such); a
            ``.npz`` with ``train_images`` (N, H, W, C) and ``train_labels``, and the same for ``val`` and ``test`` if
            there are such; or ``stand-in:NAME``, random images with the shape and the classes of that dataset.
        root: the folder of the datasets; by default the environment's ``BETTERNORM_DATA``, or ``data``. A ``NAME.npz``
            in it is taken before the dataset's own files.
        image_size: the side the network sees; by default the dataset's own.
        classes: keep the first so many classes.
        train_examples: keep so many training examples, chosen once for all.
        download: fetch what is missing, where torchvision can.
    """
    return _load(name, data_folder(root), image_size, classes, train_examples, download)


def data_folder(root: str | os.PathLike[str] | None = None) -> Path:
    """The folder of the datasets: ``root``, the environment variable, or ``data``."""
    return Path(root or os.environ.get("BETTERNORM_DATA") or "data").expanduser()


@functools.lru_cache(maxsize=2)  # trials of a grid share a dataset; transfer needs two
def _load(
    name: str, root: Path, image_size: int | None, classes: int | None, train_examples: int | None, download: bool
) -> Data:
    if image_size is not None and image_size < 1:
        raise UserError(f"image_size is {image_size}; it must be a side in pixels, such as 32")
    facts, splits = read(name, root, download)
    facts = replace(facts, size=image_size or facts.size)
    if classes is not None:
        if not 2 <= classes <= facts.classes:
            raise UserError(f"classes is {classes}; {name} has {facts.classes}, so take from 2 to {facts.classes}")
        splits = {part: split.take(torch.nonzero(split.labels < classes)[:, 0]) for part, split in splits.items()}
        facts = replace(facts, classes=classes)
    if train_examples is not None:
        available = len(splits["train"])
        if not 1 <= train_examples <= available:
            raise UserError(f"train_examples is {train_examples}; the training split of {name} has {available}")
        splits["train"] = splits["train"].take(shuffled(available)[:train_examples])
    for part, split in splits.items():
        _check(name, part, split, facts)
    if not _streams(splits, facts):
        splits = {part: in_memory(name, split, facts) for part, split in splits.items()}
        facts = _measured(facts, splits["train"])
    return Data(name, facts, splits["train"], splits["val"], splits.get("test"))


def _check(name: str, part: str, split: Split, facts: Facts) -> None:
    if not len(split):
        raise UserError(f"dataset {name}: the {part} split is empty; it needs images")
    low, high = int(split.labels.min()), int(split.labels.max())
    if low < 0 or high >= facts.classes:
        raise UserError(
            f"dataset {name}: {part} labels run from {low} to {high}; with {facts.classes} classes they must be "
            f"from 0 to {facts.classes - 1}"
        )


def _streams(splits: dict[str, Split], facts: Facts) -> bool:
    count = sum(len(split) for split in splits.values())
    large = facts.size > STREAM_ABOVE or count * facts.channels * facts.size**2 > MEMORY_LIMIT
    return large and all(split.images is None for split in splits.values())


def _measured(facts: Facts, train: Split) -> Facts:
    """Mean and standard deviation of the training images, if those of the dataset are not known."""
    if facts.mean is not None:
        return facts
    pixels = train.pixels[: 1 << 14].double().transpose(0, 1).flatten(1) / 255
    deviation = [max(value, 1e-3) for value in pixels.std(1).tolist()]
    return replace(facts, mean=tuple(pixels.mean(1).tolist()), std=tuple(deviation))
