"""The products of :func:`lightning_accel.ops.grouped_linear` on a GPU, in any 16-bit dtype or float32.

Shapes: M rows, I features in, O features out, E groups, T tiles. A program computes a tile of rows of one group. Which
group that is, stands in tensors on the device, so that the host never waits for the sizes of groups; sums are float32.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE_ROWS = 64
_TILE_OUT = 64
_TILE_IN = 32


def multiply_rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows ``x`` (M, I) of group e by ``weight[e].T``; rows past ``ends[-1]`` give 0.

    Args:
        x: (M, I), of any strides.
        weight: (E, O, I) in the dtype of ``x``, of any strides.
        ends: (E,) int64, the number of rows of the groups up to each.

    Returns:
        (M, O).
    """
    num_rows, num_in, num_out = *x.shape, weight.shape[1]
    out = x.new_zeros(num_rows, num_out)
    if out.numel() and num_in:
        tiles = triton.cdiv(num_rows, _TILE_ROWS) + len(ends)  # as many as there can be: each group may end in a part
        per_group = (ends.diff(prepend=ends.new_zeros(1)) + _TILE_ROWS - 1) // _TILE_ROWS
        last_tile = per_group.cumsum(0)
        tile = torch.arange(tiles, device=x.device)
        group = torch.searchsorted(last_tile, tile, right=True)  # (T,); E for a tile that is left over
        grid = tiles, triton.cdiv(num_out, _TILE_OUT)
        with torch.cuda.device_of(x):
            _rows_kernel[grid](
                x, weight, out, ends, group, last_tile, num_in, num_out, len(ends),
                *x.stride(), *weight.stride(), **_settings(x)
            )  # fmt: skip
    return out


def multiply_groups(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Compute ``left.T @ right`` over the rows of each group: the gradient of the weights.

    Args:
        left: (M, O), of any strides.
        right: (M, I) in the dtype of ``left``, of any strides.
        ends: (E,) int64, the number of rows of the groups up to each.

    Returns:
        (E, O, I); 0 for a group without rows.
    """
    num_out, num_in = left.shape[1], right.shape[1]
    out = left.new_empty(len(ends), num_out, num_in)
    if out.numel():
        grid = len(ends), triton.cdiv(num_out, _TILE_OUT), triton.cdiv(num_in, _TILE_OUT)
        with torch.cuda.device_of(left):
            _groups_kernel[grid](
                left, right, out, ends, num_in, num_out, *left.stride(), *right.stride(), **_settings(left)
            )
    return out


def _settings(x: Tensor) -> dict[str, Any]:
    rounds = x.dtype != torch.float32 or torch.get_float32_matmul_precision() != "highest"
    tiles = {"TILE_ROWS": _TILE_ROWS, "TILE_OUT": _TILE_OUT, "TILE_IN": _TILE_IN}
    return {**tiles, "PRECISION": "tf32" if rounds else "ieee"}


@triton.jit
def _rows_kernel(
    x, weight, out, ends, groups, last_tiles, num_in, num_out, num_groups,
    x_row, x_in, weight_group, weight_out, weight_in,
    TILE_ROWS: tl.constexpr, TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    group = tl.load(groups + tl.program_id(0))
    if group < num_groups:
        before = group > 0
        first_tile = tl.load(last_tiles + group - 1, mask=before, other=0)
        start = tl.load(ends + group - 1, mask=before, other=0)
        end = tl.load(ends + group)
        row = start + (tl.program_id(0) - first_tile) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        column = (tl.program_id(1) * TILE_OUT + tl.arange(0, TILE_OUT)).to(tl.int64)
        here = weight + group * weight_group
        total = tl.zeros((TILE_ROWS, TILE_OUT), dtype=tl.float32)
        for first in range(0, num_in, TILE_IN):
            inner = (first + tl.arange(0, TILE_IN)).to(tl.int64)
            is_row = (row[:, None] < end) & (inner[None, :] < num_in)
            is_column = (inner[:, None] < num_in) & (column[None, :] < num_out)
            rows = tl.load(x + row[:, None] * x_row + inner[None, :] * x_in, mask=is_row, other=0)
            columns = tl.load(here + inner[:, None] * weight_in + column[None, :] * weight_out, mask=is_column, other=0)
            total = tl.dot(rows, columns, total, input_precision=PRECISION)
        mask = (row[:, None] < end) & (column[None, :] < num_out)
        tl.store(out + row[:, None] * num_out + column[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _groups_kernel(
    left, right, out, ends, num_in, num_out, left_row, left_out, right_row, right_in,
    TILE_ROWS: tl.constexpr, TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    end = tl.load(ends + group)
    i = (tl.program_id(1) * TILE_OUT + tl.arange(0, TILE_OUT)).to(tl.int64)
    j = (tl.program_id(2) * TILE_OUT + tl.arange(0, TILE_OUT)).to(tl.int64)
    total = tl.zeros((TILE_OUT, TILE_OUT), dtype=tl.float32)
    for first in range(start, end, TILE_IN):
        row = first + tl.arange(0, TILE_IN)
        is_left = (row[None, :] < end) & (i[:, None] < num_out)
        is_right = (row[:, None] < end) & (j[None, :] < num_in)
        a = tl.load(left + row[None, :] * left_row + i[:, None] * left_out, mask=is_left, other=0)
        b = tl.load(right + row[:, None] * right_row + j[None, :] * right_in, mask=is_right, other=0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    place = group * num_out * num_in + i[:, None] * num_in + j[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(i[:, None] < num_out) & (j[None, :] < num_in))
