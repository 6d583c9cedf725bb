"""The recurrence of :func:`lightning_accel.ops.linear_scan` on a GPU. Shapes: B samples, T steps, H channels.

A program processes one sample and a block of channels, tile by tile over time. Within a tile an associative scan over
pairs (product of gates, state from zero) runs in parallel, or the recurrence step by step if products of gates above 1
could overflow although the states do not. Sums are float32, or float64.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE_STEPS = 64
_TILE_CHANNELS = 32
_MAX_LOG2_GROWTH = tl.constexpr(10.0)  # log2 of the largest factor of gates above 1 within a tile


def scan_forward(gate: Tensor, value: Tensor, state: Tensor | None, starts: Tensor | None) -> Tensor:
    """Compute the states (B, T, H) from inputs of one dtype."""
    gate, value = gate.contiguous(), value.contiguous()
    out = torch.empty_like(value)
    if value.numel():
        state, starts = _contiguous(state), _contiguous(starts)
        with _device_of(value):
            _forward_kernel[_grid(value)](gate, value, state, starts, out, *value.shape[1:], **_settings(value))
    return out


def scan_backward(
    grad: Tensor, gate: Tensor, out: Tensor, state: Tensor | None, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of gate and value (B, T, H), and of state (B, H)."""
    grad, gate, out = grad.contiguous(), gate.contiguous(), out.contiguous()
    d_gate, d_value = torch.empty_like(gate), torch.empty_like(gate)
    d_state = gate.new_zeros(len(gate), gate.shape[2])
    if out.numel():
        tensors = grad, gate, out, _contiguous(state), _contiguous(starts), d_gate, d_value, d_state
        with _device_of(out):
            _backward_kernel[_grid(out)](*tensors, *out.shape[1:], **_settings(out))
    return d_gate, d_value, d_state


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _device_of(x: Tensor) -> Any:
    return torch.cuda.device_of(x)  # kernels start on the current device; does nothing for a tensor on the CPU


def _grid(x: Tensor) -> tuple[int, int]:
    return len(x), triton.cdiv(x.shape[2], _TILE_CHANNELS)


def _settings(x: Tensor) -> dict[str, Any]:
    wide = tl.float64 if x.dtype == torch.float64 else tl.float32
    return {"WIDE": wide, "TILE_STEPS": _TILE_STEPS, "TILE_CHANNELS": _TILE_CHANNELS}


@triton.jit
def _combine_spans(gate_1, value_1, start_1, gate_2, value_2, start_2):
    """Combine two consecutive spans; each maps a state to ``gate * state + value``, or to ``value`` after a start."""
    gate = tl.where(start_2 != 0, gate_2, gate_1 * gate_2)
    value = tl.where(start_2 != 0, value_2, gate_2 * value_1 + value_2)  # not by gates of 0: 0 * inf is NaN
    return gate, value, start_1 | start_2


@triton.jit
def _scan_tile(gate, value, start, carry, TILE_STEPS: tl.constexpr):
    """Return the states of a tile that begins with the state ``carry``, and the last of them."""
    products, sums, started = tl.associative_scan((gate, value, start), 0, _combine_spans)
    h = tl.where(started != 0, sums, products * carry[None, :] + sums)
    growth = tl.sum(tl.log2(tl.maximum(tl.abs(gate), 1.0)), 0)
    lost = tl.sum((h - h != 0.0).to(tl.int32), 0) + (growth > _MAX_LOG2_GROWTH).to(tl.int32)
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
def _forward_kernel(
    gate, value, state, starts, out, T, H, WIDE: tl.constexpr, TILE_STEPS: tl.constexpr, TILE_CHANNELS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    carry = tl.zeros((TILE_CHANNELS,), WIDE)
    if state is not None:
        carry = tl.load(state + row * H + channel, channel < H, 0.0).to(WIDE)
    for first in range(0, T, TILE_STEPS):
        t = first + tl.arange(0, TILE_STEPS)
        at = (row * T + t)[:, None] * H + channel[None, :]
        inside = (t < T)[:, None] & (channel < H)[None, :]
        a = tl.load(gate + at, inside, 1.0).to(WIDE)
        v = tl.load(value + at, inside, 0.0).to(WIDE)
        start = tl.zeros((TILE_STEPS, TILE_CHANNELS), tl.int32)
        if starts is not None:
            start += tl.load(starts + row * T + t, t < T, 0).to(tl.int32)[:, None]
        h, carry = _scan_tile(a, v, start, carry, TILE_STEPS)
        tl.store(out + at, h.to(out.dtype.element_ty), inside)


@triton.jit
def _backward_kernel(
    grad, gate, out, state, starts, d_gate, d_value, d_state, T, H,
    WIDE: tl.constexpr, TILE_STEPS: tl.constexpr, TILE_CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    carry = tl.zeros((TILE_CHANNELS,), WIDE)
    for done in range(0, T, TILE_STEPS):
        t = T - 1 - done - tl.arange(0, TILE_STEPS)  # from the end
        at = (row * T + t)[:, None] * H + channel[None, :]
        inside = (t >= 0)[:, None] & (channel < H)[None, :]
        has_next = inside & (t + 1 < T)[:, None]
        a = tl.load(gate + at + H, has_next, 0.0).to(WIDE)
        v = tl.load(grad + at, inside, 0.0).to(WIDE)
        start = tl.zeros((TILE_STEPS, TILE_CHANNELS), tl.int32)
        if starts is not None:
            start += tl.load(starts + row * T + t + 1, (t >= 0) & (t + 1 < T), 0).to(tl.int32)[:, None]
        g, carry = _scan_tile(a, v, start, carry, TILE_STEPS)
        before = tl.load(out + at - H, inside & (t > 0)[:, None], 0.0).to(WIDE)
        if state is not None:
            first_state = tl.load(state + row * H + channel, channel < H, 0.0).to(WIDE)
            before = tl.where((t == 0)[:, None], first_state[None, :], before)
        product = g * before
        of_state = g * tl.load(gate + at, inside, 0.0).to(WIDE)
        if starts is not None:
            begins = (tl.load(starts + row * T + t, t >= 0, 0) != 0)[:, None]
            product = tl.where(begins, 0.0, product)
            of_state = tl.where(begins, 0.0, of_state)
        tl.store(d_value + at, g.to(d_value.dtype.element_ty), inside)
        tl.store(d_gate + at, product.to(d_gate.dtype.element_ty), inside)
        is_first = inside & (t == 0)[:, None]
        tl.store(d_state + row * H + channel[None, :] + at * 0, of_state.to(d_state.dtype.element_ty), is_first)
