"""What was settled before the test set was read, at the medium scale; ``docs/results/protocol.md`` says it in words.

Hyperparameters are chosen on validation data with seed 0 and written down here. An experiment that is not in
:data:`FIXED` runs with that seed alone and never reads the test set. The commit that adds it to :data:`FIXED` comes
before its first reading, as the history shows.
"""

from __future__ import annotations

SCALE = "medium"
TUNING_SEED = 0

# Experiments whose hyperparameters are settled, and what they rest on.
FIXED = {
    "ghost-size": "the pilot",
    "alpha-ghost": "the pilot",
    "alpha-groupnorm": "candidates of the same length",
    "small-batch": "candidates of two epochs, and of the same length with steps of 128",
    "non-iid": "candidates of the same length",
    "combined": "the pilot at B = 128, the candidates at B = 2, and what lies between them",
    "decay": "the pilot; decay of gamma and beta as strong as that of the weights, as in the paper",
}

# Differences that do not matter, for claims that there is none.
MARGINS = {"top1": 0.5, "cross_entropy": 0.02}  # points; nats

# What the plan assumes of the standard deviation between seeds, until it has been measured.
SPREAD = {"top1": 0.45, "top1, same network": 0.2}

# Learning rate of every norm with four classes per batch: of the candidates (docs/results/protocol/non-iid.csv) the one
# with the highest mean of top-1 on validation data, at the best alpha.
FOUR_CLASSES = 0.003

# Learning rate and groups of channels of Group Norm at B = 128: of the candidates
# (docs/results/protocol/alpha-groupnorm.csv) the one with the highest top-1 on validation data, at its best alpha.
GROUP_NORM = (0.1, 16)

# Learning rate and groups of channels of each norm at B = 2: of the candidates (docs/results/protocol/small-batch.csv)
# the one with the highest top-1 on validation data, at its best alpha.
TWO_EXAMPLES: dict[str, tuple[float, int | None]] = {
    "group norm": (0.0125, 16),
    "batch group norm": (0.005, 16),
    "batch norm": (0.0016, None),
}

# The same where a step is of 128 examples, which are normalised two by two.
TWO_EXAMPLES_TOGETHER: dict[str, tuple[float, int | None]] = {
    "group norm": GROUP_NORM,
    "batch group norm": (0.1, 16),
    "batch norm": (0.3, None),
}

# Learning rate of some ghost sizes at B = 128, where each has its own: of the candidates
# (docs/results/protocol/ghost-size.csv) the one with the highest top-1 on validation data, at the best alpha.
GHOSTS = {128: 0.1, 8: 0.3, 2: 0.3}

# Decay on gamma and beta of each network: of the candidates (docs/results/protocol/decay.csv) the strength with the
# highest top-1 on validation data, at the best alpha.
NORM_DECAY = {"residual network": 0.002, "the same without shortcuts": 0.002}
