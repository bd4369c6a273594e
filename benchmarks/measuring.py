"""Ratios that hold on a machine that others use too: variants take turns, and each is compared within its round."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

WARMUP_ROUNDS = 3

# Processor time leaves out what other programs take, as long as no thread waits for another: with one thread.
CLOCKS = {"wall": lambda: _now_when_done(time.perf_counter), "processor": time.process_time}


def _now_when_done(clock: Callable[[], float]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock()


@dataclass
class Ratio:
    """Median over the rounds of a variant's time over the baseline's in the same round."""

    ratio: float
    low: float  # first and third quartile of the rounds
    high: float
    milliseconds: float


def compare(variants: dict[str, Callable[[], object]], rounds: int, clock: str = "wall") -> dict[str, Ratio]:
    """Time all variants once a round; the first is the baseline. The order rotates: none always follows one other."""
    now = CLOCKS[clock]
    names = list(variants)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(WARMUP_ROUNDS):
        for run in variants.values():
            run()
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                begin = now()
                variants[name]()
                times[name].append(now() - begin)
    finally:
        gc.enable()
    baseline = times[names[0]]
    found = {}
    for name, measured in times.items():
        ratios = [one / base for one, base in zip(measured, baseline, strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
        found[name] = Ratio(median, low, high, statistics.median(measured) * 1e3)
    return found


def saved_bytes(module: nn.Module, x: Tensor) -> int:
    """What autograd keeps for the backward pass: distinct storages, without parameters and buffers."""
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    kept: dict[int, int] = {}
    held = []  # alive to the end, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor)
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        held.append(module(x))
    return sum(size for address, size in kept.items() if address not in own)


def geometric_mean(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))
