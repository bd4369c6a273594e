"""Alpha on pretrained batch norm models (Figure 1, and appendix D for the whole range of alpha).

The paper, ImageNet: with the best alpha ResNet-152 gains up to 0.6 points of top-1, 0.16 of top-5 and 4.7 % of the
loss, without training; MobileNetV2 and NASNet-A gain too; the best alpha is largest for NASNet-A, which was trained
with the smallest batches; a small alpha gives most of the gain, and large values cost more and more. Expect the same
for any trained model. At small scale: five pretrained CIFAR-100 residual networks, on the CIFAR-100 test images.
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
from betternorm_lab.experiments.arms import Arm
from betternorm_lab.experiments.findings import Findings, FinishedRuns
from betternorm_lab.experiments.scales import SMOKE
from betternorm_lab.models import CIFAR_RESNETS, CifarResNet
from betternorm_lab.results import Figure, Outcome, Table, Verdict
from betternorm_lab.store import Row
from betternorm_lab.training import CALIBRATED, JUDGED_BY, Config, tune_for_row
from betternorm_lab.trials import Progress, Runtime, Trial

TITLE = "Alpha on pretrained models"
PLACE = "Figure 1, section 3.1; appendix D"

NARROW = 0.2  # how far the figure of the main text reaches
ALPHAS = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 0.7, 1.0)
WORDS = {
    "top1": "top-1, %",
    "top5": "top-5, %",
    "cross_entropy": "cross-entropy",
    CALIBRATED: "cross-entropy after temperature scaling",
}
CLAIMS = (
    ("alpha raises top-1", "top1", claims.MORE),
    ("alpha raises top-5", "top5", claims.MORE),
    ("alpha lowers the cross-entropy", "cross_entropy", claims.LESS),
    ("alpha lowers the cross-entropy after temperature scaling", CALIBRATED, claims.LESS),
)
SMALL_ALPHA = 0.05  # our reading of "a small amount"


@dataclass(frozen=True, kw_only=True)
class Curve(Trial):
    """All metrics of a trained model by alpha, and the gain of each at its own best alpha.

    Gains are cross-validated with five folds: alpha is chosen on four of them and evaluated on the fifth.

    Args:
        network: a name in :data:`CIFAR_RESNETS`, or what :func:`betternorm.integrations.models.load_model` takes.
        weights: a file, given as a path or relative to the data folder; "timm" downloads those of timm.
        source: instead of both, the fields of a training run whose model is used.
        dataset, split, limit: the images, and how many of them; split "all" is all images.
    """

    kind: ClassVar[str] = "alpha-by-metric"
    random: ClassVar[bool] = False

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
        if hasattr(network, "pretrained_cfg"):  # a timm model has the mean and standard deviation it was trained with
            data = replace(data, facts=replace(data.facts, **_pixels(cast(dict[str, Any], network.pretrained_cfg))))
        convert(network, "weighed")
        images = _all(data) if self.split == "all" else getattr(data, self.split)
        loader = Loader(data, images, 250, workers=runtime.workers)
        searches = {  # one search per metric; the first evaluates, and the others reuse its file
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
        any_one = searches[CALIBRATED]
        return {
            "alpha_as_trained": any_one.baseline,
            "alpha_table": any_one.table,
            "examples": any_one.examples,
            **{f"alpha_{name}": one.best[name] for name, one in searches.items()},
            **{f"gain_{name}": vars(one.gains[name]) for name, one in searches.items()},
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
    """A pretrained timm model, from its cache or the network."""
    from betternorm.integrations.torchvision import ready

    ready()
    import timm

    model: nn.Module = timm.create_model(network.removeprefix("timm:"), pretrained=True)
    return model.eval()


def _all(data: Data) -> Split:
    """All images of a folder, which the reader has split for training, validation and test."""
    parts = [part for part in (data.train, data.validation, data.test) if part is not None]
    labels = torch.cat([part.labels for part in parts])
    if parts[0].images is not None:
        return Split(labels, torch.cat([part.pixels for part in parts]))
    return Split(labels, source=parts[0].source, rows=torch.cat([part.rows for part in parts if part.rows is not None]))


def own_arms(networks: Sequence[str], images: str, image_size: int | None) -> dict[Arm, Trial]:
    """Arms for given models and images: SPEC=WEIGHTS for each model, SPEC alone with the weights of timm."""
    arms: dict[Arm, Trial] = {}
    for words in networks:
        network, _, weights = words.partition("=")
        arms[Arm(method=network)] = Curve(
            network=network, weights=weights or "timm", dataset=images, split="all", image_size=image_size
        )
    return arms


def arms(scale: str) -> dict[Arm, Trial]:
    if scale == "smoke":
        plain = {"epochs": 8, "tune_alpha": False}
        return {
            Arm(method=f"width {width}"): Curve(
                source=SMOKE.changed | plain | {"width": width}, dataset="digits", alphas=SMOKE.alpha_grid
            )
            for width in (8, 12)
        }
    if scale == "small":
        return {
            Arm(method=f"ResNet-{depth}"): Curve(
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
        Arm(method=name): Curve(network=network, weights="timm", image_size=size)
        for name, (network, size) in networks.items()
    }


def conclude(runs: FinishedRuns) -> Findings:
    by_model = {arm.method: row for arm, rows in runs.items() for row in rows}  # nothing is random: one row each
    rows = [
        [name, words, *_gain_cells(row, metric), row[f"alpha_{metric}"], row["examples"]]
        for name, row in by_model.items()
        for metric, words in WORDS.items()
    ]
    verdicts: list[Verdict] = []
    for claim, metric, claimed in CLAIMS:
        margin = runs.margin(metric)
        each = [_gained(f"{name}: {claim}", name, row, metric, claimed, margin) for name, row in by_model.items()]
        verdicts += [*each, *_of_all(claim, metric, each, [_change(row, metric) for row in by_model.values()])]
    verdicts += _by_curves(by_model)
    curves = {arm.method: rows for arm, rows in runs.items()}
    figures: list[Figure] = [
        *findings.alpha_figures("Pretrained models, small alpha", curves, NARROW),
        *findings.alpha_figures("Pretrained models, the whole range of alpha", curves),
    ]
    headers = ["model", "metric", "alpha = 0", "at its best alpha", "change", "95 % interval", "best alpha", "images"]
    notes = (
        "Nothing is trained, so there are no seeds: n is the number of images. Alpha and temperature are "
        "cross-validated: chosen on four folds and evaluated on the fifth, for each metric separately. Intervals are "
        "over images, corrected for the number of alphas tried."
    )
    return Findings([Table("Gain from alpha", headers, rows), _temperatures(by_model)], figures, verdicts, notes)


def _temperatures(by_model: Mapping[str, Row]) -> Table:
    """How much of alpha's effect on the cross-entropy a temperature explains."""
    rows = []
    for name, row in by_model.items():
        plain, calibrated = _gain(row, "cross_entropy"), _gain(row, CALIBRATED)
        change, interval = _gain_cells(row, CALIBRATED)[2:]
        numbers = (plain["before"], plain["after"], calibrated["before"], calibrated["after"])
        rows.append([name, *(f"{number:.4f}" for number in numbers), f"{change} ({interval})"])
    headers = ["model", "baseline", "alpha alone", "temperature alone", "both", "both, compared with temperature alone"]
    return Table("Cross-entropy: alpha, temperature, and both", headers, rows)


def _gain_cells(row: Row, metric: str) -> list[object]:
    gain = _gain(row, metric)
    interval = f"{gain['low']:+.3f} to {gain['high']:+.3f}"
    return [gain["before"], gain["after"], f"{gain['after'] - gain['before']:+.3f}", interval]


def _gain(row: Row, metric: str) -> dict[str, float]:
    return {part: findings.scaled(metric, row[f"gain_{metric}"][part]) for part in ("before", "after", "low", "high")}


def _change(row: Row, metric: str) -> float:
    gain = _gain(row, metric)
    return gain["after"] - gain["before"]


def _gained(claim: str, name: str, row: Row, metric: str, claimed: claims.Region, margin: float) -> Verdict:
    gain = _gain(row, metric)
    before, after, change, interval = _gain_cells(row, metric)
    evidence = f"{before:.3f} to {after:.3f}, {change} ({interval}), {row['examples']} images"
    return claims.judge(claim, (gain["low"], gain["high"]), claimed, evidence, margin, id=f"{name}/{metric}")


def _of_all(claim: str, metric: str, each: Sequence[Verdict], changes: Sequence[float]) -> list[Verdict]:
    """The claim for every model, as the paper states it."""
    if not each:
        return []
    places = 3 if max(map(abs, changes)) < 0.1 else 2
    low, high = (f"{change:+.{places}f}" for change in (min(changes), max(changes)))
    count = sum(verdict.outcome is Outcome.REPLICATED for verdict in each)
    every = claims.together(f"every model: {claim}", each, id=f"all/{metric}")
    evidence = f"{count} of {len(each)} models; changes from {low} to {high}"
    return [replace(every, evidence=evidence, measured=f"{low} to {high} ({len(each)} models)", detectable=None)]


def _by_curves(by_model: Mapping[str, Row]) -> list[Verdict]:
    """Read directly from the curves: most of the gain comes early, and alpha = 1 is worse than 0."""
    if not by_model:
        return []
    losses = {
        name: {line["alpha"]: line["cross_entropy"] for line in row["alpha_table"]} for name, row in by_model.items()
    }
    early = {name: _early_share(loss) for name, loss in losses.items()}
    return [
        claims.certain(
            f"every model: an alpha of {SMALL_ALPHA:g} or less gives most of the gain in cross-entropy",
            all(share > 0.5 for share in early.values()),
            ", ".join(f"{name} {share:.0%}" for name, share in early.items()),
            id="all/small-alpha",
        ),
        claims.certain(
            "every model: with alpha = 1 the cross-entropy is worse than with 0",
            all(loss[1.0] > loss[0.0] for loss in losses.values()),
            ", ".join(f"{name} {loss[0.0]:.3f} at 0, {loss[1.0]:.3f} at 1" for name, loss in losses.items()),
            id="all/alpha-1",
            sanity=True,
        ),
    ]


def _early_share(loss: Mapping[float, float]) -> float:
    """The share of the largest gain that small alphas reach; 1 if there is no gain."""
    gains = {alpha: loss[0.0] - value for alpha, value in loss.items()}
    largest = max(gains.values())
    return max(gain for alpha, gain in gains.items() if alpha <= SMALL_ALPHA) / largest if largest else 1.0
