"""The splits: their sizes, and that they never change."""

import hashlib

import numpy as np
import pytest
from betternorm_lab.data import splits


def checksum(*arrays):
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
    return digest.hexdigest()[:12]


CIFAR = 50_000
SVHN = 73_257 + 531_131  # the 604,388 of the paper
CUB = 5_994


@pytest.mark.parametrize(
    ("count", "sizes", "expected", "fixed"),
    [
        (CIFAR, splits.CIFAR_SIZES, (40_000, 10_000), "61798807bc8c"),
        (SVHN, splits.svhn_sizes(SVHN), (483_510, 120_878), "f6a0c40ed9af"),
        (CUB, splits.cub_sizes(CUB), (4_496, 1_498), "e7b009cd1fc4"),
        (60_000, splits.FASHION_SIZES, (50_000, 10_000), "c4a62cf6e926"),
    ],
    ids=["cifar", "svhn", "cub", "fashion-mnist"],
)
def test_random_splits_have_the_papers_sizes_and_never_change(count, sizes, expected, fixed):
    parts = splits.split_by_size(count, *sizes)
    assert tuple(map(len, parts)) == expected
    assert sorted(np.concatenate(parts).tolist()) == list(range(count))
    assert checksum(*parts) == fixed


def test_caltech256_takes_40_10_and_30_images_of_every_class():
    labels = np.repeat(np.arange(256), np.random.RandomState(1).randint(80, 120, 256))
    parts = splits.split_by_class(labels, *splits.CALTECH256_SIZES)
    assert len(np.unique(np.concatenate(parts))) == sum(map(len, parts))
    for part, each in zip(parts, (40, 10, 30), strict=True):
        assert (np.bincount(labels[part]) == each).all()
    assert checksum(*parts) == "51c601205b8f"


@pytest.mark.parametrize(
    ("name", "count"), [("svhn", 483_510), ("cub2011", 4_496), ("fashion-mnist", 50_000), ("caltech256", 40 * 256)]
)
def test_the_size_of_a_training_split_is_known_before_it_is_read(name, count):
    assert splits.training_images(name) == count
