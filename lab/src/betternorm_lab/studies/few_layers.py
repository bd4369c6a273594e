"""The gain from alpha in one, three and five layers, for pretrained CIFAR-100 models.

    python -m betternorm_lab.studies.few_layers --data cifar100.npz --weights cifar100_resnets/

Alpha is tuned and cross-validated on half of the test set, as `tune_alpha` does. docs/serving.md has the table.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path

import numpy as np
import torch
from betternorm_lab.models.cifar_resnets import MEAN, STD, CifarResNet

import betternorm
from betternorm.display.tables import table
from betternorm.errors import UncertainGainWarning
from betternorm.integrations.checkpoints import load_checkpoint
from betternorm.weighing.search import tune_alpha

Batches = list[tuple[torch.Tensor, torch.Tensor]]
BATCH = 50  # the fastest on a CPU, with channels_last


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m betternorm_lab.studies.few_layers", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--data", type=Path, required=True, help="an .npz with test_images and test_labels")
    parser.add_argument("--weights", type=Path, required=True, help="the folder with resnet8_cifar100.pth and so on")
    parser.add_argument("--depths", type=int, nargs="+", default=[8, 14, 20])
    parser.add_argument("--images", type=int, default=10_000, help="of the test set, half of which is used (10000)")
    parser.add_argument("--work", type=Path, default=Path("/tmp/few-layers"), help="for intermediate results")
    parser.add_argument("--json", type=Path, default=Path("few-layers.json"))
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(parents=True, exist_ok=True)
    to_tune = tuning_half(arguments.data, arguments.images)
    lines, results = [], {}
    for depth in arguments.depths:
        model = load(depth, arguments.weights / f"resnet{depth}_cifar100.pth")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UncertainGainWarning)  # the table has the intervals
            kept = arguments.work / f"{depth}-{arguments.images}.pt"
            found = tune_alpha(model, to_tune, layers=3, resume=kept)
        print(f"ResNet-{depth}\n{found}\n", flush=True)
        results[depth] = found.to_dict()
        arguments.json.write_text(json.dumps(results, separators=(",", ":")) + "\n")
        assert found.few_layers is not None
        for row in found.few_layers.rows:
            gain = row.gain
            interval = f"{gain.low:+.4f} to {gain.high:+.4f}"
            where = str(row.layers) if row is not found.few_layers.rows[-1] else "all"
            change = f"{gain.difference:+.4f}"
            lines.append(
                [
                    f"ResNet-{depth}",
                    where,
                    f"{gain.after:.4f}",
                    change,
                    interval,
                    "none" if row.share is None else f"{row.share:.0%}",
                    row.work,
                ]
            )
    print(
        table(["network", "layers", "after temperature", "change", "95 % interval", "of the gain", "not folded"], lines)
    )


def load(depth: int, weights: Path) -> torch.nn.Module:
    model = betternorm.convert(load_checkpoint(CifarResNet(depth), weights), "weighed")
    return model.to(memory_format=torch.channels_last)


def tuning_half(path: Path, images: int) -> Batches:
    """Half of a random sample of the test images, in batches."""
    with np.load(path) as file:
        pixels = torch.from_numpy(file["test_images"]).permute(0, 3, 1, 2)
        labels = torch.from_numpy(file["test_labels"])
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:images]
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in (MEAN, STD))
    normalized = ((pixels / 255 - mean) / std).contiguous(memory_format=torch.channels_last)
    return [(normalized[rows], labels[rows]) for rows in order.chunk(2)[0].split(BATCH)]


if __name__ == "__main__":
    main()
