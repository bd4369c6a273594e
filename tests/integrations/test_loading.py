"""Batches of images, by workers and without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from betternorm.errors import UserError
from betternorm.integrations.loading import ImageLoader


class Images(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Five images, of which one is bad, or larger than the others."""

    def __init__(self, bad: int | None = None, large: int | None = None) -> None:
        self.bad, self.large = bad, large

    def __len__(self) -> int:
        return 5

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        if row == self.bad:
            raise UserError(f"image {row} cannot be read")
        return torch.full((1, 3 if row == self.large else 2, 2), float(row)), row


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_those_of_torch(workers: int) -> None:
    found = list(ImageLoader(Images(), batch_size=2, num_workers=workers))
    expected = list(torch.utils.data.DataLoader(Images(), batch_size=2))
    assert len(found) == len(expected) == 3
    for (x, y), (expected_x, expected_y) in zip(found, expected, strict=True):
        assert torch.equal(x, expected_x)
        assert torch.equal(y, expected_y)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_users_mistake_comes_as_it_was_raised(workers: int) -> None:
    with pytest.raises(UserError) as caught:
        list(ImageLoader(Images(bad=3), batch_size=2, num_workers=workers))
    assert str(caught.value) == "image 3 cannot be read"


def test_images_of_different_sizes_are_an_error() -> None:
    with pytest.raises(UserError, match="have different sizes"):
        list(ImageLoader(Images(large=1), batch_size=2))
