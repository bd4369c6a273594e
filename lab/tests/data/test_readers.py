"""Files in the layouts that the datasets come in, and what a broken one says."""

import itertools
import pickle
from urllib.error import URLError

import numpy as np
import pytest
import scipy.io
import torch
from betternorm_lab import data
from betternorm_lab.data import dataset, readers, splits
from PIL import Image

from betternorm.errors import UserError


@pytest.fixture
def unchecked(monkeypatch):
    """torchvision compares checksums of the real files; these are small ones of the same layout."""
    datasets = readers._torchvision()
    for kind in (datasets.CIFAR10, datasets.SVHN, datasets.Flowers102):
        monkeypatch.setattr(kind, "_check_integrity", lambda self: True)
    monkeypatch.setattr(datasets.svhn, "check_integrity", lambda *_: True)
    monkeypatch.setattr(datasets.cifar, "check_integrity", lambda *_: True)
    dataset._load.cache_clear()
    yield
    dataset._load.cache_clear()


def pixels(count, side=32, seed=0):
    return np.random.RandomState(seed).randint(0, 256, (count, side, side, 3), dtype=np.uint8)


def save_picture(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


def write_cifar100(root):
    folder = root / "cifar-100-python"
    folder.mkdir()
    for name, count in (("train", 50), ("test", 10)):
        entry = {"data": pixels(count).transpose(0, 3, 1, 2).reshape(count, -1), "fine_labels": list(range(count))}
        (folder / name).write_bytes(pickle.dumps(entry))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [str(n) for n in range(100)]}))


def write_svhn(root):
    for name, count in (("train", 30), ("extra", 70), ("test", 20)):
        arrays = {"X": pixels(count).transpose(1, 2, 3, 0), "y": np.arange(count)[:, None] % 10 + 1}
        scipy.io.savemat(root / f"{name}_32x32.mat", arrays)


def write_fashion_mnist(root):
    folder = root / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    for name, count in (("train", 12), ("t10k", 4)):
        header = b"\x00\x00\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (count, 28, 28))
        (folder / f"{name}-images-idx3-ubyte").write_bytes(header + pixels(count, 28)[..., 0].tobytes())
        labels = (np.arange(count) % 10).astype(np.uint8).tobytes()
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(b"\x00\x00\x08\x01" + count.to_bytes(4, "big") + labels)


def write_caltech256(root):
    for label in range(257):
        name = f"{label + 1:03}.{'clutter' if label == 256 else 'thing'}"
        for number in range(1, 5):
            path = root / "caltech256" / "256_ObjectCategories" / name / f"{label + 1:03}_{number:04}.jpg"
            save_picture(path, pixels(1, 12)[0])


def write_flowers102(root):
    folder = root / "flowers-102"
    for number in range(1, 13):
        save_picture(folder / "jpg" / f"image_{number:05}.jpg", pixels(1, 70)[0][:, :50])
    scipy.io.savemat(folder / "imagelabels.mat", {"labels": np.arange(1, 13)[None]})
    parts = {"trnid": [[1, 2, 3]], "valid": [[4, 5]], "tstid": [[6, 7, 8, 9, 10, 11, 12]]}
    scipy.io.savemat(folder / "setid.mat", parts)


def write_cub2011(root):
    folder = root / "CUB_200_2011"
    names = [f"{label + 1:03}.bird/{number}.jpg" for label in range(4) for number in range(5)]
    for name in names:
        save_picture(folder / "images" / name, pixels(1, 20)[0])
    write = {
        "images.txt": names,
        "image_class_labels.txt": [int(name[:3]) for name in names],
        "train_test_split.txt": [int(number % 5 < 3) for number in range(20)],
    }
    for file, column in write.items():
        (folder / file).write_text("".join(f"{n} {value}\n" for n, value in enumerate(column, 1)))


def write_imagenet(root):
    for part, count in (("train", 3), ("val", 1)):
        for wnid in ("n01", "n02"):
            for number in range(count):
                save_picture(root / part / wnid / f"{number}.JPEG", pixels(1, 20)[0])
    torch.save(({"n01": ("tench",), "n02": ("goldfish",)}, ["n01"]), root / "meta.bin")


@pytest.mark.parametrize(
    ("name", "write", "sizes", "constants"),
    [
        ("cifar100", write_cifar100, (40, 10, 10), {"CIFAR_SIZES": (40, 10)}),
        ("svhn", write_svhn, (80, 20, 20), {}),
        ("fashion-mnist", write_fashion_mnist, (10, 2, 4), {"FASHION_SIZES": (10, 2)}),
        ("caltech256", write_caltech256, (512, 256, 256), {"CALTECH256_SIZES": (2, 1, 1)}),
        ("flowers102", write_flowers102, (3, 2, 7), {}),
        ("cub2011", write_cub2011, (9, 3, 8), {}),
        ("imagenet", write_imagenet, (6, 2, None), {}),
    ],
)
def test_each_layout_is_read(tmp_path, monkeypatch, unchecked, name, write, sizes, constants):
    for constant, value in constants.items():
        monkeypatch.setattr(splits, constant, value)
    write(tmp_path)
    found = data.load(name, tmp_path, image_size=16)
    assert (len(found.train), len(found.validation)) == sizes[:2]
    assert (len(found.test) if found.test else None) == sizes[2]
    assert found.train.images.shape[1:] == (found.facts.channels, 16, 16)
    images, labels = next(iter(data.Loader(found, found.train, 2, train=True)))
    assert images.shape == (2, found.facts.channels, 16, 16)
    assert images.isfinite().all()
    assert labels.dtype == torch.int64


def test_large_photographs_are_streamed_the_same_each_time(tmp_path):
    for label in range(2):
        for number in range(10):
            save_picture(tmp_path / f"class{label}" / f"{number}.png", pixels(1, 130, seed=number)[0][:110])
    found = data.load(str(tmp_path), image_size=112)
    assert found.train.images is None
    loader = data.Loader(found, found.train, 4, train=True, seed=3)
    loader.set_epoch(1)
    first, second = list(loader), list(loader)
    assert [images.shape for images, _ in first] == [(4, 3, 112, 112)] * 3
    for (images, labels), (same_images, same_labels) in zip(first, second, strict=True):
        assert torch.equal(images, same_images)
        assert torch.equal(labels, same_labels)
    loader.set_epoch(2)
    assert not torch.equal(next(iter(loader))[0], first[0][0])
    held = list(data.Loader(found, found.validation, 3))
    assert sum(len(labels) for _, labels in held) == len(found.validation) == 4


# Batches ------------------------------------------------------------------------------------------------------------


def one_class(folder):
    save_picture(folder / "only" / "a.png", pixels(1)[0])
    return str(folder), {}


def corrupt_picture(folder):
    for label in "ab":
        for number in range(5):
            save_picture(folder / label / f"{number}.png", pixels(1)[0])
    (folder / "b" / "4.png").write_bytes((folder / "b" / "3.png").read_bytes()[:200])
    return str(folder), {"image_size": 16}


def no_pictures(folder):
    for label in "ab":
        (folder / label).mkdir()
    return str(folder), {}


def npz(folder, **arrays):
    np.savez(folder / "x.npz", **arrays)
    return str(folder / "x.npz"), {}


def not_npz(folder):
    (folder / "x.npz").write_bytes(b"not an archive")
    return str(folder / "x.npz"), {}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (one_class, "has 1 class; a classifier needs at least 2"),
        (corrupt_picture, "b/4.png cannot be read as an image"),
        (no_pictures, "has no images"),
        (not_npz, "cannot be read as .npz"),
        (
            lambda folder: npz(folder, train_images=pixels(4), train_labels=np.arange(3)),
            "one integer for each of the 4",
        ),
        (lambda folder: npz(folder, train_images=pixels(4) / 255, train_labels=np.arange(4)), "must be uint8"),
        (lambda folder: npz(folder, x=np.zeros(3)), "needs train_images"),
        (
            lambda folder: npz(folder, train_images=pixels(9), train_labels=np.arange(9) - 1, classes=np.arange(9)),
            "they must be from 0 to 8",
        ),
        (
            lambda folder: npz(folder, train_images=pixels(9), train_labels=np.arange(9), classes=np.arange(4)),
            "they must be from 0 to 3",
        ),
        (lambda folder: ("cifra10", {}), "'cifra10'; it must be one of digits, cifar10"),
        (lambda folder: ("svhn", {}), "put train_32x32.mat, extra_32x32.mat and test_32x32.mat or svhn.npz there"),
        (lambda folder: ("cub2011", {}), "is missing or incomplete in .*BETTERNORM_DATA$"),
        (lambda folder: ("digits", {"classes": 11}), "classes is 11; digits has 10"),
        (lambda folder: ("digits", {"train_examples": 5000}), "train_examples is 5000"),
        (lambda folder: ("digits", {"image_size": -1}), "image_size is -1"),
    ],
)
def test_what_cannot_be_loaded_says_why_in_one_line(tmp_path, make, words):
    name, options = make(tmp_path)
    with pytest.raises(UserError, match=words) as problem:
        data.load(name, tmp_path, **options)
    assert "\n" not in str(problem.value)


def test_a_download_that_fails_says_so(tmp_path, monkeypatch):
    def fetch(self):
        raise URLError("no route to host")

    monkeypatch.setattr(readers._torchvision().CIFAR10, "download", fetch)
    with pytest.raises(UserError, match=r"dataset cifar10 could not be fetched into .*no route to host"):
        data.load("cifar10", tmp_path, download=True)


def test_a_corrupt_photograph_in_a_stream_is_named(tmp_path):
    name, _ = corrupt_picture(tmp_path)
    found = data.load(name, image_size=128)
    loaders = [data.Loader(found, split, 2) for split in (found.train, found.validation, found.test)]
    with pytest.raises(UserError, match=r"b/4\.png cannot be read as an image") as problem:
        list(itertools.chain(*loaders))
    assert "\n" not in str(problem.value)
