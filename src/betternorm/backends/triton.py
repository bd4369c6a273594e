"""Grouped batch norm on GPUs, in Triton: training forward and backward, and inference example weighing.

A program works on a run of consecutive examples and a block of channels. If that fits into its registers, it reads x
once and writes y. A run that does not fit is cut into pieces: each leaves the moments of its channels in a table, the
last piece of the run to finish puts them together, and a second kernel reads x again and writes y. In the same way the
last run to finish puts together the statistics of the batch, and moves the averages. An integer counter tells who is
last, and tables are always read in the same order: the result is the same every time.

A tile is (examples, channels, space). In channels_last memory the examples of a run follow one another without a gap:
there a run is one long example. :func:`_plan` chooses the size of tiles, and nothing else does.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: N803 - sizes in capitals, as Triton code has them

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from betternorm.backends.operators import dense

HELD = 32768  # values of x, or of x and dy together, in the registers of one program: more are spilled
PIECE = 8192  # values of a tile where the run does not fit
SMALL = 2048  # values below which a program takes more channels
TABLE = 2048  # values of a table that are put together at a time
SECTOR = 32  # bytes, the least that memory delivers


# ---- what the kernels share ----


@triton.jit
def _tile(
    N, C, S, groups, blocks, pieces, inner_tiles, K: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """What this program works on.

    Returns the block of channels, the run and the piece of it; the channels, and which are real; where the tile begins,
    offsets from there, and which are real; how many values of a channel are in the tile.
    """
    program = tl.program_id(0)  # neighbours have neighbouring channels, which share cache lines
    block, run, piece = program % blocks, program // blocks // pieces, program // blocks % pieces

    i = tl.arange(0, BLOCK_G * BLOCK_K)  # groups of channels, each padded from K to BLOCK_K
    if K == BLOCK_K:
        c = block * (BLOCK_G * K) + i
        real = c < C
    else:
        c = (block * BLOCK_G + i // BLOCK_K) * K + i % BLOCK_K
        real = (c < C) & (i % BLOCK_K < K)

    size = N // groups + (run < N % groups).to(tl.int32)
    first = (run * (N // groups) + tl.minimum(run, N % groups)).to(tl.int64)
    n = piece // inner_tiles * BLOCK_N
    s = piece % inner_tiles * BLOCK_S
    j = tl.arange(0, BLOCK_S)[None, None, :]
    if CHANNELS_LAST:
        start = (first * S + s) * C
        offsets = j * C + c[None, :, None]
        mask = (j < size * S - s) & real[None, :, None]
        count = tl.minimum(tl.maximum(size * S - s, 0), BLOCK_S)
    else:
        i = tl.arange(0, BLOCK_N)[:, None, None]
        start = (first + n) * C * S + s
        offsets = i * (C * S) + c[None, :, None] * S + j
        mask = (i < size - n) & (j < S - s) & real[None, :, None]
        count = tl.minimum(tl.maximum(size - n, 0), BLOCK_N) * tl.minimum(S - s, BLOCK_S)
    return block, run, piece, c, real, start, offsets, mask, count.to(tl.float32)


@triton.jit
def _sum(tile):
    """Over examples and space."""
    return tl.sum(tl.sum(tile, 2), 0)


@triton.jit
def _moments(values, mask, count):
    """Mean and sum of squared deviations of every channel, in two passes over registers: no cancellation."""
    count = tl.maximum(count, 1)
    mean = _sum(values) / count
    deviation = tl.where(mask, values - mean[None, :, None], 0)
    return _corrected(mean, _sum(deviation), _sum(deviation * deviation), count)


@triton.jit
def _corrected(mean, rest, squares, count):
    """Without the rounding of ``mean``, from which the deviations sum up to ``rest``: NaN where a value is infinite."""
    better = mean + rest / count
    return tl.where(better == better, better, mean), tl.maximum(squares - rest * rest / count, 0)


@triton.jit
def _over_channels(table, K: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr):
    """Every entry replaced by the mean over its channel group. Entries that are not real are 0."""
    if K > 1:
        mean = tl.sum(tl.reshape(table, (BLOCK_G, BLOCK_K)), 1) / K
        table = tl.reshape(tl.broadcast_to(mean[:, None], (BLOCK_G, BLOCK_K)), (BLOCK_G * BLOCK_K,))
    return table


@triton.jit
def _affine(weight, bias, c, real):
    gamma = tl.full(c.shape, 1, tl.float32)
    beta = tl.full(c.shape, 0, tl.float32)
    if weight is not None:
        gamma = tl.load(weight + c, real, 0).to(tl.float32)
    if bias is not None:
        beta = tl.load(bias + c, real, 0).to(tl.float32)
    return gamma, beta


@triton.jit
def _load_groups(first, second, run, c, real, C, K: tl.constexpr):
    """Of two tables (groups, C / K), the entry of every channel's group."""
    entry = run.to(tl.int64) * (C // K) + c // K
    return tl.load(first + entry, real, 0), tl.load(second + entry, real, 0)


@triton.jit
def _store_groups(first, second, run, c, real, C, K: tl.constexpr, of_first, of_second):
    entry = run.to(tl.int64) * (C // K) + c // K
    tl.store(first + entry, of_first, real & (c % K == 0))
    tl.store(second + entry, of_second, real & (c % K == 0))


@triton.jit
def _store_row(table, row, c, real, C, first, second, third):
    """Store a row of a table (rows, 3, C), which the last program reduces."""
    pointers = table + row.to(tl.int64) * 3 * C + c
    tl.store(pointers, first, real)
    tl.store(pointers + C, second, real)
    tl.store(pointers + 2 * C, third, real)


@triton.jit
def _is_last(arrivals, expected):
    """Whether the rows of all others that count here are written. The barrier waits for the threads of this program."""
    tl.debug_barrier()
    return tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == expected - 1


@triton.jit
def _load_rows(table, begin, stop, c, real, C, BLOCK_ROWS: tl.constexpr):
    row = begin + tl.arange(0, BLOCK_ROWS)
    pointers = table + row.to(tl.int64)[:, None] * 3 * C + c[None, :]
    mask = (row < stop)[:, None] & real[None, :]
    # From the second-level cache, which all programs share: the first level may hold what was there before.
    first = tl.load(pointers, mask, 0, cache_modifier=".cg")
    second = tl.load(pointers + C, mask, 0, cache_modifier=".cg")
    return first, second, tl.load(pointers + 2 * C, mask, 0, cache_modifier=".cg")


@triton.jit
def _merge_moments(table, begin, stop, c, real, C, BLOCK_ROWS: tl.constexpr):
    """Count, mean and sum of squared deviations of the union of the rows, each with its own three."""
    zeros = tl.zeros((BLOCK_ROWS, c.shape[0]), tl.float32)
    count, total = zeros, zeros
    for i in range(begin, stop, BLOCK_ROWS):
        counts, means, _ = _load_rows(table, i, stop, c, real, C, BLOCK_ROWS)
        count += counts
        total += counts * means
    number = tl.maximum(tl.sum(count, 0), 1)
    mean = tl.sum(total, 0) / number
    rest, squares = zeros, zeros
    for i in range(begin, stop, BLOCK_ROWS):
        counts, means, inner = _load_rows(table, i, stop, c, real, C, BLOCK_ROWS)
        deviation = tl.where(counts > 0, means - mean[None, :], 0)
        rest += counts * deviation
        squares += inner + counts * deviation * deviation
    mean, squares_of_all = _corrected(mean, tl.sum(rest, 0), tl.sum(squares, 0), number)
    return number, mean, squares_of_all


@triton.jit
def _add_rows(table, begin, stop, c, real, C, BLOCK_ROWS: tl.constexpr):
    zeros = tl.zeros((BLOCK_ROWS, c.shape[0]), tl.float32)
    first, second, third = zeros, zeros, zeros
    for i in range(begin, stop, BLOCK_ROWS):
        firsts, seconds, thirds = _load_rows(table, i, stop, c, real, C, BLOCK_ROWS)
        first += firsts
        second += seconds
        third += thirds
    return tl.sum(first, 0), tl.sum(second, 0), tl.sum(third, 0)


@triton.jit
def _normalize(values, mean, rstd, gamma, beta):
    return (values - mean[None, :, None]) * (rstd * gamma)[None, :, None] + beta[None, :, None]


@triton.jit
def _gradient(slope, xhat, rstd, gamma, mean_dxhat, mean_dxhat_xhat):
    dxhat = slope * gamma[None, :, None]
    return (dxhat - mean_dxhat[None, :, None] - xhat * mean_dxhat_xhat[None, :, None]) * rstd[None, :, None]


# ---- forward and inference ----


@triton.jit
def _forward_kernel(
    x, y, weight, bias, mean, rstd, alpha, alpha_step, running_mean, running_var, batch_mean, batch_var, momentum, eps,
    piece_rows, run_rows, piece_arrivals, run_arrivals, N, C, S, groups, blocks, pieces, inner_tiles,
    K: tl.constexpr, CHANNELS_LAST: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr, WHOLE: tl.constexpr, BLOCK_PIECES: tl.constexpr, BLOCK_RUNS: tl.constexpr,
):  # fmt: skip
    """Statistics of runs, and y where the whole run is here. With alpha it is inference, where a run is one example."""
    block, run, piece, c, real, start, offsets, mask, count = _tile(
        N, C, S, groups, blocks, pieces, inner_tiles, K, CHANNELS_LAST, BLOCK_N, BLOCK_G, BLOCK_K, BLOCK_S
    )
    values = tl.load(x + start + offsets, mask, 0).to(tl.float32)
    own_mean, squares = _moments(values, mask, count)
    if not WHOLE:
        _store_row(piece_rows, run * pieces + piece, c, real, C, count, own_mean, squares)
        if not _is_last(piece_arrivals + run * blocks + block, pieces):
            return
        begin = run * pieces
        count, own_mean, squares = _merge_moments(piece_rows, begin, begin + pieces, c, real, C, BLOCK_PIECES)

    average, var = own_mean, squares / count
    if alpha is not None:
        a = tl.load(alpha + c * alpha_step, real, 0).to(tl.float32)
        moving = tl.load(running_mean + c, real, 0).to(tl.float32)
        average = (1 - a) * moving + a * own_mean
        var = (1 - a) * tl.load(running_var + c, real, 0).to(tl.float32) + a * var
        var += a * (1 - a) * (moving - own_mean) * (moving - own_mean)
    group_mean = _over_channels(average, K, BLOCK_G, BLOCK_K)
    between = tl.where(real, average - group_mean, 0)
    group_rstd = 1 / tl.sqrt(_over_channels(var + between * between, K, BLOCK_G, BLOCK_K) + eps)
    if mean is not None:
        _store_groups(mean, rstd, run, c, real, C, K, group_mean, group_rstd)
    if WHOLE:
        gamma, beta = _affine(weight, bias, c, real)
        tl.store(y + start + offsets, _normalize(values, group_mean, group_rstd, gamma, beta), mask)

    if batch_mean is not None:
        _store_row(run_rows, run, c, real, C, count, own_mean, squares)
        if _is_last(run_arrivals + block, groups):
            total, m, total_squares = _merge_moments(run_rows, 0, groups, c, real, C, BLOCK_RUNS)
            v = total_squares / total
            tl.store(batch_mean + c, m, real)
            tl.store(batch_var + c, v, real)
            if running_mean is not None:
                before = tl.load(running_mean + c, real, 0).to(tl.float32)
                moved = (1 - momentum) * tl.load(running_var + c, real, 0).to(tl.float32) + momentum * v
                tl.store(running_var + c, moved + momentum * (1 - momentum) * (m - before) * (m - before), real)
                tl.store(running_mean + c, (1 - momentum) * before + momentum * m, real)


@triton.jit
def _normalize_kernel(
    x, y, weight, bias, mean, rstd, N, C, S, groups, blocks, pieces, inner_tiles, K: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """y of a piece, when the statistics of its run are known."""
    _, run, _, c, real, start, offsets, mask, _ = _tile(
        N, C, S, groups, blocks, pieces, inner_tiles, K, CHANNELS_LAST, BLOCK_N, BLOCK_G, BLOCK_K, BLOCK_S
    )
    center, scale = _load_groups(mean, rstd, run, c, real, C, K)
    gamma, beta = _affine(weight, bias, c, real)
    values = tl.load(x + start + offsets, mask, 0).to(tl.float32)
    tl.store(y + start + offsets, _normalize(values, center, scale, gamma, beta), mask)


# ---- backward ----


@triton.jit
def _backward_kernel(
    dy, x, dx, weight, mean, rstd, mean_dxhat, mean_dxhat_xhat, dweight, dbias,
    piece_rows, run_rows, piece_arrivals, run_arrivals, N, C, S, groups, blocks, pieces, inner_tiles,
    K: tl.constexpr, CHANNELS_LAST: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr, WHOLE: tl.constexpr, BLOCK_PIECES: tl.constexpr, BLOCK_RUNS: tl.constexpr,
):  # fmt: skip
    """Sums of dy and of dy * xhat over runs and over the batch, and dx where the whole run is here."""
    block, run, piece, c, real, start, offsets, mask, count = _tile(
        N, C, S, groups, blocks, pieces, inner_tiles, K, CHANNELS_LAST, BLOCK_N, BLOCK_G, BLOCK_K, BLOCK_S
    )
    center, scale = _load_groups(mean, rstd, run, c, real, C, K)
    xhat = (tl.load(x + start + offsets, mask, 0).to(tl.float32) - center[None, :, None]) * scale[None, :, None]
    slope = tl.load(dy + start + offsets, mask, 0).to(tl.float32)
    sum_dy, sum_dy_xhat = _sum(slope), _sum(slope * xhat)
    if not WHOLE:
        _store_row(piece_rows, run * pieces + piece, c, real, C, sum_dy, sum_dy_xhat, count)
        if not _is_last(piece_arrivals + run * blocks + block, pieces):
            return
        begin = run * pieces
        sum_dy, sum_dy_xhat, count = _add_rows(piece_rows, begin, begin + pieces, c, real, C, BLOCK_PIECES)

    if dx is not None:
        gamma, _ = _affine(weight, None, c, real)
        count = tl.maximum(count, 1)  # it is 0 for channels that are not real
        first = _over_channels(gamma * sum_dy, K, BLOCK_G, BLOCK_K) / count
        second = _over_channels(gamma * sum_dy_xhat, K, BLOCK_G, BLOCK_K) / count
        if WHOLE:
            tl.store(dx + start + offsets, _gradient(slope, xhat, scale, gamma, first, second), mask)
        else:
            _store_groups(mean_dxhat, mean_dxhat_xhat, run, c, real, C, K, first, second)

    _store_row(run_rows, run, c, real, C, sum_dy, sum_dy_xhat, count)
    if _is_last(run_arrivals + block, groups):
        of_bias, of_weight, _ = _add_rows(run_rows, 0, groups, c, real, C, BLOCK_RUNS)
        tl.store(dbias + c, of_bias, real)
        tl.store(dweight + c, of_weight, real)


@triton.jit
def _gradient_kernel(
    dy, x, dx, weight, mean, rstd, mean_dxhat, mean_dxhat_xhat, N, C, S, groups, blocks, pieces, inner_tiles,
    K: tl.constexpr, CHANNELS_LAST: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """dx of a piece, when the sums of its run are known."""
    _, run, _, c, real, start, offsets, mask, _ = _tile(
        N, C, S, groups, blocks, pieces, inner_tiles, K, CHANNELS_LAST, BLOCK_N, BLOCK_G, BLOCK_K, BLOCK_S
    )
    center, scale = _load_groups(mean, rstd, run, c, real, C, K)
    first, second = _load_groups(mean_dxhat, mean_dxhat_xhat, run, c, real, C, K)
    gamma, _ = _affine(weight, None, c, real)
    xhat = (tl.load(x + start + offsets, mask, 0).to(tl.float32) - center[None, :, None]) * scale[None, :, None]
    slope = tl.load(dy + start + offsets, mask, 0).to(tl.float32)
    tl.store(dx + start + offsets, _gradient(slope, xhat, scale, gamma, first, second), mask)


# ---- launchers ----


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    channels_per_group: int,
    eps: float,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    momentum: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, mean and 1 / std of every group, (groups, C / channels_per_group), and mean and variance over the batch, (C).

    The first N % groups runs have one example more than the others. ``running_mean`` and ``running_var``, where given,
    are moved toward the batch's in place, in the same launch.
    """
    x = dense(x)
    weight, bias, moving_mean, moving_var = _contiguous(weight, bias, running_mean, running_var)
    plan = _plan(x, groups, channels_per_group, held=1)
    y = torch.empty_like(x)
    mean, rstd = (_table(x, groups, x.shape[1] // channels_per_group) for _ in range(2))
    batch_mean, batch_var = (_table(x, x.shape[1]) for _ in range(2))
    with torch.cuda.device_of(x):
        _forward_kernel[plan.grid](
            x, y, weight, bias, mean, rstd, None, 0, moving_mean, moving_var, batch_mean, batch_var,
            momentum, eps, *_workspace(x, plan), **plan.sizes, **plan.tile, **plan.closing,
        )  # fmt: skip
        if not plan.whole:
            _normalize_kernel[plan.grid](x, y, weight, bias, mean, rstd, **plan.sizes, **plan.tile)
    for given, moved in ((running_mean, moving_mean), (running_var, moving_var)):
        if given is not None and moved is not None and moved is not given:
            given.copy_(moved)
    return y, mean, rstd, batch_mean, batch_var


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    groups: int,
    channels_per_group: int,
    need_dx: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of x, weight and bias, given what :func:`forward` returned."""
    x, (weight,) = dense(x), _contiguous(weight)
    dy = dy if dy.stride() == x.stride() else torch.empty_like(x, dtype=dy.dtype).copy_(dy)
    plan = _plan(x, groups, channels_per_group, held=2)
    dx = torch.empty_like(x) if need_dx else None
    dweight, dbias = (_table(x, x.shape[1]) for _ in range(2))
    averages = (None, None) if plan.whole or not need_dx else (torch.empty_like(mean), torch.empty_like(mean))
    with torch.cuda.device_of(x):
        _backward_kernel[plan.grid](
            dy, x, dx, weight, mean, rstd, *averages, dweight, dbias,
            *_workspace(x, plan), **plan.sizes, **plan.tile, **plan.closing,
        )  # fmt: skip
        if need_dx and not plan.whole:
            _gradient_kernel[plan.grid](dy, x, dx, weight, mean, rstd, *averages, **plan.sizes, **plan.tile)
    return dx, dweight, dbias


def infer(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    alpha: Tensor,
    channels_per_group: int,
    eps: float,
) -> Tensor:
    """y with weight ``alpha``, a tensor of one value or one per channel, on the example's own statistics."""
    x = dense(x)
    weight, bias, moving_mean, moving_var = _contiguous(weight, bias, running_mean, running_var)
    examples, channels = x.shape[:2]
    if alpha.numel() not in (1, channels):
        raise ValueError(f"alpha has {alpha.numel()} elements and the input has {channels} channels")
    alpha = alpha.contiguous()
    plan = _plan(x, examples, channels_per_group, held=1)
    y = torch.empty_like(x)
    shape = (examples, channels // channels_per_group)
    statistics = (None, None) if plan.whole else (_table(x, *shape), _table(x, *shape))
    with torch.cuda.device_of(x):
        _forward_kernel[plan.grid](
            x, y, weight, bias, *statistics, alpha, int(alpha.numel() > 1), moving_mean, moving_var, None, None,
            0.0, eps, *_workspace(x, plan, training=False), **plan.sizes, **plan.tile, **plan.closing,
        )  # fmt: skip
        if not plan.whole:
            _normalize_kernel[plan.grid](x, y, weight, bias, *statistics, **plan.sizes, **plan.tile)
    return y


class Plan(NamedTuple):
    """How the work is cut up."""

    whole: bool  # a program holds its whole run
    grid: tuple[int]
    sizes: dict[str, int]
    tile: dict[str, Any]
    closing: dict[str, Any]  # for the kernels that put tables together


def _plan(x: Tensor, groups: int, channels_per_group: int, held: int) -> Plan:
    """``held`` is how many tensors like x a program keeps in registers."""
    examples, channels = x.shape[:2]
    space = x.numel() // (examples * channels)
    largest = -(-examples // groups)
    channels_last = space == 1 or not x.is_contiguous()
    outer, inner = (1, largest * space) if channels_last else (largest, space)

    block_n, block_k, block_s = (triton.next_power_of_2(size) for size in (outer, channels_per_group, inner))
    all_groups = triton.next_power_of_2(channels // channels_per_group)
    sector = SECTOR // x.element_size() if channels_last else 1
    block_g = min(max(sector // block_k, 1), all_groups)
    if block_k > HELD // held:
        raise ValueError(f"channels_per_group = {channels_per_group}: the GPU kernels take at most {HELD // held}")
    whole = block_n * block_g * block_k * block_s <= HELD // held
    if not whole:
        block_s = min(block_s, max(PIECE // (block_g * block_k), 1))
        block_n = min(block_n, max(PIECE // (block_g * block_k * block_s), 1))
    while block_n * block_g * block_k * block_s < SMALL and block_g < all_groups:
        block_g *= 2
    values = block_n * block_g * block_k * block_s

    inner_tiles = -(-inner // block_s)
    pieces = -(-outer // block_n) * inner_tiles
    blocks = -(-channels // (block_g * channels_per_group))
    sizes = {
        "N": examples, "C": channels, "S": space,
        "groups": groups, "blocks": blocks, "pieces": pieces, "inner_tiles": inner_tiles,
    }  # fmt: skip
    tile = {
        "K": channels_per_group, "CHANNELS_LAST": channels_last,
        "BLOCK_N": block_n, "BLOCK_G": block_g, "BLOCK_K": block_k, "BLOCK_S": block_s,
        "num_warps": min(max(values // 1024, 4), 16), "enable_fp_fusion": True,
    }  # fmt: skip
    rows = max(TABLE // (block_g * block_k), 1)
    block_pieces, block_runs = (min(rows, triton.next_power_of_2(count)) for count in (pieces, groups))
    closing = {"WHOLE": whole, "BLOCK_PIECES": block_pieces, "BLOCK_RUNS": block_runs}
    return Plan(whole, (blocks * groups * pieces,), sizes, tile, closing)


def _workspace(x: Tensor, plan: Plan, training: bool = True) -> tuple[Tensor | None, ...]:
    """Rows of pieces and of runs, and how many of each have arrived. Inference has no use for those of runs."""
    groups, blocks, pieces = (plan.sizes[name] for name in ("groups", "blocks", "pieces"))
    piece_rows = None if plan.whole else _table(x, groups, pieces, 3, x.shape[1])
    run_rows = _table(x, groups, 3, x.shape[1]) if training else None
    if plan.whole and not training:
        return None, None, None, None
    # One launch more, to set them to zero: counters that outlive a call would be shared by streams.
    arrivals = torch.zeros(blocks * (1 + groups), dtype=torch.int32, device=x.device)
    return piece_rows, run_rows, arrivals[blocks:], arrivals


def _table(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _contiguous(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if tensor is None else tensor.contiguous() for tensor in tensors)
