"""``betternorm inspect``: the norm layers of a model, the effect of weight decay on each, and recommendations."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn

from betternorm.advice import advise
from betternorm.backends import cpu
from betternorm.cli import OK
from betternorm.decay.report import norm_report
from betternorm.decay.visit import guess_input
from betternorm.display.terminal import show
from betternorm.errors import UserError
from betternorm.integrations.models import load_model
from betternorm.integrations.preprocessing import declared_preprocessing

# Examples for measuring effects: these hardly depend on the number, but the time does.
MEASURED_WITH = 4

EXAMPLES = """\
examples:
  betternorm inspect timm:resnet50 --batch-size 128
  betternorm inspect torchvision:inception_v3 --quick
  betternorm inspect nets/mine.py:build --input 3,32,32 --svg layers.svg
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("model", metavar="MODEL", help="timm:NAME, torchvision:NAME or path/to/file.py:function")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="batch size in training (default: 32)")
    parser.add_argument("--input", metavar="3,224,224", help="shape of one example (default: guessed)")
    parser.add_argument("--overfits", choices=["yes", "no"], help="whether the model overfits, if known")
    parser.add_argument("--quick", action="store_true", help="estimate all effects at once instead of measuring each")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the norm layers as a graph")


def run(arguments: argparse.Namespace) -> int:
    if arguments.batch_size < 1:
        raise UserError(f"--batch-size is {arguments.batch_size}; it must be 1 or more")
    shape = _shape(arguments.input)
    model = load_model(arguments.model)
    try:
        example, source = _example(arguments.model, model, shape, arguments.batch_size)
        report = norm_report(
            model,
            example,
            batch_size=arguments.batch_size,
            quick=arguments.quick,
            progress=False if arguments.quiet else None,
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    overfits = {"yes": True, "no": False, None: None}[arguments.overfits]
    advice = advise(arguments.batch_size, overfits=overfits, report=report)
    if arguments.svg:
        try:
            arguments.svg.write_text(report.to_svg(), encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"--svg {arguments.svg} cannot be written: {reason}") from error
    if arguments.json:
        result = {"model": arguments.model, "report": report.to_dict(), "advice": advice.to_dict()}
        print(json.dumps(result, indent=2))
    else:
        kernels = "" if cpu.loaded else f"\n\nkernels: {cpu.status}"
        side = "x".join(map(str, example.shape[1:]))
        show(f"{report}\n\ninput: {side} ({source})\n\n{advice}{kernels}")
    return OK


def _shape(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise UserError(f"--input is {text!r}; write the shape of one example, such as 3,224,224")
    return shape


def _example(name: str, model: nn.Module, shape: tuple[int, ...] | None, batch_size: int) -> tuple[Tensor, str]:
    """A random batch, and where its shape is from."""
    examples, source = max(2, min(batch_size, MEASURED_WITH)), "as given by --input"
    if shape is None:
        try:
            declared = declared_preprocessing(name, model)
        except AttributeError:  # torchvision's detectors take images of any size
            declared = None
        if declared is None or declared.size is None:
            return guess_input(model, examples), "guessed; --input sets it"
        shape, source = (len(declared.mean), *declared.size), "declared by the model; --input sets another"
    return torch.randn(examples, *shape, generator=torch.Generator().manual_seed(0)), source
