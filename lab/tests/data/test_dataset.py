"""Datasets by their name, real ones where they are at hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from betternorm_lab import data
from betternorm_lab.data import readers

from .test_splits import checksum


def test_digits_are_there_without_a_download():
    digits = data.load()
    assert (len(digits.train), len(digits.validation), len(digits.test)) == (1079, 359, 359)
    assert digits.train.images.shape == (1079, 1, 8, 8)
    assert digits.num_classes == 10
    assert data.training_images("digits") == 1079
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
    assert data.training_images(name) == sizes[0]
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


def test_facts_are_complete():
    for name, facts in data.DATASETS.items():
        assert name in readers.READERS
        assert facts.mean is None or len(facts.mean) == len(facts.std) == facts.channels
        assert replace(facts, size=16).size == 16
