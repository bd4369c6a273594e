"""How far the byte model is from published measurements: python -m benchmarks.published PATH_OF_LIGER_KERNEL.

The model predicts time as bytes over bandwidth. Liger-Kernel publishes times of group norm in Triton and in torch, for
inputs (128, C, 512) in float32 on two GPUs. Needs a clone of that repository; nothing of it is copied here.
"""

from __future__ import annotations

import csv
import io
import statistics
import subprocess
import sys
from collections import defaultdict

COMMITS = ("ead96b6", "4c32ab6")
BANDWIDTH = {"NVIDIA B200": 8000e9, "NVIDIA A100-SXM4-40GB": 1555e9}  # bytes per second, as published
# Times that a tensor like x is read or written. Groups of 2,048 values fit on the chip, so Triton reads them once.
PASSES = {
    ("liger", "forward"): 2,
    ("liger", "backward"): 3,
    ("huggingface", "forward"): 3,
    ("huggingface", "backward"): 5,
}
NAMES = {"liger": "Liger-Kernel (Triton)", "huggingface": "torch"}
SHORTEST = 50e-6  # seconds; below, launches dominate


def ratios(repository: str) -> dict[tuple[str, str, str], list[float]]:
    """Measured over predicted time by GPU, kernel and direction."""
    found = defaultdict(list)
    for commit in COMMITS:
        command = ["git", "-C", repository, "show", f"{commit}:benchmark/data/all_benchmark_data.csv"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        latest = {}
        for row in csv.DictReader(io.StringIO(text)):
            key = row["gpu_name"], row["kernel_provider"], row["kernel_operation_mode"]
            if row["kernel_name"] == "group_norm" and row["metric_name"] == "speed" and key[1:] in PASSES:
                latest[(*key, int(float(row["x_value"])))] = float(row["y_value_50"]) / 1e3
        for (gpu, kernel, way, channels), seconds in latest.items():
            if gpu in BANDWIDTH:
                predicted = PASSES[kernel, way] * 128 * channels * 512 * 4 / BANDWIDTH[gpu]
                if predicted > SHORTEST:
                    found[gpu, kernel, way].append(seconds / predicted)
    return found


def main() -> None:
    table = ratios(sys.argv[1])
    rows = [(gpu, NAMES[kernel], way, values) for (gpu, kernel, way), values in sorted(table.items())]
    triton = [value for (_, kernel, _), values in table.items() if kernel == "liger" for value in values]
    everything = [value for values in table.values() for value in values]
    rows += [("both", "Triton", "both", triton), ("both", "all", "both", everything)]
    print("| GPU | kernel | direction | rows | measured / predicted, median | largest |")
    print("| --- | --- | --- | ---: | ---: | ---: |")
    for gpu, kernel, way, values in rows:
        print(f"| {gpu} | {kernel} | {way} | {len(values)} | {statistics.median(values):.2f} | {max(values):.2f} |")


if __name__ == "__main__":
    main()
