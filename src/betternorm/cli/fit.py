"""``betternorm fit``: make a pretrained model robust to corruptions with unlabeled images (section 3.1)."""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from betternorm.cli import FINDING, OK
from betternorm.cli.data import (
    CHECKED,
    Data,
    add_model_options,
    add_running_options,
    build_model,
    check_at_least,
    check_predictions,
    find_device,
    parse_floats,
    resumable,
)
from betternorm.cli.files import check_outputs, write_all
from betternorm.cli.parser import CommandParser
from betternorm.display.progress import clock
from betternorm.display.terminal import show
from betternorm.errors import UncertainGainWarning
from betternorm.integrations.checkpoints import save_checkpoint
from betternorm.integrations.images import read_unlabeled
from betternorm.integrations.loading import ImageLoader
from betternorm.integrations.preprocessing import Preprocessing, preprocessing
from betternorm.weighing.fit import PER, STEPS, fit_alpha
from betternorm.weighing.shifts import KINDS

EXAMPLES = """\
examples:
  betternorm fit timm:resnet50 --checkpoint resnet50.safetensors --images photos --max-clean-drop 0.5
  betternorm fit mine.py:build --checkpoint mine.pt --images photos --mean 0,0,0 --std 1,1,1 --shift noise,blur

Writes the checkpoint (--out), the fitted alphas with the strength curve (.json), and its plot (.png). Exit codes: 0 the
model is more robust, 1 no significant gain, 2 bad usage or input. To load the checkpoint:
model = betternorm.load(model, "fitted.pt")
"""


def add_arguments(parser: CommandParser) -> None:
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("model", metavar="MODEL", help="timm:NAME, torchvision:NAME or file.py:function")
    add("--checkpoint", type=Path, required=True, metavar="FILE", help=".pt, .pth or .safetensors")
    add("--images", type=Path, required=True, metavar="FOLDER", help="folder of images without labels, or an .npz")
    add("--output", "--out", dest="out", type=Path, metavar="FILE", help="(default: CHECKPOINT-fitted)")
    add = parser.add_argument_group("the fit").add_argument
    add("--per", choices=PER, default="channel", help="one alpha for each (default: channel)")
    add("--shift", metavar="NAMES", help=f"corruptions: some of {','.join(KINDS)} (default: all)")
    add("--max-clean-drop", type=float, metavar="X", help="in points (default: the best mean of clean and corrupted)")
    add("--steps", rare=True, type=int, default=STEPS, metavar="N", help=f"of Adam, per fit (default: {STEPS})")
    add("--seed", rare=True, type=int, default=0, metavar="N", help="(default: 0)")
    add(
        "--require-significant",
        rare=True,
        action=argparse.BooleanOptionalAction,
        default=True,
        help="leave alpha unchanged if the gain is not significant (default: yes)",
    )
    add_model_options(parser, max_examples=1000, labels=False)
    add_running_options(parser, batch_size=100)


def run(arguments: argparse.Namespace) -> int:
    check_at_least(arguments, batch_size=2, max_examples=1, num_classes=1, steps=1, workers=0)
    checkpoint: Path = arguments.checkpoint
    out: Path = arguments.out or checkpoint.with_name(f"{checkpoint.stem}-fitted{checkpoint.suffix}")
    outputs = [out, out.with_suffix(".json"), out.with_suffix(".png")]
    check_outputs(outputs, arguments.force or arguments.dry_run)
    device = find_device(arguments.device)
    model = build_model(arguments, device)
    mean, std = (parse_floats(name, getattr(arguments, name)) for name in ("mean", "std"))
    how = preprocessing(arguments.model, model, mean, std, arguments.size)
    images = read_unlabeled(arguments.images, how).limited(arguments.max_examples)
    loader = ImageLoader(images, batch_size=arguments.batch_size, num_workers=arguments.workers)
    sample = ImageLoader(images.limited(CHECKED), batch_size=arguments.batch_size)
    data = Data(loader, sample, len(images), str(how), (how.mean, how.std))
    seconds = check_predictions(model, data, device, plausible=False)
    if arguments.dry_run:
        batches = 3 * (3.3 * arguments.steps) + 7 * 3 * len(images) / arguments.batch_size  # forward passes' worth
        print(
            f"model:       {arguments.model}, {checkpoint}\n"
            f"images:      {len(images)} from {arguments.images}: {how}\n"
            f"would take:  about {clock(batches * seconds)} on {device}\n"
            f"would write: {', '.join(map(str, outputs))}"
        )
        return OK
    fit = _fitted(arguments, model, loader, how, out.with_suffix(".unfinished"))
    makers: dict[Path, Any] = {outputs[1]: fit.save, outputs[2]: fit.plot}
    if fit.strength:
        makers = {out: lambda path: save_checkpoint(model, path), **makers}
    write_all(makers)
    if arguments.json:
        print(json.dumps(fit.to_dict(), indent=2))
    else:
        load = f'\nto load it: model = betternorm.load(model, "{out}")' if fit.strength else ""
        show(f"{fit}\n\nwritten: {', '.join(map(str, makers))}{load}")
    return OK if fit.strength else FINDING


def _fitted(arguments: argparse.Namespace, model: nn.Module, loader: Any, how: Preprocessing, unfinished: Path) -> Any:
    """Fit, with intermediate results in a file until it is finished."""
    with resumable(unfinished), warnings.catch_warnings():
        warnings.simplefilter("ignore", UncertainGainWarning)  # the verdict says it
        return fit_alpha(
            model,
            loader,
            per=arguments.per,
            shifts=None if arguments.shift in (None, "all") else arguments.shift.split(","),
            mean=how.mean,
            std=how.std,
            max_clean_drop=arguments.max_clean_drop,
            steps=arguments.steps,
            batch_size=arguments.batch_size,
            require_significant=arguments.require_significant,
            resume=unfinished,
            seed=arguments.seed,
            progress=False if arguments.quiet or arguments.json else None,
        )
