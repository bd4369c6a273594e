"""Alpha on five CIFAR-100 networks that others trained: tuned on half of the test set, judged on the other half.

    python benchmarks/alpha_cifar100.py --data cifar100.npz --weights cifar100_resnets/ --out docs/results

Writes alpha-cifar100.json (every number), alpha-cifar100.svg (the curves) and alpha-cifar100.md. What has been
evaluated is kept in --work, and the same command goes on there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import betternorm
from betternorm.integrations.checkpoints import load_checkpoint
from betternorm.lab.models.cifar_resnets import DEPTHS, MEAN, STD, CifarResNet
from betternorm.weighing.comparison import compare_alpha
from betternorm.weighing.result import AlphaSearch
from betternorm.weighing.scale import from_u, to_u
from betternorm.weighing.search import alpha_grid, tune_alpha

Batches = list[tuple[torch.Tensor, torch.Tensor]]

METRICS = ("top1", "top5", "cross_entropy", "ece")
GRID = 33
BATCH = 50  # small and channels last: the fastest on a CPU
SEED = 0  # of the halves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="an .npz with test_images and test_labels")
    parser.add_argument("--weights", type=Path, required=True, help="the folder with resnet8_cifar100.pth and so on")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/alpha-cifar100"), help="where unfinished work is kept")
    parser.add_argument("--depths", type=int, nargs="+", default=list(DEPTHS))
    parser.add_argument("--per-layer", type=int, nargs="*", default=[], help="depths to fit one alpha per layer on")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(parents=True, exist_ok=True)
    arguments.out.mkdir(parents=True, exist_ok=True)

    to_tune, to_judge = halves(arguments.data)
    results = []
    for depth in arguments.depths:
        network = partial(load, depth, arguments.weights / f"resnet{depth}_cifar100.pth")
        kept = arguments.work / f"resnet{depth}.pt"
        result = once(kept.with_suffix(".json"), partial(measure, network, to_tune, to_judge, kept))
        if depth in arguments.per_layer:
            kept = arguments.work / f"resnet{depth}-per-layer.pt"
            work = partial(measure_per_layer, network, to_tune, to_judge, kept)
            result["per_layer"] = once(kept.with_suffix(".json"), work)
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


def halves(path: Path) -> list[Batches]:
    """Batches of two random halves of the test set."""
    with np.load(path) as file:
        pixels = torch.from_numpy(file["test_images"]).permute(0, 3, 1, 2)
        labels = torch.from_numpy(file["test_labels"])
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in (MEAN, STD))
    images = ((pixels / 255 - mean) / std).contiguous(memory_format=torch.channels_last)
    return [[(images[rows], labels[rows]) for rows in half.split(BATCH)] for half in order.chunk(2)]


def measure(network: Callable[[], torch.nn.Module], to_tune: Batches, to_judge: Batches, kept: Path) -> dict[str, Any]:
    search = tune_alpha(network(), to_tune, METRICS, resume=kept, insist=True)
    settings = {"cross_entropy": search.best["cross_entropy"], "top1": search.best["top1"]}
    judged = {name: judge(network(), to_judge, alpha) for name, alpha in settings.items()}
    # The grid begins with what the search has evaluated, and adds the rest.
    grid = tune_alpha(network(), to_tune, METRICS, grid=GRID, resume=kept, insist=True)
    points = set(alpha_grid(GRID) or ())
    return {
        "search": search.to_dict(),
        "settings": settings,
        "judged": judged,
        "grid": [row for row in grid.table if row["alpha"] in points],
    }


def measure_per_layer(
    network: Callable[[], torch.nn.Module], to_tune: Batches, to_judge: Batches, kept: Path
) -> dict[str, Any]:
    found = tune_alpha(
        network(), to_tune, ("cross_entropy", "top1"), resume=kept, insist=True, per_layer=True, epochs=2
    )
    assert found.per_layer is not None
    return {"search": found.to_dict(), "judged": judge(network(), to_judge, found.per_layer.alphas)}


def judge(model: torch.nn.Module, to_judge: Batches, alpha: float | dict[str, float]) -> dict[str, dict[str, Any]]:
    return {metric: vars(gain) for metric, gain in compare_alpha(model, to_judge, alpha, metrics=METRICS).items()}


def against_grid(result: dict[str, Any]) -> dict[str, float]:
    """How far the best of the search is from the best of the grid: cross-entropy in per cent of it, top-1 in points."""
    tried = result["search"]["table"]
    lowest, by_grid = (min(row["cross_entropy"] for row in rows) for rows in (tried, result["grid"]))
    highest, highest_by_grid = (max(row["top1"] for row in rows) for rows in (tried, result["grid"]))
    return {
        "cross_entropy_percent": 100 * (lowest / by_grid - 1),
        "top1_points": 100 * (highest - highest_by_grid),
        "evaluations": result["search"]["evaluations"],
        "passes": result["search"]["passes"],
    }


def summary(result: dict[str, Any]) -> str:
    gain = result["judged"]["cross_entropy"]["cross_entropy"]
    return f"ResNet-{result['depth']}: {gain['before']:.4f} -> {gain['after']:.4f} held out; {against_grid(result)}"


def write(results: list[dict[str, Any]], folder: Path) -> None:
    (folder / "alpha-cifar100.json").write_text(json.dumps(results, indent=1) + "\n")
    figure(results, folder / "alpha-cifar100.svg")
    (folder / "alpha-cifar100.md").write_text(page(results))


def figure(results: list[dict[str, Any]], path: Path) -> None:
    """The curves of every network on the half that alpha was tuned on, relative to alpha = 0."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "betternorm"  # the same file from the same numbers
    drawing = Figure(figsize=(12, 4), layout="constrained")
    panels = (("cross_entropy", "cross-entropy", 1), ("top1", "top-1, points", 100), ("top5", "top-5, points", 100))
    for axes, (metric, title, scale) in zip(drawing.subplots(1, 3), panels, strict=True):
        for shade, result in zip(np.linspace(0.25, 0.95, len(results)), results, strict=True):
            rows = sorted(
                result["grid"] + [r for r in result["search"]["table"] if r not in result["grid"]], key=_alpha
            )
            rows = [row for row in rows if row["alpha"] <= 0.2]
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


def _alpha(row: dict[str, float]) -> float:
    return row["alpha"]


def page(results: list[dict[str, Any]]) -> str:
    searched = [AlphaSearch.from_dict(result["search"]) for result in results]
    examples, folds = searched[0].examples, searched[0].folds
    lines = [
        "# Alpha on five CIFAR-100 networks trained by others",
        "",
        "ResNet-8 to 32 with plain BatchNorm, from the public repository karanchahal/distiller. The CIFAR-100 test set",
        f"falls into two random halves of {examples} images: one tunes alpha, the other judges it. Nothing is trained.",
        "Intervals are 95 % paired bootstrap intervals of the change. One network of each depth, one split.",
        "",
        "    python benchmarks/alpha_cifar100.py --data cifar100.npz --weights cifar100_resnets",
        "",
        "## On the half that did not choose alpha",
        "",
        "Alpha chosen for cross-entropy:",
        "",
        *_judged_table(results, "cross_entropy"),
        "",
        "Alpha chosen for top-1:",
        "",
        *_judged_table(results, "top1"),
        "",
        "![cross-entropy, top-1 and top-5 against alpha](alpha-cifar100.svg)",
        "",
        "The curves are of the half that tuned alpha.",
        "",
        "## The search against a grid of 33",
        "",
        "On the tuning half: the best the adaptive search found, against the best of a grid of 33 alphas (dense near 0",
        "and 1). Negative for cross-entropy and positive for top-1 mean that the search did better than the grid.",
        "",
        "| network | alphas tried | passes | cross-entropy against the grid | top-1 against the grid |",
        "| --- | --- | --- | --- | --- |",
    ]
    for result in results:
        row = against_grid(result)
        lines.append(
            f"| ResNet-{result['depth']} | {row['evaluations']} | {row['passes']} "
            f"| {row['cross_entropy_percent']:+.3f} % | {row['top1_points']:+.2f} points |"
        )
    lines += [
        "",
        f"## What {folds} folds said, without the other half",
        "",
        "The gain that `tune_alpha` reports from the tuning half alone, for comparison with the first table.",
        "",
        "| network | cross-entropy, as trained | tuned | 95 % interval of the change |",
        "| --- | --- | --- | --- |",
    ]
    for result, search in zip(results, searched, strict=True):
        gain = search.gains["cross_entropy"]
        lines.append(
            f"| ResNet-{result['depth']} | {gain.before:.4f} | {gain.after:.4f} | {gain.low:+.4f} to {gain.high:+.4f} |"
        )
    layered = [result for result in results if "per_layer" in result]
    if layered:
        lines += [
            "",
            "## One alpha per layer",
            "",
            "Fitted on the tuning half; cross-entropy on the other half, and the change by folds against one alpha for",
            "all, by which it is kept or not.",
            "",
            "| network | as trained | one alpha | alpha per layer | folds: change against one alpha | kept |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
    for result in layered:
        single, many = (part["judged"]["cross_entropy"] for part in (result, result["per_layer"]))
        single = single["cross_entropy"]
        fitted = AlphaSearch.from_dict(result["per_layer"]["search"]).per_layer
        assert fitted is not None
        change = fitted.against_single
        lines.append(
            f"| ResNet-{result['depth']} | {single['before']:.4f} | {single['after']:.4f} | {many['after']:.4f} "
            f"| {change.difference:+.4f} ({change.low:+.4f} to {change.high:+.4f}) "
            f"| {'yes' if fitted.kept else 'no'} |"
        )
    return "\n".join([*lines, ""])


def _judged_table(results: list[dict[str, Any]], chosen_for: str) -> list[str]:
    lines = [
        "| network | alpha | top-1 | change | top-5 | change | cross-entropy | change |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        cells = [f"ResNet-{result['depth']}", f"{result['settings'][chosen_for]:.4f}"]
        for metric, scale, places in (("top1", 100, 2), ("top5", 100, 2), ("cross_entropy", 1, 4)):
            gain = {
                name: value * scale for name, value in result["judged"][chosen_for][metric].items() if value is not None
            }
            change = gain["after"] - gain["before"]
            cells.append(f"{gain['before']:.{places}f} → {gain['after']:.{places}f}")
            cells.append(f"{change:+.{places}f} ({gain['low']:+.{places}f} to {gain['high']:+.{places}f})")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
