"""Experiment 4: all four techniques against batch norm and against ghost batch norm alone (section 4.2), at B = 128.

At this batch size the paper's combination is ghost batches, decay on gamma and beta, and alpha.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import betternorm
from betternorm.weighing.alpha import weighed_layers
from betternorm_lab.evidence import chosen
from betternorm_lab.evidence.networks import BASE, Choice, Trained, choose_alpha, cross_entropy, first, top1, trained
from betternorm_lab.evidence.rows import Array, pack, write_arrays
from betternorm_lab.evidence.runs import Places, require_committed
from betternorm_lab.training import Config

NAME = "all-four"
SEEDS = (0, 1, 2, 3, 4)
STRENGTHS = (1, 4, 8)  # of decay on gamma and beta, relative to the weights' own
ALPHAS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8, 0.9, 0.95, 1.0)
VALIDATION = 5_000  # images

BATCH = replace(BASE, learning_rate=0.1)
GHOST = replace(BASE, norm="ghost", norm_options={"ghost_size": 8}, learning_rate=0.3)
READINGS = ("as trained", "alpha")


def with_decay(strength: int) -> Config:
    return replace(GHOST, norm_decay=strength * BASE.weight_decay)


def arms() -> dict[str, Config]:
    strength = chosen.of(chosen.ALL_FOUR, "decay")
    return {"batch norm": BATCH, "ghost batch norm": GHOST, "all four": with_decay(strength)}


def select(places: Places) -> list[dict[str, Any]]:
    """Validation top-1 with seed 0, as trained and at the best alpha, for every strength of decay."""
    table = []
    for strength in STRENGTHS:
        network = trained(with_decay(strength), places.work, places.data)
        choice = alpha_of(network)
        row = {"decay": strength, "training top-1": 100 * network.train_top1, "alpha": choice.alpha}
        row |= {"validation top-1 as trained": choice.table[0.0], "at its best alpha": choice.table[choice.alpha]}
        table.append(row)
        print(row, flush=True)
    return table


def compute(places: Places) -> None:
    compute_arms(places, NAME, arms(), SEEDS)


def compute_arms(
    places: Places, name: str, settings: dict[str, Config], seeds: tuple[int, ...], **options: Any
) -> None:
    """The rows that are not there yet, seed by seed. ``options`` are those of `trained`."""
    commit = require_committed()
    for seed in seeds:
        for arm, config in settings.items():
            path = places.out / "rows" / name / f"{arm.replace(' ', '-')}-{seed}.npz"
            if not path.exists():
                meta, arrays = read(trained(replace(config, seed=seed), places.work, places.data, **options))
                write_arrays(path, meta | {"arm": arm, "seed": seed, "commit": commit}, **arrays)
                print(path.name, {reading: round(value, 2) for reading, value in meta["top1"].items()}, flush=True)


def alpha_of(network: Trained) -> Choice:
    if not weighed_layers(network.model):
        betternorm.convert(network.model, "weighed")
    return choose_alpha(network, network.batches(first(network.data.validation, VALIDATION)), ALPHAS)


def read(network: Trained) -> tuple[dict[str, Any], dict[str, Array]]:
    """Test images as trained, and at the alpha that validation data chose for top-1."""
    choice = alpha_of(network)
    assert network.data.test is not None
    test = network.batches(network.data.test)
    arrays, means, losses = {}, {}, {}
    for reading, alpha in zip(READINGS, (0.0, choice.alpha), strict=True):
        betternorm.set_alpha(network.model, alpha)
        logits, labels = network.logits(test)
        correct = top1(logits, labels)
        arrays[f"clean/{reading}"] = pack(correct)
        means[reading], losses[reading] = 100 * float(correct.mean()), cross_entropy(logits, labels)
    meta = {
        "settings": {name: value for name, value in network.config.changed.items() if name != "seed"},
        "train_top1": 100 * network.train_top1,
        "alpha": choice.alpha,
        "validation": list(choice.table.items()),
        "top1": means,
        "cross_entropy": losses,
        "images": len(network.data.test),
        "key": network.config.key,
    }
    return meta, arrays
