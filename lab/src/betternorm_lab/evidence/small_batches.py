"""Experiment 2: alpha on models that were trained with small batches and torch's defaults.

Batch norm with statistics over 2 to 16 examples and gradients accumulated to 128 per optimizer step. The moving
averages of such models are poor (torch's default momentum of 0.1 spans ten batches) and differ from the statistics
of training.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import betternorm
from betternorm.weighing.shifts import corruptions
from betternorm_lab.data import Loader
from betternorm_lab.evidence import chosen
from betternorm_lab.evidence.analysis import Claim, Estimate, over_seeds_and_images
from betternorm_lab.evidence.networks import (
    BASE,
    EVALUATION_BATCH,
    Batches,
    Choice,
    Trained,
    best_temperature,
    choose_alpha,
    cross_entropy,
    sample,
    top1,
    trained,
    with_seed,
)
from betternorm_lab.evidence.pages import PLACES, RUN, Panel, draw, table
from betternorm_lab.evidence.rows import Array, pack, read_arrays, unpack, write_arrays
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
READINGS = ("as trained", "alpha", "calibrate", "calibrate and alpha", "augmented", "augmented and alpha")


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


def row_file(places: Places, size: int, seed: int) -> Path:
    return places.out / "rows" / NAME / f"{size:02d}-{seed}.npz"


def _missing(places: Places) -> list[tuple[int, int]]:
    """Size by size: most of the primary claims are about the first."""
    return [(size, seed) for size in SIZES for seed in SEEDS if not row_file(places, size, seed).exists()]


def plan(places: Places) -> list[str]:
    return [f"statistics over {size}, seed {seed}" for size, seed in _missing(places)]


def compute(places: Places) -> None:
    commit = require_committed()
    for size, seed in _missing(places):
        settings = with_seed(config(size, chosen.of(chosen.SMALL_BATCHES, size)), seed)
        meta, arrays = read(trained(settings, places.work, places.data))
        path = row_file(places, size, seed)
        write_arrays(path, meta | {"size": size, "seed": seed, "commit": commit}, **arrays)
        print(path.name, {name: round(value, 2) for name, value in meta["top1"].items()}, flush=True)


def read(network: Trained) -> tuple[dict[str, Any], dict[str, Array]]:
    """All readings on clean and on corrupted test images."""
    validation = network.batches(sample(network.data.validation, VALIDATION))
    models, passes = {"": network}, {}
    for name in ("calibrate", "augmented"):
        models[name] = Trained(**vars(network) | {"model": deepcopy(network.model)})
        passes[name] = calibrate(models[name], augment=name == "augmented")
    readings: dict[str, tuple[Trained, float]] = {}
    choices: dict[str, Choice] = {}
    for name, model in models.items():
        with_alpha = f"{name} and alpha" if name else "alpha"
        choices[with_alpha] = choose_alpha(model, validation, ALPHAS)
        readings |= {name or "as trained": (model, 0.0), with_alpha: (model, choices[with_alpha].alpha)}
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
        assert facts.mean is not None
        assert facts.std is not None
        _TEST_SETS["clean"] = network.batches(test)
        for kind in KINDS:
            (shift,) = corruptions([f"{kind}:{STRENGTH}"], facts.mean, facts.std).values()
            _TEST_SETS[kind] = network.batches(sample(test, CORRUPTED), shift)
    return _TEST_SETS


def calibrate(network: Trained, augment: bool = False) -> int:
    """On training images, in float32. Augmented, that is with the random crops and flips of training."""
    split = sample(network.data.train, CALIBRATION)
    loader = (
        Loader(network.data, split, EVALUATION_BATCH, train=True, augment=True) if augment else network.batches(split)
    )
    return betternorm.calibrate(network.model, [images for images, _ in loader], progress=False)


def validation_top1(network: Trained) -> float:
    validation = network.batches(sample(network.data.validation, VALIDATION))
    return 100 * float(top1(*network.logits(validation)).mean())


# ---- the page ----

CONTRASTS = (
    ("alpha", "as trained"),
    ("calibrate", "as trained"),
    ("calibrate and alpha", "calibrate"),
    ("calibrate and alpha", "alpha"),
    ("calibrate and alpha", "as trained"),
    ("augmented", "as trained"),
    ("augmented and alpha", "augmented"),
    ("augmented and alpha", "alpha"),
)
Runs = dict[int, list[tuple[dict[str, Any], dict[str, Array]]]]  # by size, in the order of the seeds


def finished(places: Places) -> Runs:
    """All rows, by size; seeds that not all sizes have are left out of comparisons between sizes only."""
    runs: Runs = {}
    for path in sorted((places.out / "rows" / NAME).glob("*.npz")):
        meta, arrays = read_arrays(path)
        runs.setdefault(meta["size"], []).append((meta, arrays))
    return runs


def correct(runs: Runs, size: int, name: str, reading: str) -> Array:
    """(seeds, images), in percent. ``name`` is "clean", a corruption, or "corrupted" for the mean of all."""
    if name == "corrupted":
        return sum((correct(runs, size, kind, reading) for kind in KINDS), np.zeros(())) / len(KINDS)
    rows = runs[size]
    images = rows[0][0]["images"]["clean" if name == "clean" else "corrupted"]
    return 100.0 * np.stack([unpack(arrays[f"{name}/{reading}"], images) for _, arrays in rows])


def ready(places: Places) -> bool:
    """Whether there is enough for a page: two seeds of one size."""
    return bool(_enough(finished(places)))


def _enough(runs: Runs) -> Runs:
    return {size: rows for size, rows in runs.items() if len(rows) > 1}


def contrast(runs: Runs, size: int, name: str, reading: str, baseline: str) -> Estimate:
    return over_seeds_and_images(correct(runs, size, name, reading) - correct(runs, size, name, baseline))


def claims(places: Places) -> list[Claim]:
    runs = finished(places)
    both, calibrated, plain = "calibrate and alpha", "calibrate", "as trained"

    def has(*sizes: int) -> bool:
        return all(len(runs.get(size, ())) >= len(SEEDS) for size in sizes)

    def gain(size: int) -> Array:
        return correct(runs, size, "clean", both) - correct(runs, size, "clean", calibrated)

    return [
        Claim(
            "P3",
            "trained with batches of 2: alpha raises top-1 over the model as trained",
            "",
            contrast(runs, 2, "clean", "alpha", plain) if has(2) else None,
        ),
        Claim(
            "P4",
            "trained with batches of 2: alpha after `calibrate` raises top-1 over `calibrate` alone",
            "",
            contrast(runs, 2, "clean", both, calibrated) if has(2) else None,
        ),
        Claim(
            "P5",
            "trained with batches of 8: alpha after `calibrate` raises top-1 over `calibrate` alone",
            "",
            contrast(runs, 8, "clean", both, calibrated) if has(8) else None,
        ),
        Claim(
            "P6",
            "that gain is larger with batches of 2 than with batches of 16",
            "larger for smaller batches",
            over_seeds_and_images(gain(2) - gain(16)) if has(2, 16) else None,
        ),
        Claim(
            "P7",
            "trained with batches of 2, corrupted images: alpha after `calibrate` is better than `calibrate` alone",
            "",
            contrast(runs, 2, "corrupted", both, calibrated) if has(2) else None,
        ),
    ]


def page(places: Places) -> str:
    runs = _enough(finished(places))
    sizes = sorted(runs)
    draw(
        places.out / f"{NAME}.svg", [_panel(runs, "clean", "Clean test images"), _panel(runs, "corrupted", "Corrupted")]
    )
    readings = [
        [size, len(runs[size]), name] + [f"{correct(runs, size, key, reading).mean():.1f}" for reading in READINGS]
        for size in sizes
        for name, key in (("clean", "clean"), ("corrupted", "corrupted"))
    ]
    gains = []
    for size in sizes:
        for reading, baseline in CONTRASTS:
            clean, corrupted = (contrast(runs, size, name, reading, baseline) for name in ("clean", "corrupted"))
            gains.append(
                [
                    size,
                    f"{reading} - {baseline}",
                    clean.seeds,
                    *(part for e in (clean, corrupted) for part in (e.text(), f"{e.detectable:.2f}")),
                ]
            )
    kinds = [
        [size, kind]
        + [f"{correct(runs, size, kind, reading).mean():.1f}" for reading in READINGS]
        + [contrast(runs, size, kind, "calibrate and alpha", "calibrate").text()]
        for size in sizes
        for kind in KINDS
    ]
    other = [
        [
            size,
            f"{runs[size][0][0]['learning_rate']:g}",
            f"{np.mean([meta['train_top1'] for meta, _ in runs[size]]):.1f}",
            *(
                ", ".join(f"{meta['alpha'][name]:g}" for meta, _ in runs[size])
                for name in ("alpha", "calibrate and alpha", "augmented and alpha")
            ),
            *(
                f"{np.mean([meta['losses'][reading]['calibrated'] for meta, _ in runs[size]]):.3f}"
                for reading in READINGS
            ),
        ]
        for size in sizes
    ]
    return PAGE.format(
        answer=_answer(runs),
        readings=table(["statistics over", "seeds", "test images", *READINGS], readings, 3),
        gains=table(
            ["statistics over", "difference", "seeds", "clean [95 %]", "detectable", "corrupted [95 %]", "detectable"],
            gains,
            2,
        ),
        kinds=table(["statistics over", "corruption", *READINGS, "alpha after calibrate [95 %]"], kinds, 2),
        other=table(
            ["statistics over", "learning rate", "training top-1", "alphas", "after calibrate", "augmented", *READINGS],
            other,
        ),
        command=f"{RUN} {NAME} {PLACES}",
    )


def _answer(runs: Runs) -> str:
    parts = []
    for size in sorted(runs):
        alpha, both = (contrast(runs, size, "clean", *pair) for pair in (CONTRASTS[0], CONTRASTS[2]))
        shifted = contrast(runs, size, "corrupted", *CONTRASTS[2])
        parts.append(
            f"- **{size} examples**: alpha alone changes top-1 by {alpha.text(1)} points; after `calibrate`, "
            f"alpha changes it by {both.text(1)} on clean and {shifted.text(1)} on corrupted images."
        )
    return "\n".join(parts)


def _panel(runs: Runs, name: str, title: str) -> Panel:
    series = {}
    for reading in READINGS[1:]:
        estimates = {size: contrast(runs, size, name, reading, READINGS[0]) for size in sorted(runs)}
        series[reading] = [(str(size), e.mean, *e.interval) for size, e in estimates.items()]
    return Panel(title, "examples per batch in training", "change of top-1, points", series, zero_line=True)


PAGE = """# Alpha for models trained with small batches

**Question.** A model was trained with batch norm and 2 to 16 examples per batch (gradients accumulated to 128 per step,
torch's default momentum). What do alpha and `calibrate` gain, without retraining?

**Answer.**

{answer}

Points of top-1 on CIFAR-10 test images with 95 % intervals for new seeds and new images. `calibrate` recomputes the
moving averages on 2,000 training images as they are, *augmented* on the same number with the random crops and flips of
training; alpha is chosen for top-1 on 5,000 clean validation images for each model.
Pre-registered as P3 to P7 of the [protocol](../protocol.md#round-3); verdicts are on the [index](index.md). The
readings *augmented* were added after three of the models had been read, and are exploratory.

![Change of top-1 by examples per batch, on clean and corrupted images](small-batches.svg)

## Top-1, %

{readings}
Sizes with one seed are left out. Clean: 10,000 test images. Corrupted: the mean of six corruptions at strength 3 of 5,
on 5,000 of them.

## Gains

{gains}
*Detectable*: the minimum detectable effect at 80 % power. `calibrate` on images as they are lowers clean top-1, because
the layers were trained on padded crops; so it is not the best baseline for P4 and P5, and the gain over the better one
is the line *augmented and alpha - augmented*.

## By corruption

{kinds}
## Settings and cross-entropy

{other}
The last six columns are test cross-entropy after a temperature fitted on validation images. Learning rates were chosen
from 0.1 and 0.3 on validation data with seed 0 ([all candidates](selection/small-batches.csv)). A small residual
network (0.31 million parameters), 40,000 training images, 3 epochs (936 steps): accuracies are below what the
dataset allows; the differences between readings of the same model are the result.

## Run it

    {command}

Rows: `docs/results/evidence/rows/small-batches/`, one file per model, with packed per-image correctness.
"""
