"""Experiment 4: all four techniques against batch norm and against ghost batch norm alone (section 4.2), at B = 128.

At this batch size the paper's combination is ghost batches, decay on gamma and beta, and alpha.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import betternorm
from betternorm.weighing.alpha import weighed_layers
from betternorm_lab.evidence import chosen
from betternorm_lab.evidence.analysis import Claim, Estimate, over_seeds_and_images, pooled_variance
from betternorm_lab.evidence.networks import BASE, Choice, Trained, choose_alpha, cross_entropy, sample, top1, trained
from betternorm_lab.evidence.pages import PLACES, RUN, Panel, draw, table
from betternorm_lab.evidence.rows import Array, pack, read_arrays, unpack, write_arrays
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
ARMS = BASELINE, GHOSTS, COMBINED = "batch norm", "ghost batch norm", "all four"


def with_decay(strength: int) -> Config:
    return replace(GHOST, norm_decay=strength * BASE.weight_decay)


def arms() -> dict[str, Config]:
    strength = chosen.of(chosen.ALL_FOUR, "decay")
    return dict(zip(ARMS, (BATCH, GHOST, with_decay(strength)), strict=True))


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


def row_file(places: Places, arm: str, seed: int) -> Path:
    return places.out / "rows" / NAME / f"{arm.replace(' ', '-')}-{seed}.npz"


def _missing(places: Places) -> list[tuple[str, int]]:
    """Seed by seed, so that all arms have the same number of seeds at any time."""
    return [(arm, seed) for seed in SEEDS for arm in ARMS if not row_file(places, arm, seed).exists()]


def plan(places: Places) -> list[str]:
    return [f"{arm}, seed {seed}" for arm, seed in _missing(places)]


def compute(places: Places) -> None:
    commit, settings = require_committed(), arms()
    for arm, seed in _missing(places):
        meta, arrays = read(trained(replace(settings[arm], seed=seed), places.work, places.data))
        path = row_file(places, arm, seed)
        write_arrays(path, meta | {"arm": arm, "seed": seed, "commit": commit}, **arrays)
        print(path.name, {reading: round(value, 2) for reading, value in meta["top1"].items()}, flush=True)


def alpha_of(network: Trained) -> Choice:
    if not weighed_layers(network.model):
        betternorm.convert(network.model, "weighed")
    return choose_alpha(network, network.batches(sample(network.data.validation, VALIDATION)), ALPHAS)


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


# ---- the page ----

CONTRASTS = (
    ((GHOSTS, "as trained"), (BASELINE, "as trained")),
    ((COMBINED, "alpha"), (BASELINE, "as trained")),
    ((COMBINED, "alpha"), (GHOSTS, "as trained")),
    ((COMBINED, "as trained"), (GHOSTS, "as trained")),
    ((BASELINE, "alpha"), (BASELINE, "as trained")),
    ((GHOSTS, "alpha"), (GHOSTS, "as trained")),
    ((COMBINED, "alpha"), (COMBINED, "as trained")),
)
Runs = dict[str, list[tuple[dict[str, Any], dict[str, Array]]]]  # by arm, in the order of the seeds
Cell = tuple[str, str]  # arm and reading


def finished(places: Places) -> Runs:
    """The rows of the seeds that every arm has."""
    runs: Runs = {}
    for path in sorted((places.out / "rows" / NAME).glob("*.npz")):
        meta, arrays = read_arrays(path)
        runs.setdefault(meta["arm"], []).append((meta, arrays))
    shared = set.intersection(*({meta["seed"] for meta, _ in rows} for rows in runs.values())) if runs else set()
    return {arm: [row for row in rows if row[0]["seed"] in shared] for arm, rows in runs.items()}


def correct(runs: Runs, cell: Cell) -> Array:
    """(seeds, images), in percent."""
    arm, reading = cell
    return 100.0 * np.stack([unpack(arrays[f"clean/{reading}"], meta["images"]) for meta, arrays in runs[arm]])


def contrast(runs: Runs, cell: Cell, baseline: Cell, pool: Sequence[Cell] = ()) -> Estimate:
    """Between arms, the variance between seeds is pooled over the arms of the experiment, as the protocol declares."""
    pooled = None
    if cell[0] != baseline[0]:
        pooled = pooled_variance({str(one): correct(runs, one).mean(1).tolist() for one in pool})
    return over_seeds_and_images(correct(runs, cell) - correct(runs, baseline), pooled)


def pool_of(runs: Runs) -> list[Cell]:
    return [(BASELINE, "as trained"), (GHOSTS, "as trained"), (COMBINED, "alpha")]


def complete(runs: Runs, arms: int, least: int = len(SEEDS)) -> bool:
    return len(runs) >= arms > 0 and min(map(len, runs.values())) >= least


def ready(places: Places) -> bool:
    """Whether there is enough for a page: two seeds of every arm."""
    return complete(finished(places), len(ARMS), 2)


def claims(places: Places) -> list[Claim]:
    runs = finished(places)
    texts = (
        ("P8", "ghost batch norm is better than batch norm", "+5.8 (Caltech-256), +0.84 (CIFAR-100)"),
        ("P9", "all four techniques are better than batch norm", "Figure 5a"),
        ("P10", "all four techniques are better than ghost batch norm alone", "Figure 5a"),
    )
    return [
        Claim(*text, contrast(runs, *pair, pool_of(runs)) if complete(runs, 3) else None)
        for text, pair in zip(texts, CONTRASTS, strict=False)
    ]


def page(places: Places) -> str:
    runs = finished(places)
    arms_table = []
    for arm, rows in runs.items():
        means = [correct(runs, (arm, reading)).mean(1) for reading in READINGS]
        arms_table.append(
            [
                arm,
                len(rows),
                *(f"{mean.mean():.2f} ± {mean.std(ddof=1):.2f}" for mean in means),
                ", ".join(f"{meta['alpha']:g}" for meta, _ in rows),
                f"{np.mean([meta['train_top1'] for meta, _ in rows]):.1f}",
            ]
        )
    estimates = {pair: contrast(runs, *pair, pool_of(runs)) for pair in CONTRASTS}
    gains = [
        [f"{named(cell)} - {named(baseline)}", e.seeds, e.text(), f"{e.detectable:.2f}"]
        for (cell, baseline), e in estimates.items()
    ]
    points = [(named(cell), e.mean, *e.interval) for (cell, _), e in list(estimates.items())[:2]]
    label = "top-1 less that of batch norm, points"
    draw(places.out / f"{NAME}.svg", [Panel("CIFAR-100, 10,000 images", "", label, {"": points}, zero_line=True)])
    ghosts, ours, added = list(estimates.values())[:3]
    return PAGE.format(
        answer=f"Ghost batch norm changes top-1 over batch norm by {ghosts.text()} points, all four techniques by "
        f"{ours.text()}, and all four over ghost batch norm alone by {added.text()}.",
        arms=table(["arm", "seeds", "as trained", "with alpha", "alphas chosen", "training top-1"], arms_table),
        gains=table(["difference", "seeds", "top-1 [95 %]", "detectable"], gains),
        command=f"{RUN} {NAME} {PLACES}",
    )


def named(cell: Cell) -> str:
    arm, reading = cell
    return arm if (reading == "alpha") == (arm == COMBINED) else f"{arm}, {reading.replace('alpha', 'with alpha')}"


PAGE = """# All four techniques, batch norm, and ghost batch norm alone

**Question.** At 128 examples per batch, does the paper's combination beat batch norm and ghost batch norm alone?

**Answer.** {answer}

CIFAR-100 with 10,000 training images; points of top-1 on 10,000 test images, mean ± standard deviation between seeds;
95 % intervals for new seeds and new images. Pre-registered as P8 to P10 of the [protocol](../protocol.md#round-3);
verdicts are on the [index](index.md).

![Difference to batch norm](all-four.svg)

{arms}
## Differences

{gains}
*Detectable*: the minimum detectable effect at 80 % power.

## Settings

Ghosts of 8 at learning rate 0.3, batch norm at 0.1: the medium scale's choices for the same data. *All four* at this
batch size are ghosts of 8, decay on gamma and beta (strength chosen of 1, 4 and 8 times the weights' on validation
data, [candidates](selection/all-four.csv)), and alpha, chosen for top-1 on 5,000 validation images; the paper adds
groups of channels below 4 examples per batch. A residual network of 0.31 million parameters, 20 epochs: half
the medium scale's length, so networks overfit less and regularization has less to gain than there.

## Run it

    {command}

Rows: `docs/results/evidence/rows/all-four/`, one file per model, with packed per-image correctness.
"""
