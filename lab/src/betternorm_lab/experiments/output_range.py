"""The range of the output of a norm layer: the bound of Eq. 2, and what models reach of it (appendices A and B).

The paper claims: in training the output of batch norm (before gamma and beta) lies within ±sqrt(B - 1), where B is the
number of values that a mean is taken over, and the bound is tight; at inference there is no such bound. In the last
norm layer, at 4x4, of a CIFAR-10 model, the training range comes close to the bound for small B (-5.30 of -5.57 for
B = 32), and at inference values exceed it. Expect inference example weighing to bring the range back toward it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from betternorm.layers import GroupedBatchNorm
from betternorm.weighing.alpha import set_alpha, weighed_layers
from betternorm_lab.data import Data, Loader
from betternorm_lab.experiments import claims, findings, ghost_size, trained_networks
from betternorm_lab.experiments.arms import Arm
from betternorm_lab.experiments.findings import Findings, FinishedRuns
from betternorm_lab.experiments.scales import TASKS
from betternorm_lab.results import Figure, Table, Verdict
from betternorm_lab.trials import Progress, Runtime, Trial

TITLE = "The range of the output, in training and at inference"
PLACE = "Equation 2; appendices A and B"

SIZES = {"smoke": (2, 8, 32), "small": (2, 4, 8, 16, 32, 64, 128, 256), "paper": tuple(2**k for k in range(1, 12))}
TIGHT = 0.999  # the share of the bound that adversarial inputs should reach
LAYER, NETWORK = "layer", "network"
ROUNDING = 1e-9  # of the bound, in float64


@dataclass(frozen=True, kw_only=True)
class Extremes(Trial):
    """The largest and smallest output of the layer for adversarial inputs, for groups of some number of values."""

    kind: ClassVar[str] = "output-extremes"
    random: ClassVar[bool] = False

    values: int = 2
    attempts: int = 64
    steps: int = 150

    def run(self, folder: Path, runtime: Runtime, progress: Progress) -> dict[str, Any]:
        """With the input of the proof (one value differs from all others), and by gradient ascent."""
        generator = torch.Generator().manual_seed(self.seed)
        # eps reduces the bound: the inputs are large, as in the proof, so that the reduction is small.
        layer = GroupedBatchNorm(self.attempts, affine=False, dtype=torch.float64).train()
        sign = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(self.attempts // 2)
        lone = torch.zeros(self.values, self.attempts, dtype=torch.float64)
        lone[0] = torch.logspace(0, 4, self.attempts, dtype=torch.float64) * sign
        outputs = [layer(lone)]
        drawn = torch.randn(self.values, self.attempts, generator=generator, dtype=torch.float64)
        inputs = (100 * drawn).requires_grad_()
        outputs.append(layer(inputs).detach())
        optimizer = torch.optim.Adam([inputs], lr=20.0)
        for step in range(self.steps):
            optimizer.zero_grad()
            output = layer(inputs)
            outputs.append(output.detach())
            (-output[0] * sign).sum().backward()
            optimizer.step()
            progress((step + 1) / self.steps)
        extremes = torch.stack([torch.stack([output.min(), output.max()]) for output in outputs])
        reached = layer(inputs.detach())
        layer.eval()
        layer.reset_running_stats()  # mean 0 and variance 1, unlike these inputs
        at_inference = layer(lone)
        return {
            "bound": math.sqrt(self.values - 1),
            "minimum": extremes[:, 0].min().item(),
            "maximum": extremes[:, 1].max().item(),
            "ascent_minimum": reached.min().item(),
            "ascent_maximum": reached.max().item(),
            "inference_minimum": at_inference.min().item(),
            "inference_maximum": at_inference.max().item(),
        }


@dataclass(frozen=True, kw_only=True)
class Ranges(trained_networks.OnTrainedNetwork):
    """The range in the last norm layer of a trained model: over an epoch of training, and over the test set."""

    kind: ClassVar[str] = "output-ranges"

    def measure(self, network: nn.Module, data: Data, progress: Progress) -> dict[str, Any]:
        *_, last = weighed_layers(network).values()
        tuned = last.alpha
        with torch.no_grad():  # the output before gamma and beta; nothing after this layer matters here
            last.weight.fill_(1.0)
            last.bias.fill_(0.0)
        training = Loader(data, data.train, self.batch_size, train=True, seed=self.seed)
        testing = trained_networks.held_out(data)
        result: dict[str, Any] = {"alpha": tuned}
        for name, loader, alpha in (
            ("training", training, 0.0),
            ("inference", testing, 0.0),
            ("weighed", testing, tuned),
        ):
            one = copy.deepcopy(network).train(name == "training")
            set_alpha(one, alpha)
            low, high, space = _range(one, loader)
            result |= {f"{name}_minimum": low, f"{name}_maximum": high}
        examples = last.examples_per_group or self.batch_size
        return result | {"values": examples * space, "bound": math.sqrt(examples * space - 1)}


def _range(network: nn.Module, loader: Loader) -> tuple[float, float, int]:
    """The smallest and largest output of the last norm layer, and the number of its positions."""
    *_, last = weighed_layers(network).values()
    seen: list[Tensor] = []
    space = 1

    def record_extremes(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal space
        space = output[0, 0].numel()
        seen.append(torch.stack([output.min(), output.max()]))

    handle = last.register_forward_hook(record_extremes)
    with torch.no_grad():
        for images, _ in loader:
            network(images)
    handle.remove()
    extremes = torch.stack(seen)
    return extremes[:, 0].min().item(), extremes[:, 1].max().item(), space


def arms(scale: str) -> dict[Arm, Trial]:
    result: dict[Arm, Trial] = {Arm(method=LAYER, size=values): Extremes(values=values) for values in SIZES[scale]}
    task = Arm(next(iter(TASKS[scale])))
    for arm, config in ghost_size.arms(scale).items():
        if arm.task == task:
            result[Arm(method=NETWORK, size=arm.size)] = Ranges.of(config)
    return result


def conclude(runs: FinishedRuns) -> Findings:
    layer = {arm.size or 0: runs[arm][0] for arm in runs.arms(method=LAYER) if runs[arm]}
    network = {arm.size or 0: runs[arm] for arm in runs.arms(method=NETWORK) if runs[arm]}
    return Findings(
        [_extremes_table(layer), _ranges_table(network)],
        [_extremes_figure(layer), *_ranges_figures(network)],
        [*_extremes_verdicts(layer), *_ranges_verdicts(runs)],
        f"The layer is in float64; the tolerance is {ROUNDING:g} of the bound (float32 may exceed it by 1e-5).",
    )


def _extremes_table(layer: dict[int, Any]) -> Table:
    headers = ["values B", "sqrt(B - 1)", "minimum", "maximum", "share of the bound", "at inference"]
    rows = [
        [
            values,
            row["bound"],
            row["minimum"],
            row["maximum"],
            min(-row["minimum"], row["maximum"]) / row["bound"],
            f"{row['inference_minimum']:.4g} to {row['inference_maximum']:.4g}",
        ]
        for values, row in layer.items()
    ]
    return Table("Adversarial inputs to the layer", headers, rows)


def _extremes_figure(layer: dict[int, Any]) -> Figure:
    lines: dict[str, Callable[[Any], float]] = {
        "bound": lambda row: row["bound"],
        "maximum in training": lambda row: row["maximum"],
    }
    lines |= {"minimum in training": lambda row: row["minimum"], "minus the bound": lambda row: -row["bound"]}
    lines |= {"maximum at inference, alpha = 0": lambda row: row["inference_maximum"]}
    series = [
        findings.curve(name, {values: [read(row)] for values, row in layer.items()}) for name, read in lines.items()
    ]
    inference = series.pop()
    # Unbounded values would flatten the other curves: they are clipped at twice the bound.
    top = 2 * max((row["bound"] for row in layer.values()), default=1.0)
    clipped = replace(inference, y=[min(y, top) for y in inference.y], low=None, high=None)
    return Figure(
        "Adversarial inputs to the layer (inference clipped)", "values B", "output", [*series, clipped], log_x=True
    )


def _extremes_verdicts(layer: dict[int, Any]) -> list[Verdict]:
    """Nothing here is random: a claim holds for every size, or it does not."""
    if not layer:
        return []
    parts = [min(-row["minimum"], row["maximum"]) / row["bound"] for row in layer.values()]
    most = [max(-row["minimum"], row["maximum"]) / row["bound"] for row in layer.values()]
    outside = [max(-row["inference_minimum"], row["inference_maximum"]) / row["bound"] for row in layer.values()]
    return [
        claims.certain(claim, holds, evidence, id=id, sanity=True)
        for claim, id, holds, evidence in (
            (
                f"adversarial inputs reach {TIGHT} of the bound on both sides",
                "tight",
                min(parts) >= TIGHT,
                f"at least {min(parts):.6f} of it, for {len(layer)} sizes",
            ),
            (
                "no input exceeds the bound in training",
                "bounded",
                max(most) <= 1 + ROUNDING,
                f"at most {max(most):.7f} of it, for {len(layer)} sizes",
            ),
            (
                "at inference with alpha = 0, outputs exceed it",
                "unbounded",
                min(outside) > 1,
                f"at least {min(outside):.3g} times the bound",
            ),
        )
    ]


READINGS = {"training": "in training", "inference": "inference, alpha = 0", "weighed": "inference, alpha tuned"}


def _ranges_table(network: dict[int, list[Any]]) -> Table:
    headers = [
        "ghost size",
        "values B",
        "sqrt(B - 1)",
        *(f"{words}, {end}" for words in READINGS.values() for end in ("minimum", "maximum")),
    ]
    rows = [
        [
            size,
            rows[0]["values"],
            rows[0]["bound"],
            *(
                findings.cell([row[f"{name}_{end}"] for row in rows])
                for name in READINGS
                for end in ("minimum", "maximum")
            ),
        ]
        for size, rows in network.items()
    ]
    return Table("The last norm layer of trained models", headers, rows)


def _ranges_figures(network: dict[int, list[Any]]) -> list[Figure]:
    if not network:
        return []
    series = [
        findings.curve(
            f"{end}, {words}", {rows[0]["values"]: [row[f"{name}_{end}"] for row in rows] for rows in network.values()}
        )
        for name, words in READINGS.items()
        for end in ("minimum", "maximum")
    ]
    for sign, words in ((1, "bound"), (-1, "minus the bound")):
        series.append(
            findings.curve(words, {rows[0]["values"]: [sign * rows[0]["bound"]] for rows in network.values()})
        )
    return [Figure("The last norm layer of trained models", "values B", "output", series, log_x=True)]


def _ranges_verdicts(runs: FinishedRuns) -> list[Verdict]:
    arms = runs.arms(method=NETWORK)
    largest, smallest = arms[0], arms[-1]

    def reach(arm: Arm, name: str) -> list[float]:
        return [max(-row[f"{name}_minimum"], row[f"{name}_maximum"]) / row["bound"] for row in runs[arm]]

    training, inference, weighed = (reach(smallest, name) for name in ("training", "inference", "weighed"))
    return [
        claims.compare(
            f"in training, ghost size {smallest.size} comes closer to the bound than batch norm (shares of it)",
            training,
            reach(largest, "training"),
            id="closer",
        ),
        claims.compare(
            f"at inference, ghost size {smallest.size} exceeds the bound (shares of it)",
            inference,
            [1.0] * len(training),
            id="exceeds",
            paired=True,
        ),
        claims.compare(
            f"alpha brings the range with ghost size {smallest.size} back toward the bound (shares of it)",
            weighed,
            inference,
            claims.LESS,
            id="alpha",
            paired=True,
        ),
    ]
