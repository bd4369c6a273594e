"""Where decay on gamma and beta can act in well-known networks: the table of docs/decay-paths.md.

    python lab/src/betternorm_lab/studies/decay_paths.py --update docs/decay-paths.md

Networks have their initial weights, seeded; four random images of the size in the table; torch on one CPU thread.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from betternorm.decay.effects import ACTS
from betternorm.decay.report import NormReport, norm_report
from betternorm.integrations.models import load_model

# Measuring each of their layers takes up to an hour on a CPU; their effects are estimated.
ESTIMATED = ("nasnetalarge", "inception_v3, auxiliary head")

# name in the table, model, what it is built with, side of the images
NETWORKS: list[tuple[str, str, dict[str, Any], int]] = [
    ("resnet50", "torchvision:resnet50", {}, 96),
    ("resnet152", "torchvision:resnet152", {}, 96),
    ("resnetv2_50", "timm:resnetv2_50", {}, 96),
    ("inception_v3", "timm:inception_v3", {}, 139),
    ("inception_v3, auxiliary head", "torchvision:inception_v3", {"init_weights": False}, 299),
    ("mobilenetv2_100", "timm:mobilenetv2_100", {}, 96),
    ("densenet121", "torchvision:densenet121", {}, 96),
    ("nasnetalarge", "timm:nasnetalarge", {}, 96),
    ("convnext_tiny", "timm:convnext_tiny", {}, 96),
    ("convnext_tiny, layer scale 1", "timm:convnext_tiny", {"ls_init_value": 1.0}, 96),
    ("vit_tiny", "timm:vit_tiny_patch16_224", {}, 224),
]
EXAMPLES = 4
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME", help="one network of the table")
    parser.add_argument("--update", type=Path, metavar="FILE", help="replace the table in this document")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        f"| network | images | norm layers | with a path | effect above {ACTS} | of these without a path "
        "| those without a path, together | the paths |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, spec, keywords, side in NETWORKS:
        if arguments.only in (None, name):
            started = time.monotonic()
            lines.append(row(name, side, report_on(spec, keywords, side, quick=name in ESTIMATED)))
            print(lines[-1], f"  ({time.monotonic() - started:.0f} s)", flush=True)
    if arguments.update:
        text = arguments.update.read_text()
        before, after = text[: text.index(BEGIN)], text[text.index(END) :]
        arguments.update.write_text(before + "\n".join([BEGIN, *lines, ""]) + after)


def report_on(spec: str, keywords: dict[str, Any], side: int, quick: bool) -> NormReport:
    torch.manual_seed(0)
    return norm_report(load_model(spec, **keywords), torch.randn(EXAMPLES, 3, side, side), quick=quick)


def row(name: str, side: int, report: NormReport) -> str:
    both = [layer for layer in report.with_effect if layer.path]
    blocks = list(dict.fromkeys(layer.name.rpartition(".")[0] or layer.name for layer in report.with_path))
    shown = ", ".join(f"`{block}`" for block in blocks[:4]) + (
        f" and {len(blocks) - 4} more" if len(blocks) > 4 else ""
    )
    counts = (len(report), len(report.with_path), len(report.with_effect), len(report.with_effect) - len(both))
    name += " (estimated)" * report.quick
    return f"| {name} | {side}×{side} | {' | '.join(map(str, counts))} | {report.joint_effect or 0:.3f} | {shown} |"


if __name__ == "__main__":
    main()
