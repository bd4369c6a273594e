"""Alpha and a temperature on five CIFAR-100 networks that others trained: fitted on some images, judged on others.

    python -m benchmarks.alpha_cifar100 --data cifar100.npz --weights cifar100_resnets/ --out docs/results

Writes alpha-cifar100.json (every number), alpha-cifar100.svg (the curves) and alpha-cifar100.md. What has been
evaluated is kept in --work, and the same command goes on there.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from betternorm_lab.models.cifar_resnets import DEPTHS, MEAN, STD, CifarResNet

import betternorm
from betternorm.errors import UncertainGainWarning
from betternorm.integrations.checkpoints import load_checkpoint
from betternorm.weighing.alpha import weighed_layers
from betternorm.weighing.batches import output_and_target
from betternorm.weighing.evaluation import Evaluations
from betternorm.weighing.evidence import Gain, gain_between
from betternorm.weighing.metrics import CALIBRATED
from betternorm.weighing.metrics import METRICS as KNOWN
from betternorm.weighing.result import AlphaSearch
from betternorm.weighing.scale import from_u, to_u
from betternorm.weighing.search import tune_alpha
from betternorm.weighing.temperature import at_inverse, best_inverse

Batches = list[tuple[torch.Tensor, torch.Tensor]]

METRICS = ("top1", "top5", "cross_entropy", CALIBRATED)
BATCH = 50  # small and channels last: the fastest on a CPU
SEED = 0  # of the halves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="an .npz with test_images and test_labels")
    parser.add_argument("--weights", type=Path, required=True, help="the folder with resnet8_cifar100.pth and so on")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/alpha-cifar100"), help="where unfinished work is kept")
    parser.add_argument("--depths", type=int, nargs="+", default=list(DEPTHS))
    parser.add_argument("--images", type=int, default=10_000, help="of the test set, half of them to tune on")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(parents=True, exist_ok=True)
    arguments.out.mkdir(parents=True, exist_ok=True)

    to_tune, to_judge = halves(arguments.data, arguments.images)
    results = []
    for depth in arguments.depths:
        network = partial(load, depth, arguments.weights / f"resnet{depth}_cifar100.pth")
        kept = arguments.work / f"resnet{depth}.pt"
        result = once(kept.with_suffix(".json"), partial(measure, network, to_tune, to_judge, kept))
        results.append({"depth": depth, **result})
        print(summary(results[-1]), flush=True)
    write(results, arguments.out)


def load(depth: int, weights: Path) -> torch.nn.Module:
    model = betternorm.convert(load_checkpoint(CifarResNet(depth), weights), "weighed")
    return model.to(memory_format=torch.channels_last)


def once(path: Path, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    if not path.exists():
        path.write_text(json.dumps(work()))
    return json.loads(path.read_text())


def halves(path: Path, images: int) -> list[Batches]:
    """Batches of two random halves of so many test images."""
    with np.load(path) as file:
        pixels = torch.from_numpy(file["test_images"]).permute(0, 3, 1, 2)
        labels = torch.from_numpy(file["test_labels"])
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))[:images]
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in (MEAN, STD))
    normalised = ((pixels / 255 - mean) / std).contiguous(memory_format=torch.channels_last)
    return [[(normalised[rows], labels[rows]) for rows in half.split(BATCH)] for half in order.chunk(2)]


def measure(network: Callable[[], torch.nn.Module], to_tune: Batches, to_judge: Batches, kept: Path) -> dict[str, Any]:
    model = network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncertainGainWarning)  # the table says it
        search = tune_alpha(model, to_tune, METRICS, resume=kept, require_significant=False)
    settings = {name: search.best[name] for name in ("top1", "cross_entropy", CALIBRATED)}
    # The temperature of the network as trained is fitted on the same images as the others.
    tuned = evaluated(network(), to_tune, [0.0])
    inverse = best_inverse(tuned.values[CALIBRATED][0.0], tuned.counts[CALIBRATED])
    temperature = {"as trained": 1 / inverse, "both": search.temperature}
    judged = evaluated(network(), to_judge, [0.0, *settings.values()])
    return {
        "search": search.to_dict(),
        "settings": settings,
        "temperature": temperature,
        "rows": four_rows(judged, settings, temperature),
        "accuracy": {name: vars(change(judged, alpha, "top1")) for name, alpha in settings.items()},
    }


def evaluated(model: torch.nn.Module, data: Batches, alphas: list[float]) -> Evaluations:
    metrics = {name: KNOWN[name] for name in METRICS}
    found = Evaluations(model, weighed_layers(model), data, metrics, output_and_target, None, None, False, 0.0)
    found.evaluate(alphas)
    return found


def four_rows(
    judged: Evaluations, settings: dict[str, float], temperature: dict[str, float | None]
) -> dict[str, dict[str, Any]]:
    """The cross-entropy with what was fitted on the other images, and what alpha gives beyond the temperature."""
    assert temperature["as trained"] is not None
    assert temperature["both"] is not None
    curves, counts = judged.values[CALIBRATED], judged.counts[CALIBRATED]
    plain = judged.values["cross_entropy"]
    cooled = at_inverse(curves[0.0], 1 / temperature["as trained"])
    both = at_inverse(curves[settings[CALIBRATED]], 1 / temperature["both"])
    metric = KNOWN["cross_entropy"]
    return {
        name: vars(gain_between(metric, before, after, counts))
        for name, before, after in (
            ("temperature alone", plain[0.0], cooled),
            ("alpha alone", plain[0.0], plain[settings["cross_entropy"]]),
            ("both", plain[0.0], both),
            ("beyond temperature", cooled, both),
        )
    }


def change(judged: Evaluations, alpha: float, metric: str) -> Gain:
    column = judged.column(metric)
    before, after = column.numbers(0.0), column.numbers(alpha)
    return gain_between(column.metric, before, after, column.counts, column.units, seed=SEED)


def summary(result: dict[str, Any]) -> str:
    rows = {name: round(row["after"], 4) for name, row in result["rows"].items()}
    return f"ResNet-{result['depth']}: {result['rows']['both']['before']:.4f}, {rows}, {result['settings']}"


def write(results: list[dict[str, Any]], folder: Path) -> None:
    (folder / "alpha-cifar100.json").write_text(json.dumps(results, separators=(",", ":")) + "\n")
    figure(results, folder / "alpha-cifar100.svg")
    (folder / "alpha-cifar100.md").write_text(page(results))


def figure(results: list[dict[str, Any]], path: Path) -> None:
    """The curves of every network on the half that alpha was tuned on, relative to alpha = 0."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "betternorm"  # the same file from the same numbers
    drawing = Figure(figsize=(12, 4), layout="constrained")
    panels = (
        ("cross_entropy", "cross-entropy", 1),
        (CALIBRATED, "cross-entropy after temperature", 1),
        ("top1", "top-1, points", 100),
    )
    for axes, (metric, title, scale) in zip(drawing.subplots(1, 3), panels, strict=True):
        for shade, result in zip(np.linspace(0.25, 0.95, len(results)), results, strict=True):
            rows = [row for row in result["search"]["table"] if row["alpha"] <= 0.2]
            change = [scale * (row[metric] - rows[0][metric]) for row in rows]
            colour = matplotlib.colormaps["viridis_r"](shade)
            axes.plot([row["alpha"] for row in rows], change, "o-", markersize=3, color=colour, linewidth=1.2)
            axes.lines[-1].set_label(f"ResNet-{result['depth']}")
        axes.axhline(0, color="#999999", linewidth=0.8, linestyle="--")
        axes.set_xscale("function", functions=(to_u, from_u))
        axes.set_xticks([0, 0.01, 0.03, 0.06, 0.1, 0.15, 0.2])
        axes.set_xlabel("alpha")
        axes.set_title(f"{title}: change from alpha = 0", fontsize=10)
    axes.legend(fontsize=8)
    drawing.savefig(path, metadata={"Date": None})


def page(results: list[dict[str, Any]]) -> str:
    searched = [AlphaSearch.from_dict(result["search"]) for result in results]
    four, accuracy, folds = [], [], []
    for result, search in zip(results, searched, strict=True):
        name, rows, settings = f"ResNet-{result['depth']}", result["rows"], result["settings"]
        cells = [f"{rows['both']['before']:.4f}"]
        cells += [f"{rows[key]['after']:.4f}" for key in ("alpha alone", "temperature alone", "both")]
        four.append(f"| {name} | {' | '.join(cells)} | {_change(rows['beyond temperature'], 1, 4)} |")
        cells = [f"{settings[key]:.4f} | {_change(result['accuracy'][key], 100, 2)}" for key in settings]
        before = 100 * result["accuracy"]["top1"]["before"]
        accuracy.append(f"| {name} | {before:.2f} | {' | '.join(cells)} |")
        gain = search.gains[CALIBRATED]
        folds.append(
            f"| {name} | {search.evaluations} | {search.passes} | {gain.before:.4f} | {gain.after:.4f} "
            f"| {_change(vars(gain), 1, 4)} | {'yes' if search.significant else 'no'} |"
        )
    return PAGE.format(
        examples=searched[0].examples,
        images=2 * searched[0].examples,
        folds=searched[0].folds,
        four="\n".join(four),
        accuracy="\n".join(accuracy),
        by_folds="\n".join(folds),
    )


PAGE = """\
# Alpha on five CIFAR-100 networks trained by others

ResNet-8 to 32 with plain BatchNorm, from the public repository karanchahal/distiller. {images} images of the CIFAR-100
test set fall into two random halves of {examples}: one fits alpha and the temperature, the other judges them. Nothing
is trained. Intervals are 95 % paired intervals of the change. One network of each depth, one split.

    python -m benchmarks.alpha_cifar100 --data cifar100.npz --weights cifar100_resnets --images {images}

## Is it more than a temperature?

Cross-entropy on the half that fitted nothing. Alpha alone is the best alpha for the cross-entropy as it is; with both,
alpha is the best one after a temperature.

| network | as trained | alpha alone | temperature alone | both | alpha beyond the temperature |
| --- | ---: | ---: | ---: | ---: | --- |
{four}

Much of what alpha alone does is to soften outputs that are too sure. The deeper the network, the more of that there is
to do; one temperature does it better, and changes no answer. What alpha adds to it stands in the last column.

![the cross-entropy, before and after a temperature, and top-1, against alpha](alpha-cifar100.svg)

The curves are of the half that alpha was tuned on.

## Top-1, by what alpha was chosen for

The change in points on the half that chose nothing.

| network | as trained | alpha for top-1 | change | alpha for cross-entropy | change | after temperature | change |
| --- | ---: | ---: | --- | ---: | --- | ---: | --- |
{accuracy}

## What {folds} folds said, without the other half

What `tune_alpha` reports from the tuning half alone: the cross-entropy after a temperature. Its interval is wide enough
for the best of all alphas tried.

| network | alphas tried | passes | temperature alone | both | change | significant |
| --- | ---: | ---: | ---: | ---: | --- | --- |
{by_folds}
"""


def _change(gain: dict[str, Any], scale: float, places: int) -> str:
    change, low, high = (scale * number for number in (gain["after"] - gain["before"], gain["low"], gain["high"]))
    return f"{change:+.{places}f} ({low:+.{places}f} to {high:+.{places}f})"


if __name__ == "__main__":
    main()
