"""Weight decay on gamma and beta: off, toward 0, toward 1, with and without paths to the output (section 3.3).

The paper claims: on CIFAR-100 with ResNet-18, over 10 runs, decay on gamma and beta gains 0.3 points (P = 0.002), and
it does not matter whether gamma decays toward 0 or 1 (P = 0.46); on Caltech-256 it gains 0.91 points with ResNet-50,
but costs 0.13 with Inception-v3, whose norm layers, but for the last, have no path to the output around other norm
layers. Nothing changes on SVHN. Expect a small effect, needing many runs, and only where networks overfit and have
shortcuts.

What decay does adds up over steps, as learning rate x decay x steps / (1 - momentum). The 360 steps of the small scale
with the usual 5e-4 would shrink a gamma by 7 %, which nobody could see. It takes 0.01 for gamma and beta, a factor of 4
and twenty times as strong as on the weights, which was not tuned on validation data. At medium scale gamma and beta
decay as the weights do, which shrinks them by half; where validation data chose another strength, with that too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from betternorm_lab.experiments import claims, findings, ghost_size, protocol
from betternorm_lab.experiments.findings import Findings, FinishedRuns, Label
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
}  # of gamma and beta; all: as the weights
STRENGTHS = (0.000125, 0.0005, 0.002)  # candidates at medium scale; the weights decay by 0.0005
TUNED = "toward 0, tuned"
WITH, WITHOUT, ONE = "with paths", "without paths", "one path"


def networks(scale: str) -> dict[Label, Config]:
    """By whether norm layers have paths to the output that pass no other, and by name.

    The pre-activation networks of the smoke and small scale end in a norm, so that only this one has a path, with
    shortcuts or without.
    """
    if scale == "paper":
        large = replace(CALTECH256, image_size=224, network="resnet50")
        return {(WITH, "ResNet-18"): PAPER, (WITH, "ResNet-50"): large, (WITHOUT, "Inception-v3"): CALTECH256}
    if scale == "medium":
        return {
            (WITH, "residual network"): FEW,
            (WITHOUT, "the same without shortcuts"): replace(FEW, network="post_plain"),
        }
    config = {"smoke": SMOKE, "small": SMALL}[scale]
    return {
        (ONE, "pre-activation network"): config,
        (ONE, "the same without shortcuts"): replace(config, network="plain18"),
    }


def arms(scale: str) -> dict[Label, Trial]:
    settings: dict[str, dict[str, Any]] = {
        "off": {},
        "toward 0": {"norm_decay": DECAY[scale]},
        "toward 1": {"norm_decay": DECAY[scale], "gamma_target": 1},
    }
    found: dict[Label, Trial] = {
        (*network, name): replace(config, **options)
        for network, config in networks(scale).items()
        for name, options in settings.items()
        if name != "toward 1" or config.network not in ("plain18", "post_plain", "inception_v3")
    }
    if scale == protocol.SCALE:
        for (paths, network), config in networks(scale).items():
            strength = protocol.NORM_DECAY[network]
            if strength != config.weight_decay:  # which it has already
                found[paths, network, TUNED] = replace(config, norm_decay=strength)
    return found


def candidates(scale: str) -> dict[Label, Trial]:
    """What the strength of decay on gamma and beta at medium scale is chosen from, for each network."""
    return {
        (network, f"decay {strength:g}"): replace(config, norm_decay=strength)
        for (_, network), config in networks(scale).items()
        for strength in STRENGTHS
    }


def conclude(runs: FinishedRuns) -> Findings:
    columns = ("validation_top1", "test_top1", ghost_size.TRAINING, "test_cross_entropy")
    rows = [[label[1], label[2], *(findings.cell(runs.numbers(label, name)) for name in columns)] for label in runs]
    verdicts: list[Verdict] = []
    effects: dict[str, list[float]] = {}
    margin = runs.margin("top1")
    for paths, network in dict.fromkeys(label[:2] for label in runs):
        read = {label[2]: runs.numbers(label, "test_top1") for label in runs if label[:2] == (paths, network)}
        both = runs.by_seed(*(((paths, network, name), "test_top1") for name in ("toward 0", "off")))
        effects[paths] = effects.get(paths, []) + [a - b for a, b in zip(*both, strict=True)]
        for name, decay in (("toward 0", "on gamma and beta"), (TUNED, "of the best strength on validation data")):
            if name not in read:
                continue
            if paths == WITHOUT:
                claim, region = f"does not raise test top-1 by {margin:g} points", claims.at_most(margin)
            else:
                claim, region = "raises test top-1", claims.MORE
            verdicts.append(
                claims.compare(f"{network}: decay {decay} {claim}", read[name], read["off"], region, margin=margin)
            )
        if "toward 1" in read:
            claim = f"{network}: toward 0 or toward 1 makes no difference of {margin:g} points"
            verdicts.append(claims.compare(claim, read["toward 0"], read["toward 1"], claims.within(margin)))
    if WITH in effects:
        verdicts.append(
            claims.compare(
                "decay gains more in networks with paths to the output than in those without",
                effects[WITH],
                effects[WITHOUT],
                margin=margin,
            )
        )
    headers = ["network", "decay", "validation top-1, %", "test top-1, %", "training top-1, %", "test cross-entropy"]
    bars = [
        findings.curve(network, {label[2]: runs.numbers(label, "test_top1") for label in runs if label[1] == network})
        for network in runs.names(1)
    ]
    figure = Figure("Decay on gamma and beta", "decay", "test top-1, %", bars, kind="bar")
    table = Table("Top-1 by decay on gamma and beta", headers, rows)
    return Findings([table], [figure], verdicts, ghost_size.TRAINING_NOTE)
