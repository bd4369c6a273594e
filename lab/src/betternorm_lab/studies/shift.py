"""Alpha on shifted data: seven models, six corruptions, compared with test-time batch statistics and linear mixing.

    python -m betternorm_lab.studies.shift --data cifar100.npz --weights cifar100_resnets/ --out docs/results

Alpha is chosen on 500 images and evaluated on 1,000 others; for each corruption it is chosen on clean images and the
other five corruptions, so that the evaluated corruption is unseen. Writes shift.json, shift.md and shift.svg.
Intermediate results are stored in --work, and the same command continues from them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from betternorm_lab import training
from betternorm_lab.data import Loader
from betternorm_lab.experiments.scales import GROUPS, SMALL
from betternorm_lab.models.cifar_resnets import DEPTHS, MEAN, STD, CifarResNet
from betternorm_lab.report.figures import to_svg
from betternorm_lab.store import write_text
from betternorm_lab.training import Config
from betternorm_lab.trials import Runtime
from torch import Tensor, nn

import betternorm
from betternorm.integrations.checkpoints import load_checkpoint
from betternorm.weighing.alpha import alpha_as_trained, set_alpha, weighed_layers
from betternorm.weighing.calibration import calibrate
from betternorm.weighing.shifts import Rule, Shift, corruptions

KINDS = ("noise", "blur", "contrast", "brightness", "fog", "compression")
STRENGTH = 3
SETS = ("clean", *KINDS)
AWAY = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3)  # distance of alpha from that of training
CHOOSE, JUDGE = 500, 1000  # images
SEED = 0  # of the order of the test set
MOST_CLEAN_LOSS = 0.005  # of top-1
RULES = {"mean": Rule(True), "clean": Rule(True, MOST_CLEAN_LOSS)}
BATCHES = {  # batch statistics at test time: size and order
    "batch 1": (1, False),  # of one image each: alpha = 1
    "batch 8": (8, False),
    "batch 64": (64, False),
    "batch 8, one class": (8, True),
    "batch 64, one class": (64, True),
}
LAB = replace(SMALL, tune_alpha=False, test=False)  # photographs of flowers, 20 classes
LAB_NETWORKS = {
    "lab, ghost size 4": {"norm": "ghost", "norm_options": {"ghost_size": 4}},
    "lab, Group Norm": {"norm": "group", "norm_options": {"num_groups": GROUPS["small"]}},
}


@dataclass
class Network:
    """A converted model, the images that alpha is chosen on, those it is evaluated on, and the corruptions."""

    model: nn.Module
    choose: tuple[Tensor, Tensor]
    judge: tuple[Tensor, Tensor]
    shifts: dict[str, Shift]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="cifar100.npz")
    parser.add_argument("--weights", type=Path, required=True, help="the folder with resnet8_cifar100.pth and so on")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/shift"), help="for intermediate results")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(parents=True, exist_ok=True)
    makers: dict[str, Callable[[], Network]] = {
        f"ResNet-{depth}": partial(published, depth, arguments.weights, arguments.data) for depth in DEPTHS
    }
    makers |= {name: partial(of_the_lab, name, arguments.data.parent, arguments.work) for name in LAB_NETWORKS}
    results = {}
    for name, make in makers.items():
        kept = arguments.work / f"{name.replace(' ', '-')}.npz"
        if not kept.exists():
            np.savez_compressed(kept, **measure(make()))
        with np.load(kept) as file:
            results[name] = conclude(dict(file))
        print(name, results[name]["alpha"], flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "shift.json").write_text(json.dumps(results, separators=(",", ":")) + "\n")
    (arguments.out / "shift.md").write_text(page(results))
    figure(results, arguments.out / "shift.svg")


# ---- the networks ----


def published(depth: int, weights: Path, data: Path) -> Network:
    with np.load(data) as file:
        pixels = torch.from_numpy(file["test_images"]).permute(0, 3, 1, 2)
        labels = torch.from_numpy(file["test_labels"]).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in (MEAN, STD))

    def part(rows: Tensor) -> tuple[Tensor, Tensor]:
        return ((pixels[rows] / 255 - mean) / std).contiguous(memory_format=torch.channels_last), labels[rows]

    model = load_checkpoint(CifarResNet(depth), weights / f"resnet{depth}_cifar100.pth")
    model = betternorm.convert(model, "weighed").eval().to(memory_format=torch.channels_last)
    return Network(model, part(order[:CHOOSE]), part(order[CHOOSE : CHOOSE + JUDGE]), _shifts(MEAN, STD))


def of_the_lab(name: str, data_root: Path, work: Path) -> Network:
    config = Config(**LAB.config | LAB_NETWORKS[name])
    runtime = Runtime(threads=torch.get_num_threads(), accelerator="cpu", show=False, data_root=str(data_root))
    folder = work / name.replace(" ", "-")
    training.train(config, folder, runtime)
    model = training.trained(config, folder, runtime).eval()
    if not weighed_layers(model):
        betternorm.convert(model, "weighed")
    data = training.load_data(config, runtime)
    assert data.test is not None
    parts = []
    for split, count in ((data.validation, CHOOSE), (data.test, JUDGE)):
        rows = torch.randperm(len(split), generator=torch.Generator().manual_seed(SEED))[:count]
        batches = list(Loader(data, split.take(rows), 250))
        parts.append(tuple(torch.cat([batch[k] for batch in batches]) for k in (0, 1)))
    if any(layer.alpha == 1 for layer in weighed_layers(model).values()):
        calibrate(model, parts[0][0].split(250), progress=False)
    return Network(model, parts[0], parts[1], _shifts(data.facts.mean, data.facts.std))


def _shifts(mean: Sequence[float], std: Sequence[float]) -> dict[str, Shift]:
    return {kind: corruptions(f"{kind}:{STRENGTH}", mean, std)[f"{kind}:{STRENGTH}"] for kind in KINDS}


# ---- measuring: which answers are right ----


def measure(network: Network) -> dict[str, np.ndarray]:
    """Right or wrong for every image, by part, set and method."""
    model = network.model
    baseline = alpha_as_trained(weighed_layers(model))
    found: dict[str, np.ndarray] = {"baseline": np.array(baseline)}

    def images_of(part: str, name: str) -> tuple[Tensor, Tensor]:
        images, labels = getattr(network, part)
        return (images if name == "clean" else torch.cat([network.shifts[name](x) for x in images.split(250)])), labels

    for name in SETS:
        images, labels = images_of("choose", name)
        for away in AWAY:
            set_alpha(model, abs(baseline - away))
            found[f"choose|{name}|{away}"] = right(model, images, labels)
        print(name, end=" ", flush=True)
    chosen = choices(found)
    for name in SETS:
        images, labels = images_of("judge", name)
        for away in sorted({0.0, *(chosen[rule][name] for rule in chosen)}):
            set_alpha(model, abs(baseline - away))
            found[f"judge|{name}|{away}"] = right(model, images, labels)
        if baseline == 0:  # Group Norm has no use for the statistics of a batch
            with changed(model, own_statistics_mixed_linearly(chosen["mean"][name])):
                found[f"judge|{name}|linear"] = right(model, images, labels)
            for method, (size, by_class) in BATCHES.items():
                if size == 1:
                    set_alpha(model, 1.0)
                    found[f"judge|{name}|{method}"] = right(model, images, labels)
                else:
                    with changed(model, statistics_of_the_batch):
                        found[f"judge|{name}|{method}"] = right(model, images, labels, size, by_class)
        print(name, end=" ", flush=True)
    return found


def right(model: nn.Module, images: Tensor, labels: Tensor, size: int = 50, by_class: bool = False) -> np.ndarray:
    """In batches of this size; by class, in batches that hold one class alone."""
    rows = (
        [torch.nonzero(labels == label)[:, 0] for label in labels.unique()] if by_class else [torch.arange(len(labels))]
    )
    answers = torch.empty(len(labels), dtype=torch.long)
    with torch.inference_mode():
        for batch in (batch for part in rows for batch in part.split(size)):
            answers[batch] = model(images[batch].contiguous(memory_format=torch.channels_last)).argmax(1)
    return (answers == labels).numpy()


Forward = Callable[[nn.Module, Tensor], Tensor]


@contextmanager
def changed(model: nn.Module, forward: Forward) -> Iterator[None]:
    """The norm layers with another forward pass."""
    layers = weighed_layers(model).values()
    for layer in layers:
        layer.forward = forward.__get__(layer)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def statistics_of_the_batch(layer: nn.Module, x: Tensor) -> Tensor:
    """Nado et al., arXiv:2006.10963."""
    return nn.functional.batch_norm(x, None, None, layer.weight, layer.bias, True, 0.0, layer.eps)


def own_statistics_mixed_linearly(alpha: float) -> Forward:
    """As alpha-BN does (You et al., arXiv:2110.04065), of one image: without the term of the means' distance."""

    def forward(layer: nn.Module, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(x, (2, 3), correction=0, keepdim=True)
        mean = (1 - alpha) * layer.running_mean[:, None, None] + alpha * mean
        var = (1 - alpha) * layer.running_var[:, None, None] + alpha * var
        scale = layer.weight[:, None, None] * (var + layer.eps).rsqrt()
        return x * scale + (layer.bias[:, None, None] - mean * scale)

    return forward


# ---- choosing and evaluating alpha ----


def choices(found: Mapping[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """By rule and set: the distance of alpha from that of training, chosen without the evaluated corruption."""
    top1 = {name: {away: float(found[f"choose|{name}|{away}"].mean()) for away in AWAY} for name in SETS}
    return {
        key: {name: rule.choose(top1["clean"], [top1[kind] for kind in KINDS if kind != name], 0.0) for name in SETS}
        for key, rule in RULES.items()
    }


def conclude(found: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Top-1 of every method on every set, and the change by alpha with its interval, in points."""
    baseline, chosen = float(found["baseline"]), choices(found)
    rows = {}
    for name in SETS:
        before = found[f"judge|{name}|0.0"]
        row: dict[str, Any] = {"as trained": 100 * float(before.mean())}
        for rule, away in chosen.items():
            row[f"alpha, {rule}"] = change(before, found[f"judge|{name}|{away[name]}"])
        for method in ("linear", *BATCHES):
            if f"judge|{name}|{method}" in found:
                row[method] = 100 * float(found[f"judge|{name}|{method}"].mean())
        rows[name] = row
    alpha = {rule: {name: abs(baseline - value) for name, value in away.items()} for rule, away in chosen.items()}
    return {"baseline": baseline, "alpha": alpha, "top1": rows}


def change(before: np.ndarray, after: np.ndarray) -> dict[str, float]:
    """Top-1 after, and the paired 95 % interval of the change, in points."""
    difference = 100 * (after.astype(float) - before)
    half = 1.96 * difference.std(ddof=1) / np.sqrt(len(difference))
    middle = difference.mean()
    return {"top1": 100 * float(after.mean()), "change": middle, "low": middle - half, "high": middle + half}


def figure(results: Mapping[str, Any], path: Path) -> None:
    """From the alpha of training to the chosen one, on every kind of image."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(12, 3.4), layout="constrained")
    panels = drawing.subplots(1, len(SHOWN), sharey=True)
    rows = range(len(SETS), 0, -1)
    for axes, (name, title) in zip(panels, SHOWN.items(), strict=True):
        for row, images in zip(rows, SETS, strict=True):
            top1 = results[name]["top1"][images]
            before, after = top1["as trained"], top1["alpha, mean"]["top1"]
            colour = "#1b7f4d" if after >= before else "#c1440e"
            axes.plot([before, after], [row, row], color=colour, linewidth=3.5, solid_capstyle="butt", zorder=2)
            axes.plot(before, row, "o", markersize=6, color="white", markeredgecolor="#444444", zorder=3)
            axes.plot(after, row, "o", markersize=6, color=colour, zorder=3)
            for method, mark in (("batch 64", "|"), ("batch 64, one class", "x")):
                if method in top1:
                    axes.plot(top1[method], row, mark, markersize=8 if mark == "|" else 5, color="#888888", zorder=1)
        axes.set_title(title, fontsize=10)
        axes.set_xlim(0, 80)
        axes.set_xlabel("top-1, %")
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    panels[0].set_yticks(rows, SETS)
    panels[0].plot([], [], "o", color="white", markeredgecolor="#444444", label="baseline")
    panels[0].plot([], [], "o", color="#1b7f4d", label="with alpha")
    panels[0].plot([], [], "|", color="#888888", markersize=8, label="statistics of 64 random images")
    panels[0].plot([], [], "x", color="#888888", markersize=5, label="statistics of images of one class")
    drawing.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    write_text(path, to_svg(drawing))


def page(results: Mapping[str, Any]) -> str:
    parts = []
    for name, result in results.items():
        methods = [method for method in METHODS if method in result["top1"]["clean"]]
        lines = [
            f"### {name}",
            "",
            f"| images | baseline | alpha, best mean | change | alpha, clean cost {100 * MOST_CLEAN_LOSS:g} | change "
            + "".join(f"| {METHODS[method]} " for method in methods)
            + "|",
            "| --- | ---: | ---: | --- | ---: | --- " + "| ---: " * len(methods) + "|",
        ]
        for images in SETS:
            row, cells = result["top1"][images], []
            for rule in RULES:
                gain = row[f"alpha, {rule}"]
                cells.append(f"{gain['top1']:.1f} at {result['alpha'][rule][images]:g}")
                cells.append(f"{gain['change']:+.1f} ({gain['low']:+.1f} to {gain['high']:+.1f})")
            cells += [f"{row[method]:.1f}" for method in methods]
            lines.append(f"| {images} | {row['as trained']:.1f} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    changes = {name: result["top1"]["compression"]["alpha, mean"] for name, result in results.items()}
    worst = min(changes, key=lambda name: changes[name]["change"])
    lost = changes[worst]
    compression = f"{worst} loses {-lost['change']:.1f} points ({lost['low']:+.1f} to {lost['high']:+.1f})"
    return PAGE.format(
        compression=compression,
        choose=CHOOSE,
        judge=JUDGE,
        strength=STRENGTH,
        summary="\n".join(summary(results)),
        tables="\n\n".join(parts),
    )


def summary(results: Mapping[str, Any]) -> list[str]:
    """The mean over the corruptions, and the change on clean images."""
    lines = [
        "| network | clean | corrupted | alpha, best mean: clean | corrupted | batch 64: clean | corrupted "
        "| batch 64, one class: clean | corrupted |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, result in results.items():
        top1, cells = result["top1"], []
        for method in ("as trained", "alpha, mean", "batch 64", "batch 64, one class"):
            values = {images: row.get(method) for images, row in top1.items()}
            if None in values.values():
                cells += ["", ""]
                continue
            numbers = {images: value["top1"] if isinstance(value, dict) else value for images, value in values.items()}
            cells += [f"{numbers['clean']:.1f}", f"{sum(numbers[kind] for kind in KINDS) / len(KINDS):.1f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


SHOWN = {  # in the figure
    "ResNet-8": "ResNet-8",
    "ResNet-20": "ResNet-20",
    "ResNet-32": "ResNet-32",
    "lab, ghost size 4": "trained with ghost size 4",
}
METHODS = {
    "linear": "linear mixing",
    "batch 1": "batch 1",
    "batch 8": "batch 8",
    "batch 64": "batch 64",
    "batch 8, one class": "batch 8, one class",
    "batch 64, one class": "batch 64, one class",
}
PAGE = """\
# Alpha under shifted data

Top-1 in percent. Nothing is trained, and with alpha each image is processed independently. Alpha is chosen on {choose}
images and evaluated on {judge} others (fewer for the two models of the lab). For each corruption it is chosen on clean
images and the *other* five corruptions, so the evaluated corruption is unseen; for clean images it is chosen on all
six. All corruptions have strength {strength} of 5.

    python -m betternorm_lab.studies.shift --data cifar100.npz --weights cifar100_resnets

{summary}

![Top-1 of four models on clean and corrupted images, baseline and with alpha](shift.svg)

The ResNets are pretrained CIFAR-100 models. The two models of the lab are not: they are small networks trained on 20
classes of Flowers-102, one with ghost size 4 and one with Group Norm, and alpha is chosen on their 200 validation
images. *Corrupted* is the mean over the six corruptions. Alpha gains most on blur, fog and low contrast. On compression
it does not help: {compression}.

## By corruption

Two rules choose alpha: the best mean over clean and corrupted images, and the best on corrupted images that costs at
most 0.5 points on clean images (on the images it is chosen on). Intervals are paired 95 % intervals of the change from
the baseline. For comparison:

- **linear mixing**: the same alpha, with the variances mixed linearly as in alpha-BN, without the term for the distance
  between the means.
- **batch 1, 8, 64**: the statistics of the test batch instead of the moving averages, with batches of 1, 8 or 64 images
  in random order, or of one class at a time (about ten images per class, so 64 means all of them).

{tables}
"""


if __name__ == "__main__":
    main()
