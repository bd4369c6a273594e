"""``betternorm tune``: choose alpha for a pretrained model on labeled images (section 3.1)."""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from betternorm.cli import FINDING, OK
from betternorm.cli.data import (
    Data,
    add_model_options,
    add_running_options,
    build_model,
    check_at_least,
    check_exists,
    check_predictions,
    find_device,
    first_line,
    read_data,
    resumable,
)
from betternorm.cli.files import check_outputs, write_all
from betternorm.cli.parser import CommandParser
from betternorm.conversion.convert import convert
from betternorm.conversion.fold import fold
from betternorm.display.progress import clock
from betternorm.display.terminal import show
from betternorm.errors import UncertainGainWarning, UserError
from betternorm.integrations.checkpoints import save_checkpoint
from betternorm.weighing.metrics import CALIBRATED, METRICS
from betternorm.weighing.result import AlphaSearch
from betternorm.weighing.search import tune_alpha
from betternorm.weighing.shifts import KINDS, corruptions

EXAMPLES = """\
examples:
  betternorm tune timm:resnet50 --checkpoint resnet50.safetensors --data imagenet/val --max-examples 5000
  betternorm tune mine.py:build --checkpoint mine.pt --data val.pt --mean 0,0,0 --std 1,1,1 --shift noise,blur:3

Writes the checkpoint (--out), the results (.json) and plots (.svg). To load the checkpoint:
model = betternorm.load(model, "tuned.pt"). Exit codes: 0 better, 1 no significant gain, 2 bad usage or input, 3 better
but another metric is worse, 4 no verdict because outputs are NaN or infinite.
"""
WORSE = 3  # the objective is better and another metric is significantly worse
NO_VERDICT = 4  # outputs at the baseline are not finite


def add_arguments(parser: CommandParser) -> None:
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("model", metavar="MODEL", help="timm:NAME, torchvision:NAME or file.py:function")
    add("--checkpoint", type=Path, required=True, metavar="FILE", help=".pt, .pth or .safetensors")
    add("--data", required=True, help="class folders, .npz or .pt with images and labels, or a dataset name")
    add("--output", "--out", dest="out", type=Path, metavar="FILE", help="(default: CHECKPOINT-tuned)")
    add = parser.add_argument_group("search").add_argument
    add("--objective", choices=list(METRICS), metavar="NAME", help=f"{', '.join(METRICS)} (default: {CALIBRATED})")
    add("--layers", type=int, metavar="K", help="alpha in at most K layers, so that the others can be folded")
    add("--fold", action="store_true", help="with --layers: also export the folded model as .pt2")
    add("--shift", metavar="NAMES", help=f"also optimize for corruptions: all, or some of {','.join(KINDS)}")
    add("--shifted-data", metavar="DATA", help="also optimize for this shifted dataset")
    add(
        "--max-clean-drop",
        type=float,
        metavar="X",
        old={"--max-clean-loss": "--max-clean-drop"},
        help="with shifts: allowed drop on clean data, in points",
    )
    add("--per-layer", rare=True, action="store_true", help="deprecated: one alpha per layer, if better")
    add("--fold-temperature", rare=True, action="store_true", help="divide the last linear layer by the temperature")
    add("--grid", rare=True, type=int, metavar="N", help="evaluate N alphas instead of searching")
    add("--folds", rare=True, type=int, default=5, metavar="K", help="for cross-validation (default: 5)")
    add(
        "--require-significant",
        rare=True,
        action=argparse.BooleanOptionalAction,
        default=True,
        old={"--insist": "--no-require-significant"},
        help="leave alpha unchanged if the gain is not significant (default: yes)",
    )
    add_model_options(parser)
    add_running_options(parser)


def run(arguments: argparse.Namespace) -> int:
    out = _check(arguments)
    device = find_device(arguments.device)
    model = build_model(arguments, device)
    data = read_data(arguments, arguments.data, model, device)
    seconds_per_batch = check_predictions(model, data, device)
    example = next(iter(data.loader))[0][:2] if arguments.fold else None
    if arguments.fold:
        _check_fold(model, arguments.layers, example)
    shifts = _shifts(arguments, model, data, device)
    if arguments.dry_run:
        _print_plan(arguments, out, data, seconds_per_batch, len(shifts or ()), device)
        return OK
    result = _tuned(arguments, model, data, shifts, out.with_suffix(".unfinished"))
    written = _write(result, model, out, example)
    if arguments.json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        show(f"{result}\n\nwritten: {', '.join(map(str, written))}")
    if not result.has_verdict:
        return NO_VERDICT
    if result.worse:
        return WORSE
    return OK if _is_changed(result) else FINDING


def _check(arguments: argparse.Namespace) -> Path:
    """Check what can be checked without the model; returns the path of the checkpoint to write."""
    check_at_least(arguments, batch_size=1, max_examples=1, num_classes=1, layers=1, workers=0)
    if arguments.fold and arguments.layers is None:
        raise UserError("--fold needs --layers K: with an alpha in every layer there is nothing to fold")
    if arguments.max_clean_drop is not None:
        if not arguments.max_clean_drop >= 0:
            raise UserError(f"--max-clean-drop is {arguments.max_clean_drop:g}; it must be 0 or more")
        if arguments.shift is None and arguments.shifted_data is None:
            raise UserError("--max-clean-drop is a rule for shifted data; pass --shift or --shifted-data too")
    check_exists("--data", arguments.data)
    if arguments.shifted_data is not None:
        check_exists("--shifted-data", arguments.shifted_data)
    checkpoint: Path = arguments.checkpoint
    out: Path = arguments.out or checkpoint.with_name(f"{checkpoint.stem}-tuned{checkpoint.suffix}")
    check_outputs(_outputs(out, arguments.fold), arguments.force or arguments.dry_run)
    return out


def _outputs(out: Path, fold: bool) -> list[Path]:
    plots = [".svg"] if importlib.util.find_spec("matplotlib") else []
    return [out, *(out.with_suffix(suffix) for suffix in (".json", *plots, *([".pt2"] if fold else [])))]


def _is_changed(result: AlphaSearch) -> bool:
    return result.alpha != result.baseline or result.temperature_folded_into is not None


def _shifts(arguments: argparse.Namespace, model: nn.Module, data: Data, device: torch.device) -> dict[str, Any] | None:
    """Corruptions by name, and the loader of a shifted dataset."""
    shifts: dict[str, Any] = {}
    if arguments.shift is not None:
        if data.pixels is None:
            raise UserError(
                f"--shift needs images with a mean and std, and {arguments.data} contains preprocessed floats"
            )
        names = None if arguments.shift == "all" else arguments.shift.split(",")
        try:
            shifts |= corruptions(names, *data.pixels)
        except ValueError as error:
            raise UserError(f"--shift: {error}") from error
    if arguments.shifted_data is not None:
        shifted = read_data(arguments, arguments.shifted_data, model, device)
        check_predictions(model, shifted, device, plausible=False)
        shifts[Path(arguments.shifted_data).name] = shifted.loader
    return shifts or None


def _print_plan(
    arguments: argparse.Namespace, out: Path, data: Data, seconds_per_batch: float, shifts: int, device: torch.device
) -> None:
    alphas = (arguments.grid or 13) + (17 if arguments.layers else 0)
    seconds = alphas * seconds_per_batch * -(-data.examples // arguments.batch_size) * (1 + shifts)
    print(
        f"model:       {arguments.model}, {arguments.checkpoint}\n"
        f"data:        {data.examples} images from {arguments.data}: {data.description}\n"
        f"objective:   {arguments.objective or ('top1' if shifts else CALIBRATED)}\n"
        f"would take:  about {clock(seconds)} for {alphas} alphas on {device}\n"
        f"would write: {', '.join(map(str, _outputs(out, arguments.fold)))}"
    )


def _tuned(
    arguments: argparse.Namespace, model: nn.Module, data: Data, shifts: dict[str, Any] | None, unfinished: Path
) -> AlphaSearch:
    """Tune alpha, with intermediate results in a file until the search is finished."""
    with resumable(unfinished), warnings.catch_warnings():
        warnings.simplefilter("ignore", UncertainGainWarning)  # the printed result says it
        warnings.simplefilter("ignore", DeprecationWarning)
        return tune_alpha(
            convert(model, "weighed"),
            data.loader,
            metrics=tuple(METRICS),
            objective=arguments.objective,
            shifts=shifts,
            max_clean_drop=arguments.max_clean_drop,
            fold_temperature=arguments.fold_temperature,
            grid=arguments.grid,
            per_layer=arguments.per_layer,
            layers=arguments.layers,
            folds=arguments.folds,
            require_significant=arguments.require_significant,
            resume=unfinished,
            progress=False if arguments.quiet or arguments.json else None,
        )


def _write(result: AlphaSearch, model: nn.Module, out: Path, example: Tensor | None) -> list[Path]:
    """Results and plots, and if the model has changed, the checkpoint and the folded model."""
    writers: dict[Path, Callable[[Path], object]] = {}
    changed = _is_changed(result)
    for path in _outputs(out, example is not None):
        if path == out:
            writers |= {path: lambda path: save_checkpoint(model, path)} if changed else {}
        elif path.suffix == ".json":
            writers[path] = result.save
        elif path.suffix == ".svg":
            writers[path] = result.plot
        elif changed:
            writers[path] = lambda path: _export(_folded(model, example), example, path)
    write_all(writers)
    return list(writers)


def _check_fold(model: nn.Module, layers: int, example: Tensor | None) -> None:
    """Check before the search that there will be something to fold."""
    before, after = (sum(isinstance(m, _BatchNorm) for m in net.modules()) for net in (model, _folded(model, example)))
    if before - after <= layers:
        raise UserError(
            f"--fold with --layers {layers}: only {before - after} layers can be folded, and all may get an alpha"
        )


def _folded(model: nn.Module, example: Tensor | None) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about layers that cannot be folded
        try:
            return fold(copy.deepcopy(model).cpu(), None if example is None else example.cpu())
        except ValueError as error:
            raise UserError(f"--fold: {first_line(error)}") from error


def _export(model: nn.Module, images: Tensor | None, path: Path) -> None:
    """A program for any batch size that needs torch only."""
    assert images is not None
    any_batch = ({0: torch.export.Dim("batch", min=1)},)
    torch.export.save(torch.export.export(model, (images.cpu(),), dynamic_shapes=any_batch), path)
