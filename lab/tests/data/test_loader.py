"""The batches of an epoch: shuffled, not i.i.d., augmented, shared among processes."""

import numpy as np
import pytest
import torch
from betternorm_lab import data

from betternorm.errors import UserError


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


def test_every_part_of_an_accumulated_batch_has_its_own_few_classes():
    labels = torch.arange(5000) % 100
    batches = data.order(labels, 128, seed=0, epoch=0, classes_per_batch=4, parts=4)
    assert batches.shape == (39, 128)
    parts = labels[batches].view(-1, 32)
    assert max(len(part.unique()) for part in parts) == 4
    assert all((part.bincount(minlength=100) % 8 == 0).all() for part in parts)
    assert np.mean([len(batch.unique()) for batch in labels[batches]]) > 12  # 16 draws of 100


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


def test_normalized_training_data_has_mean_0_and_deviation_1():
    digits = data.load()
    images = torch.cat([images for images, _ in data.Loader(digits, digits.train, 500)])
    assert images.mean().abs() < 1e-3
    assert (images.std() - 1).abs() < 1e-3


# Bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 2000}, "batch_size is 2000; the training split has 1079 examples"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 10, "classes_per_batch": 4}, "classes_per_batch is 4; it must divide the batch size, 10"),
        ({"batch_size": 24, "classes_per_batch": 8, "parts": 2}, "classes_per_batch is 8; it must divide .*, 12"),
        ({"batch_size": 9, "world_size": 2}, "a multiple of the 2 processes"),
    ],
)
def test_batches_that_cannot_be(options, words):
    digits = data.load()
    with pytest.raises(UserError, match=words):
        data.Loader(digits, digits.train, train=True, **options)
