"""Overhead of the lab: its input pipeline and its training loop, compared with plain PyTorch, in one run.

    python -m betternorm_lab.studies.throughput --data-root FOLDER

CIFAR-100, batches of 128 with crop and flip, ResNet-18 of width 16, one thread of torch; a DataLoader with two workers.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from betternorm_lab import data, training
from betternorm_lab.trials import Runtime
from torch import nn

from benchmarks.measuring import compare
from betternorm.display.progress import Bar
from betternorm.display.tables import table
from betternorm.integrations.torchvision import ready

BATCH = 128
WORKERS = 2
STEPS = 1  # of training, in a turn: many short turns say more than few long ones
BATCHES = 60  # of input alone, in a turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", help="folder of cifar100.npz or torchvision's CIFAR-100")
    parser.add_argument("--rounds", type=int, default=25)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cifar = data.load("cifar100", arguments.data_root)
    config = training.Config(dataset="cifar100", width=16, steps_per_epoch=STEPS, epochs=10_000, validate_every=0)
    runtime = Runtime(data_root=arguments.data_root, accelerator="cpu", show=False)
    with tempfile.TemporaryDirectory() as folder, training.deterministic(True):
        session = training.Session(config, Path(folder), runtime)
        started = time.perf_counter()
        session._save()
        saving = time.perf_counter() - started
        session._save = lambda: None  # once in 312 steps of a real epoch, not in each turn: counted apart
        # One thread in one process: its own time leaves out what other programs take. Workers need the wall clock.
        steps = compare(
            {
                "training, bare loop": bare_training(cifar, config),
                "training, betternorm": lambda: session._epoch(Bar("", show=False), lambda part: None),
                "input pipeline": lab_input(cifar),
            },
            arguments.rounds,
            clock="processor",
        )
        inputs = compare(
            {"torchvision, 2 workers": torchvision_input(cifar), "input pipeline": lab_input(cifar)}, arguments.rounds
        )
    images = {"training, bare loop": BATCH * STEPS, "training, betternorm": BATCH * STEPS}
    for clock, found in (("processor", steps), ("wall", inputs)):
        lines = [
            [name, round(1e3 * images.get(name, BATCH * BATCHES) / ratio.milliseconds)] for name, ratio in found.items()
        ]
        print(table([f"{clock} time", "images per second"], lines), end="\n\n")
    training_time = steps["training, betternorm"].milliseconds / STEPS
    share = saving / (len(cifar.train) / BATCH * training_time / 1e3)
    ahead = training_time / (steps["input pipeline"].milliseconds / BATCHES)
    print(f"input pipeline / training      {ahead:.1f} x")
    print(f"input pipeline / torchvision   {1 / inputs['input pipeline'].ratio:.1f} x")
    print(f"betternorm / bare loop         {1 / (steps['training, betternorm'].ratio + share):.3f} x")
    print(f"a checkpoint takes {saving:.3f} s, {share:.2%} of an epoch")


def lab_input(cifar: data.Data) -> Callable[[], None]:
    loader = data.Loader(cifar, cifar.train, BATCH, train=True)

    def batches() -> Iterator[Any]:
        for epoch in itertools.count():
            loader.set_epoch(epoch)
            yield from loader

    return _taking(batches())


def torchvision_input(cifar: data.Data) -> Callable[[], None]:
    """torchvision's dataset and transforms in a DataLoader, as most people write it."""
    ready()
    from torchvision import datasets, transforms

    dataset = datasets.CIFAR100.__new__(datasets.CIFAR100)  # what its files would give, without the files
    dataset.data = cifar.train.images.permute(0, 2, 3, 1).contiguous().numpy()
    dataset.targets = cifar.train.labels.tolist()
    dataset.target_transform = None
    dataset.transform = transforms.Compose(
        [
            transforms.RandomCrop(32, padding=4),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(cifar.facts.mean, cifar.facts.std),
        ]
    )
    loader = torch.utils.data.DataLoader(
        dataset, BATCH, shuffle=True, num_workers=WORKERS, drop_last=True, persistent_workers=True
    )
    return _taking(itertools.chain.from_iterable(itertools.repeat(loader)))


def _taking(batches: Iterator[Any]) -> Callable[[], None]:
    def turn() -> None:
        for _ in range(BATCHES):
            next(batches)

    return turn


def bare_training(cifar: data.Data, config: training.Config) -> Callable[[], None]:
    """The loop one writes oneself, on normalised images that lie ready in memory."""
    model = training.build_model(config, cifar).train()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=config.learning_rate, momentum=config.momentum, weight_decay=config.weight_decay
    )
    batches = itertools.cycle(list(itertools.islice(data.Loader(cifar, cifar.train, BATCH, train=True), 16)))

    def turn() -> None:
        for images, labels in itertools.islice(batches, STEPS):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()

    return turn


if __name__ == "__main__":
    main()
