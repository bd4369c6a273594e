"""``betternorm tune``: a trained network and labelled images in, a better network and evidence out (section 3.1)."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from betternorm.cli import FINDING, OK
from betternorm.cli.parser import CommandParser
from betternorm.conversion.convert import convert
from betternorm.conversion.fold import fold
from betternorm.display.progress import clock
from betternorm.display.terminal import show
from betternorm.errors import UncertainGainWarning, UserError
from betternorm.integrations.checkpoints import load_checkpoint, save_checkpoint
from betternorm.integrations.images import read_images
from betternorm.integrations.loading import ImageLoader
from betternorm.integrations.models import load_model
from betternorm.integrations.preprocessing import preprocessing
from betternorm.weighing.batches import evaluating, output_and_target
from betternorm.weighing.metrics import CALIBRATED, METRICS, SHARES
from betternorm.weighing.result import AlphaSearch
from betternorm.weighing.scale import to_u
from betternorm.weighing.search import tune_alpha
from betternorm.weighing.shifts import KINDS, corruptions

EXAMPLES = """\
examples:
  betternorm tune timm:resnet50 --checkpoint resnet50.safetensors --data imagenet/val --max-examples 5000
  betternorm tune mine.py:build --checkpoint mine.pt --data val --mean 0,0,0 --std 1,1,1 --shift noise,blur:3

Writes the checkpoint (--out), a table (.json) and curves (.png, .html). Exit codes: 0 better, 1 no gain to be told from
chance, 3 better and another metric worse. To load it: model = betternorm.load(model, "tuned.pt")
"""
ENOUGH_FOR_TIMING = 2  # batches: the first also compiles and warms up
WORSE = 3  # what the shell gets where the objective is better and another metric certainly worse


def add_arguments(parser: CommandParser) -> None:
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("model", metavar="MODEL", help="timm:NAME, torchvision:NAME or file.py:function")
    add("--checkpoint", type=Path, required=True, metavar="FILE", help=".pt, .pth or .safetensors")
    add("--data", required=True, help="one folder per class, an .npz, or a dataset by name")
    add("--output", "--out", dest="out", type=Path, metavar="FILE", help="(default: CHECKPOINT-tuned, beside it)")
    add = parser.add_argument_group("what is searched").add_argument
    add("--objective", choices=list(METRICS), metavar="NAME", help=f"{', '.join(METRICS)} (default: {CALIBRATED})")
    add("--per-layer", action="store_true", help="one alpha per layer, where that is better")
    add("--layers", type=int, metavar="K", help="alpha in K layers only, so that the others can be folded")
    add("--fold", action="store_true", help="with --layers: also write the folded network, a .pt2 of torch.export")
    add("--shift", metavar="NAMES", help=f"choose on corruptions too: all, or of {','.join(KINDS)}")
    add("--shifted-data", metavar="DATA", help="and on a shifted set of your own, given like --data")
    add(
        "--max-clean-drop",
        type=float,
        metavar="X",
        old={"--max-clean-loss": "--max-clean-drop"},
        help="in points, under shift (default: the best mean)",
    )
    add("--fold-temperature", rare=True, action="store_true", help="divide the last linear layer by the temperature")
    add("--grid", rare=True, type=int, metavar="N", help="try N alphas instead of searching")
    add("--folds", rare=True, type=int, default=5, metavar="K", help="for the evidence (default: 5)")
    add(
        "--require-significant",
        rare=True,
        action=argparse.BooleanOptionalAction,
        default=True,
        old={"--insist": "--no-require-significant"},
        help="leave alpha unchanged if the gain is not significant (default: yes)",
    )
    add = parser.add_argument_group("model and images (default: what the model declares)").add_argument
    add("--num-classes", type=int, metavar="N", help="of the model")
    add("--ema", rare=True, action="store_true", help="take the averaged weights of the checkpoint")
    add("--mean", metavar="R,G,B", help="of the pixels, between 0 and 1")
    add("--std", metavar="R,G,B", help="of the pixels")
    add("--size", type=int, metavar="SIDE", help="of the images")
    add("--max-examples", type=int, metavar="N", old={"--limit": "--max-examples"}, help="use N images, evenly spaced")
    add(
        "--data-root",
        rare=True,
        type=Path,
        metavar="FOLDER",
        help="where a dataset known by its name lies (default: data)",
    )
    add("--split", rare=True, choices=["val", "test"], default="val", help="of such a dataset (default: val)")
    add = parser.add_argument_group("running").add_argument
    add("--device", rare=True, help="(default: cuda where there is one)")
    add("--batch-size", type=int, default=64, metavar="N", help="(default: 64)")
    add("--workers", rare=True, type=int, default=0, metavar="N", help="processes that read images (default: 0)")
    add("--dry-run", action="store_true", help="check on a batch, say what it takes, write nothing")
    add("--force", action="store_true", help="write over an earlier result")
    add("--json", action="store_true", help="print JSON")
    add("--quiet", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> int:
    for name in ("batch_size", "max_examples", "num_classes", "layers"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}; it must be 1 or more")
    if arguments.workers < 0:
        raise UserError(f"--workers is {arguments.workers}; it must be 0 or more")
    if arguments.fold and arguments.layers is None:
        raise UserError("--fold needs --layers K: with an alpha in every layer there is nothing to fold")
    out = _out(arguments)
    device = _device(arguments.device)
    keywords = {} if arguments.num_classes is None else {"num_classes": arguments.num_classes}
    model = load_checkpoint(load_model(arguments.model, **keywords), arguments.checkpoint, arguments.ema)
    model = model.to(device).eval()
    loader, examples, described, pixels = _data(arguments, arguments.data, model, device)
    per_batch = _checked_on_a_batch(model, loader, device)
    if arguments.fold:
        _check_fold(model, arguments.layers)
    shifts = _shifts(arguments, model, device, pixels)
    if arguments.dry_run:
        seconds = per_batch * -(-examples // arguments.batch_size) * (1 + len(shifts or ()))
        _plan(arguments, out, examples, described, seconds)
        return OK
    found = _tuned(arguments, model, loader, shifts, out.with_suffix(".unfinished"))
    written = _write(found, model, arguments.model, out, next(iter(loader))[0][:2] if arguments.fold else None)
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        show(f"{found}\n\nwritten: {', '.join(map(str, written))}")
    if found.worse:
        return WORSE
    return OK if _is_changed(found) else FINDING


def _is_changed(found: AlphaSearch) -> bool:
    return found.alpha != found.baseline or found.temperature_folded_into is not None


def _out(arguments: argparse.Namespace) -> Path:
    checkpoint: Path = arguments.checkpoint
    out: Path = arguments.out or checkpoint.with_name(f"{checkpoint.stem}-tuned{checkpoint.suffix}")
    check_outputs([out, *_beside(out, arguments.fold)], arguments.force or arguments.dry_run)
    return out


def check_outputs(outputs: Sequence[Path], force: bool) -> None:
    """The first is the checkpoint."""
    out = outputs[0]
    if out.suffix not in (".pt", ".pth", ".safetensors"):
        raise UserError(f"--out is {out}; its name has to end in .pt, .pth or .safetensors")
    if not out.parent.is_dir():
        raise UserError(f"--out is {out}, and there is no folder {out.parent}")
    there = [str(path) for path in outputs if path.exists()]
    if there and not force:
        raise UserError(f"{there[0]} exists; give --force to write over it, or another --out")


def _beside(out: Path, fold: bool) -> list[Path]:
    return [out.with_suffix(suffix) for suffix in (".json", ".png", ".html", *([".pt2"] if fold else []))]


def _device(name: str | None) -> torch.device:
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device is {name!r}, which cannot be used here: {str(error).splitlines()[0]}") from error
    return device


Pixels = tuple[Sequence[float], Sequence[float]]  # the mean and std that images were normalised by


def _shifts(
    arguments: argparse.Namespace, model: nn.Module, device: torch.device, pixels: Pixels | None
) -> dict[str, Any] | None:
    """Corruptions by name, and a loader of the user's shifted set."""
    if arguments.max_clean_drop is not None and not arguments.max_clean_drop >= 0:
        raise UserError(f"--max-clean-drop is {arguments.max_clean_drop:g}; it must be 0 or more")
    found: dict[str, Any] = {}
    if arguments.shift is not None:
        if pixels is None:
            raise UserError(f"--shift needs images with a mean and std, and {arguments.data} holds floats as they are")
        names = None if arguments.shift == "all" else arguments.shift.split(",")
        try:
            found |= corruptions(names, *pixels)
        except ValueError as error:
            raise UserError(f"--shift: {error}") from error
    if arguments.shifted_data is not None:
        loader = _data(arguments, arguments.shifted_data, model, device)[0]
        _checked_on_a_batch(model, loader, device)
        found[Path(arguments.shifted_data).name] = loader
    if not found and arguments.max_clean_drop is not None:
        raise UserError("--max-clean-drop is a rule for shifted data; give --shift or --shifted-data too")
    return found or None


def _data(
    arguments: argparse.Namespace, given: str, model: nn.Module, device: torch.device
) -> tuple[Iterable[tuple[Tensor, Tensor]], int, str, Pixels | None]:
    """Batches, how many examples they hold, how they are prepared, and by which mean and std."""
    path = Path(given)
    mean, std = (_floats(name, getattr(arguments, name)) for name in ("mean", "std"))
    if path.is_dir() or path.suffix == ".npz":
        how = preprocessing(arguments.model, model, mean, std, arguments.size)
        images = read_images(path, how)
        classes = _classes(model)
        if classes is not None:
            images.check_labels(classes)
        if arguments.max_examples is not None:
            images = images.limited(arguments.max_examples)
        batches = ImageLoader(
            images,
            batch_size=arguments.batch_size,
            num_workers=arguments.workers,
            pin_memory=device.type == "cuda",
            persistent_workers=arguments.workers > 0,
        )
        if images.how is None:
            return batches, len(images), "floats as they are", None
        return batches, len(images), str(how), (how.mean, how.std)
    try:
        from betternorm_lab import data as lab
    except ImportError as error:
        raise UserError(f"--data {given!r} needs the lab: pip install 'betternorm[lab]' ({error})") from error
    return _named(lab, given, arguments, mean, std, device)


def _named(
    lab: Any,
    dataset: str,
    arguments: argparse.Namespace,
    mean: list[float] | None,
    std: list[float] | None,
    device: torch.device,
) -> tuple[Iterable[tuple[Tensor, Tensor]], int, str, Pixels]:
    """A dataset of the lab, prepared as the lab does it."""
    data = lab.load(dataset, arguments.data_root, image_size=arguments.size)
    given = {name: tuple(numbers) for name, numbers in (("mean", mean), ("std", std)) if numbers is not None}
    data = dataclasses.replace(data, facts=dataclasses.replace(data.facts, **given))
    split = data.test if arguments.split == "test" else data.validation
    if split is None:
        raise UserError(f"--split is {arguments.split}; {dataset} has no labels for it")
    if arguments.max_examples is not None and arguments.max_examples < len(split):
        split = split.take(torch.linspace(0, len(split) - 1, arguments.max_examples).round().long())
    loader = lab.Loader(data, split, arguments.batch_size, device=device, workers=arguments.workers)
    described = f"the {arguments.split} split, mean and std {'given' if given else 'of the dataset'}"
    return loader, len(split), described, (data.facts.mean, data.facts.std)


def _classes(model: nn.Module) -> int | None:
    """The size of the last linear layer, where there is one."""
    heads = [module.out_features for module in model.modules() if isinstance(module, nn.Linear)]
    return heads[-1] if heads else None


def _floats(name: str, text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--{name} is {text!r}; it has to be numbers like 0.485,0.456,0.406") from None


def _checked_on_a_batch(model: nn.Module, loader: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> float:
    """Run a batch or two through the network; returns seconds a batch."""
    seconds = 0.0
    with evaluating(model), torch.inference_mode():
        for number, (x, y) in enumerate(loader, 1):
            started = time.monotonic()
            try:
                output, target = output_and_target(model, (x.to(device), y.to(device)))
                METRICS["cross_entropy"].measure(output, target)
            except (RuntimeError, ValueError, TypeError) as error:
                shape = tuple(x.shape)
                raise UserError(f"the network fails on a batch of shape {shape}: {_first_line(error)}") from error
            seconds = time.monotonic() - started
            if number == ENOUGH_FOR_TIMING:
                break
    return seconds


def _plan(arguments: argparse.Namespace, out: Path, examples: int, described: str, seconds_a_pass: float) -> None:
    alphas = (arguments.grid or 13) + (17 if arguments.layers else 0)
    lines = [
        f"model:       {arguments.model}, {arguments.checkpoint}",
        f"data:        {examples} images from {arguments.data}: {described}",
        f"objective:   {arguments.objective or ('top1' if arguments.shift else CALIBRATED)}",
        f"would take:  about {clock(alphas * seconds_a_pass)} for {alphas} alphas on {_device(arguments.device)}",
        f"would write: {', '.join(map(str, (out, *_beside(out, arguments.fold))))}",
    ]
    print("\n".join(lines))


def _tuned(
    arguments: argparse.Namespace,
    model: nn.Module,
    loader: Iterable[tuple[Tensor, Tensor]],
    shifts: dict[str, Any] | None,
    unfinished: Path,
) -> AlphaSearch:
    """Tune, keeping what is evaluated in a file for as long as it is unfinished."""
    had_begun = unfinished.exists()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UncertainGainWarning)  # the table says it
            found = tune_alpha(
                convert(model, "weighed"),
                loader,
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
    except (ValueError, TypeError) as error:
        if not had_begun:
            _remove(unfinished)
        raise UserError(_first_line(error)) from error
    _remove(unfinished)
    return found


def _remove(unfinished: Path) -> None:
    for path in unfinished.parent.glob(f"{unfinished.name}*"):  # that of a shifted set lies beside it
        path.unlink(missing_ok=True)


def _write(found: AlphaSearch, model: nn.Module, spec: str, out: Path, to_fold_with: Tensor | None) -> list[Path]:
    """Without a gain there is no checkpoint."""
    table, picture, page, *folded = _beside(out, to_fold_with is not None)
    makers: dict[Path, Callable[[Path], object]] = {
        table: found.save,
        picture: lambda path: found.plot(path),
        page: lambda path: path.write_text(_page(spec, found), encoding="utf-8"),
    }
    if _is_changed(found):
        makers = {out: lambda path: save_checkpoint(model, path), **makers}
        for program in folded:
            makers[program] = lambda path: _export(_folded(model), to_fold_with, path)
    write_all(makers)
    return list(makers)


def write_all(makers: Mapping[Path, Callable[[Path], object]]) -> None:
    """Everything or nothing: all files are written under other names first."""
    made: list[tuple[Path, Path]] = []
    try:
        for target, make in makers.items():
            unfinished = target.with_name(f".unfinished-{target.name}")
            made.append((unfinished, target))
            make(unfinished)
        for unfinished, target in made:
            unfinished.replace(target)
    except OSError as error:
        raise UserError(f"{next(iter(makers)).parent} cannot be written to: {error.strerror}") from error
    finally:
        for unfinished, _ in made:
            unfinished.unlink(missing_ok=True)


def _check_fold(model: nn.Module, layers: int) -> None:
    """Whether there will be something to fold, before hours of work."""
    before, after = (sum(isinstance(m, _BatchNorm) for m in net.modules()) for net in (model, _folded(model)))
    if before - after <= layers:
        raise UserError(
            f"--fold with --layers {layers}: no more than {before - after} layers fold, and all may get an alpha"
        )


def _folded(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers that stay
        try:
            return fold(copy.deepcopy(model).cpu())
        except ValueError as error:
            raise UserError(f"--fold: {_first_line(error)}") from error


def _export(model: nn.Module, images: Tensor | None, path: Path) -> None:
    """A program for any batch size, which needs torch and not this package."""
    assert images is not None
    any_batch = ({0: torch.export.Dim("batch", min=1)},)
    torch.export.save(torch.export.export(model, (images.cpu(),), dynamic_shapes=any_batch), path)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# ---- the page ----

STYLE = """\
body { font-family: sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
pre { background: #f6f6f6; padding: 1rem; overflow-x: auto; font-size: 0.85rem; line-height: 1.35 }
svg { max-width: 100%; height: auto } circle:hover { r: 6 }
"""


def _page(spec: str, found: AlphaSearch) -> str:
    """Curves with the numbers under the pointer, and the tables; one file that needs no other."""
    curves = "\n".join(f"<h2>{escape(metric)}</h2>\n{_curve(found, metric)}" for metric in found.gains)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>alpha of {escape(spec)}</title>'
        f"<style>{STYLE}</style></head><body>\n<h1>Inference example weighing: {escape(spec)}</h1>\n"
        f"<p>{escape(found.verdict())}</p>\n{curves}\n<pre>{escape(str(found))}</pre>\n</body></html>\n"
    )


def _curve(found: AlphaSearch, metric: str) -> str:
    wide, high, edge = 640, 260, 50
    scale = 100 if metric in SHARES else 1
    rows = [(row["alpha"], row[metric] * scale) for row in found.table]
    low, top = min(value for _, value in rows), max(value for _, value in rows)
    span = (top - low) or 1.0

    def place(alpha: float, value: float) -> tuple[float, float]:
        across = edge + (wide - 2 * edge) * float(to_u(alpha))
        return round(across, 1), round(high - edge + (2 * edge - high) * (value - low) / span, 1)

    points = [place(*row) for row in rows]
    dots = []
    for (alpha, value), (x, y) in zip(rows, points, strict=True):
        colour = "#c1440e" if alpha == found.best[metric] else "#777" if alpha == found.baseline else "#33628d"
        hint = f"alpha {alpha:.4g}: {metric} {value:.4f}{' %' if metric in SHARES else ''}"
        dots.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"><title>{escape(hint)}</title></circle>')
    ticks = [
        f'<text x="{place(alpha, low)[0]}" y="{high - edge + 22}" text-anchor="middle">{alpha:g}</text>'
        for alpha in (0, 0.05, 0.25, 0.5, 0.75, 0.95, 1)
    ]
    sides = [
        f'<text x="{edge - 8}" y="{place(0, value)[1] + 4}" text-anchor="end">{value:.4g}</text>'
        for value in (low, top)
    ]
    path = " ".join(f"{x},{y}" for x, y in points)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" font-size="12" role="img" '
        f'aria-label="{escape(metric)} against alpha">'
        f'<polyline points="{path}" fill="none" stroke="#33628d" stroke-width="1.5"/>{"".join(dots + ticks + sides)}'
        f'<text x="{wide / 2}" y="{high - 8}" text-anchor="middle">alpha</text></svg>'
    )
