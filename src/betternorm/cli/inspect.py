"""``betternorm inspect``: the norm layers of a model, how far decay can act on each, and what would help."""

from __future__ import annotations

import argparse
import json
from html import escape
from pathlib import Path

import torch
from torch import Tensor, nn

from betternorm.advice import Advice, advise
from betternorm.backends import cpu
from betternorm.cli import OK
from betternorm.decay.report import NormReport, norm_report
from betternorm.decay.visit import guess_input
from betternorm.display.picture import colour
from betternorm.display.terminal import show
from betternorm.errors import UserError
from betternorm.integrations.models import load_model

# Enough examples for statistics of a batch; the effects hardly depend on their number, the time does.
MEASURED_WITH = 4

EXAMPLES = """\
examples:
  betternorm inspect timm:resnet50 --batch-size 128
  betternorm inspect torchvision:inception_v3 --quick
  betternorm inspect nets/mine.py:build --input 3,32,32 --html report.html
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("model", metavar="MODEL", help="timm:NAME, torchvision:NAME or path/to/file.py:function")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="of training (default: 32)")
    parser.add_argument("--input", metavar="3,224,224", help="shape of one example (default: guessed)")
    parser.add_argument("--overfits", choices=["yes", "no"], help="whether the model overfits, where that is known")
    parser.add_argument("--quick", action="store_true", help="estimate all effects at once instead of measuring each")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with table and picture")


def run(arguments: argparse.Namespace) -> int:
    if arguments.batch_size < 1:
        raise UserError(f"--batch-size is {arguments.batch_size}; it must be 1 or more")
    shape = _shape(arguments.input)
    model = load_model(arguments.model)
    try:
        report = norm_report(
            model,
            _example(model, shape, arguments.batch_size),
            batch_size=arguments.batch_size,
            quick=arguments.quick,
            progress=False if arguments.quiet else None,
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    overfits = {"yes": True, "no": False, None: None}[arguments.overfits]
    advice = advise(arguments.batch_size, overfits=overfits, report=report)
    if arguments.html:
        try:
            arguments.html.write_text(_page(arguments.model, report, advice), encoding="utf-8")
        except OSError as error:
            raise UserError(f"--html {arguments.html} cannot be written: {error.strerror}") from error
    if arguments.json:
        found = {"model": arguments.model, "report": report.to_dict(), "advice": advice.to_dict()}
        print(json.dumps(found, indent=2))
    else:
        pure = "" if cpu.loaded else f"\n\nkernels: {cpu.status}"
        show(f"{report}\n\n{advice}{pure}")
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


def _example(model: nn.Module, shape: tuple[int, ...] | None, batch_size: int) -> Tensor:
    examples = max(2, min(batch_size, MEASURED_WITH))
    if shape is None:
        return guess_input(model, examples)
    return torch.randn(examples, *shape, generator=torch.Generator().manual_seed(0))


def _page(name: str, report: NormReport, advice: Advice) -> str:
    head = ("layer", "kind", "channels", "statistics over", "values", "path", "effect", "advised", "why")
    rows = []
    for layer in report:
        effect = "" if layer.effect is None else f"{layer.effect:.3f}"
        light = "#fff" if (layer.effect or 0) > 0.6 else "#222"
        cells: list[object] = [layer.name, layer.kind, layer.channels, layer.groups, layer.values_per_group]
        cells.append({True: "yes", False: "no", None: ""}[layer.path])
        before = "".join(f"<td>{escape('' if cell is None else str(cell))}</td>" for cell in cells)
        shaded = f'<td style="background:{colour(layer.effect)};color:{light}">{effect}</td>'
        rows.append(f"<tr>{before}{shaded}<td>{escape(layer.advised)}</td><td>{escape(layer.why)}</td></tr>")
    lines = "".join(
        f"<li>{escape(line.what)}<br><small>Section {line.section}: {escape(line.evidence)}</small></li>"
        for line in advice.lines
    )
    try:
        picture = report.to_svg()
    except ValueError as error:
        picture = f"<p>{escape(str(error))}</p>"
    return _PAGE.format(
        name=escape(name),
        summary=escape(report.summary()),
        batch_size=advice.batch_size,
        lines=lines,
        head="".join(f"<th>{word}</th>" for word in head),
        rows="\n".join(rows),
        picture=picture,
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Norm layers of {name}</title>
<style>
body {{ font: 15px/1.5 sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
table {{ border-collapse: collapse; display: block; overflow-x: auto; }}
th, td {{ padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: left; white-space: nowrap; }}
figure {{ overflow-x: auto; margin: 0; }}
</style></head><body>
<h1>Norm layers of {name}</h1>
<p>{summary}.</p>
<h2>Advice at batch size {batch_size}</h2><ol>{lines}</ol>
<h2>Layers</h2>
<p><b>Path</b>: a way to the output that meets no other normalisation. <b>Effect</b>: how far scaling gamma and beta of
the layer changes the output in training; 0 where a later normalisation undoes it.</p>
<table><thead><tr>{head}</tr></thead><tbody>
{rows}
</tbody></table>
<h2>Picture</h2><figure>{picture}</figure>
</body></html>
"""
