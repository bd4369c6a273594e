"""``betternorm diagnose``: what is wrong with the norm layers of a trained model, what it costs, and what fixes it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from betternorm.advice import diagnose
from betternorm.cli import FINDING, OK
from betternorm.cli.data import (
    add_model_options,
    add_running_options,
    build_model,
    check_at_least,
    check_exists,
    check_predictions,
    find_device,
    first_line,
    read_data,
)
from betternorm.cli.files import write_all
from betternorm.cli.parser import CommandParser
from betternorm.display.terminal import show
from betternorm.errors import UserError

EXAMPLES = """\
examples:
  betternorm diagnose timm:resnet50 --checkpoint resnet50.safetensors --data val
  betternorm diagnose timm:resnet50 --checkpoint a.pt --data val --try-fixes

Nothing is changed. Exit codes: 0 the norm layers are fine, 1 a finding.
"""


def add_arguments(parser: CommandParser) -> None:
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("model", metavar="MODEL", help="timm:NAME, torchvision:NAME or file.py:function")
    add("--checkpoint", type=Path, required=True, metavar="FILE", help=".pt, .pth or .safetensors")
    add("--data", required=True, help="class folders, .npz or .pt with images and labels, or a dataset name")
    add("--stats-data", metavar="DATA", help="training data: tells wrong averages from shifted data")
    add("--train-batch-size", type=int, metavar="N", help="examples per process in training")
    add("--try-fixes", action="store_true", help="also measure what each fix gains, on images it did not use")
    add("--output", "--out", dest="out", type=Path, metavar="FILE", help="also write the findings as .json")
    add_model_options(parser, max_examples=2000)
    add_running_options(parser, dry_run=False)


def run(arguments: argparse.Namespace) -> int:
    check_at_least(arguments, batch_size=1, max_examples=1, num_classes=1, train_batch_size=1)
    if arguments.out is not None and arguments.out.exists() and not arguments.force:
        raise UserError(f"--out {arguments.out} exists; pass --force to overwrite it")
    for option, data in (("--data", arguments.data), ("--stats-data", arguments.stats_data)):
        if data is not None:
            check_exists(option, data)
    device = find_device(arguments.device)
    model = build_model(arguments, device)
    data = read_data(arguments, arguments.data, model, device)
    check_predictions(model, data, device, plausible=False)  # a broken model is what this is for
    stats = None if arguments.stats_data is None else read_data(arguments, arguments.stats_data, model, device).loader
    try:
        diagnosis = diagnose(
            model,
            data.loader,
            stats_loader=None if stats is None else _shuffled(stats, arguments.batch_size),
            train_batch_size=arguments.train_batch_size,
            try_fixes=arguments.try_fixes,
            max_examples=arguments.max_examples,
            progress=False if arguments.quiet or arguments.json else None,
        )
    except (ValueError, TypeError) as error:
        raise UserError(first_line(error)) from error
    if arguments.out is not None:
        write_all({arguments.out: diagnosis.save})
    if arguments.json:
        print(json.dumps(diagnosis.to_dict(), indent=2))
    else:
        show(diagnosis)
    return OK if diagnosis.is_healthy else FINDING


def _shuffled(loader: Iterable[tuple[Tensor, Tensor]], batch_size: int) -> list[tuple[Tensor, Tensor]]:
    """Images in random order: that of the files is not the order of training."""
    x, y = (torch.cat([part.cpu() for part in parts]) for parts in zip(*loader, strict=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return [(x[rows], y[rows]) for rows in order.tensor_split(max(1, len(x) // batch_size))]
