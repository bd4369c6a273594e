"""Training and reading the networks of Round 3: one setting of CIFAR-100, bits per test image instead of means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import betternorm
from betternorm_lab.data import Data, Loader, Split
from betternorm_lab.data.splits import shuffled
from betternorm_lab.evidence.rows import Array
from betternorm_lab.training import Config
from betternorm_lab.training.checkpoints import read_checkpoint, write_checkpoint
from betternorm_lab.training.session import Session
from betternorm_lab.trials import Runtime

BASE = Config(
    dataset="cifar100",
    train_examples=10_000,
    network="post_resnet",
    width=32,
    blocks=(1, 1, 1),
    stem_stride=2,
    batch_size=128,
    epochs=20,
    precision="bf16-mixed",
    validate_every=0,
    tune_alpha=False,
    test=False,
)
EVALUATION_BATCH = 250
TEMPERATURES = tuple(2 ** (k / 24) for k in range(-24, 49))  # candidates, from 0.5 to 4

Batches = list[tuple[Tensor, Tensor]]


@dataclass
class Trained:
    """A trained model in evaluation mode, its data, and what training reported."""

    config: Config
    model: nn.Module
    data: Data
    train_top1: float
    precision: Any  # the autocast that it was trained with

    def batches(self, split: Split, corruption: Any = None) -> Batches:
        """All images of a split, in its order and normalized, in memory."""
        return [
            (
                (images if corruption is None else corruption(images)).contiguous(memory_format=torch.channels_last),
                labels,
            )
            for images, labels in Loader(self.data, split, EVALUATION_BATCH)
        ]

    def logits(self, batches: Batches) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(), self.precision():
            parts = [(self.model(images).float(), labels) for images, labels in batches]
        return torch.cat([part for part, _ in parts]), torch.cat([labels for _, labels in parts])


def trained(config: Config, work: Path, data_root: Path, session: type[Session] = Session) -> Trained:
    """Train, or load what an earlier call left in ``work``. Killed, it goes on from its last epoch."""
    folder = work / "networks" / config.key
    folder.mkdir(parents=True, exist_ok=True)
    runtime = Runtime(data_root=str(data_root), accelerator="cpu", threads=1, channels_last=True, show=False)
    run = session(config, folder, runtime)
    finished = read_checkpoint(folder / "model.pt", config)
    if finished is None:
        run.train(lambda part: None)
        finished = {"model": run.model.state_dict(), "result": {"train_top1": run.history[-1]["top1"]}}
        write_checkpoint(folder / "model.pt", config, finished)
        (folder / "checkpoint.pt").unlink(missing_ok=True)
    else:
        run.model.load_state_dict(finished["model"])
    train_top1 = finished["result"]["train_top1"]
    return Trained(config, run.model.eval(), run.data, train_top1, run.fabric.autocast)


def with_seed(config: Config, seed: int) -> Config:
    return replace(config, seed=seed)


def sample(split: Split, count: int) -> Split:
    """So many random images, always the same: files are sorted by class."""
    return split.take(np.sort(shuffled(len(split))[:count]))


def top1(logits: Tensor, labels: Tensor) -> Array:
    correct: Array = (logits.argmax(1) == labels).numpy()
    return correct


def cross_entropy(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> float:
    return float(torch.nn.functional.cross_entropy(logits / temperature, labels))


def best_temperature(logits: Tensor, labels: Tensor) -> float:
    return min(TEMPERATURES, key=lambda one: cross_entropy(logits, labels, one))


@dataclass(frozen=True)
class Choice:
    """Alpha with the highest validation top-1 (of equals the smallest), and the temperature at that alpha."""

    alpha: float
    temperature: float
    table: dict[float, float]  # validation top-1 by alpha, %


def choose_alpha(network: Trained, validation: Batches, alphas: Sequence[float]) -> Choice:
    table, temperatures = {}, {}
    for alpha in alphas:
        betternorm.set_alpha(network.model, alpha)
        logits, labels = network.logits(validation)
        table[alpha] = 100 * float(top1(logits, labels).mean())
        temperatures[alpha] = best_temperature(logits, labels)
    betternorm.set_alpha(network.model, 0.0)
    best = max(alphas, key=lambda alpha: (table[alpha], -alpha))
    return Choice(best, temperatures[best], table)
