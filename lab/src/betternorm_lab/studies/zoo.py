"""Every timm and torchvision architecture with batch norm: convert, set alpha in three layers, fold, reparameterize.

Each model is built without pretrained weights, with random statistics, gammas and betas in its norm layers, and called
with two images of the smallest size that it accepts. Checked, with the largest error relative to the largest output:

- converted, with alpha 0: equal to the original bit for bit;
- alpha 0.1 in the first, the middle and the last batch norm, the others folded: equal to the same model unfolded;
- timm's ``reparameterize_model`` on the model with these alphas: exact, or an error that explains why;
- reparameterized first, then converted and folded as above.

Families take turns, each from its smallest model on, so an interrupted run covers all families. Finished models are
skipped when the run is repeated.

    python -m betternorm_lab.studies.zoo [--family resnet] [--limit 50] [--json zoo.json] [--page docs/compatibility.md]
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import betternorm
from betternorm.display.progress import Bar
from betternorm.example import tensors_in
from betternorm.integrations.torchvision import ready

SIDES = (32, 64, 96, 128, 160, 192, 224, 256, 288, 384)
LARGEST = 250e6  # parameters: 1 GB
ALPHA, LAYERS = 0.1, 3
TOLERANCE = 1e-4
OK = ("ok", "no batch norm")
BEGIN, END = "<!-- the table: written by make zoo -->\n", "<!-- end of the table of make zoo -->\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", default="", help="only families that begin with this")
    parser.add_argument("--limit", type=int, help="stop after this many models with batch norm")
    parser.add_argument("--json", type=Path, help="rows, one per model; models in it are skipped")
    parser.add_argument("--page", type=Path, help="write the table to this Markdown page, between its two comments")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ready()
    rows = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else []
    results_by_name = {row["name"]: row for row in rows}
    names = in_turns([name for name in architectures() if family(name).startswith(arguments.family)])
    todo = [name for name in names if name not in results_by_name][: arguments.limit]
    with Bar("zoo", len(todo)) as bar:
        for name in todo:
            started = time.monotonic()
            row = outline(name)
            row |= {} if "finding" in row else checked(name)
            results_by_name[name] = row | {"seconds": round(time.monotonic() - started, 1)}
            save(arguments.json, results_by_name)
            bar.advance(note=name)
    rows = list(results_by_name.values())
    if arguments.page:
        before, _, rest = arguments.page.read_text().partition(BEGIN)
        arguments.page.write_text(before + BEGIN + page(rows, names) + END + rest.partition(END)[2])
    return report(rows)


def save(path: Path | None, rows: dict[str, dict[str, Any]]) -> None:
    if path:
        partial = path.with_suffix(".partial")
        partial.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows.values()) + "\n]\n")
        partial.replace(path)


def architectures() -> list[str]:
    import timm
    import torchvision

    return [f"torchvision:{name}" for name in torchvision.models.list_models(torchvision.models)] + [
        f"timm:{name}" for name in timm.list_models()
    ]


def family(name: str) -> str:
    """The library and the file that a model comes from."""
    import timm
    import torchvision

    library, _, name = name.partition(":")
    builder = timm.model_entrypoint(name) if library == "timm" else torchvision.models.get_model_builder(name)
    return f"{builder.__module__.rpartition('.')[2]} ({library})"


def build(name: str) -> nn.Module:
    import timm
    import torchvision

    library, _, name = name.partition(":")
    model: nn.Module
    if library == "timm":
        model = timm.create_model(name, pretrained=False)
    else:
        model = torchvision.models.get_model(name, weights=None)
    return model.eval()


def outline(name: str) -> dict[str, Any]:
    """Name, family, size and number of batch norm layers, of the model on the meta device."""
    row: dict[str, Any] = {"name": name, "family": family(name)}
    try:
        with torch.device("meta"):
            model = build(name)
    except Exception:  # some compute at construction, which needs numbers
        return row | {"parameters": 0}
    row["parameters"] = sum(p.numel() for p in model.parameters())
    row["norms"] = len(batch_norms(model))
    if not row["norms"]:
        row["finding"] = "no batch norm"
    elif row["parameters"] > LARGEST:
        row["finding"] = f"not tried: {row['parameters'] / 1e6:.0f} million parameters"
    return row


def in_turns(names: list[str]) -> list[str]:
    """One model of each family after the other, small ones first as far as the names tell."""
    families: dict[str, list[str]] = {}
    for name in sorted(names, key=size_by_name):
        families.setdefault(family(name), []).append(name)
    turns = itertools.zip_longest(*families.values())
    return [name for turn in turns for name in turn if name is not None]


SIZES = ("test", "atto", "femto", "pico", "nano", "xxs", "xxt", "tiny", "t", "xs", "n", "s", "small", "", "m", "medium")
SIZES += ("b", "base", "l", "large", "x", "xl", "h", "huge", "g", "giant")


def size_by_name(name: str) -> tuple[int, int]:
    words = re.findall(r"[a-z]+|[0-9]+", name.partition(":")[2])
    ranks = [SIZES.index(word) for word in words if word in SIZES]
    numbers = [int(word) for word in words if word.isdigit()]
    return min(ranks, default=SIZES.index("")), numbers[0] if numbers else 0


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    return {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}


def checked(name: str) -> dict[str, Any]:
    """The results for one model. ``finding`` is "ok" or what is wrong."""
    torch.manual_seed(0)
    try:
        model = build(name)
    except Exception as error:
        return {"finding": f"cannot be built: {first_line(error)}"}
    norms = batch_norms(model)
    if not norms:
        return {"norms": 0, "finding": "no batch norm"}
    randomize(norms)
    reason = ""
    for x in inputs(model):
        try:
            expected = outputs(model, x)
        except Exception as error:  # too small an input: the next is larger
            reason = first_line(error)
            continue
        if not all(bool(y.isfinite().all()) for y in expected):
            return {"norms": len(norms), "finding": "the original's outputs are not finite"}
        try:
            return {"norms": len(norms), "side": x.shape[-1]} | results(model, x, expected)
        except Exception as error:
            return {"norms": len(norms), "finding": f"{type(error).__name__}: {first_line(error)}"}
    return {"norms": len(norms), "finding": f"accepts none of the inputs: {reason}"}


def randomize(norms: dict[str, _BatchNorm]) -> None:
    for norm in norms.values():
        for tensor, low, high in (
            (norm.running_mean, -0.2, 0.2),
            (norm.running_var, 0.5, 2),
            (norm.weight, 0.5, 1.5),
            (norm.bias, -0.2, 0.2),
        ):
            if tensor is not None:
                nn.init.uniform_(tensor, low, high)


def results(model: nn.Module, x: Tensor, expected: list[Tensor]) -> dict[str, Any]:
    weighed = betternorm.convert(copy.deepcopy(model), "weighed", where=lambda name, m: isinstance(m, _BatchNorm))
    if not all(map(torch.equal, outputs(weighed, x), expected)):
        return {"finding": "alpha 0 differs from the original"}
    row = folded(weighed, x)
    if not hasattr(model, "pretrained_cfg"):
        return row
    before = {type(module) for module in model.modules()}
    with torch.no_grad():
        deployed = reparameterize(model)
    if {type(module) for module in deployed.modules()} == before and len(batch_norms(deployed)) == row["norms"]:
        return row
    row["reparameterized"] = with_alpha_reparameterized(weighed, x.to(next(weighed.parameters()).dtype))
    norms = batch_norms(deployed)
    row["norms after"] = len(norms)
    if norms:
        converted = betternorm.convert(deployed, "weighed", where=lambda name, m: isinstance(m, _BatchNorm))
        after = folded(converted, x)
        row |= {"error after": after["error"], "folded after": after["folded"]}
        row["finding"] = after["finding"] if row["finding"] == "ok" else row["finding"]
    else:
        row["error after"] = error_of(outputs(deployed, x), expected)
    if row["reparameterized"] not in ("exact", "error"):
        row["finding"] = f"reparameterized with alpha: {row['reparameterized']}"
    return row


def reparameterize(model: nn.Module) -> nn.Module:
    from timm.utils import reparameterize_model

    deployed: nn.Module = reparameterize_model(model)
    return deployed


def folded(model: nn.Module, x: Tensor) -> dict[str, Any]:
    """Set alpha in three layers, fold the others, and compare."""
    norms = list(batch_norms(model))
    chosen = {norms[0], norms[len(norms) // 2], norms[-1]}
    betternorm.set_alpha(model, dict.fromkeys(chosen, ALPHA))
    expected = outputs(model, x)
    row: dict[str, Any] = {"norms": len(norms)}
    served = copy.deepcopy(model)
    try:
        betternorm.fold(served, x)
    except ValueError as error:
        if not str(error).startswith("nothing to fold"):
            return row | {"folded": 0, "error": None, "finding": f"fold: {first_line(error)}"}
    error = error_of(outputs(served, x), expected)
    if error > TOLERANCE and x.dtype == torch.float32:
        return folded(model.double(), x.double()) | {"in float64": True, "error in float32": error}
    row |= {"folded": len(norms) - len(batch_norms(served)), "error": error}
    return row | {"finding": "ok" if error <= TOLERANCE else f"folding changes the output by {error:.1e}"}


def with_alpha_reparameterized(model: nn.Module, x: Tensor) -> str:
    """What reparameterizing a model with alphas does: exact, an error, or how far it is off."""
    expected = outputs(model, x)
    try:
        with torch.no_grad():
            deployed = reparameterize(model)
    except RuntimeError as error:
        return "error" if "would replace" in str(error) and "alpha" in str(error) else first_line(error)
    error = error_of(outputs(deployed, x), expected)
    return "exact" if error <= TOLERANCE else f"off by {error:.1e}"


def inputs(model: nn.Module) -> Iterator[Tensor]:
    """From small to large, and finally the size that the model declares."""
    channels, high, wide = (getattr(model, "pretrained_cfg", None) or {}).get("input_size") or (3, 224, 224)
    sides = [side for side in SIDES if side < max(high, wide)]
    for size in [*((side, side) for side in sides), (high, wide)]:
        yield torch.randn(2, channels, *size)


def outputs(model: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.inference_mode():
        return tensors_in(model(x))


def error_of(actual: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference relative to the largest output."""
    largest = max(float(y.abs().max()) for y in expected)
    difference = max(float((a - b).abs().max()) for a, b in zip(actual, expected, strict=True))
    return float(f"{difference / max(largest, 1e-30):.1e}")


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def report(rows: list[dict[str, Any]]) -> int:
    kinds = Counter(row["finding"].partition(":")[0] for row in rows)
    for row in rows:
        if row["finding"] not in OK:
            print(f"{row['name']}: {row['finding']}")
    print(f"{len(rows)} architectures; {dict(kinds)}")
    return 0 if set(kinds) <= set(OK) else 1


def page(rows: list[dict[str, Any]], names: list[str]) -> str:
    """A Markdown section with one row per family, and one per model that is not "ok"."""
    families: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["finding"] != "no batch norm":
            families.setdefault(row["family"], []).append(row)
    lines = []
    totals: Counter[str] = Counter()
    others = []
    for name, members in sorted(families.items()):
        done = [row for row in members if "error" in row]
        others += [row for row in members if row["finding"] != "ok"]
        totals.update(done=len(done), ok=sum(row["finding"] == "ok" for row in done))
        if done:
            cells = (name, str(len(done)), share(done, "folded", "norms"), worst(done, "error"), reparameterized(done))
            lines.append(f"| {' | '.join((*cells, worst(done, 'error after')))} |")
    left = ""
    if len(rows) < len(names):
        left = f"Of {len(names)} architectures with and without batch norm, {len(names) - len(rows)} were not run.\n"
    text = [
        HEAD.format(left=left, **versions(), **totals),
        *lines,
        "",
    ]
    if others:
        text += ["| model without a result | reason |", "| --- | --- |"]
        text += [f"| `{row['name']}` | {row['finding']} |" for row in sorted(others, key=lambda row: str(row["name"]))]
    return "\n".join(text) + "\n"


HEAD = """
`make zoo` builds the classification models of timm {timm} and torchvision {torchvision} that contain batch norm (torch
{torch}, random weights and statistics, two images), and checks that `convert`, `set_alpha`, `fold` and timm's
`reparameterize_model` are correct together. The alpha of the first, the middle and the last batch norm layer is 0.1,
and all others are folded where that is exact. Errors are the largest difference of an output relative to the largest
output, in float32; the table has the largest of each family.

{ok} of {done} models are correct with an error of at most 1e-4, and in all of these the converted model with alpha 0 is
equal to the original bit for bit. Models that amplify the rounding of float32 further are compared in float64 (*).
{left}
- *layers folded*: as a share of all batch norm layers. The others follow an activation, a sum, or the input.
- *reparameterized with alpha*: the effect of `reparameterize_model` on a model that has these three alphas: `exact` if
  no layer with alpha was to be fused, otherwise an `error` that names the layer and alpha. None lost alpha silently.
- *error, reparameterized first*: reparameterize the original model, then convert, set alpha and fold.

| family | models | layers folded | error | reparameterized with alpha | error, reparameterized first |
| --- | --- | --- | --- | --- | --- |"""


def versions() -> dict[str, str]:
    import timm
    import torchvision

    return {
        "torch": torch.__version__.partition("+")[0],
        "timm": timm.__version__,
        "torchvision": torchvision.__version__.partition("+")[0],
    }


def share(rows: list[dict[str, Any]], part: str, whole: str) -> str:
    return f"{100 * sum(row[part] for row in rows) / sum(row[whole] for row in rows):.0f} %"


def worst(rows: list[dict[str, Any]], key: str) -> str:
    values = [row[key] for row in rows if row.get(key) is not None]
    mark = "*" if key == "error" and any(row.get("in float64") for row in rows) else ""
    return f"{max(values):.0e}{mark}" if values else ""


def reparameterized(rows: list[dict[str, Any]]) -> str:
    counts = Counter(row["reparameterized"] for row in rows if "reparameterized" in row)
    return ", ".join(f"{kind} ({count})" for kind, count in counts.items())


if __name__ == "__main__":
    sys.exit(main())
