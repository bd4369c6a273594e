"""Alpha on networks that others trained with batch norm (Figure 1, and the appendix for all of alpha).

The paper, ImageNet: with alpha set right ResNet-152 gains up to 0.6 points of top-1, 0.16 of top-5 and 4.7 % of the
loss, without training; MobileNetV2 and NASNet-A gain too; the best alpha is largest for NASNet-A, the one trained with
the smallest batches; a little of alpha gives most of the gain, and large values cost more and more. Expect the same on
any trained network. At small scale: five residual networks that others trained on CIFAR-100, on its test images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import nn

from betternorm.integrations.checkpoints import load_checkpoint
from betternorm.integrations.models import load_model
from betternorm.lab.data import Data, Loader, Split, load
from betternorm.lab.experiments import claims, findings, trained_networks
from betternorm.lab.experiments.findings import Findings, FinishedRuns, Label
from betternorm.lab.experiments.scales import SMOKE
from betternorm.lab.models import CIFAR_RESNETS, CifarResNet
from betternorm.lab.results import Figure, Table, Verdict
from betternorm.lab.training import CALIBRATED, JUDGED_BY, Config, tune_for_row
from betternorm.lab.trials import Progress, Runtime, Trial
from betternorm.surgery import convert

TITLE = "Alpha on networks that others trained"
PLACE = "Figure 1, section 3.1; appendix D"

NARROW = 0.2  # how far the figure of the main text reaches
ALPHAS = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 0.7, 1.0)
WORDS = {
    "top1": "top-1, %",
    "top5": "top-5, %",
    "cross_entropy": "cross-entropy",
    CALIBRATED: "cross-entropy, after temperature",
}


@dataclass(frozen=True, kw_only=True)
class Curve(Trial):
    """All metrics of a trained network by alpha. Which alpha is best is chosen on four fifths and judged on the fifth.

    Args:
        network: a name in :data:`CIFAR_RESNETS`, or what :func:`betternorm.integrations.models.load_model` takes.
        weights: a file, as it stands or in the folder of the datasets; "timm" are those that timm fetches.
        source: instead of both, the fields of a training whose network is taken.
        dataset, split, limit: the images, the first so many of them; split "all" is every one.
    """

    kind: ClassVar[str] = "alpha-curve"
    random: ClassVar[bool] = False  # the network and the images are given

    network: str = ""
    weights: str = ""
    source: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()
    dataset: str = "imagenet"
    image_size: int | None = None
    split: str = "validation"
    limit: int | None = None
    alphas: tuple[float, ...] = ALPHAS

    def run(self, folder: Path, runtime: Runtime, progress: Progress) -> dict[str, Any]:
        data = load(self.dataset, runtime.data_root, image_size=self.image_size, download=runtime.download)
        network = self._network(data, folder, runtime)
        if hasattr(network, "pretrained_cfg"):  # of timm: each has the mean and deviation it was trained with
            data = replace(data, facts=replace(data.facts, **_pixels(cast(dict[str, Any], network.pretrained_cfg))))
        convert(network, "weighed")
        images = _all(data) if self.split == "all" else getattr(data, self.split)
        loader = Loader(data, images, 250, workers=runtime.workers)
        found = tune_for_row(
            network,
            loader,
            grid=self.alphas,
            limit=self.limit,
            resume=folder / "search.pt",
            progress=runtime.show,
        )
        return {
            "alpha": found.alpha,
            "alpha_as_trained": found.baseline,
            "alpha_table": found.table,
            "examples": found.examples,
            **{f"alpha_{name}": found.best[name] for name in (*JUDGED_BY, CALIBRATED)},
            **{f"gain_{name}": vars(found.gains[name]) for name in (*JUDGED_BY, CALIBRATED)},
        }

    def _network(self, data: Data, folder: Path, runtime: Runtime) -> nn.Module:
        if self.source:
            return trained_networks.network_of(Config(**dict(self.source)), folder, runtime)
        if self.weights == "timm":
            return _fetched(self.network)
        if self.network in CIFAR_RESNETS:
            network: nn.Module = CifarResNet(CIFAR_RESNETS[self.network], data.num_classes)
        else:
            network = load_model(self.network)
        network = load_checkpoint(network, trained_networks.data_file(self.weights, runtime))
        return network.eval()


def _pixels(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(settings[name]) for name in ("mean", "std")}


def _fetched(network: str) -> nn.Module:
    """A network of timm with the weights that timm keeps for it, from its cache or the net."""
    from betternorm.integrations.torchvision import ready

    ready()
    import timm

    model: nn.Module = timm.create_model(network.removeprefix("timm:"), pretrained=True)
    return model.eval()


def _all(data: Data) -> Split:
    """A folder of nothing but validation images, which reading has split as if it were for training."""
    parts = [part for part in (data.train, data.validation, data.test) if part is not None]
    labels = torch.cat([part.labels for part in parts])
    if parts[0].images is not None:
        return Split(labels, torch.cat([part.pixels for part in parts]))
    return Split(labels, source=parts[0].source, rows=torch.cat([part.rows for part in parts if part.rows is not None]))


def own_arms(networks: Sequence[str], images: str, image_size: int | None) -> dict[Label, Trial]:
    """Arms for networks and images of one's own: SPEC=WEIGHTS for each network, SPEC alone with the weights of timm."""
    found: dict[Label, Trial] = {}
    for words in networks:
        network, _, weights = words.partition("=")
        found[network,] = Curve(
            network=network, weights=weights or "timm", dataset=images, split="all", image_size=image_size
        )
    return found


def arms(scale: str) -> dict[Label, Trial]:
    if scale == "smoke":
        plain = {"epochs": 8, "tune_alpha": False}
        return {
            (f"width {width}",): Curve(
                source=SMOKE.changed | plain | {"width": width}, dataset="digits", alphas=SMOKE.alpha_grid
            )
            for width in (8, 12)
        }
    if scale == "small":
        return {
            (f"ResNet-{depth}",): Curve(
                network=f"cifar100_resnet{depth}",
                weights=f"cifar100_resnets/resnet{depth}_cifar100.pth",
                dataset="cifar100",
                split="test",
            )
            for depth in CIFAR_RESNETS.values()
        }
    networks = {
        "ResNet-152": ("timm:resnet152.tv_in1k", 224),
        "MobileNetV2": ("timm:mobilenetv2_100.ra_in1k", 224),
        "NASNet-A": ("timm:nasnetalarge.tf_in1k", 331),
    }
    return {
        (name,): Curve(network=network, weights="timm", image_size=size) for name, (network, size) in networks.items()
    }


def conclude(runs: FinishedRuns) -> Findings:
    rows, verdicts = [], []
    for (name,), found in runs.items():
        for row in found:
            for metric, words in WORDS.items():
                if f"gain_{metric}" in row.result:  # older rows know of no temperature
                    rows.append([name, words, *_gain_cells(row, metric), row[f"alpha_{metric}"], row["examples"]])
            verdicts += [
                _gained(f"{name}: alpha lowers the cross-entropy", row, "cross_entropy", claims.LESS),
                _gained(f"{name}: the alpha chosen for cross-entropy raises top-1 too", row, "top1", claims.MORE),
                _past_best(name, row),
            ]
            if f"gain_{CALIBRATED}" in row.result:
                claim = f"{name}: alpha lowers the cross-entropy also after a temperature"
                verdicts.append(_gained(claim, row, CALIBRATED, claims.LESS))
    arms = {name: found for (name,), found in runs.items()}
    figures: list[Figure] = [
        *findings.alpha_figures("Trained networks, small alpha", arms, NARROW),
        *findings.alpha_figures("Trained networks, all of alpha", arms),
    ]
    headers = [
        "network",
        "metric",
        "alpha = 0",
        "alpha chosen",
        "change",
        "95 % interval",
        "best alpha for it",
        "images",
    ]
    notes = (
        "Nothing is trained, so there are no seeds: n is the number of images. Alpha is chosen for cross-entropy on "
        "four fifths of the images and judged on the others, in turn; intervals are of a paired bootstrap over images."
    )
    return Findings([Table("What alpha gains", headers, rows)], figures, verdicts, notes)


def _gain_cells(row: Any, metric: str) -> list[object]:
    gain = {part: findings.scaled(metric, row[f"gain_{metric}"][part]) for part in ("before", "after", "low", "high")}
    interval = f"{gain['low']:+.3f} to {gain['high']:+.3f}"
    return [gain["before"], gain["after"], f"{gain['after'] - gain['before']:+.3f}", interval]


def _gained(claim: str, row: Any, metric: str, claimed: claims.Region) -> Verdict:
    gain = row[f"gain_{metric}"]
    before, after, change, interval = _gain_cells(row, metric)
    evidence = f"{before:.3f} to {after:.3f}, {change} ({interval}), {row['examples']} images"
    return claims.judge(claim, (gain["low"], gain["high"]), claimed, evidence)


def _past_best(name: str, row: Any) -> Verdict:
    """Large alphas are far from training: the whole example is worse than none of it."""
    loss = {line["alpha"]: line["cross_entropy"] for line in row["alpha_table"]}
    return claims.certain(
        f"{name}: with alpha = 1 the cross-entropy is worse than with 0",
        loss[1.0] > loss[0.0],
        f"{loss[0.0]:.3f} at 0, {loss[1.0]:.3f} at 1, on {row['examples']} images",
    )
