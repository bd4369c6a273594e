"""Splits, files, batches: the paper's sizes, the same rows everywhere, and images that are windows of the originals."""

import hashlib
import itertools
import pickle
from dataclasses import replace
from urllib.error import URLError

import numpy as np
import pytest
import scipy.io
import torch
from PIL import Image

from betternorm.errors import UserError
from betternorm.lab import data


def checksum(*arrays):
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
    return digest.hexdigest()[:12]


# Splits -------------------------------------------------------------------------------------------------------------

CIFAR = 50_000
SVHN = 73_257 + 531_131  # the 604,388 of the paper
CUB = 5_994


@pytest.mark.parametrize(
    ("count", "sizes", "expected", "fixed"),
    [
        (CIFAR, data.CIFAR_SIZES, (40_000, 10_000), "61798807bc8c"),
        (SVHN, data.svhn_sizes(SVHN), (483_510, 120_878), "f6a0c40ed9af"),
        (CUB, data.cub_sizes(CUB), (4_496, 1_498), "e7b009cd1fc4"),
        (60_000, data.FASHION_SIZES, (50_000, 10_000), "c4a62cf6e926"),
    ],
    ids=["cifar", "svhn", "cub", "fashion-mnist"],
)
def test_random_splits_have_the_papers_sizes_and_never_change(count, sizes, expected, fixed):
    parts = data.split_by_size(count, *sizes)
    assert tuple(map(len, parts)) == expected
    assert sorted(np.concatenate(parts).tolist()) == list(range(count))
    assert checksum(*parts) == fixed


def test_caltech256_takes_40_10_and_30_images_of_every_class():
    labels = np.repeat(np.arange(256), np.random.RandomState(1).randint(80, 120, 256))
    parts = data.split_by_class(labels, *data.CALTECH256_SIZES)
    assert len(np.unique(np.concatenate(parts))) == sum(map(len, parts))
    for part, each in zip(parts, (40, 10, 30), strict=True):
        assert (np.bincount(labels[part]) == each).all()
    assert checksum(*parts) == "51c601205b8f"


def test_digits_are_there_without_a_download():
    digits = data.load()
    assert (len(digits.train), len(digits.validation), len(digits.test)) == (1079, 359, 359)
    assert digits.train.images.shape == (1079, 1, 8, 8)
    assert digits.num_classes == 10
    sums = [checksum(split.labels.numpy()) for split in (digits.train, digits.validation, digits.test)]
    assert sums == ["8d056ee070ec", "544d9e98933e", "ed6c1a94dca3"]


@pytest.mark.parametrize(
    ("name", "sizes", "size"),
    [
        ("cifar100", (40_000, 10_000, 10_000), 32),
        ("flowers102", (1_020, 1_020, 6_149), 64),
        ("caltech101", (2_020, 505, 2_505), 64),
    ],
)
def test_real_files_are_found_and_split(real_data, name, sizes, size):
    found = data.load(name, real_data)
    splits = (found.train, found.validation, found.test)
    assert tuple(map(len, splits)) == sizes
    assert found.facts.size == size
    for split in splits:
        assert split.labels.unique().tolist() == list(range(found.num_classes))
    whole = np.load(real_data / f"{name}.npz")
    if (
        name == "cifar100"
    ):  # the test set is the official one, and training and validation are the official training set
        assert np.array_equal(found.test.images.permute(0, 2, 3, 1).numpy(), whole["test_images"])
        both = torch.cat([found.train.images, found.validation.images]).sum((1, 2, 3)).sort().values
        assert torch.equal(both, torch.from_numpy(whole["train_images"]).sum((1, 2, 3)).sort().values)


def test_real_flowers_at_half_the_side_are_block_means(real_data):
    small = data.load("flowers102", real_data, image_size=32).train.images
    large = np.load(real_data / "flowers102.npz")["train_images"].astype(np.float64)
    blocks = large.reshape(len(large), 32, 2, 32, 2, 3).mean((2, 4)).transpose(0, 3, 1, 2)
    assert np.abs(small.numpy() - blocks).max() <= 0.5


def test_some_classes_and_some_examples():
    few = data.load("digits", classes=3, train_examples=50)
    assert few.num_classes == 3
    assert len(few.train) == 50
    assert few.test.labels.unique().tolist() == [0, 1, 2]
    again = data.load("digits", classes=3, train_examples=20)
    assert torch.equal(again.train.images, few.train.images[:20])


# Files of the layouts that the datasets come in -----------------------------------------------------------------------


@pytest.fixture
def unchecked(monkeypatch):
    """torchvision compares checksums of the real files; these are small ones of the same layout."""
    datasets = data._torchvision()
    for kind in (datasets.CIFAR10, datasets.SVHN, datasets.Flowers102):
        monkeypatch.setattr(kind, "_check_integrity", lambda self: True)
    monkeypatch.setattr(datasets.svhn, "check_integrity", lambda *_: True)
    monkeypatch.setattr(datasets.cifar, "check_integrity", lambda *_: True)
    data._load.cache_clear()
    yield
    data._load.cache_clear()


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
        monkeypatch.setattr(data, constant, value)
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


def test_an_epoch_is_a_shuffle_and_follows_from_seed_and_number():
    labels = torch.arange(103) % 7
    first = data.order(labels, 10, seed=1, epoch=4)
    assert first.shape == (10, 10)
    assert len(first.unique()) == 100
    assert torch.equal(first, data.order(labels, 10, seed=1, epoch=4))
    for other in ({"seed": 2, "epoch": 4}, {"seed": 1, "epoch": 5}):
        assert not torch.equal(first, data.order(labels, 10, **other))


@pytest.mark.parametrize(("batch_size", "classes"), [(128, 4), (12, 3), (8, 8), (6, 1)])
def test_non_iid_batches_hold_few_classes_in_equal_parts(batch_size, classes):
    labels = torch.arange(5000) % 20
    batches = data.order(labels, batch_size, seed=0, epoch=0, classes_per_batch=classes)
    assert batches.shape == (5000 // batch_size, batch_size)
    each = batch_size // classes
    seen = set()
    for batch in batches:
        counts = labels[batch].bincount(minlength=20)
        assert (counts % each == 0).all()  # a class drawn twice, with replacement, has two parts
        assert counts.sum() == batch_size
        seen |= set(counts.nonzero()[:, 0].tolist())
    assert len(seen) == 20
    runs = (labels[batches][:, 1:] == labels[batches][:, :-1]).double().mean()
    assert runs < 1 / classes + 0.3 if classes > 1 else runs == 1  # shuffled: classes do not stand together


def test_classes_are_drawn_with_replacement():
    labels = torch.arange(1000) % 4
    batches = data.order(labels, 8, seed=0, epoch=0, classes_per_batch=4)
    distinct = np.array([len(labels[batch].unique()) for batch in batches])
    # four draws from four: all different with probability 4!/4^4 = 0.094
    assert abs((distinct == 4).mean() - 0.094) < 0.1
    assert set(distinct) >= {2, 3, 4}


def bytes_again(images, facts):
    mean = torch.tensor(facts.mean).view(-1, 1, 1)
    std = torch.tensor(facts.std).view(-1, 1, 1)
    return ((images * std + mean) * 255).round().to(torch.uint8).numpy()


def test_augmented_images_are_windows_of_the_padded_original():
    stand_in = data.load("stand-in:cifar10", train_examples=64)
    loader = data.Loader(stand_in, stand_in.train, 32, train=True, seed=5)
    rows = data.order(stand_in.train.labels, 32, seed=5, epoch=0).flatten().tolist()
    images = bytes_again(torch.cat([images for images, _ in loader]), stand_in.facts)
    found = []
    for image, row in zip(images, rows, strict=True):
        padded = np.pad(stand_in.train.images[row].numpy(), ((0, 0), (4, 4), (4, 4)))
        matches = [
            (top, left, mirrored)
            for top in range(9)
            for left in range(9)
            for mirrored in (False, True)
            if np.array_equal(padded[:, top : top + 32, left : left + 32][..., :: -1 if mirrored else 1], image)
        ]
        assert len(matches) == 1
        found += matches
    tops, lefts, mirrors = zip(*found, strict=True)
    assert len(set(tops)) > 5
    assert len(set(lefts)) > 5
    assert 16 < sum(mirrors) < 48


def test_evaluation_is_the_split_in_order_and_unchanged():
    digits = data.load()
    batches = list(data.Loader(digits, digits.validation, 100))
    assert [len(labels) for _, labels in batches] == [100, 100, 100, 59]
    again = bytes_again(torch.cat([images for images, _ in batches]), digits.facts)
    assert np.array_equal(again, digits.validation.images.numpy())
    assert torch.equal(torch.cat([labels for _, labels in batches]), digits.validation.labels)


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_share_every_batch(world_size):
    digits = data.load()
    whole = list(data.Loader(digits, digits.train, 64, train=True, seed=9))
    shares = [
        list(data.Loader(digits, digits.train, 64, train=True, seed=9, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    for step, (images, labels) in enumerate(whole):
        assert torch.equal(torch.cat([share[step][0] for share in shares]), images)
        assert torch.equal(torch.cat([share[step][1] for share in shares]), labels)
    held = [data.Loader(digits, digits.test, 50, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert sum(len(labels) for loader in held for _, labels in loader) == len(digits.test)


def test_normalised_training_data_has_mean_0_and_deviation_1():
    digits = data.load()
    images = torch.cat([images for images, _ in data.Loader(digits, digits.train, 500)])
    assert images.mean().abs() < 1e-3
    assert (images.std() - 1).abs() < 1e-3


# Bad input ----------------------------------------------------------------------------------------------------------


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
        (lambda folder: npz(folder, train_images=pixels(4), train_labels=np.arange(3)), "one label for each of the 4"),
        (lambda folder: npz(folder, train_images=pixels(4) / 255, train_labels=np.arange(4)), "has to be uint8"),
        (lambda folder: npz(folder, x=np.zeros(3)), "needs train_images"),
        (
            lambda folder: npz(folder, train_images=pixels(9), train_labels=np.arange(9) - 1, classes=np.arange(9)),
            "they have to be from 0 to 8",
        ),
        (
            lambda folder: npz(folder, train_images=pixels(9), train_labels=np.arange(9), classes=np.arange(4)),
            "they have to be from 0 to 3",
        ),
        (lambda folder: ("cifra10", {}), "'cifra10'; it has to be one of digits, cifar10"),
        (lambda folder: ("svhn", {}), "put train_32x32.mat, extra_32x32.mat and test_32x32.mat or svhn.npz there"),
        (lambda folder: ("cub2011", {}), "is not in .*BETTERNORM_DATA$"),
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

    monkeypatch.setattr(data._torchvision().CIFAR10, "download", fetch)
    with pytest.raises(UserError, match=r"dataset cifar10 could not be fetched into .*no route to host"):
        data.load("cifar10", tmp_path, download=True)


def test_a_corrupt_photograph_in_a_stream_is_named(tmp_path):
    name, _ = corrupt_picture(tmp_path)
    found = data.load(name, image_size=128)
    loaders = [data.Loader(found, split, 2) for split in (found.train, found.validation, found.test)]
    with pytest.raises(UserError, match=r"b/4\.png cannot be read as an image") as problem:
        list(itertools.chain(*loaders))
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 2000}, "batch_size is 2000; the training split has 1079 examples"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 10, "classes_per_batch": 4}, "classes_per_batch is 4; it has to divide the batch size, 10"),
        ({"batch_size": 9, "world_size": 2}, "a multiple of the 2 processes"),
    ],
)
def test_batches_that_cannot_be(options, words):
    digits = data.load()
    with pytest.raises(UserError, match=words):
        data.Loader(digits, digits.train, train=True, **options)


def test_facts_are_complete():
    for name, facts in data.DATASETS.items():
        assert name in data.READERS
        assert facts.mean is None or len(facts.mean) == len(facts.std) == facts.channels
        assert replace(facts, size=16).size == 16
