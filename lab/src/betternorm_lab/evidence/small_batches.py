"""Experiment 2: alpha on models that were trained with small batches and torch's defaults.

Batch norm with statistics over 2 to 16 examples and gradients accumulated to 128 per optimizer step. The moving
averages of such models are poor (torch's default momentum of 0.1 spans ten batches) and differ from the statistics
of training.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import betternorm
from betternorm.weighing.shifts import corruptions
from betternorm_lab.evidence import chosen
from betternorm_lab.evidence.networks import (
    BASE,
    Batches,
    Trained,
    best_temperature,
    choose_alpha,
    cross_entropy,
    first,
    top1,
    trained,
    with_seed,
)
from betternorm_lab.evidence.rows import Array, pack, write_arrays
from betternorm_lab.evidence.runs import Places, require_committed
from betternorm_lab.training import Config

NAME = "small-batches"
SIZES = (2, 8, 16)  # those of the primary claims; then 4, as time allows
RATES = (0.1, 0.3)
EPOCHS = 3
TRAINING_IMAGES = 40_000
SEEDS = (0, 1, 2, 3, 4)
ALPHAS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
VALIDATION, CALIBRATION, CORRUPTED = 5_000, 2_000, 5_000  # images
KINDS = ("noise", "blur", "contrast", "brightness", "fog", "compression")
STRENGTH = 3
READINGS = ("as trained", "alpha", "calibrate", "calibrate and alpha")


class MicroBatchNorm(betternorm.GhostBatchNorm):
    """Batch norm trained on micro-batches whose gradients are accumulated, computed in one pass.

    Normalization of a micro-batch is that of a ghost batch. Moving averages are those of ``nn.BatchNorm2d`` after the
    same micro-batches in sequence: each moves them by ``momentum`` toward its mean and its unbiased variance. They do
    not affect training and forget exponentially, so the steps before ``track_from`` need not be exact.
    """

    def __init__(self, num_features: int, size: int, track_from: int = 0) -> None:
        super().__init__(num_features, size)
        self.track_from = track_from

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or int(self.num_batches_tracked) < self.track_from:
            return super().forward(input)
        mean, var = self.running_mean.clone(), self.running_var.clone()
        output = super().forward(input)
        with torch.no_grad():
            size = self.examples_per_group or len(input)
            groups = input.detach().float().unflatten(0, (-1, size))
            means = groups.mean((1, 3, 4))
            count = size * input[0, 0].numel()
            variances = (groups.square().mean((1, 3, 4)) - means.square()).clamp(min=0) * count / (count - 1)
            momentum = self.momentum if self.momentum is not None else 0.1
            last = len(means) - 1
            weights = momentum * (1 - momentum) ** (last - torch.arange(last + 1.0))
            kept = (1 - momentum) ** (last + 1)
            self.running_mean.copy_(kept * mean + weights @ means)
            self.running_var.copy_(kept * var + weights @ variances)
        return output


def micro_batches(model: nn.Module, *, size: int, track_from: int) -> nn.Module:
    """Replace the batch norm layers of a new model."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, MicroBatchNorm(child.num_features, size, track_from))
    return model


def config(size: int, rate: float) -> Config:
    norm = f"{__name__}:micro_batches"
    last_epoch = (EPOCHS - 1) * (TRAINING_IMAGES // BASE.batch_size)  # what was before weighs less than 1e-100
    options = {"size": size, "track_from": last_epoch}
    base = replace(BASE, dataset="cifar10", train_examples=None, epochs=EPOCHS)
    return replace(base, norm=norm, norm_options=options, learning_rate=rate)


def select(places: Places) -> list[dict[str, Any]]:
    """Validation top-1 with seed 0, after `calibrate`, for every candidate."""
    table = []
    for size in SIZES:
        for rate in RATES:
            network = trained(config(size, rate), places.work, places.data)
            as_trained = validation_top1(network)
            calibrate(network)
            calibrated = validation_top1(network)
            table.append(
                {
                    "statistics over": size,
                    "learning rate": rate,
                    "training top-1": 100 * network.train_top1,
                    "validation top-1 as trained": as_trained,
                    "validation top-1 after calibrate": calibrated,
                }
            )
            print(table[-1], flush=True)
    return table


def compute(places: Places) -> None:
    """The rows that are not there yet: seed by seed, so that all sizes have the same number of seeds."""
    commit = require_committed()
    for seed in SEEDS:
        for size in SIZES:
            path = places.out / "rows" / NAME / f"{size:02d}-{seed}.npz"
            if not path.exists():
                meta, arrays = read(
                    trained(with_seed(config(size, chosen.SMALL_BATCHES[size]), seed), places.work, places.data)
                )
                write_arrays(path, meta | {"size": size, "seed": seed, "commit": commit}, **arrays)
                print(path.name, {name: round(value, 2) for name, value in meta["top1"].items()}, flush=True)


def read(network: Trained) -> tuple[dict[str, Any], dict[str, Array]]:
    """The four readings on clean and on corrupted test images."""
    validation = network.batches(first(network.data.validation, VALIDATION))
    plain = Trained(**vars(network) | {"model": deepcopy(network.model)})
    passes = calibrate(network)
    choices = {"alpha": choose_alpha(plain, validation, ALPHAS)}
    choices["calibrate and alpha"] = choose_alpha(network, validation, ALPHAS)
    readings = {
        "as trained": (plain, 0.0),
        "alpha": (plain, choices["alpha"].alpha),
        "calibrate": (network, 0.0),
        "calibrate and alpha": (network, choices["calibrate and alpha"].alpha),
    }
    arrays: dict[str, Array] = {}
    means: dict[str, float] = {}
    losses: dict[str, dict[str, float]] = {}
    for name, batches in test_sets(network).items():
        for reading, (model, alpha) in readings.items():
            betternorm.set_alpha(model.model, alpha)
            logits, labels = model.logits(batches)
            correct = top1(logits, labels)
            arrays[f"{name}/{reading}"] = pack(correct)
            if name == "clean":
                means[reading] = 100 * float(correct.mean())
                temperature = best_temperature(*model.logits(validation))
                losses[reading] = {
                    "cross_entropy": cross_entropy(logits, labels),
                    "calibrated": cross_entropy(logits, labels, temperature),
                }
    meta = {
        "learning_rate": network.config.learning_rate,
        "train_top1": 100 * network.train_top1,
        "alpha": {name: choice.alpha for name, choice in choices.items()},
        "validation": {name: list(choice.table.items()) for name, choice in choices.items()},
        "passes": passes,
        "top1": means,
        "losses": losses,
        "images": {"clean": sum(len(labels) for _, labels in test_sets(network)["clean"]), "corrupted": CORRUPTED},
        "key": network.config.key,
    }
    return meta, arrays


_TEST_SETS: dict[str, Batches] = {}  # the same for every model; corrupting takes as long as evaluating


def test_sets(network: Trained) -> dict[str, Batches]:
    if not _TEST_SETS:
        test = network.data.test
        assert test is not None
        facts = network.data.facts
        _TEST_SETS["clean"] = network.batches(test)
        for kind in KINDS:
            (shift,) = corruptions([f"{kind}:{STRENGTH}"], facts.mean, facts.std).values()
            _TEST_SETS[kind] = network.batches(first(test, CORRUPTED), shift)
    return _TEST_SETS


def calibrate(network: Trained) -> int:
    """On training images without augmentation, in float32."""
    images = [images for images, _ in network.batches(first(network.data.train, CALIBRATION))]
    return betternorm.calibrate(network.model, images, progress=False)


def validation_top1(network: Trained) -> float:
    validation = network.batches(first(network.data.validation, VALIDATION))
    return 100 * float(top1(*network.logits(validation)).mean())
