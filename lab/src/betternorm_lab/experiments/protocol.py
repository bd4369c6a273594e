"""What was fixed before the test set was evaluated, at the medium scale; see ``docs/results/protocol.md``.

Hyperparameters are chosen on validation data with seed 0 and committed here. An experiment that is not in
:data:`FIXED` runs with that seed only and never evaluates on the test set. The commit that adds it to :data:`FIXED`
precedes the first evaluation.
"""

from __future__ import annotations

SCALE = "medium"
TUNING_SEED = 0

# Experiments whose hyperparameters are fixed, and what the choice is based on.
FIXED = {
    "ghost-size": "the pilot",
    "alpha-ghost": "the pilot",
    "alpha-groupnorm": "candidates of the full length",
    "small-batch": "candidates of two epochs, and of the full length with 128 examples per step",
    "non-iid": "candidates of the full length",
    "combined": "the pilot at B = 128, the candidates at B = 2, and interpolation between them",
    "decay": "the pilot; decay on gamma and beta as strong as on the weights, as in the paper",
}

# Margins of equivalence.
MARGINS = {"top1": 0.5, "cross_entropy": 0.02}  # points; nats

# The standard deviation between seeds that the power analysis assumed before the first run.
SPREAD = {"top1": 0.45, "top1, same network": 0.2}

# Learning rate of every norm with four classes per batch: of the candidates (docs/results/protocol/non-iid.csv.gz), the
# one with the highest mean validation top-1 at the best alpha.
FOUR_CLASSES = 0.003

# Learning rate and channel groups of Group Norm at B = 128: of the candidates
# (docs/results/protocol/alpha-groupnorm.csv.gz), the one with the highest validation top-1 at its best alpha.
GROUP_NORM = (0.1, 16)

# Learning rate and channel groups of each norm at B = 2: of the candidates (docs/results/protocol/small-batch.csv.gz),
# the one with the highest validation top-1 at its best alpha.
TWO_EXAMPLES: dict[str, tuple[float, int | None]] = {
    "group norm": (0.0125, 16),
    "batch group norm": (0.005, 16),
    "batch norm": (0.0016, None),
}

# The same with 128 examples per step, normalized in pairs.
TWO_EXAMPLES_TOGETHER: dict[str, tuple[float, int | None]] = {
    "group norm": GROUP_NORM,
    "batch group norm": (0.1, 16),
    "batch norm": (0.3, None),
}

# Learning rate of some ghost sizes at B = 128, in the setting where each has its own: of the candidates
# (docs/results/protocol/ghost-size.csv.gz), the one with the highest validation top-1 at the best alpha.
GHOSTS = {128: 0.1, 8: 0.3, 2: 0.3}

# Decay on gamma and beta of each network: of the candidates (docs/results/protocol/decay.csv.gz), the strength with the
# highest validation top-1 at the best alpha.
NORM_DECAY = {"post_resnet": 0.002, "post_plain": 0.002}

# The verdict in settings in which the models hardly trained: four classes per batch, and one batch of one or two
# examples per step.
UNDERTRAINED = "undertrained models (training top-1 below 25 %)"
