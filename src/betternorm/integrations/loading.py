"""A DataLoader whose workers pass on errors in the data without a traceback in the message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import default_collate

from betternorm.errors import UserError


class ImageLoader(torch.utils.data.DataLoader):  # type: ignore[type-arg]
    """Batches of images and labels.

    torch adds the traceback of the worker to the message of an exception. Here a `UserError` of the dataset is
    returned as a value instead, and raised where the batch is requested.
    """

    def __init__(self, images: Any, **options: Any) -> None:
        super().__init__(_ErrorsAsValues(images), collate_fn=_collate, **options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            if isinstance(batch, UserError):
                raise batch
            yield batch


class _ErrorsAsValues(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, images: Any) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> Any:
        try:
            return self.images[row]
        except UserError as error:
            return error


def _collate(items: list[Any]) -> Any:
    for item in items:
        if isinstance(item, UserError):
            return item
    if len({image.shape for image, _ in items}) > 1:
        return UserError("the images have different sizes: pass the size that the model expects with --size")
    return default_collate(items)
