"""The products of :mod:`lightning_accel.ops.grouped_products` on a GPU, in any 16-bit dtype or float32.

Shapes: M rows, N rows to gather from, I features in, O features out, E groups. A program computes a tile of rows of one
group, and finds that group from the sizes on the device, so that the host never waits for them; sums are float32.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_FEW = 64  # rows of a group, or features: with fewer, tiles are not measured
_ROW_TILES = [(64, 64, 32, 4, 3), (64, 128, 64, 4, 3), (128, 128, 32, 8, 4), (128, 128, 64, 8, 3), (128, 256, 64, 8, 3)]
_GROUP_TILES = [(32, 64, 64, 4, 3), (32, 128, 128, 8, 4), (64, 128, 128, 8, 3)]


def multiply_rows(x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None, source: Tensor | None) -> Tensor:
    """Multiply the rows of group e by ``weight[e].T`` and add ``bias[e]``; rows past ``ends[-1]`` give 0.

    Args:
        x: (M, I), of any strides; with ``source`` (N, I).
        weight: (E, O, I) in the dtype of ``x``, of any strides.
        ends: (E,) int64, the number of rows of the groups up to each.
        bias: (E, O).
        source: (M,) int64, the row of ``x`` to multiply; read up to ``ends[-1]`` alone.

    Returns:
        (M, O).
    """
    num_rows, (num_groups, num_out, num_in) = len(x if source is None else source), weight.shape
    out = x.new_empty(num_rows, num_out)
    if not out.numel():
        return out
    rows_of_group = num_rows // num_groups
    kernel: Any = _measured_rows_kernel
    tiles = {}
    if not _is_measured(rows_of_group, num_in, num_out):
        kernel = _rows_kernel
        tiles = {"TILE_ROWS": min(max(triton.next_power_of_2(rows_of_group), 16), 64), "TILE_OUT": 64, "TILE_IN": 32}

    def grid(meta: Mapping[str, int]) -> tuple[int, int]:
        # as many tiles as there can be: each group, and the rows of none, may end in a part of one
        return triton.cdiv(num_rows, meta["TILE_ROWS"]) + num_groups, triton.cdiv(num_out, meta["TILE_OUT"])

    with torch.cuda.device_of(x):  # kernels start on the current device
        kernel[grid](
            x, weight, None if bias is None else bias.contiguous(), source, out, ends,
            num_rows, num_in, num_out, num_groups, *x.stride(), *weight.stride(),
            PRECISION=_precision(x), GROUPS=triton.next_power_of_2(num_groups + 1), **tiles,
        )  # fmt: skip
    return out


def multiply_groups(left: Tensor, right: Tensor, ends: Tensor, source: Tensor | None) -> Tensor:
    """Compute ``left.T @ right`` over the rows of each group: the gradient of the weights.

    Args:
        left: (M, O), of any strides.
        right: (M, I) in the dtype of ``left``, of any strides; with ``source`` (N, I).
        ends: (E,) int64, the number of rows of the groups up to each.
        source: (M,) int64, the row of ``right`` to multiply; read up to ``ends[-1]`` alone.

    Returns:
        (E, O, I); 0 for a group without rows.
    """
    num_out, num_in, num_groups = left.shape[1], right.shape[1], len(ends)
    out = left.new_empty(num_groups, num_out, num_in)
    if not out.numel():
        return out
    kernel: Any = _measured_groups_kernel
    tiles = {}
    if not _is_measured(len(left) // num_groups, num_in, num_out):
        kernel, tiles = _groups_kernel, {"TILE_ROWS": 32, "TILE_OUT": 64, "TILE_IN": 64}

    def grid(meta: Mapping[str, int]) -> tuple[int, int, int]:
        return triton.cdiv(num_out, meta["TILE_OUT"]), triton.cdiv(num_in, meta["TILE_IN"]), num_groups

    with torch.cuda.device_of(left):
        kernel[grid](
            left, right, source, out, ends, num_in, num_out, *left.stride(), *right.stride(),
            PRECISION=_precision(left), **tiles,
        )  # fmt: skip
    return out


def _is_measured(*sizes: int) -> bool:
    """Return whether the fastest tiles are looked for, which may differ, and round differently, in the next run."""
    if torch.are_deterministic_algorithms_enabled() or torch.cuda.is_current_stream_capturing():
        return False
    return min(sizes) >= _FEW


def _precision(x: Tensor) -> str:
    rounds = x.dtype != torch.float32 or torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if rounds else "ieee"


def _configs(tiles: list[tuple[int, int, int, int, int]]) -> list[triton.Config]:
    names = "TILE_ROWS", "TILE_OUT", "TILE_IN"
    return [
        triton.Config(dict(zip(names, sizes, strict=True)), num_warps=warps, num_stages=stages)
        for *sizes, warps, stages in tiles
    ]


@triton.jit
def _rows_kernel(
    x, weight, bias, source, out, ends, num_rows, num_in, num_out, num_groups,
    x_row, x_in, weight_group, weight_out, weight_in, PRECISION: tl.constexpr, GROUPS: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr,
):  # fmt: skip
    num_tiles, num_out_tiles = tl.num_programs(0), tl.num_programs(1)
    number = tl.program_id(1) * num_tiles + tl.program_id(0)  # in the order in which programs start
    tile, out_tile = tl.swizzle2d(number // num_out_tiles, number % num_out_tiles, num_tiles, num_out_tiles, 8)
    each = tl.arange(0, GROUPS)  # the last that counts, number num_groups, is of the rows of no group
    starts = tl.load(ends + each - 1, (each > 0) & (each <= num_groups), other=0)
    stops = tl.minimum(tl.load(ends + each, each < num_groups, other=num_rows), num_rows)
    tiles = tl.where(each <= num_groups, (stops - starts + TILE_ROWS - 1) // TILE_ROWS, 0)
    last_tiles = tl.cumsum(tiles, 0)
    group = tl.sum((last_tiles <= tile).to(tl.int64), 0)
    here = each == group
    start = tl.sum(tl.where(here, starts + (tile - last_tiles + tiles) * TILE_ROWS, 0), 0)
    stop = tl.sum(tl.where(here, stops, 0), 0)
    row = start + tl.arange(0, TILE_ROWS)  # of a tile that is left over, from 0 up to 0
    column = (out_tile * TILE_OUT + tl.arange(0, TILE_OUT)).to(tl.int64)
    total = tl.zeros((TILE_ROWS, TILE_OUT), dtype=tl.float32)
    if group < num_groups:
        place = row
        if source is not None:
            place = tl.load(source + row, row < stop, other=0)
        for first in range(0, num_in, TILE_IN):
            inner = (first + tl.arange(0, TILE_IN)).to(tl.int64)
            is_row = (row[:, None] < stop) & (inner[None, :] < num_in)
            is_column = (inner[:, None] < num_in) & (column[None, :] < num_out)
            rows = tl.load(x + place[:, None] * x_row + inner[None, :] * x_in, is_row, other=0)
            at = group * weight_group + inner[:, None] * weight_in + column[None, :] * weight_out
            total = tl.dot(rows, tl.load(weight + at, is_column, other=0), total, input_precision=PRECISION)
        if bias is not None:
            total += tl.load(bias + group * num_out + column, column < num_out, other=0).to(tl.float32)[None, :]
    mask = (row[:, None] < stop) & (column[None, :] < num_out)
    tl.store(out + row[:, None] * num_out + column[None, :], total.to(out.dtype.element_ty), mask)


@triton.jit
def _groups_kernel(
    left, right, source, out, ends, num_in, num_out, left_row, left_out, right_row, right_in,
    PRECISION: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(2).to(tl.int64)
    start = tl.load(ends + group - 1, group > 0, other=0)
    stop = tl.load(ends + group)
    i = (tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)).to(tl.int64)
    j = (tl.program_id(1) * TILE_IN + tl.arange(0, TILE_IN)).to(tl.int64)
    total = tl.zeros((TILE_OUT, TILE_IN), dtype=tl.float32)
    for first in range(0, (stop - start).to(tl.int32), TILE_ROWS):
        row = start + first + tl.arange(0, TILE_ROWS)
        place = row
        if source is not None:
            place = tl.load(source + row, row < stop, other=0)
        is_left = (row[None, :] < stop) & (i[:, None] < num_out)
        is_right = (row[:, None] < stop) & (j[None, :] < num_in)
        a = tl.load(left + row[None, :] * left_row + i[:, None] * left_out, is_left, other=0)
        b = tl.load(right + place[:, None] * right_row + j[None, :] * right_in, is_right, other=0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    at = group * num_out * num_in + i[:, None] * num_in + j[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), (i[:, None] < num_out) & (j[None, :] < num_in))


_measured_rows_kernel = triton.autotune(_configs(_ROW_TILES), ["num_in", "num_out", "weight_in"])(_rows_kernel)
_measured_groups_kernel = triton.autotune(_configs(_GROUP_TILES), ["num_in", "num_out"])(_groups_kernel)
