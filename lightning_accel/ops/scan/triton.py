"""The recurrence of :func:`lightning_accel.ops.linear_scan` on a GPU. Shapes: B samples, T steps, H channels, C chunks.

A program processes a chunk of one sample's time and a block of its channels, tile by tile. Within a tile an associative
scan over pairs (product of gates, state from zero) runs in parallel, or the recurrence step by step if products of
gates above 1 could overflow although the states do not. Sums are float32, or float64.

Where samples and channels are too few for the GPU, time is split into chunks (Martin and Cundy 2018,
https://arxiv.org/abs/1709.04057, section 3.2): a first kernel computes the product of gates and the state from zero of
each, and each program of the second computes from those the state that its chunk begins with. The gradient is the same
recurrence from the last step to the first.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_accel.ops.scan.linear import empty_as

_TILE_STEPS = 64
_TILE_CHANNELS = 32
_LEAST_CHUNK = 4 * _TILE_STEPS  # steps; in chunks, gates and values are read twice
_PROGRAMS_OF_PROCESSOR = 2  # wanted, so that one computes while the other loads
_LARGE = 1 << 22  # elements, from which on the shape of tiles is measured
_TILES = [(64, 32, 4), (64, 32, 8), (64, 16, 4), (32, 64, 4), (32, 32, 2)]
_MAX_LOG2_GROWTH = tl.constexpr(10.0)  # log2 of the largest factor of gates above 1 within a tile or a chunk


def scan_forward(gate: Tensor, value: Tensor, state: Tensor | None, starts: Tensor | None) -> Tensor:
    """Compute the states (B, T, H) from inputs of one dtype."""
    gate, value = _with_adjacent_channels(gate), _with_adjacent_channels(value)
    out = empty_as(value, value.dtype)
    if out.numel():
        state, starts = _contiguous(state), _contiguous(starts)
        with _device_of(out):
            chunks = _scan_chunks(gate, value, starts, False)
            kernel, settings = _choose(_forward_kernel, _measured_forward_kernel, out)
            kernel[_grid(out, chunks)](
                gate, value, state, starts, *chunks, out, *out.shape[1:],
                *gate.stride()[:2], *value.stride()[:2], *out.stride()[:2], **settings,
            )  # fmt: skip
    return out


def scan_backward(
    grad: Tensor, gate: Tensor, out: Tensor, state: Tensor | None, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of gate and value (B, T, H), and of state (B, H)."""
    grad, gate, out = _with_adjacent_channels(grad), _with_adjacent_channels(gate), _with_adjacent_channels(out)
    d_gate, d_value = empty_as(out, out.dtype), empty_as(out, out.dtype)
    d_state = gate.new_zeros(len(gate), gate.shape[2])
    if out.numel():
        state, starts = _contiguous(state), _contiguous(starts)
        with _device_of(out):
            chunks = _scan_chunks(gate, grad, starts, True)
            kernel, settings = _choose(_backward_kernel, _measured_backward_kernel, out)
            kernel[_grid(out, chunks)](
                gate, grad, state, starts, *chunks, out, d_gate, d_value, d_state, *out.shape[1:],
                *gate.stride()[:2], *grad.stride()[:2], *out.stride()[:2], *d_gate.stride()[:2], **settings,
            )  # fmt: skip
    return d_gate, d_value, d_state


_Chunks = tuple[Tensor | None, Tensor | None, Tensor | None, int, int]


def _scan_chunks(gate: Tensor, value: Tensor, starts: Tensor | None, reverse: bool) -> _Chunks:
    """Return products of gates, states from zero and growth (B, C - 1, H) of chunks but the last, their length and C.

    Growth is the logarithm of the product of gates above 1. Tensors are None for one chunk.
    """
    num_rows, num_steps, num_channels = value.shape
    count = _count_chunks(value)
    length = triton.cdiv(triton.cdiv(num_steps, count), _TILE_STEPS) * _TILE_STEPS
    count = triton.cdiv(num_steps, length)
    if count == 1:
        return None, None, None, length, 1
    wide = torch.promote_types(value.dtype, torch.float32)
    products, ends, growths = value.new_empty(3, num_rows, count - 1, num_channels, dtype=wide)
    kernel, settings = _choose(_chunks_kernel, _measured_chunks_kernel, value)

    def grid(meta: Mapping[str, int]) -> tuple[int, int, int]:
        return num_rows, triton.cdiv(num_channels, meta["TILE_CHANNELS"]), count - 1

    kernel[grid](
        gate, value, starts, products, ends, growths, length, num_steps, num_channels,
        *gate.stride()[:2], *value.stride()[:2], REVERSE=reverse, **settings,
    )  # fmt: skip
    return products, ends, growths, length, count


def _count_chunks(x: Tensor) -> int:
    """Return into how many chunks to split time, so that all processors have programs."""
    programs = len(x) * triton.cdiv(x.shape[2], _TILE_CHANNELS)
    wanted = _PROGRAMS_OF_PROCESSOR * _count_processors(x.device)
    return max(1, min(triton.cdiv(wanted, programs), x.shape[1] // _LEAST_CHUNK))


@lru_cache
def _count_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _choose(kernel: Any, measured: Any, x: Tensor) -> tuple[Any, dict[str, Any]]:
    """Return the kernel to start on ``x``, and its settings.

    Tiles that are measured may differ, and round differently, in the next run.
    """
    settings = {"WIDE": tl.float64 if x.dtype == torch.float64 else tl.float32}
    is_fixed = torch.are_deterministic_algorithms_enabled() or torch.cuda.is_current_stream_capturing()
    if x.numel() >= _LARGE and not is_fixed:
        return measured, settings
    return kernel, settings | {"TILE_STEPS": _TILE_STEPS, "TILE_CHANNELS": _TILE_CHANNELS}


def _grid(x: Tensor, chunks: _Chunks) -> Any:
    return lambda meta: (len(x), triton.cdiv(x.shape[2], meta["TILE_CHANNELS"]), chunks[-1])


def _with_adjacent_channels(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _device_of(x: Tensor) -> Any:
    return torch.cuda.device_of(x)  # kernels start on the current device; does nothing for a tensor on the CPU


@triton.jit
def _combine_spans(gate_1, value_1, gate_2, value_2):
    """Combine two consecutive spans; each maps a state to ``gate * state + value``."""
    return gate_1 * gate_2, gate_2 * value_1 + value_2


@triton.jit
def _combine_spans_with_starts(gate_1, value_1, start_1, gate_2, value_2, start_2):
    """Combine two consecutive spans; each maps a state to ``gate * state + value``, or to ``value`` after a start."""
    gate = tl.where(start_2 != 0, gate_2, gate_1 * gate_2)
    value = tl.where(start_2 != 0, value_2, gate_2 * value_1 + value_2)  # not by gates of 0: 0 * inf is NaN
    return gate, value, start_1 | start_2


@triton.jit
def _multiply(a, b):
    return a * b


@triton.jit
def _log2_growth(gate):
    return tl.sum(tl.log2(tl.maximum(tl.abs(gate), 1.0)), 0)


@triton.jit
def _scan_tile(gate, value, start, carry, HAS_STARTS: tl.constexpr, TILE_STEPS: tl.constexpr):
    """Return the states of a tile that begins with the state ``carry``, and the last of them."""
    if HAS_STARTS:
        products, sums, started = tl.associative_scan((gate, value, start), 0, _combine_spans_with_starts)
        h = tl.where(started != 0, sums, products * carry[None, :] + sums)
    else:
        products, sums = tl.associative_scan((gate, value), 0, _combine_spans)
        h = products * carry[None, :] + sums
    lost = tl.sum((h - h != 0.0).to(tl.int32), 0) + (_log2_growth(gate) > _MAX_LOG2_GROWTH).to(tl.int32)
    if tl.sum(lost, 0) > 0:  # overflow or NaN that the recurrence itself may not have
        h = _scan_sequentially(gate, value, start, carry, TILE_STEPS)
    last = tl.arange(0, TILE_STEPS)[:, None] == TILE_STEPS - 1
    return h, tl.sum(tl.where(last, h, 0.0), 0)


@triton.jit
def _scan_sequentially(gate, value, start, carry, TILE_STEPS: tl.constexpr):
    """Compute the states of a tile step by step."""
    h = tl.zeros_like(value)
    for t in range(TILE_STEPS):
        now = tl.arange(0, TILE_STEPS)[:, None] == t
        gate_t, value_t = tl.sum(tl.where(now, gate, 0.0), 0), tl.sum(tl.where(now, value, 0.0), 0)
        begins = tl.sum(tl.where(now, start, 0), 0) != 0
        carry = tl.where(begins, value_t, gate_t * carry + value_t)
        h = tl.where(now, carry[None, :], h)
    return h


@triton.jit
def _load_terms(
    gate, value, starts, row, channel, t, T, H, gate_row, gate_step, value_row, value_step,
    REVERSE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Load gates, values and starts of a tile of steps ``t``; each state comes of the step before, or after."""
    inside = ((t >= 0) & (t < T))[:, None] & (channel < H)[None, :]
    v = tl.load(value + row * value_row + t[:, None] * value_step + channel[None, :], inside, 0.0).to(WIDE)
    of_gate = t + 1 if REVERSE else t
    has_gate = inside & (of_gate < T)[:, None]
    a = tl.load(gate + row * gate_row + of_gate[:, None] * gate_step + channel[None, :], has_gate, 1.0).to(WIDE)
    start = tl.zeros_like(a).to(tl.int32)
    if starts is not None:
        start += tl.load(starts + row * T + of_gate, (t >= 0) & (of_gate < T), 0).to(tl.int32)[:, None]
    return a, v, start, inside


@triton.jit
def _chunks_kernel(
    gate, value, starts, products, ends, growths, length, T, H, gate_row, gate_step, value_row, value_step,
    REVERSE: tl.constexpr, WIDE: tl.constexpr, TILE_STEPS: tl.constexpr, TILE_CHANNELS: tl.constexpr,
):  # fmt: skip
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(2)
    channel = tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    end, growth = tl.zeros((TILE_CHANNELS,), WIDE), tl.zeros((TILE_CHANNELS,), WIDE)
    product = tl.full((TILE_CHANNELS,), 1, WIDE)
    for first in range(number * length, (number + 1) * length, TILE_STEPS):
        t = (first + tl.arange(0, TILE_STEPS)).to(tl.int64)
        t = T - 1 - t if REVERSE else t
        a, v, start, _ = _load_terms(
            gate, value, starts, row, channel, t, T, H, gate_row, gate_step, value_row, value_step, REVERSE, WIDE
        )
        _, end = _scan_tile(a, v, start, end, starts is not None, TILE_STEPS)
        growth += _log2_growth(a)
        product *= tl.reduce(tl.where(start != 0, 0.0, a), 0, _multiply)
    at = (row * tl.num_programs(2) + number) * H + channel
    tl.store(products + at, product, channel < H)
    tl.store(ends + at, end, channel < H)
    tl.store(growths + at, growth, channel < H)


@triton.jit
def _begin_chunk(products, ends, growths, carry, length, num_chunks, row, channel, T, H):
    """Return the state before this program's chunk, its first step, and the one after its last.

    Where the product of a chunk's gates could overflow, or a state is not finite, the program of the first chunk
    processes all steps, and the others none.
    """
    number = tl.program_id(2)
    begin, stop = number * length, tl.minimum((number + 1) * length, T)
    if products is not None:
        now, mine, lost = carry, carry, tl.zeros_like(channel)
        for before in range(num_chunks - 1):
            at = (row * (num_chunks - 1) + before) * H + channel
            growth = tl.load(growths + at, channel < H, 0.0)
            now = tl.load(products + at, channel < H, 0.0) * now + tl.load(ends + at, channel < H, 0.0)
            lost += ((growth > _MAX_LOG2_GROWTH) | (now - now != 0.0)).to(tl.int32)
            mine = tl.where(before + 1 == number, now, mine)
        if tl.sum(lost, 0) > 0:
            begin, stop = 0, tl.where(number == 0, T, 0)
        else:
            carry = mine
    return carry, begin, stop


@triton.jit
def _forward_kernel(
    gate, value, state, starts, products, ends, growths, length, num_chunks, out, T, H,
    gate_row, gate_step, value_row, value_step, out_row, out_step,
    WIDE: tl.constexpr, TILE_STEPS: tl.constexpr, TILE_CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    carry = tl.zeros((TILE_CHANNELS,), WIDE)
    if state is not None:
        carry = tl.load(state + row * H + channel, channel < H, 0.0).to(WIDE)
    carry, begin, stop = _begin_chunk(products, ends, growths, carry, length, num_chunks, row, channel, T, H)
    for first in range(begin, stop, TILE_STEPS):
        t = (first + tl.arange(0, TILE_STEPS)).to(tl.int64)
        a, v, start, inside = _load_terms(
            gate, value, starts, row, channel, t, T, H, gate_row, gate_step, value_row, value_step, False, WIDE
        )
        h, carry = _scan_tile(a, v, start, carry, starts is not None, TILE_STEPS)
        at = row * out_row + t[:, None] * out_step + channel[None, :]
        tl.store(out + at, h.to(out.dtype.element_ty), inside)


@triton.jit
def _backward_kernel(
    gate, grad, state, starts, products, ends, growths, length, num_chunks, out, d_gate, d_value, d_state, T, H,
    gate_row, gate_step, grad_row, grad_step, out_row, out_step, d_row, d_step,
    WIDE: tl.constexpr, TILE_STEPS: tl.constexpr, TILE_CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    carry = tl.zeros((TILE_CHANNELS,), WIDE)
    carry, begin, stop = _begin_chunk(products, ends, growths, carry, length, num_chunks, row, channel, T, H)
    for first in range(begin, stop, TILE_STEPS):
        t = T - 1 - (first + tl.arange(0, TILE_STEPS)).to(tl.int64)  # from the end
        a, v, start, inside = _load_terms(
            gate, grad, starts, row, channel, t, T, H, gate_row, gate_step, grad_row, grad_step, True, WIDE
        )
        g, carry = _scan_tile(a, v, start, carry, starts is not None, TILE_STEPS)
        of_out = row * out_row + (t - 1)[:, None] * out_step + channel[None, :]
        before = tl.load(out + of_out, inside & (t > 0)[:, None], 0.0).to(WIDE)
        if state is not None:
            first_state = tl.load(state + row * H + channel, channel < H, 0.0).to(WIDE)
            before = tl.where((t == 0)[:, None], first_state[None, :], before)
        product = g * before
        of_gate = row * gate_row + t[:, None] * gate_step + channel[None, :]
        of_state = g * tl.load(gate + of_gate, inside, 0.0).to(WIDE)
        if starts is not None:
            begins = (tl.load(starts + row * T + t, t >= 0, 0) != 0)[:, None]
            product = tl.where(begins, 0.0, product)
            of_state = tl.where(begins, 0.0, of_state)
        at = row * d_row + t[:, None] * d_step + channel[None, :]
        tl.store(d_value + at, g.to(d_value.dtype.element_ty), inside)
        tl.store(d_gate + at, product.to(d_gate.dtype.element_ty), inside)
        is_first = inside & (t == 0)[:, None]
        of_channel = d_state + row * H + channel[None, :] + t[:, None] * 0
        tl.store(of_channel, of_state.to(d_state.dtype.element_ty), is_first)


def _measured(kernel: Any) -> Any:
    configs = [
        triton.Config({"TILE_STEPS": steps, "TILE_CHANNELS": channels}, num_warps=warps)
        for steps, channels, warps in _TILES
    ]
    return triton.autotune(configs, ["H"])(kernel)


_measured_chunks_kernel = _measured(_chunks_kernel)
_measured_forward_kernel = _measured(_forward_kernel)
_measured_backward_kernel = _measured(_backward_kernel)
