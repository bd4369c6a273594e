"""Datasets, their splits and the batches drawn from them (section 4.1, and 4.4 for batches that are not i.i.d.).

Small images live in memory as bytes; crop, flip and normalisation are done on whole batches on the device. Large
ones are read by DataLoader workers. Everything random about an epoch follows from a seed and the epoch's number alone,
so that a training run can start again at any epoch, and any number of processes sees the same batches.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from betternorm.errors import UserError
from betternorm.integrations.loading import ImageLoader

SPLIT_SEED = 0  # one split of every dataset for all time: changing this makes every stored result incomparable
MEMORY_LIMIT = 4 << 30  # bytes of images held in memory; what needs more is streamed
STREAM_ABOVE = 96  # larger sides are photographs: decoded as they are read, with crops of random scale
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Facts:
    """What is known of a dataset before it is read. ``mean`` and ``std`` are of pixels in [0, 1]."""

    title: str
    classes: int
    size: int
    layout: str  # what to put where, for the message when it is missing
    mean: tuple[float, ...] | None = IMAGENET_MEAN  # None: measured on the training split
    std: tuple[float, ...] | None = IMAGENET_STD
    channels: int = 3
    padding: int = 0  # on each side, before the random crop; 0: one eighth of the side
    flip: bool = True
    fetched: bool = True  # whether torchvision can download it


DATASETS: dict[str, Facts] = {
    "digits": Facts("scikit-learn's digits", 10, 8, "it is inside scikit-learn", None, None, 1, 1, flip=False),
    "cifar10": Facts("CIFAR-10", 10, 32, "cifar-10-batches-py/", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": Facts("CIFAR-100", 100, 32, "cifar-100-python/", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "svhn": Facts(
        "SVHN",
        10,
        32,
        "train_32x32.mat, extra_32x32.mat and test_32x32.mat",
        (0.4309, 0.4302, 0.4463),
        (0.1965, 0.1984, 0.1992),
        flip=False,
    ),
    "fashion-mnist": Facts(
        "Fashion-MNIST", 10, 28, "FashionMNIST/raw/ with the four idx files", (0.2860,), (0.3530,), 1, 4
    ),
    "caltech101": Facts("Caltech-101", 101, 64, "caltech101/101_ObjectCategories/"),
    "caltech256": Facts("Caltech-256", 256, 299, "caltech256/256_ObjectCategories/"),
    "flowers102": Facts("Oxford Flowers-102", 102, 224, "flowers-102/ with jpg/, imagelabels.mat and setid.mat"),
    "cub2011": Facts(
        "CUB-200-2011",
        200,
        224,
        "CUB_200_2011/ with images/, images.txt and train_test_split.txt",
        fetched=False,
    ),
    "imagenet": Facts(
        "ImageNet",
        1000,
        224,
        "train/ and val/ with a folder a class, and ILSVRC2012_devkit_t12.tar.gz or meta.bin",
        fetched=False,
    ),
}


@dataclass(frozen=True, eq=False)
class Split:
    """Labels, and images either in memory, (N, C, H, W) bytes, or in a dataset that decodes them one by one."""

    labels: Tensor
    images: Tensor | None = None
    source: Any = None  # source[i] is a pair of a PIL image and anything
    rows: Tensor | None = None  # which items of the source these are

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Tensor | Sequence[int] | np.ndarray) -> Split:
        rows = torch.as_tensor(rows, dtype=torch.int64)
        if self.images is not None:
            return Split(self.labels[rows], self.images[rows])
        return Split(self.labels[rows], source=self.source, rows=rows if self.rows is None else self.rows[rows])


@dataclass(frozen=True, eq=False)
class Data:
    """A dataset ready for training. ``test`` is None where nobody outside has its labels (ImageNet)."""

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
    """Read a dataset and split it as the paper does.

    Args:
        name: one of :data:`DATASETS`; a folder with a folder a class (or train/, val/ and test/ of such); a ``.npz``
            with ``train_images`` (N, H, W, C) and ``train_labels``, and the same for ``val`` and ``test`` if there are
            such; or ``stand-in:NAME``, random images with the shape and the classes of that dataset, to try things on.
        root: the folder of the datasets; by default the environment's ``BETTERNORM_DATA``, or ``data``. A ``NAME.npz``
            in it is taken before the dataset's own files.
        image_size: the side the network sees; by default the dataset's own.
        classes: keep the first so many classes.
        train_examples: keep so many training examples, chosen once for all.
        download: fetch what is missing, where torchvision can.
    """
    where = Path(root or os.environ.get("BETTERNORM_DATA") or "data").expanduser()
    return _load(name, where, image_size, classes, train_examples, download)


@functools.lru_cache(maxsize=2)  # the trials of a grid share a dataset; two, because transfer reads two
def _load(
    name: str, root: Path, image_size: int | None, classes: int | None, train_examples: int | None, download: bool
) -> Data:
    if image_size is not None and image_size < 1:
        raise UserError(f"image_size is {image_size}; it has to be a side in pixels, like 32")
    facts, splits = _read(name, root, download)
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
            f"dataset {name}: {part} labels run from {low} to {high}; with {facts.classes} classes they have to be "
            f"from 0 to {facts.classes - 1}"
        )


def _streams(splits: dict[str, Split], facts: Facts) -> bool:
    count = sum(len(split) for split in splits.values())
    large = facts.size > STREAM_ABOVE or count * facts.channels * facts.size**2 > MEMORY_LIMIT
    return large and all(split.images is None for split in splits.values())


def _measured(facts: Facts, train: Split) -> Facts:
    """Mean and deviation of the training images, where the dataset's are not known."""
    if facts.mean is not None:
        return facts
    pixels = train.images[: 1 << 14].double().transpose(0, 1).flatten(1) / 255
    deviation = [max(value, 1e-3) for value in pixels.std(1).tolist()]
    return replace(facts, mean=tuple(pixels.mean(1).tolist()), std=tuple(deviation))


# Splits -------------------------------------------------------------------------------------------------------------


def shuffled(count: int, seed: int = SPLIT_SEED) -> np.ndarray:
    """A permutation that is the same on every machine: NumPy promises RandomState's stream for ever."""
    return np.random.RandomState(seed).permutation(count)


def split_by_size(count: int, *sizes: int, seed: int = SPLIT_SEED) -> list[np.ndarray]:
    """Disjoint random rows, sorted: so many for each part."""
    order = shuffled(count, seed)
    ends = np.cumsum(sizes)
    return [np.sort(order[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def split_by_class(labels: np.ndarray, *sizes: int, seed: int = SPLIT_SEED) -> list[np.ndarray]:
    """So many random rows of every class for each part; the last part takes what there is, up to its size."""
    parts: list[list[np.ndarray]] = [[] for _ in sizes]
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        if len(rows) <= sum(sizes[:-1]):
            raise UserError(
                f"class {label} has {len(rows)} images; a split of {' / '.join(map(str, sizes))} a class needs "
                f"more than {sum(sizes[:-1])}"
            )
        rows, start = rows[shuffled(len(rows), seed)], 0
        for part, size in zip(parts, sizes, strict=True):
            part.append(rows[start : start + size])
            start += size
    return [np.sort(np.concatenate(part)) for part in parts]


def svhn_sizes(count: int) -> tuple[int, int]:
    """80 and 20 % of the images outside the test set."""
    return round(0.8 * count), count - round(0.8 * count)


def cub_sizes(count: int) -> tuple[int, int]:
    """A quarter of the given training images for validation."""
    return count - count // 4, count // 4


CIFAR_SIZES = (40_000, 10_000)
FASHION_SIZES = (50_000, 10_000)
CALTECH256_SIZES = (40, 10, 30)  # images of every class
CALTECH101_SIZES = (20, 5, 30)  # of every class; its smallest has 31
OWN_SHARES = (0.6, 0.2, 0.2)  # a folder or file without splits of its own


def _own_split(splits: dict[str, Split]) -> dict[str, Split]:
    """Fill in what a user's own dataset lacks: a validation split, and a test split where it came in one piece."""
    if set(splits) == {"all"} or set(splits) == {"train"}:
        (whole,) = splits.values()
        held = [max(1, round(share * len(whole))) for share in OWN_SHARES[1:]]
        parts = split_by_size(len(whole), max(0, len(whole) - sum(held)), *held)
        return dict(zip(("train", "val", "test"), map(whole.take, parts), strict=True))
    if "val" not in splits:
        count = len(splits["train"])
        train, val = split_by_size(count, *svhn_sizes(count))
        return splits | {"train": splits["train"].take(train), "val": splits["train"].take(val)}
    return splits


# Reading ------------------------------------------------------------------------------------------------------------


def _read(name: str, root: Path, download: bool) -> tuple[Facts, dict[str, Split]]:
    kind, _, model = name.partition(":")
    if kind == "stand-in" and model in DATASETS:
        return DATASETS[model], _stand_in(DATASETS[model])
    if name.endswith(".npz"):
        return _own_npz(Path(name))
    if name not in DATASETS:
        if Path(name).is_dir():
            return _own_folder(Path(name))
        raise UserError(
            f"dataset is {name!r}; it has to be one of {', '.join(DATASETS)}, "
            "a folder with a folder a class, or a .npz file"
        )
    facts = DATASETS[name]
    archive = root / f"{name}.npz"
    if archive.is_file():
        size, splits, _ = _npz(archive)
        return replace(facts, size=size), _paper_split(name, splits)
    try:
        return facts, _paper_split(name, READERS[name](root, download))
    except (RuntimeError, OSError, KeyError) as problem:
        said = (str(problem).splitlines() or [""])[0]
        if download and facts.fetched:
            raise UserError(f"dataset {name} could not be fetched into {root.resolve()}: {said}") from problem
        fetch = ", or fetch it with --download" if facts.fetched else ""
        raise UserError(
            f"dataset {name} ({facts.title}) is not in {root.resolve()}, or not whole: "
            f"put {facts.layout} or {name}.npz there, or say where it is with --data-root or BETTERNORM_DATA{fetch}"
        ) from problem


def _paper_split(name: str, splits: dict[str, Split]) -> dict[str, Split]:
    """The splits of section 4.1 where the dataset does not come with them. The test set is never touched."""
    if "val" in splits:
        return splits
    whole = splits.get("all", splits.get("train"))
    count = len(whole)
    if name == "caltech256":
        parts = split_by_class(whole.labels.numpy(), *CALTECH256_SIZES)
    elif name == "caltech101":
        parts = split_by_class(whole.labels.numpy(), *CALTECH101_SIZES)
    elif name in SIZES:
        sizes = SIZES[name](count)
        if sum(sizes) != count:
            raise UserError(f"dataset {name} has {count} training images; the paper's split needs {sum(sizes)}")
        parts = split_by_size(count, *sizes)
    else:
        return _own_split(splits)
    named = dict(zip(("train", "val", "test"), map(whole.take, parts), strict=False))
    return named if "all" in splits else named | {"test": splits["test"]}


SIZES = {
    "cifar10": lambda count: CIFAR_SIZES,
    "cifar100": lambda count: CIFAR_SIZES,
    "fashion-mnist": lambda count: FASHION_SIZES,
    "svhn": svhn_sizes,
    "cub2011": cub_sizes,
}


def _npz(path: Path) -> tuple[int, dict[str, Split], int]:
    """The side, the splits and the number of classes of a file of arrays."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except (OSError, ValueError, EOFError) as problem:
        raise UserError(f"{path} cannot be read as .npz: {problem}") from problem
    splits = {}
    for part in ("train", "val", "test", "all"):
        if f"{part}_images" not in arrays:
            continue
        images, labels = arrays[f"{part}_images"], arrays.get(f"{part}_labels")
        if labels is None or len(labels) != len(images):
            raise UserError(f"{path}: {part}_labels has to hold one label for each of the {len(images)} images")
        if images.dtype != np.uint8 or images.ndim not in (3, 4):
            raise UserError(f"{path}: {part}_images is {images.dtype} {images.shape}; it has to be uint8 (N, H, W, C)")
        images = images[..., None] if images.ndim == 3 else images
        splits[part] = Split(_labels(labels), torch.from_numpy(images).permute(0, 3, 1, 2).contiguous())
    if not splits:
        raise UserError(f"{path} has {sorted(arrays)}; it needs train_images and train_labels")
    known = len(arrays["classes"]) if "classes" in arrays else 0
    return next(iter(splits.values())).images.shape[-1], splits, known


def _own_npz(path: Path) -> tuple[Facts, dict[str, Split]]:
    size, splits, classes = _npz(path)
    classes = classes or max(int(split.labels.max()) for split in splits.values()) + 1
    channels = next(iter(splits.values())).images.shape[1]
    _need_two_classes(path, classes)
    return Facts(str(path), classes, size, str(path), None, None, channels), _own_split(splits)


def _own_folder(path: Path) -> tuple[Facts, dict[str, Split]]:
    parts = [part for part in ("train", "val", "test") if (path / part).is_dir()]
    if "train" not in parts:
        parts = []
    folders = {part: path / part for part in parts} or {"all": path}
    names = sorted(entry.name for entry in next(iter(folders.values())).iterdir() if entry.is_dir())
    _need_two_classes(path, len(names))
    splits = {part: _folder(folder, names) for part, folder in folders.items()}
    for part, split in splits.items():
        if not len(split):
            raise UserError(f"{folders[part]} has no images ({', '.join(sorted(EXTENSIONS))}) in its folders a class")
    return Facts(str(path), len(names), 224, str(path)), _own_split(splits)


def _need_two_classes(path: Path, classes: int) -> None:
    if classes < 2:
        raise UserError(f"{path} has {classes} class{'' if classes == 1 else 'es'}; a classifier needs at least 2")


EXTENSIONS = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff"}


def _folder(folder: Path, names: Sequence[str]) -> Split:
    """A folder a class. Class names are given, so that every split numbers them alike."""
    paths, labels = [], []
    for label, name in enumerate(names):
        found = (
            sorted(path for path in (folder / name).rglob("*") if path.suffix.lower() in EXTENSIONS)
            if (folder / name).is_dir()
            else []
        )
        paths += found
        labels += [label] * len(found)
    return Split(_labels(labels), source=_Pictures(paths))


class _Pictures:
    """Files, each opened when it is asked for."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        from PIL import Image

        try:
            with Image.open(self.paths[row]) as picture:
                return picture.convert("RGB"), 0
        except (OSError, SyntaxError, ValueError) as problem:
            raise UserError(f"{self.paths[row]} cannot be read as an image; replace or remove it") from problem


def _labels(labels: Any) -> Tensor:
    return torch.as_tensor(np.asarray(labels), dtype=torch.int64)


def _digits(root: Path, download: bool) -> dict[str, Split]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # sixteen shades in the file
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
    """torchvision has no CUB-200-2011; its own index files say what belongs where."""
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
    """A prototype a class under noise: learnable, and as large as the real thing only in shape."""
    generator = torch.Generator().manual_seed(SPLIT_SEED)
    shape = (facts.channels, facts.size, facts.size)
    prototypes = torch.rand(facts.classes, facts.channels, 2, 2, generator=generator) * 160
    count = max(64, min(2048, (1 << 26) // (3 * facts.size**2)))
    splits = {}
    for part, share in (("train", 1), ("val", 4), ("test", 4)):
        labels = torch.randint(0, facts.classes, (count // share,), generator=generator)
        images = F.interpolate(prototypes[labels], size=shape[1:])
        images += torch.rand(images.shape, generator=generator) * 95
        splits[part] = Split(labels, images.to(torch.uint8))
    return splits


# Into memory --------------------------------------------------------------------------------------------------------


def in_memory(name: str, split: Split, facts: Facts) -> Split:
    """The split as bytes of the wanted side, all images square."""
    if split.images is None:
        pictures = [_square(_picture(name, split, row), facts.size) for row in range(len(split))]
        return Split(split.labels, torch.stack(pictures))
    return Split(split.labels, resized(split.images, facts.size))


def resized(images: Tensor, size: int) -> Tensor:
    """Bytes at another side: the mean over blocks where the side divides, bilinear with antialiasing elsewhere."""
    if images.shape[-2:] == (size, size):
        return images
    parts = []
    for part in images.split(4096):  # as floats, all at once would be four times the dataset
        if part.shape[-1] == part.shape[-2] and part.shape[-1] % size == 0:
            part = F.avg_pool2d(part.float(), part.shape[-1] // size)
        else:
            part = F.interpolate(part.float(), size=(size, size), mode="bilinear", antialias=True)
        parts.append(part.round_().clamp_(0, 255).to(torch.uint8))
    return torch.cat(parts)


def _picture(name: str, split: Split, row: int) -> Any:
    number = int(split.rows[row]) if split.rows is not None else row
    try:
        return split.source[number][0].convert("RGB")
    except UserError:
        raise
    except (OSError, SyntaxError, ValueError) as problem:
        raise UserError(f"image {number} of {name} cannot be read: {problem}; replace or remove it") from problem


def _square(picture: Any, size: int) -> Tensor:
    """Short side to ``size``, then the centre."""
    width, height = picture.size
    scale = size / min(width, height)
    picture = picture.resize((max(size, round(width * scale)), max(size, round(height * scale))))
    left, top = (picture.width - size) // 2, (picture.height - size) // 2
    pixels = np.asarray(picture.crop((left, top, left + size, top + size)))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


# Batches ------------------------------------------------------------------------------------------------------------


def order(labels: Tensor, batch_size: int, *, seed: int, epoch: int, classes_per_batch: int | None = None) -> Tensor:
    """The rows of every batch of an epoch, (steps, batch_size). What is left over at the end of a shuffle is left out.

    ``classes_per_batch=k`` makes batches that are not i.i.d. (section 4.4): k classes drawn with replacement,
    ``batch_size / k`` examples of each, shuffled within the batch.
    """
    if not 1 <= batch_size <= len(labels):
        raise UserError(
            f"batch_size is {batch_size}; the training split has {len(labels)} examples, "
            f"so take from 1 to {len(labels)}"
        )
    steps = len(labels) // batch_size
    generator = _generator(seed, epoch, "order")
    if classes_per_batch is None:
        return torch.randperm(len(labels), generator=generator)[: steps * batch_size].view(steps, batch_size)
    if not 1 <= classes_per_batch <= batch_size or batch_size % classes_per_batch:
        raise UserError(
            f"classes_per_batch is {classes_per_batch}; it has to divide the batch size, {batch_size}, into equal parts"
        )
    each = batch_size // classes_per_batch
    members = [torch.nonzero(labels == label)[:, 0] for label in labels.unique()]
    batches = []
    for _ in range(steps):
        drawn = torch.randint(0, len(members), (classes_per_batch,), generator=generator)
        rows = torch.cat([_draw(members[label], each, generator) for label in drawn])
        batches.append(rows[torch.randperm(batch_size, generator=generator)])
    return torch.stack(batches)


def _draw(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """So many of the rows, each once where there are enough."""
    if len(rows) >= count:
        return rows[torch.randperm(len(rows), generator=generator)[:count]]
    return rows[torch.randint(0, len(rows), (count,), generator=generator)]


def _generator(seed: int, epoch: int, purpose: str) -> torch.Generator:
    """Its own stream for every seed, epoch and purpose."""
    words = [seed & 0xFFFFFFFF, epoch, *purpose.encode()]
    return torch.Generator().manual_seed(int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1))


class Loader:
    """Batches of normalised images and their labels, on the device.

    In training (``train=True``) an iteration is the epoch last given to :meth:`set_epoch`, shuffled and augmented;
    otherwise it is the split in its order, whole and as it is. With ``world_size`` processes each gets its contiguous
    share of every training batch, and its own examples in evaluation; what is drawn at random does not depend on
    the number of processes.
    """

    def __init__(
        self,
        data: Data,
        split: Split,
        batch_size: int,
        *,
        train: bool = False,
        augment: bool | None = None,
        classes_per_batch: int | None = None,
        steps: int | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        rank: int = 0,
        world_size: int = 1,
        workers: int = 2,
    ) -> None:
        if train and batch_size % world_size:
            raise UserError(f"batch_size is {batch_size}; it has to be a multiple of the {world_size} processes")
        self.facts, self.split, self.batch_size = data.facts, split, batch_size
        self.train, self.augment = train, train if augment is None else augment
        self.classes_per_batch, self.steps, self.seed, self.epoch = classes_per_batch, steps, seed, 0
        self.device, self.rank, self.world_size, self.workers = torch.device(device), rank, world_size, workers
        self.padding = (data.facts.padding or data.facts.size // 8) if self.augment else 0
        if split.images is not None:
            self._images = split.images.to(self.device)
            self._labels = split.labels.to(self.device)
        scale = torch.tensor(data.facts.std, dtype=torch.float32).mul(255).reciprocal().view(-1, 1, 1)
        shift = torch.tensor(data.facts.mean, dtype=torch.float32).mul(-255).view(-1, 1, 1) * scale
        self._scale, self._shift = scale.to(self.device), shift.to(self.device)
        if train:
            self._order()  # a batch size that cannot be is reported here, before any work

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        if self.train:
            steps = len(self.split) // self.batch_size
            return steps if self.steps is None else min(self.steps, steps)
        return -(-len(self._shard()) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = self._order()
        return self._from_memory(batches) if self.split.images is not None else self._from_files(batches)

    def _order(self) -> list[Tensor]:
        if not self.train:
            return list(self._shard().split(self.batch_size))
        rows = order(
            self.split.labels,
            self.batch_size,
            seed=self.seed,
            epoch=self.epoch,
            classes_per_batch=self.classes_per_batch,
        )
        return list(rows[: self.steps])

    def _shard(self) -> Tensor:
        return torch.arange(len(self.split))[self.rank :: self.world_size]

    def _mine(self, batch: Tensor) -> Tensor:
        """This process's share of what belongs to a training batch (last dimension)."""
        return batch.chunk(self.world_size, -1)[self.rank] if self.train else batch

    def _from_memory(self, batches: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        generator = _generator(self.seed, self.epoch, "augment")
        for batch in batches:
            rows = self._mine(batch).to(self.device)
            images = self._images[rows] if not self.augment else self._augmented(rows, len(batch), generator)
            yield (images * self._scale).add_(self._shift), self._labels[rows]

    def _augmented(self, rows: Tensor, batch: int, generator: torch.Generator) -> Tensor:
        """A window of every image, half of them mirrored; drawn for the whole batch, so that processes agree."""
        corners = torch.randint(0, 2 * self.padding + 1, (2, batch), generator=generator)
        mirrored = torch.rand(batch, generator=generator) < (0.5 if self.facts.flip else 0.0)
        top, left = self._mine(corners).to(self.device)
        size = self.facts.size
        padded = F.pad(self._images[rows], (self.padding,) * 4)
        windows = padded.unfold(2, size, 1).unfold(3, size, 1)  # a view of every crop: nothing is copied yet
        images = windows[torch.arange(len(rows), device=self.device), :, top, left]
        return torch.where(self._mine(mirrored).to(self.device).view(-1, 1, 1, 1), images.flip(3), images)

    def _from_files(self, batches: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        generator = _generator(self.seed, self.epoch, "augment")
        files = _Decoded(self.split, self.facts, self.augment)
        loader = ImageLoader(
            files,
            batch_sampler=[self._mine(batch).tolist() for batch in batches],
            num_workers=self.workers,
            generator=generator,  # seeds the workers, so that an epoch's crops follow from seed and epoch
            pin_memory=self.device.type == "cuda",
        )
        for images, labels in loader:
            images = images.to(self.device, non_blocking=True)
            yield (images * self._scale).add_(self._shift), labels.to(self.device, non_blocking=True)


class _Decoded(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Photographs of any size as square bytes: a crop of random scale in training, the centre otherwise."""

    CENTRE = 0.875  # of the short side, as ImageNet networks are evaluated

    def __init__(self, split: Split, facts: Facts, augment: bool) -> None:
        self.split, self.facts, self.augment = split, facts, augment

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        picture = _picture(self.facts.title, self.split, row)
        size = self.facts.size
        if not self.augment:
            wide = round(size / self.CENTRE)
            edge = (wide - size) // 2
            return _square(picture, wide)[:, edge : edge + size, edge : edge + size], self.split.labels[row]
        box = self._random_box(*picture.size)
        pixels = torch.from_numpy(np.asarray(picture.resize((size, size), box=box)).copy()).permute(2, 0, 1)
        mirrored = self.facts.flip and float(torch.rand(())) < 0.5
        return pixels.flip(2) if mirrored else pixels, self.split.labels[row]

    @staticmethod
    def _random_box(width: int, height: int) -> tuple[int, int, int, int]:
        """8 to 100 % of the area at a ratio of 3/4 to 4/3, as Inception networks are trained."""
        area = width * height * float(torch.empty(()).uniform_(0.08, 1.0))
        ratio = float(torch.empty(()).uniform_(np.log(3 / 4), np.log(4 / 3)).exp())
        w = min(width, max(1, round((area * ratio) ** 0.5)))
        h = min(height, max(1, round((area / ratio) ** 0.5)))
        left = int(torch.randint(0, width - w + 1, ()))
        top = int(torch.randint(0, height - h + 1, ()))
        return left, top, left + w, top + h
