"""Rows of batches."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from betternorm.weighing.batches import example_keys, iterate, number_of_examples, select
from betternorm.weighing.metrics import Metric
from betternorm.weighing.search import tune_alpha


def test_keys_of_rows_do_not_depend_on_the_batch() -> None:
    x, y = torch.randn(40, 3, 40, 40), torch.arange(40)
    keys = example_keys((x, y))
    assert len(set(keys.tolist())) == 40
    for part, labels, expected in zip(x.split(7), y.split(7), keys.split(7), strict=True):
        assert torch.equal(example_keys({"image": part, "label": labels}), expected)
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(keys))


def test_another_label_makes_another_example() -> None:
    x, y = torch.randn(5, 3, 8, 8), torch.arange(5)
    corrected = y.clone()
    corrected[2] = 7
    assert (example_keys((x, y)) == example_keys((x, corrected))).tolist() == [True, True, False, True, True]


def detection(sizes: list[int], images: int) -> list[Any]:
    """Lists of images and of dicts, as detection models take them; images share a size or do not."""
    generator = torch.Generator().manual_seed(2)
    return [
        (
            [torch.randn(3, size, 8, generator=generator) for size in sizes[:images]],
            [{"boxes": torch.rand(k % 3, 4), "labels": torch.ones(k % 3)} for k in range(images)],
        )
        for _ in range(5)
    ]


@pytest.mark.parametrize("sizes", [[8] * 12, list(range(8, 20))])
@pytest.mark.parametrize("most", [None, 1, 12, 14, 26, 60])
def test_images_in_a_list_are_counted_and_limited_one_by_one(sizes: list[int], most: int | None) -> None:
    loader = detection(sizes, 12)
    every = [(x, y) for images, targets in loader for x, y in zip(images, targets, strict=True)]
    seen = list(iterate(loader, most, torch.device("cpu")))
    assert sum(map(number_of_examples, seen)) == (most or 60)
    pairs = [(x, y) for images, targets in seen for x, y in zip(images, targets, strict=True)]
    assert len(pairs) == (most or 60)
    for (x, y), (expected, target) in zip(pairs, every, strict=False):
        assert torch.equal(x, expected)
        assert torch.equal(y["boxes"], target["boxes"])
    keys = torch.cat([example_keys(batch) for batch in seen])
    assert len(torch.unique(keys)) == len(keys) == (most or 60)


def test_images_in_a_list_may_have_labels_in_a_tensor_or_be_in_a_dict() -> None:
    images = [torch.randn(3, 8, 8) for _ in range(4)]
    for batch in ((images, torch.arange(4)), {"image": images, "label": torch.arange(4), "name": "abcd"}):
        assert number_of_examples(batch) == 4
        assert len(example_keys(batch)) == 4
        part = select(batch, torch.tensor([True, False, True, False]))
        x, y = (part["image"], part["label"]) if isinstance(part, dict) else part
        assert torch.equal(torch.stack(x), torch.stack(images)[[0, 2]])
        assert y.tolist() == [0, 2]


def test_several_inputs_of_one_batch_size_are_not_a_list_of_images() -> None:
    batch = ((torch.randn(2, 5), torch.randn(2, 3)), torch.arange(2))
    assert number_of_examples(batch) == 2
    (first, second), target = next(iterate([batch], 1, torch.device("cpu")))
    assert (first.shape, second.shape, target.shape) == ((1, 5), (1, 3), (1,))


def test_alpha_is_tuned_on_lists_of_images() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    counted = []

    def forward(model: nn.Module, batch: Any) -> tuple[Any, Any]:
        counted.append(len(batch[0]))
        return torch.cat([model(image[None]) for image in batch[0]]), batch[1]

    spread = Metric("spread", lambda output, target: output.var(1), higher_is_better=False)
    result = tune_alpha(
        model,
        detection(list(range(8, 20)), 12),
        (),
        spread,
        grid=[0.5],
        max_examples=55,
        forward=forward,
        require_significant=False,
    )
    assert result.examples == 55
    assert sum(counted) == 2 * 55
