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

from betternorm.conversion.convert import convert
from betternorm.integrations.checkpoints import load_checkpoint
from betternorm.integrations.models import load_model
from betternorm_lab.data import Data, Loader, Split, load
from betternorm_lab.experiments import claims, findings, trained_networks
from betternorm_lab.experiments.findings import Findings, FinishedRuns, Label
from betternorm_lab.experiments.scales import SMOKE
from betternorm_lab.models import CIFAR_RESNETS, CifarResNet
from betternorm_lab.results import Figure, Outcome, Table, Verdict
from betternorm_lab.store import Row
from betternorm_lab.training import CALIBRATED, JUDGED_BY, Config, tune_for_row
from betternorm_lab.trials import Progress, Runtime, Trial

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
CLAIMS = (
    ("alpha raises top-1", "top1", claims.MORE),
    ("alpha raises top-5", "top5", claims.MORE),
    ("alpha lowers the cross-entropy", "cross_entropy", claims.LESS),
    ("alpha lowers the cross-entropy after a temperature", CALIBRATED, claims.LESS),
)
LITTLE = 0.05  # as we read "a small amount"


@dataclass(frozen=True, kw_only=True)
class Curve(Trial):
    """All metrics of a trained network by alpha, and what each gains at its own best alpha.

    Which one is best for a metric is chosen on four fifths of the images and judged on the fifth, in turn.

    Args:
        network: a name in :data:`CIFAR_RESNETS`, or what :func:`betternorm.integrations.models.load_model` takes.
        weights: a file, as it stands or in the folder of the datasets; "timm" are those that timm fetches.
        source: instead of both, the fields of a training whose network is taken.
        dataset, split, limit: the images, the first so many of them; split "all" is every one.
    """

    kind: ClassVar[str] = "alpha-by-metric"
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
        found = {  # one search for each metric; the first evaluates, and the others read what it has kept
            name: tune_for_row(
                network,
                loader,
                objective=name,
                grid=self.alphas,
                max_examples=self.limit,
                resume=folder / "search.pt",
                progress=runtime.show,
            )
            for name in (*JUDGED_BY, CALIBRATED)
        }
        any_one = found[CALIBRATED]
        return {
            "alpha_as_trained": any_one.baseline,
            "alpha_table": any_one.table,
            "examples": any_one.examples,
            **{f"alpha_{name}": one.best[name] for name, one in found.items()},
            **{f"gain_{name}": vars(one.gains[name]) for name, one in found.items()},
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
    by_network = {name: row for (name,), found in runs.items() for row in found}  # nothing is random: one row each
    rows = [
        [name, words, *_gain_cells(row, metric), row[f"alpha_{metric}"], row["examples"]]
        for name, row in by_network.items()
        for metric, words in WORDS.items()
    ]
    verdicts: list[Verdict] = []
    for claim, metric, claimed in CLAIMS:
        margin = runs.margin(metric)
        each = [_gained(f"{name}: {claim}", row, metric, claimed, margin) for name, row in by_network.items()]
        verdicts += [*each, *_of_all(claim, each, [_change(row, metric) for row in by_network.values()])]
    verdicts += _by_curves(by_network)
    arms = {name: found for (name,), found in runs.items()}
    figures: list[Figure] = [
        *findings.alpha_figures("Trained networks, small alpha", arms, NARROW),
        *findings.alpha_figures("Trained networks, all of alpha", arms),
    ]
    headers = [
        "network",
        "metric",
        "alpha = 0",
        "at its own alpha",
        "change",
        "95 % interval",
        "best alpha for it",
        "images",
    ]
    notes = (
        "Nothing is trained, so there are no seeds: n is the number of images. Each metric is read at the alpha that "
        "is best for it, which is chosen on four fifths of the images and judged on the others, in turn, and so is the "
        "temperature. Intervals are over images, and wide enough for the best of all alphas tried."
    )
    return Findings([Table("What alpha gains", headers, rows)], figures, verdicts, notes)


def _gain_cells(row: Row, metric: str) -> list[object]:
    gain = _gain(row, metric)
    interval = f"{gain['low']:+.3f} to {gain['high']:+.3f}"
    return [gain["before"], gain["after"], f"{gain['after'] - gain['before']:+.3f}", interval]


def _gain(row: Row, metric: str) -> dict[str, float]:
    """Shares in per cent, as everywhere."""
    return {part: findings.scaled(metric, row[f"gain_{metric}"][part]) for part in ("before", "after", "low", "high")}


def _change(row: Row, metric: str) -> float:
    gain = _gain(row, metric)
    return gain["after"] - gain["before"]


def _gained(claim: str, row: Row, metric: str, claimed: claims.Region, margin: float) -> Verdict:
    gain = _gain(row, metric)
    before, after, change, interval = _gain_cells(row, metric)
    evidence = f"{before:.3f} to {after:.3f}, {change} ({interval}), {row['examples']} images"
    return claims.judge(claim, (gain["low"], gain["high"]), claimed, evidence, margin)


def _of_all(claim: str, each: Sequence[Verdict], changes: Sequence[float]) -> list[Verdict]:
    """The paper says it of every network."""
    if not each:
        return []
    places = 3 if max(map(abs, changes)) < 0.1 else 2
    low, high = (f"{change:+.{places}f}" for change in (min(changes), max(changes)))
    held = sum(verdict.outcome is Outcome.SEEN for verdict in each)
    both = claims.together(f"every network: {claim}", each)
    evidence = f"{held} of {len(each)} networks; changes from {low} to {high}"
    return [replace(both, evidence=evidence, measured=f"{low} to {high} ({len(each)} networks)", detectable=None)]


def _by_curves(by_network: Mapping[str, Row]) -> list[Verdict]:
    """What the curves show as they are: most of the gain comes early, and the whole example is worse than none."""
    if not by_network:
        return []
    losses = {
        name: {line["alpha"]: line["cross_entropy"] for line in row["alpha_table"]} for name, row in by_network.items()
    }
    early = {name: _early_share(loss) for name, loss in losses.items()}
    return [
        claims.certain(
            f"every network: an alpha of {LITTLE:g} or less gives most of what alpha does to the cross-entropy",
            all(share > 0.5 for share in early.values()),
            ", ".join(f"{name} {share:.0%}" for name, share in early.items()),
        ),
        claims.certain(
            "every network: with alpha = 1 the cross-entropy is worse than with 0",
            all(loss[1.0] > loss[0.0] for loss in losses.values()),
            ", ".join(f"{name} {loss[0.0]:.3f} at 0, {loss[1.0]:.3f} at 1" for name, loss in losses.items()),
        ),
    ]


def _early_share(loss: Mapping[float, float]) -> float:
    """How much of the largest gain there is at small alphas; all of it where there is none to be had."""
    gains = {alpha: loss[0.0] - value for alpha, value in loss.items()}
    largest = max(gains.values())
    return max(gain for alpha, gain in gains.items() if alpha <= LITTLE) / largest if largest else 1.0
