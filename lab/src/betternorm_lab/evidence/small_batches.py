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
    Choice,
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
SIZES = (2, 8, 16, 4)  # those of the primary claims first
RATES = (0.1, 0.3)
SEEDS = (0, 1, 2, 3, 4)
ALPHAS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
VALIDATION, CALIBRATION, CORRUPTED = 5_000, 2_000, 5_000  # images
KINDS = ("noise", "blur", "contrast", "brightness", "fog", "compression")
STRENGTH = 3
READINGS = ("as trained", "alpha", "calibrate", "calibrate and alpha")


class MicroBatchNorm(betternorm.GhostBatchNorm):
    """Batch norm trained on micro-batches whose gradients are accumulated, computed in one pass.

    Normalization of a micro-batch is that of a ghost batch. Moving averages are those of ``nn.BatchNorm2d`` after the
    same micro-batches in sequence: each moves them by ``momentum`` toward its mean and its unbiased variance.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
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


def micro_batches(model: nn.Module, *, size: int) -> nn.Module:
    """Replace the batch norm layers of a new model."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, MicroBatchNorm(child.num_features, size))
    return model


def config(size: int, rate: float) -> Config:
    norm = f"{__name__}:micro_batches"
    return replace(BASE, norm=norm, norm_options={"size": size}, learning_rate=rate)


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
    assert network.data.test is not None
    test, validation = network.data.test, first(network.data.validation, VALIDATION)
    shifts = corruptions([f"{kind}:{STRENGTH}" for kind in KINDS], network.data.facts.mean, network.data.facts.std)
    models: dict[str, tuple[nn.Module, Choice]] = {
        "": (deepcopy(network.model), choose_alpha(network, validation, ALPHAS))
    }
    passes = calibrate(network)
    models["calibrate"] = (deepcopy(network.model), choose_alpha(network, validation, ALPHAS))
    arrays: dict[str, Array] = {}
    means: dict[str, float] = {}
    losses: dict[str, dict[str, float]] = {}
    for prefix, (model, choice) in models.items():
        network.model = model
        for alpha, reading in (
            (0.0, prefix or "as trained"),
            (choice.alpha, "calibrate and alpha" if prefix else "alpha"),
        ):
            betternorm.set_alpha(model, alpha)
            temperature = best_temperature(*network.logits(validation))
            logits, labels = network.logits(test)
            correct = top1(logits, labels)
            means[reading] = 100 * float(correct.mean())
            losses[reading] = {
                "cross_entropy": cross_entropy(logits, labels),
                "calibrated": cross_entropy(logits, labels, temperature),
            }
            arrays[f"clean/{reading}"] = pack(correct)
            for kind, shift in zip(KINDS, shifts.values(), strict=True):
                correct = top1(*network.logits(first(test, CORRUPTED), shift))
                arrays[f"{kind}/{reading}"] = pack(correct)
    meta = {
        "learning_rate": network.config.learning_rate,
        "train_top1": 100 * network.train_top1,
        "alpha": {"alpha": models[""][1].alpha, "calibrate and alpha": models["calibrate"][1].alpha},
        "validation": {name or "as trained": list(choice.table.items()) for name, (_, choice) in models.items()},
        "passes": passes,
        "top1": means,
        "losses": losses,
        "images": {"clean": len(test), "corrupted": CORRUPTED},
        "key": network.config.key,
    }
    return meta, arrays


def calibrate(network: Trained) -> int:
    """On training images without augmentation, in float32."""
    images = network.images(first(network.data.train, CALIBRATION))
    return betternorm.calibrate(network.model, images, progress=False)


def validation_top1(network: Trained) -> float:
    return 100 * float(top1(*network.logits(first(network.data.validation, VALIDATION))).mean())
