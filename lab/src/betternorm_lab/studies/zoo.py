"""Every architecture in timm that contains BatchNorm: does it convert, and does it compute the same? (`make zoo`)

Each is built without weights, with the smallest input it takes. Converted, alpha = 0 must equal the original to the bit
and alpha = 0.1 must be finite. Prints the count and the reason for each that cannot.

    python lab/src/betternorm_lab/studies/zoo.py [--family resnet] [--limit 50] [--json zoo.json]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import betternorm
from betternorm.display.progress import Bar
from betternorm.integrations.torchvision import ready
from betternorm.weighing.alpha import set_alpha

SIDES = (32, 64, 96, 128, 160, 192, 224, 256, 288, 384)
LARGEST = 2e9  # parameters: 8 GB


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", default="", help="only names that begin with this")
    parser.add_argument("--limit", type=int, help="only so many, evenly spread")
    parser.add_argument("--json", type=Path, help="a row for every architecture; those in it are not tried again")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of timm about renamed models
    names = architectures(arguments.family)
    if arguments.limit:
        names = names[:: -(-len(names) // arguments.limit)]
    rows = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else []
    done = {row["name"] for row in rows}
    with Bar("zoo", len(names)) as bar:
        for name in names:
            if name in done:
                bar.advance()
                continue
            started = time.monotonic()
            rows.append({"name": name, "finding": tried(name), "seconds": round(time.monotonic() - started, 2)})
            bar.advance(note=name)
            if arguments.json:
                arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return report(rows)


def architectures(family: str) -> list[str]:
    ready()
    import timm

    return timm.list_models(f"{family}*")


def tried(name: str) -> str:
    """``ok``, ``no BatchNorm``, or what is wrong."""
    import timm

    try:
        with torch.device("meta"):
            outline = timm.create_model(name, pretrained=False)
    except Exception:  # some compute at construction, which needs numbers
        outline = None
    if outline is not None:
        if not has_batch_norm(outline):
            return "no BatchNorm"
        size = sum(p.numel() for p in outline.parameters())
        if size > LARGEST:
            return f"not tried: {size / 1e6:.0f} million parameters"
    torch.manual_seed(0)
    try:
        model = timm.create_model(name, pretrained=False).eval()
    except Exception as error:
        return f"cannot be built: {first_line(error)}"
    return compared(model) if has_batch_norm(model) else "no BatchNorm"


def is_batch_norm(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def has_batch_norm(model: nn.Module) -> bool:
    return any(is_batch_norm(name, module) for name, module in model.named_modules())


def compared(model: nn.Module) -> str:
    reason = ""
    for x in inputs(model):
        try:
            with torch.inference_mode():
                expected = flat(model(x))
        except Exception as error:  # too small an input: the next is larger
            reason = first_line(error)
            continue
        try:
            # GroupNorm, which some have too, becomes alpha = 1 and is equal but for rounding: not asked here.
            converted = betternorm.convert(model, "weighed", where=is_batch_norm)
            norms = [module for name, module in converted.named_modules() if is_batch_norm(name, module)]
            left = [type(module).__name__ for module in norms if not isinstance(module, betternorm.GroupedBatchNorm)]
            if left:
                return f"{len(left)} {left[0]} were not converted"
            with torch.inference_mode():
                if not torch.equal(flat(converted(x)), expected):
                    return "alpha 0 differs from the original"
                set_alpha(converted, 0.1)
                weighed = flat(converted(x))
        except Exception as error:
            return f"{type(error).__name__}: {first_line(error)}"
        return "ok" if bool(weighed.isfinite().all()) else "alpha 0.1 is not finite"
    return f"takes no input that was tried: {reason}"


def inputs(model: nn.Module) -> Iterator[Tensor]:
    """From small to large, and at last what the model declares."""
    channels, high, wide = model.pretrained_cfg.get("input_size") or (3, 224, 224)
    sides = [side for side in SIDES if side < max(high, wide)]
    for size in [*((side, side) for side in sides), (high, wide)]:
        yield torch.randn(2, channels, *size)


def flat(output: Tensor | tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    parts = output if isinstance(output, (tuple, list)) else [output]
    return torch.cat([part.flatten() for part in parts])


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def report(rows: list[dict[str, str]]) -> int:
    kinds = Counter(row["finding"].split(":")[0] for row in rows)
    with_norm = [row for row in rows if row["finding"] != "no BatchNorm"]
    for row in with_norm:
        if row["finding"] != "ok":
            print(f"{row['name']}: {row['finding']}")
    print(
        f"{len(rows)} architectures, {len(with_norm)} with BatchNorm (or unknown): {kinds['ok']} convert, equal the "
        f"original to the bit at alpha 0 and are finite at alpha 0.1; {len(with_norm) - kinds['ok']} do not, see above"
    )
    return 0 if kinds["ok"] == len(with_norm) else 1


if __name__ == "__main__":
    sys.exit(main())
