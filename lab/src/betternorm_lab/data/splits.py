"""The splits of section 4.1 into training, validation and test examples.

The sizes are here and nowhere else. Which examples go where follows from one seed that never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from betternorm.errors import UserError
from betternorm_lab.data.facts import DATASETS

SPLIT_SEED = 0  # changing this makes stored results incomparable

CIFAR_SIZES = (40_000, 10_000)
FASHION_SIZES = (50_000, 10_000)
CALTECH256_SIZES = (40, 10, 30)  # images of every class
CALTECH101_SIZES = (20, 5, 30)  # of every class; the smallest class has 31
OWN_SHARES = (0.6, 0.2, 0.2)  # for a folder or file without splits


def svhn_sizes(count: int) -> tuple[int, int]:
    """80 and 20 % of the images outside the test set."""
    return round(0.8 * count), count - round(0.8 * count)


def cub_sizes(count: int) -> tuple[int, int]:
    """A quarter of the training images for validation."""
    return count - count // 4, count // 4


def own_sizes(count: int) -> tuple[int, int, int]:
    """Training, validation and test examples of a dataset without official splits."""
    validation, test = (max(1, round(share * count)) for share in OWN_SHARES[1:])
    return max(0, count - validation - test), validation, test


# Examples of each part, from the number outside the test set.
SIZES: dict[str, Callable[[int], tuple[int, ...]]] = {
    "cifar10": lambda count: CIFAR_SIZES,
    "cifar100": lambda count: CIFAR_SIZES,
    "fashion-mnist": lambda count: FASHION_SIZES,
    "svhn": svhn_sizes,
    "cub2011": cub_sizes,
}
# Examples of every class in each part.
SIZES_PER_CLASS: dict[str, Callable[[], tuple[int, ...]]] = {
    "caltech101": lambda: CALTECH101_SIZES,
    "caltech256": lambda: CALTECH256_SIZES,
}


def training_images(name: str) -> int:
    """The number of training images after the split, without reading the dataset."""
    facts = DATASETS[name]
    if name in SIZES_PER_CLASS:
        return facts.classes * SIZES_PER_CLASS[name]()[0]
    if name in SIZES:
        return SIZES[name](facts.examples)[0]
    return facts.examples if facts.has_validation else own_sizes(facts.examples)[0]


@dataclass(frozen=True, eq=False)
class Split:
    """Labels, and images either in memory, (N, C, H, W) bytes, or in a dataset that decodes them one by one."""

    labels: Tensor
    images: Tensor | None = None
    source: Any = None  # source[i] is a pair of a PIL image and anything
    rows: Tensor | None = None  # indices into the source

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def pixels(self) -> Tensor:
        """The images of a split in memory."""
        if self.images is None:
            raise TypeError("the images of this split are not in memory")
        return self.images

    def take(self, rows: Tensor | Sequence[int] | np.ndarray) -> Split:
        rows = torch.as_tensor(rows, dtype=torch.int64)
        if self.images is not None:
            return Split(self.labels[rows], self.images[rows])
        return Split(self.labels[rows], source=self.source, rows=rows if self.rows is None else self.rows[rows])


def shuffled(count: int, seed: int = SPLIT_SEED) -> np.ndarray:
    """A permutation that is the same on every machine: NumPy guarantees the stream of RandomState."""
    return np.random.RandomState(seed).permutation(count)


def split_by_size(count: int, *sizes: int, seed: int = SPLIT_SEED) -> list[np.ndarray]:
    """Disjoint random rows, sorted, of the given sizes."""
    order = shuffled(count, seed)
    ends = np.cumsum(sizes)
    return [np.sort(order[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def split_by_class(labels: np.ndarray, *sizes: int, seed: int = SPLIT_SEED) -> list[np.ndarray]:
    """Random rows of every class, of the given sizes; the last part may be smaller."""
    parts: list[list[np.ndarray]] = [[] for _ in sizes]
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        if len(rows) <= sum(sizes[:-1]):
            raise UserError(
                f"class {label} has {len(rows)} images; a split of {' / '.join(map(str, sizes))} per class needs "
                f"more than {sum(sizes[:-1])}"
            )
        rows, start = rows[shuffled(len(rows), seed)], 0
        for part, size in zip(parts, sizes, strict=True):
            part.append(rows[start : start + size])
            start += size
    return [np.sort(np.concatenate(part)) for part in parts]


def paper_split(name: str, splits: dict[str, Split]) -> dict[str, Split]:
    """The splits of section 4.1 for datasets without official ones. Official test sets are unchanged."""
    if "val" in splits:
        return splits
    whole = splits["all"] if "all" in splits else splits["train"]
    count = len(whole)
    if name in SIZES_PER_CLASS:
        parts = split_by_class(whole.labels.numpy(), *SIZES_PER_CLASS[name]())
    elif name in SIZES:
        sizes = SIZES[name](count)
        if sum(sizes) != count:
            raise UserError(f"dataset {name} has {count} training images; the paper's split needs {sum(sizes)}")
        parts = split_by_size(count, *sizes)
    else:
        return own_split(splits)
    named = dict(zip(("train", "val", "test"), map(whole.take, parts), strict=False))
    return named if "all" in splits else named | {"test": splits["test"]}


def own_split(splits: dict[str, Split]) -> dict[str, Split]:
    """Add the missing splits of a user's dataset: validation, and test if it has no splits at all."""
    if set(splits) == {"all"} or set(splits) == {"train"}:
        (whole,) = splits.values()
        parts = split_by_size(len(whole), *own_sizes(len(whole)))
        return dict(zip(("train", "val", "test"), map(whole.take, parts), strict=True))
    if "val" not in splits:
        count = len(splits["train"])
        train, val = split_by_size(count, *svhn_sizes(count))
        return splits | {"train": splits["train"].take(train), "val": splits["train"].take(val)}
    return splits
