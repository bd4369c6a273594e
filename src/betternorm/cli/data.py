"""Model and images of a command: options, loading, and the checks that come before any long computation."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from betternorm.cli.parser import CommandParser
from betternorm.errors import UserError
from betternorm.integrations.checkpoints import load_checkpoint
from betternorm.integrations.images import FORMATS, read_class_map, read_images
from betternorm.integrations.loading import ImageLoader
from betternorm.integrations.models import load_model
from betternorm.integrations.preprocessing import preprocessing
from betternorm.weighing.batches import evaluating, output_and_target
from betternorm.weighing.metrics import METRICS

Batches = Iterable[tuple[Tensor, Tensor]]
ENOUGH_FOR_TIMING = 2  # batches: the first also compiles and warms up
CHECKED = 200  # images on which the labels are compared with the predictions


@dataclass(frozen=True)
class Data:
    """Batches of labeled images.

    Attributes:
        loader: all of them.
        sample: a few of them, evenly spaced.
        examples: how many there are.
        description: how they are preprocessed.
        pixels: the mean and std they are normalized with; None if they are read as they are.
        images: the dataset, if it was read from files.
    """

    loader: Batches
    sample: Batches
    examples: int
    description: str
    pixels: tuple[Sequence[float], Sequence[float]] | None
    images: Any = None


def add_model_options(parser: CommandParser, max_examples: int | None = None, labels: bool = True) -> None:
    """The options that `build_model` and `read_data` use, besides the model, the checkpoint and the data."""
    add = parser.add_argument_group("model and images (default: as the model declares)").add_argument
    add("--num-classes", type=int, metavar="N", help="number of outputs of the model")
    add("--ema", rare=True, action="store_true", help="use the averaged weights of the checkpoint")
    add("--mean", metavar="R,G,B", help="subtracted from pixels between 0 and 1")
    add("--std", metavar="R,G,B", help="what the difference is divided by")
    add("--size", type=int, metavar="PIXELS", help="side of the images")
    default = "" if max_examples is None else f" (default: {max_examples})"
    old, note = {"--limit": "--max-examples"}, f"use N images, evenly spaced{default}"
    add("--max-examples", type=int, default=max_examples, metavar="N", old=old, help=note)
    if labels:
        add("--class-map", type=Path, metavar="FILE", help="class folder of each output, if not in sorted order")
        add("--data-root", rare=True, type=Path, metavar="FOLDER", help="of datasets by name (default: data)")
        add("--split", rare=True, choices=["val", "test"], default="val", help="of a dataset by name (default: val)")


def add_running_options(parser: CommandParser, batch_size: int = 64, dry_run: bool = True) -> None:
    add = parser.add_argument_group("running").add_argument
    add("--device", rare=True, help="(default: cuda if available)")
    add("--batch-size", type=int, default=batch_size, metavar="N", help=f"(default: {batch_size})")
    add("--workers", rare=True, type=int, default=0, metavar="N", help="processes that read images (default: 0)")
    if dry_run:
        add("--dry-run", action="store_true", help="check everything on a few images and estimate the time")
    add("--force", action="store_true", help="overwrite existing results")
    add("--json", action="store_true", help="print JSON")
    add("--quiet", action="store_true", help="no progress bar")


def check_at_least(arguments: argparse.Namespace, **least: int) -> None:
    for name, value in least.items():
        given = getattr(arguments, name)
        if given is not None and given < value:
            raise UserError(f"--{name.replace('_', '-')} is {given}; it must be {value} or more")


@contextmanager
def resumable(file: Path) -> Iterator[None]:
    """Remove a file of intermediate results when a computation is complete, or fails at its very beginning."""
    existed = file.exists()
    try:
        yield
    except (ValueError, TypeError) as error:
        if not existed:
            _remove(file)
        raise UserError(first_line(error)) from error
    except OSError as error:
        raise UserError(f"{error.filename or file} {error.strerror}") from error
    _remove(file)


def _remove(file: Path) -> None:
    for path in file.parent.glob(f"{file.name}*"):  # each shifted dataset has a separate file
        path.unlink(missing_ok=True)


def build_model(arguments: argparse.Namespace, device: torch.device) -> nn.Module:
    """The model with the weights of the checkpoint, in evaluation mode."""
    keywords = {} if arguments.num_classes is None else {"num_classes": arguments.num_classes}
    model: nn.Module = load_checkpoint(load_model(arguments.model, **keywords), arguments.checkpoint, arguments.ema)
    model.to(device).eval()
    return model


def find_device(name: str | None) -> torch.device:
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device is {name!r}, which is not available: {first_line(error)}") from error
    return device


def check_exists(option: str, data: str) -> None:
    """Raise an error if there are no such files, and no dataset of that name."""
    if Path(data).exists() or Path(data).suffix:
        if not Path(data).exists():
            raise UserError(f"{option} {data}: there is no such file")
        return
    try:
        from betternorm_lab.data import DATASETS
    except ImportError as error:
        raise UserError(
            f"{option} {data}: there is no such file or folder; datasets by name need the lab: pip install "
            f"'betternorm[lab]' ({error})"
        ) from error
    if data.removeprefix("stand-in:") not in DATASETS:
        raise UserError(f"{option} {data}: there is no such file or folder, and the datasets are {', '.join(DATASETS)}")


def read_data(arguments: argparse.Namespace, data: str, model: nn.Module, device: torch.device) -> Data:
    """Images from files, or a dataset of betternorm-lab by name."""
    mean, std = (parse_floats(name, getattr(arguments, name)) for name in ("mean", "std"))
    path = Path(data)
    if not path.exists():
        return _dataset(data, arguments, mean, std, device)
    if not (path.is_dir() or path.suffix in (".npz", ".pt", ".pth")):
        raise UserError(f"--data {data}: expected {FORMATS}")
    class_map = None if arguments.class_map is None else read_class_map(arguments.class_map)
    images = read_images(path, preprocessing(arguments.model, model, mean, std, arguments.size), class_map)
    if arguments.max_examples is not None:
        images = images.limited(arguments.max_examples)
    loader, sample = (
        ImageLoader(
            part,
            batch_size=arguments.batch_size,
            num_workers=arguments.workers if part is images else 0,
            pin_memory=device.type == "cuda",
            persistent_workers=arguments.workers > 0 and part is images,
        )
        for part in (images, images.limited(CHECKED))
    )
    if images.how is None:
        return Data(loader, sample, len(images), "floats, already preprocessed", None, images)
    return Data(loader, sample, len(images), str(images.how), (images.how.mean, images.how.std), images)


def _dataset(
    name: str,
    arguments: argparse.Namespace,
    mean: list[float] | None,
    std: list[float] | None,
    device: torch.device,
) -> Data:
    lab: Any = importlib.import_module("betternorm_lab.data")
    data = lab.load(name, arguments.data_root, image_size=arguments.size)
    options = {key: tuple(values) for key, values in (("mean", mean), ("std", std)) if values is not None}
    data = dataclasses.replace(data, facts=dataclasses.replace(data.facts, **options))
    split = data.test if arguments.split == "test" else data.validation
    if split is None:
        raise UserError(f"--split is {arguments.split}; {name} has no labels for it")

    def spaced(count: int | None) -> Any:
        if count is None or count >= len(split):
            return split
        return split.take(torch.linspace(0, len(split) - 1, count).round().long())

    loader, sample = (
        lab.Loader(data, spaced(count), arguments.batch_size, device=device, workers=arguments.workers)
        for count in (arguments.max_examples, min(CHECKED, arguments.max_examples or CHECKED))
    )
    description = f"the {arguments.split} split, mean and std {'as specified' if options else 'of the dataset'}"
    return Data(loader, sample, len(spaced(arguments.max_examples)), description, (data.facts.mean, data.facts.std))


def check_predictions(model: nn.Module, data: Data, device: torch.device, plausible: bool = True) -> float:
    """Run the model on a few images; returns the seconds per batch.

    With ``plausible``, a model that is confident and yet no better than chance is an error: labels, preprocessing or
    weights do not belong together.
    """
    seconds, correct, confidence, count, classes = 0.0, 0.0, 0.0, 0, 0
    with evaluating(model), torch.inference_mode():
        for number, (x, y) in enumerate(data.sample, 1):
            started = time.monotonic()
            try:
                output, target = output_and_target(model, (x.to(device), y.to(device)))
                classes = output.shape[1]
                if data.images is not None:
                    data.images.check_labels(classes)
                right, _ = METRICS["top1"].measure(output, target)
            except UserError:
                raise
            except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
                shape = tuple(x.shape)
                raise UserError(f"the model fails on a batch of shape {shape}: {first_line(error)}") from error
            if number <= ENOUGH_FOR_TIMING:
                seconds = time.monotonic() - started
            correct, count = correct + float(right.sum()), count + len(right)
            confidence += float(output.float().softmax(1).amax(1).sum())
    chance = 1 / classes
    expected = count * chance + 3 * math.sqrt(count * chance * (1 - chance))
    if plausible and correct <= expected and confidence / count > (1 + chance) / 2:
        raise UserError(
            f"{correct / count:.1%} of {count} images are classified correctly, which is chance for {classes} classes, "
            f"although the mean confidence is {confidence / count:.0%}. Likely causes: labels in another order than "
            "the model's outputs (see --class-map), another --mean or --std, or a checkpoint of another model"
        )
    return seconds


def parse_floats(name: str, text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--{name} is {text!r}; expected numbers like 0.485,0.456,0.406") from None


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
