"""The sums of :mod:`lightning_accel.ops.grouped_products` on a GPU, in one order, without atomic operations.

Shapes: M rows, N sums, D features. Sums are float32, or float64 of float64.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 256  # features


def sum_rows(rows: Tensor, weights: Tensor | None, order: Tensor | None, bounds: Tensor) -> Tensor:
    """Compute sum n of ``weights[i] * rows[i]`` over each i of ``order[bounds[n]:bounds[n + 1]]``.

    Args:
        rows: (M, D); those that belong to no sum are not read.
        weights: (M,) floating; 1 by default.
        order: (M,) int64; the order of the rows by default.
        bounds: (N + 1,) int64.

    Returns:
        (N, D) in the dtype of ``rows``.
    """
    num_sums, (num_rows, width) = len(bounds) - 1, rows.shape
    out = rows.new_empty(num_sums, width)
    if out.numel():
        at_once = min(triton.next_power_of_2(triton.cdiv(max(num_rows, 1), num_sums)), 32)
        with torch.cuda.device_of(rows):
            _sum_kernel[num_sums, triton.cdiv(width, _TILE)](
                rows, None if weights is None else weights.contiguous(), order, bounds, out, width, *rows.stride(),
                WIDE=_wide(rows), ROWS=at_once, TILE=_TILE,
            )  # fmt: skip
    return out


def spread_rows(x: Tensor, rows: Tensor | None, weights: Tensor | None, source: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``weights[i] * x[source[i]]``, and the products of ``rows[i]`` and ``x[source[i]]``: the gradients.

    Args:
        x: (N, D).
        rows: (M, D); those of no sum are not read.
        weights: (M,) floating; 1 by default.
        source: (M,) int64, N for rows of no sum, which give 0.

    Returns:
        (M, D) in the dtype of ``x``, and (M,) in float32 or wider; (0,) without ``rows``.
    """
    num_rows, (num_sums, width) = len(source), x.shape
    wide = torch.promote_types(x.dtype, torch.float32)
    out, dots = x.new_empty(num_rows, width), x.new_empty(0 if rows is None else num_rows, dtype=wide)
    if num_rows:
        row_strides = (0, 0) if rows is None else rows.stride()
        with torch.cuda.device_of(x):
            _spread_kernel[num_rows,](
                x, rows, None if weights is None else weights.contiguous(), source, out, dots, num_sums, width,
                *x.stride(), *row_strides, WIDE=_wide(x), TILE=_TILE,
            )  # fmt: skip
    return out, dots


def _wide(x: Tensor) -> Any:
    return tl.float64 if x.dtype == torch.float64 else tl.float32


@triton.jit
def _sum_kernel(
    rows, weights, order, bounds, out, width, rows_row, rows_column,
    WIDE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    sum_ = tl.program_id(0).to(tl.int64)
    column = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)
    stop = tl.load(bounds + sum_ + 1)
    total = tl.zeros((ROWS, TILE), dtype=WIDE)
    for first in range(tl.load(bounds + sum_), stop, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = row < stop
        if order is not None:
            row = tl.load(order + row, inside, other=0)
        mask = inside[:, None] & (column < width)[None, :]
        part = tl.load(rows + row[:, None] * rows_row + column[None, :] * rows_column, mask, other=0).to(WIDE)
        if weights is not None:
            part *= tl.load(weights + row, inside, other=0).to(WIDE)[:, None]
        total += part
    tl.store(out + sum_ * width + column, tl.sum(total, 0).to(out.dtype.element_ty), column < width)


@triton.jit
def _spread_kernel(
    x, rows, weights, source, out, dots, num_sums, width, x_row, x_column, rows_row, rows_column,
    WIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(source + row)
    weight = tl.full((), 1, WIDE)
    if weights is not None:
        weight = tl.load(weights + row).to(WIDE)
    total = tl.zeros((TILE,), dtype=WIDE)
    for first in range(0, width, TILE):
        column = (first + tl.arange(0, TILE)).to(tl.int64)
        mask = (column < width) & (place < num_sums)
        value = tl.load(x + place * x_row + column * x_column, mask, other=0).to(WIDE)
        if rows is not None:
            total += value * tl.load(rows + row * rows_row + column * rows_column, mask, other=0).to(WIDE)
        scaled = tl.where(mask, value * weight, 0.0)  # the weight of a row of no sum may be NaN
        tl.store(out + row * width + column, scaled.to(out.dtype.element_ty), column < width)
    if rows is not None:
        tl.store(dots + row, tl.sum(total, 0))
