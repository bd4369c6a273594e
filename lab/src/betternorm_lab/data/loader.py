"""The batches of an epoch, augmented and normalized on the device (section 4.4 for batches that are not i.i.d.).

Everything random about an epoch follows from a seed and the epoch's number alone, so that a training run can start
again at any epoch, and any number of processes sees the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from betternorm.errors import UserError
from betternorm.integrations.loading import ImageLoader
from betternorm_lab.data.dataset import Data
from betternorm_lab.data.facts import Facts
from betternorm_lab.data.images import picture_at, square
from betternorm_lab.data.splits import Split


def order(
    labels: Tensor, batch_size: int, *, seed: int, epoch: int, classes_per_batch: int | None = None, parts: int = 1
) -> Tensor:
    """The rows of every batch of an epoch, (steps, batch_size). An incomplete last batch is dropped.

    ``classes_per_batch=k`` makes batches that are not i.i.d. (section 4.4): k classes drawn with replacement,
    ``batch_size / k`` examples of each, shuffled within the batch. Where gradients are accumulated over several
    ``parts``, each of them is such a batch: it is what the network sees at once.
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
    size = batch_size // parts
    if not 1 <= classes_per_batch <= size or size % classes_per_batch:
        raise UserError(f"classes_per_batch is {classes_per_batch}; it must divide the batch size, {size}")
    members = [torch.nonzero(labels == label)[:, 0] for label in labels.unique()]
    batches = []
    for _ in range(steps * parts):
        drawn = torch.randint(0, len(members), (classes_per_batch,), generator=generator)
        rows = torch.cat([_draw(members[label], size // classes_per_batch, generator) for label in drawn])
        batches.append(rows[torch.randperm(size, generator=generator)])
    return torch.stack(batches).view(steps, size * parts)


def _draw(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """A number of rows, without repetition if there are enough."""
    if len(rows) >= count:
        return rows[torch.randperm(len(rows), generator=generator)[:count]]
    return rows[torch.randint(0, len(rows), (count,), generator=generator)]


def _generator(seed: int, epoch: int, purpose: str) -> torch.Generator:
    """A random generator for every seed, epoch and purpose."""
    words = [seed & 0xFFFFFFFF, epoch, *purpose.encode()]
    return torch.Generator().manual_seed(int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1))


class Loader:
    """Batches of normalized images and their labels, on the device.

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
        parts: int = 1,
        steps: int | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        rank: int = 0,
        world_size: int = 1,
        workers: int = 2,
    ) -> None:
        if train and batch_size % world_size:
            raise UserError(f"batch_size is {batch_size}; it must be a multiple of the {world_size} processes")
        self.facts, self.split, self.batch_size = data.facts, split, batch_size
        self.train, self.augment = train, train if augment is None else augment
        self.classes_per_batch, self.parts = classes_per_batch, parts
        self.steps, self.seed, self.epoch = steps, seed, 0
        self.device, self.rank, self.world_size, self.workers = torch.device(device), rank, world_size, workers
        self.padding = (data.facts.padding or data.facts.size // 8) if self.augment else 0
        if split.images is not None:
            self._images = split.images.to(self.device)
            self._labels = split.labels.to(self.device)
        scale = torch.tensor(data.facts.std, dtype=torch.float32).mul(255).reciprocal().view(-1, 1, 1)
        shift = torch.tensor(data.facts.mean, dtype=torch.float32).mul(-255).view(-1, 1, 1) * scale
        self._scale, self._shift = scale.to(self.device), shift.to(self.device)
        if train:
            self._order()  # raises an error for an invalid batch size before any work

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
            parts=self.parts,
        )
        return list(rows[: self.steps])

    def _shard(self) -> Tensor:
        return torch.arange(len(self.split))[self.rank :: self.world_size]

    def _mine(self, batch: Tensor) -> Tensor:
        """The share of this process in a training batch (last dimension)."""
        return batch.chunk(self.world_size, -1)[self.rank] if self.train else batch

    def _from_memory(self, batches: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        generator = _generator(self.seed, self.epoch, "augment")
        for batch in batches:
            rows = self._mine(batch).to(self.device)
            images = self._images[rows] if not self.augment else self._augmented(rows, len(batch), generator)
            yield (images * self._scale).add_(self._shift), self._labels[rows]

    def _augmented(self, rows: Tensor, batch: int, generator: torch.Generator) -> Tensor:
        """Random crops and flips, drawn for the whole batch so that processes agree."""
        corners = torch.randint(0, 2 * self.padding + 1, (2, batch), generator=generator)
        mirrored = torch.rand(batch, generator=generator) < (0.5 if self.facts.flip else 0.0)
        top, left = self._mine(corners).to(self.device)
        size = self.facts.size
        padded = F.pad(self._images[rows], (self.padding,) * 4)
        windows = padded.unfold(2, size, 1).unfold(3, size, 1)  # a view of every crop, without copies
        images = windows[torch.arange(len(rows), device=self.device), :, top, left]
        return torch.where(self._mine(mirrored).to(self.device).view(-1, 1, 1, 1), images.flip(3), images)

    def _from_files(self, batches: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        generator = _generator(self.seed, self.epoch, "augment")
        files = _Decoded(self.split, self.facts, self.augment)
        loader = ImageLoader(
            files,
            batch_sampler=[self._mine(batch).tolist() for batch in batches],
            num_workers=self.workers,
            generator=generator,  # seeds the workers, so that crops depend only on seed and epoch
            pin_memory=self.device.type == "cuda",
        )
        for images, labels in loader:
            images = images.to(self.device, non_blocking=True)
            yield (images * self._scale).add_(self._shift), labels.to(self.device, non_blocking=True)


class _Decoded(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Photographs of any size as square bytes: a crop of random scale in training, a center crop otherwise."""

    CENTRE = 0.875  # of the short side, as is usual for ImageNet models

    def __init__(self, split: Split, facts: Facts, augment: bool) -> None:
        self.split, self.facts, self.augment = split, facts, augment

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        picture = picture_at(self.facts.title, self.split, row)
        size = self.facts.size
        if not self.augment:
            wide = round(size / self.CENTRE)
            edge = (wide - size) // 2
            return square(picture, wide)[:, edge : edge + size, edge : edge + size], self.split.labels[row]
        box = self._random_box(*picture.size)
        pixels = torch.from_numpy(np.asarray(picture.resize((size, size), box=box)).copy()).permute(2, 0, 1)
        mirrored = self.facts.flip and float(torch.rand(())) < 0.5
        return pixels.flip(2) if mirrored else pixels, self.split.labels[row]

    @staticmethod
    def _random_box(width: int, height: int) -> tuple[int, int, int, int]:
        """8 to 100 % of the area with aspect ratios of 3/4 to 4/3, as for Inception networks."""
        area = width * height * float(torch.empty(()).uniform_(0.08, 1.0))
        ratio = float(torch.empty(()).uniform_(np.log(3 / 4), np.log(4 / 3)).exp())
        w = min(width, max(1, round((area * ratio) ** 0.5)))
        h = min(height, max(1, round((area / ratio) ** 0.5)))
        left = int(torch.randint(0, width - w + 1, ()))
        top = int(torch.randint(0, height - h + 1, ()))
        return left, top, left + w, top + h
