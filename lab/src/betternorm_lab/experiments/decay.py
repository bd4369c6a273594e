"""Weight decay on gamma and beta: off, toward 0, toward 1, with and without paths to the output (section 3.3).

The paper claims: on CIFAR-100 with ResNet-18, over 10 runs, decay on gamma and beta gains 0.3 points (P = 0.002), and
it does not matter whether gamma decays toward 0 or 1 (P = 0.46); on Caltech-256 it gains 0.91 points with ResNet-50,
but costs 0.13 with Inception-v3, whose norm layers, except for the last, have no path to the output that bypasses other
norm layers. Nothing changes on SVHN. Expect a small effect that needs many runs, and only where models overfit and have
shortcuts.

The effect of decay accumulates over steps, as learning rate x decay x steps / (1 - momentum). The 360 steps of the
small scale with 5e-4 would shrink gamma by 7 %, too little to measure. There, decay on gamma and beta is 0.01, which
shrinks gamma by a factor of 4; it is twenty times as strong as on the weights, and was not tuned on validation data. At
medium scale gamma and beta decay like the weights, which halves them; a second arm has the strength that is best on
validation data.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from betternorm_lab.experiments import claims, findings, ghost_size, protocol
from betternorm_lab.experiments.arms import Arm
from betternorm_lab.experiments.findings import Findings, FinishedRuns
from betternorm_lab.experiments.scales import CALTECH256, FEW, PAPER, SMALL, SMOKE
from betternorm_lab.results import Figure, Table, Verdict
from betternorm_lab.training import Config
from betternorm_lab.trials import Trial

TITLE = "Weight decay on gamma and beta"
PLACE = "Section 3.3"
SEEDS = {"small": 10, "medium": 10, "paper": 10}

DECAY: dict[str, float | str] = {
    "smoke": 0.01,
    "small": 0.01,
    "medium": "all",
    "paper": "all",
}  # on gamma and beta; all: as on the weights
STRENGTHS = (0.000125, 0.0005, 0.002)  # candidates at medium scale; that of the weights is 0.0005
OFF, ZERO, ONE, TUNED = "off", "toward 0", "toward 1", "toward 0, tuned"
PLAIN_NETWORKS = ("plain18", "post_plain", "inception_v3")  # without shortcuts


def networks(scale: str) -> dict[str, Config]:
    """By name. At the paper and medium scales, the norm layers of networks with shortcuts have paths to the output that
    bypass the other norm layers, and those of the others do not.

    The pre-activation networks of the smoke and small scales end in a norm layer, the only one with such a path, with
    shortcuts or without.
    """
    if scale == "paper":
        large = replace(CALTECH256, image_size=224, network="resnet50")
        return {"ResNet-18": PAPER, "ResNet-50": large, "Inception-v3": CALTECH256}
    if scale == "medium":
        return {"residual network": FEW, "without shortcuts": replace(FEW, network="post_plain")}
    config = {"smoke": SMOKE, "small": SMALL}[scale]
    return {"pre-activation network": config, "without shortcuts": replace(config, network="plain18")}


def arms(scale: str) -> dict[Arm, Trial]:
    settings: dict[str, dict[str, Any]] = {
        OFF: {},
        ZERO: {"norm_decay": DECAY[scale]},
        ONE: {"norm_decay": DECAY[scale], "gamma_target": 1},
    }
    result: dict[Arm, Trial] = {
        Arm(setting=network, method=name): replace(config, **options)
        for network, config in networks(scale).items()
        for name, options in settings.items()
        if name != ONE or config.network not in PLAIN_NETWORKS
    }
    if scale == protocol.SCALE:
        for network, config in networks(scale).items():
            strength = protocol.NORM_DECAY[config.network]
            if strength != config.weight_decay:  # which is already an arm
                result[Arm(setting=network, method=TUNED)] = replace(config, norm_decay=strength)
    return result


def candidates(scale: str) -> dict[Arm, Trial]:
    """The strengths of decay on gamma and beta at medium scale, for each network."""
    return {
        Arm(setting=network, variant=f"decay {strength:g}"): replace(config, norm_decay=strength)
        for network, config in networks(scale).items()
        for strength in STRENGTHS
    }


def conclude(runs: FinishedRuns) -> Findings:
    columns = ("validation_top1", "test_top1", ghost_size.TRAINING, "test_cross_entropy")
    rows = [[arm.setting, arm.method, *(findings.cell(runs.numbers(arm, name)) for name in columns)] for arm in runs]
    verdicts: list[Verdict] = []
    effects: dict[bool, list[float]] = {True: [], False: []}  # by whether there are paths
    margin = runs.margin("top1")
    by_paths = runs.scale in ("medium", "paper")
    for task in runs.tasks():
        network, config = task.setting, networks(runs.scale)[task.setting]
        paths = config.network not in PLAIN_NETWORKS
        read = {arm.method: runs.numbers(arm, "test_top1") for arm in runs.arms(task)}
        both = runs.by_seed(*((task.with_method(name), "test_top1") for name in (ZERO, OFF)))
        effects[paths] += [a - b for a, b in zip(*both, strict=True)]
        for name, decay in ((ZERO, "on gamma and beta"), (TUNED, "of the best strength on validation data")):
            if name not in read:
                continue
            if by_paths and not paths:
                claim, region = f"does not raise test top-1 by {margin:g} points", claims.at_most(margin)
            else:
                claim, region = "raises test top-1", claims.MORE
            words, id = f"{network}: decay {decay} {claim}", task.id("tuned" if name == TUNED else "decay")
            verdicts.append(claims.compare(words, read[name], read[OFF], region, id=id, margin=margin))
        if ONE in read:
            claim = f"{network}: toward 0 or toward 1 makes no difference of {margin:g} points"
            equal = claims.within(margin)
            verdicts.append(claims.compare(claim, read[ZERO], read[ONE], equal, id=task.id("toward")))
    if by_paths:
        claim = "decay gains more in networks with paths to the output than in those without"
        verdicts.append(claims.compare(claim, effects[True], effects[False], id="by-paths", margin=margin))
    headers = ["network", "decay", "validation top-1, %", "test top-1, %", "training top-1, %", "test cross-entropy"]
    bars = [
        findings.curve(task.setting, {arm.method: runs.numbers(arm, "test_top1") for arm in runs.arms(task)})
        for task in runs.tasks()
    ]
    figure = Figure("Decay on gamma and beta", "decay", "test top-1, %", bars, kind="bar")
    table = Table("Top-1 by decay on gamma and beta", headers, rows)
    return Findings([table], [figure], verdicts, ghost_size.TRAINING_NOTE)
