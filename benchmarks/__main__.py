"""Print tables of ratios, and write every row as JSON: python -m benchmarks --help."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from itertools import groupby
from pathlib import Path

import torch

from benchmarks.measuring import CLOCKS, geometric_mean
from benchmarks.sections import SECTIONS, Row
from betternorm import backends
from betternorm.display.tables import table


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Print tables of ratios, and write every row as JSON."
    )
    parser.add_argument("--only", choices=SECTIONS, nargs="+", default=list(SECTIONS), help="default: all")
    parser.add_argument("--rounds", type=int, default=25, help="turns that every variant takes, 20 or more (25)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: as torch has it")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="processor: for a busy machine, with one thread"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (cpu)")
    parser.add_argument("--json", type=Path, default=Path("benchmarks.json"), help="default: benchmarks.json")
    arguments = parser.parse_args()
    if arguments.rounds < 20:
        parser.error(f"--rounds {arguments.rounds}: a median of fewer than 20 rounds says little; give 20 or more")
    if arguments.clock == "processor" and arguments.threads != 1:
        parser.error(
            f"--clock processor --threads {arguments.threads}: threads that wait count as busy; add --threads 1"
        )
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: torch finds no GPU here; leave it out to measure the CPU")
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)

    machine = {
        "torch": torch.__version__,
        "processor": processor(),
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "clock": arguments.clock,
        "kernels": backends.status(),
        "load": round(os.getloadavg()[0], 1),  # of the machine, by whatever else it does
    }
    found: list[Row] = []
    for name in arguments.only:
        for row in SECTIONS[name](arguments.rounds, arguments.clock, arguments.device):
            found.append(row)
            print(f"{row['section']}: {row['layout']} {row['case']} {row['variant']}", file=sys.stderr)
            arguments.json.write_text(json.dumps({"machine": machine, "rows": found}, indent=1) + "\n")
    print(*(f"{key}: {value}" for key, value in machine.items()), sep="\n")
    print_tables(found)


def print_tables(found: list[Row]) -> None:
    """For each section and layout, the ratios of all variants by case, and their geometric mean."""
    for (section, layout), group in groupby(found, key=lambda row: (row["section"], row["layout"])):
        by_variant: dict[str, dict[str, float]] = {}
        for row in group:
            by_variant.setdefault(row["variant"], {})[row["case"]] = row["ratio"]
        names = list(next(iter(by_variant.values())))
        lines = []
        for variant, ratios in by_variant.items():
            mean = [f"{geometric_mean(ratios.values()):.3f}"] if len(names) > 1 else []
            lines.append([variant, *(f"{ratios[name]:.3f}" for name in names), *mean])
        headers = ["variant", *names, *(["geometric mean"] if len(names) > 1 else [])]
        print(f"\n{section}, {layout}\n\n{table(headers, lines)}")


def processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


if __name__ == "__main__":
    main()
