"""A first-order linear recurrence over time, and the formulas of minGRU and minLSTM by it.

Shapes: B samples, T steps, H channels, G gates; C chunks of L steps.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import isqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_accel._private.torch import in_transform
from lightning_accel.ops.extras import runs_triton

NUM_GATES = {"mingru": 2, "minlstm": 3}

# Overhead of a small operation, as the number of elements whose arithmetic takes as long; measured on CPU.
_OVERHEAD = {"cpu": 4_000, "other": 500_000}
# The largest factor by which gates above 1 may multiply a state within a chunk, so that products of the other gates
# do not underflow before they grow again.
_MAX_GROWTH = 2.0**10


def linear_scan(gate: Tensor, value: Tensor, state: Tensor | None = None, starts: Tensor | None = None) -> Tensor:
    """Compute the recurrence ``h[:, t] = gate[:, t] * h[:, t - 1] + value[:, t]`` for all steps.

    It uses neither logarithms nor divisions, so gates may be 0, values may have any sign, and float32 stays accurate
    over tens of thousands of steps. 16-bit inputs are accumulated in float32. Small batches of many steps are split
    into chunks of time that run in parallel, unless gates above 1 could overflow within a chunk. On CUDA a Triton
    kernel is used if triton is installed; its first call measures the shape of tiles for large inputs, unless
    algorithms must be deterministic. Within transforms of torch.func, unless traced by torch.compile, the
    recurrence runs step by step through autograd.

    Args:
        gate: (B, T, H), any floating dtype; the result is time-major in memory if the inputs are.
        value: (B, T, H). If dtypes differ, the result has the wider one.
        state: (B, H), the state before the first step; zeros by default.
        starts: (B, T) bool, True where a new sequence begins: the previous state counts as 0, even if NaN or infinite.

    Returns:
        (B, T, H), the states.

    Raises:
        TypeError: if ``gate``, ``value`` or ``state`` is not floating, or ``starts`` not bool.
        ValueError: if shapes disagree.

    Source: Martin and Cundy 2018, Parallelizing Linear Recurrent Neural Nets Over Sequence Length,
    https://arxiv.org/abs/1709.04057, eq. 3 and 5 (the gradient).

    >>> gate, value = torch.full((1, 3, 1), 0.5), torch.ones(1, 3, 1)
    >>> linear_scan(gate, value).flatten()
    tensor([1.0000, 1.5000, 1.7500])
    >>> linear_scan(gate, value, starts=torch.tensor([[False, False, True]])).flatten()
    tensor([1.0000, 1.5000, 1.0000])
    """
    _check(gate, value, state, starts)
    dtype = torch.promote_types(gate.dtype, value.dtype)
    if state is not None:
        dtype = torch.promote_types(dtype, state.dtype)
        state = state.to(dtype)
    inputs = gate.to(dtype), value.to(dtype), state, starts
    if torch.compiler.is_compiling():
        return torch.ops.lightning_accel.linear_scan(*inputs)
    if in_transform():  # the autograd Function does not support them
        return _linear_scan_wide(*inputs).to(dtype)
    return _LinearScan.apply(*inputs)  # calling a custom op takes longer


def linear_scan_reference(
    gate: Tensor, value: Tensor, state: Tensor | None = None, starts: Tensor | None = None
) -> Tensor:
    """Compute :func:`linear_scan` step by step through autograd, as the reference for its tests."""
    h = torch.zeros_like(value[:, :1].sum(1)) if state is None else state
    steps = []
    for t, (g, v) in enumerate(zip(gate.unbind(1), value.unbind(1), strict=True)):
        if starts is not None:
            h = h.masked_fill(starts[:, t, None], 0)
        h = g * h + v
        steps.append(h)
    return torch.stack(steps, 1) if steps else torch.zeros_like(value)


def gated_scan_reference(
    cell: str,
    gates: Tensor,
    state: Tensor | None = None,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Compute :func:`~lightning_accel.ops.scan.gated` by :func:`linear_scan` and autograd, the reference of tests."""
    gate, value = scan_terms(cell, gates)
    if lengths is not None:
        over = torch.arange(gates.shape[1], device=gates.device) >= lengths[:, None]  # (B, T)
        gate, value = gate.masked_fill(over[..., None], 1), value.masked_fill(over[..., None], 0)
        starts = None if starts is None else starts & ~over
    return linear_scan(gate, value, state, starts)


def scan_terms(cell: str, gates: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``gate`` and ``value`` of the recurrence h = gate * h + value, (..., H) each, from (..., G * H)."""
    if cell == "mingru":
        update, new = gates.chunk(2, -1)
        return (-update).sigmoid(), update.sigmoid() * new
    keep, entry, new = gates.chunk(3, -1)
    odds = F.softplus(-entry) - F.softplus(-keep)  # the logarithm of sigmoid(keep) / sigmoid(entry)
    return odds.sigmoid(), (-odds).sigmoid() * new


def _linear_scan_wide(gate: Tensor, value: Tensor, state: Tensor | None, starts: Tensor | None) -> Tensor:
    """Compute :func:`linear_scan_reference`, accumulating 16-bit inputs in float32."""
    wide = torch.promote_types(value.dtype, torch.float32)
    return linear_scan_reference(gate.to(wide), value.to(wide), None if state is None else state.to(wide), starts)


def _check(gate: Tensor, value: Tensor, state: Tensor | None, starts: Tensor | None) -> None:
    for name, tensor in (("gate", gate), ("value", value), ("state", state)):
        if tensor is not None and not tensor.is_floating_point():
            raise TypeError(f"linear_scan needs floating tensors, but {name} is {tensor.dtype}. Call {name}.float()")
    if gate.ndim != 3 or gate.shape != value.shape:
        raise ValueError(
            f"gate and value must both be (B, T, H); got {tuple(gate.shape)} and {tuple(value.shape)}. "
            "Use expand where one of them is the same for several rows, steps or channels"
        )
    num_rows, num_steps, num_channels = value.shape
    check_state_and_starts(num_rows, num_steps, num_channels, state, starts)


def check_state_and_starts(
    num_rows: int, num_steps: int, num_channels: int, state: Tensor | None, starts: Tensor | None
) -> None:
    """Require that ``state`` and ``starts`` fit a recurrence over (B, T, H)."""
    if state is not None and state.shape != (num_rows, num_channels):
        raise ValueError(
            f"state must be (B, H), here {(num_rows, num_channels)}; got {tuple(state.shape)}. "
            "Give one state for each row, or None for zeros"
        )
    if starts is not None and starts.dtype != torch.bool:
        raise TypeError(f"starts must be bool; got {starts.dtype}. Call starts.bool()")
    if starts is not None and starts.shape != (num_rows, num_steps):
        raise ValueError(
            f"starts must be (B, T), here {(num_rows, num_steps)}; got {tuple(starts.shape)}. "
            "Mark the first step of each sequence in each row"
        )


class _LinearScan(torch.autograd.Function):
    """Compute the recurrence, saving only gates and states for backward, which the caller keeps anyway.

    Backward is a scan from the end: g[t] = d_h[t] + gate[t + 1] * g[t + 1]; d_value = g, d_gate[t] = g[t] * h[t - 1].
    """

    @staticmethod
    def forward(gate: Tensor, value: Tensor, state: Tensor | None, starts: Tensor | None) -> Tensor:
        return _forward(gate, value, state, starts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
        gate, _, state, starts = inputs
        ctx.save_for_backward(gate, output, state, starts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, grad, _backward)


def _gradients(ctx: Any, grad: Tensor, backward: Any) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: activation checkpointing recomputes them at each access
    if torch.is_grad_enabled():  # a second derivative is wanted
        backward = _differentiable_backward
    d_gate, d_value, d_state = backward(grad, *saved)
    return d_gate, d_value, None if saved[2] is None else d_state, None


def _forward(gate: Tensor, value: Tensor, state: Tensor | None, starts: Tensor | None) -> Tensor:
    if _use_triton(value):
        from lightning_accel.ops.scan.triton import scan_forward

        return scan_forward(gate, value, state, starts)
    wide = torch.promote_types(value.dtype, torch.float32)
    out = empty_as(value, wide)
    if out.numel():
        state = None if state is None else state.to(wide)
        _run_recurrence(out, gate.to(wide), value.to(wide), state, starts)
    return out.to(value.dtype)


def _backward(
    grad: Tensor, gate: Tensor, out: Tensor, state: Tensor | None, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    if _use_triton(out):
        from lightning_accel.ops.scan.triton import scan_backward

        return scan_backward(grad, gate, out, state, starts)
    dtype, wide = out.dtype, torch.promote_types(out.dtype, torch.float32)
    g, d_gate = empty_as(out, wide), empty_as(out, wide)
    if not g.numel():
        return d_gate.to(dtype), g.to(dtype), torch.zeros_like(gate[:, :1].sum(1))
    grad, gate, out = grad.to(wide), gate.to(wide), out.to(wide)
    g[:, -1] = grad[:, -1]
    following = None if starts is None else starts[:, 1:]
    _run_recurrence(g[:, :-1], gate[:, 1:], grad[:, :-1], g[:, -1], following, reverse=True)
    torch.mul(g[:, 1:], out[:, :-1], out=d_gate[:, 1:])
    d_gate[:, 0] = 0 if state is None else g[:, 0] * state
    d_state = gate[:, 0] * g[:, 0]
    if starts is not None:
        _zero_steps_(d_gate, starts)
        d_state.masked_fill_(starts[:, :1], 0)
    return d_gate.to(dtype), g.to(dtype), d_state.to(dtype)


def _differentiable_backward(
    grad: Tensor, gate: Tensor, out: Tensor, state: Tensor | None, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute :func:`_backward` by differentiable operations, for derivatives of any order."""
    if not grad.shape[1]:
        return torch.zeros_like(gate), grad, torch.zeros_like(gate.sum(1))
    first = torch.zeros_like(out[:, 0]) if state is None else state
    never = torch.zeros(gate.shape[:2], dtype=torch.bool, device=gate.device)
    starts = never if starts is None else starts
    following = torch.cat((gate[:, 1:], torch.zeros_like(gate[:, :1])), 1).flip(1)
    g = linear_scan(following, grad.flip(1), starts=torch.cat((starts[:, 1:], never[:, :1]), 1).flip(1)).flip(1)
    d_gate = g * torch.cat((first.unsqueeze(1), out[:, :-1]), 1)
    d_state = gate[:, 0] * g[:, 0]
    return d_gate.masked_fill(starts.unsqueeze(2), 0), g, d_state.masked_fill(starts[:, :1], 0)


def _run_recurrence(
    out: Tensor, gate: Tensor, value: Tensor, state: Tensor | None, starts: Tensor | None, reverse: bool = False
) -> None:
    """Write the states to ``out``, from the first step to the last, or with ``reverse`` from the last to the first."""
    if not out.numel():
        return
    if starts is None:
        _run_recurrence_without_starts(out, gate, value, state, reverse)
        return
    # Write gates, set to 0 at starts, to the memory of the states: each is read before its state overwrites it. A
    # multiplication, since masked_fill takes 8 times as long.
    torch.mul(gate, ~starts.unsqueeze(2), out=out)
    _run_recurrence_without_starts(out, out, value, state, reverse)
    # 0 times infinity or NaN is NaN, which a gate of 0 would carry over to the next sequences.
    if not out[:, 0 if reverse else -1].isfinite().all():
        masks = starts.unsqueeze(2).unbind(1)
        _run_steps([tensor.unbind(1) for tensor in (out, gate, value)], state, masks, reverse)


def _run_recurrence_without_starts(
    out: Tensor, gate: Tensor, value: Tensor, state: Tensor | None, reverse: bool
) -> None:
    num_rows, num_steps, num_channels = out.shape
    length = _chunk_length(num_steps, num_rows * num_channels, out.device.type)
    chunked = num_steps - num_steps % length if length < num_steps else 0
    cut = num_steps - chunked if reverse else chunked
    first, rest = slice(cut), slice(cut, None)
    if reverse:
        first, rest = rest, first
    if chunked:
        chunks = [x[:, first].unflatten(1, (-1, length)) for x in (out, gate, value)]
        begins = _initial_chunk_states(chunks, state, reverse)
        if begins is None:
            _run_steps([x.unbind(1) for x in (out, gate, value)], state, None, reverse)
            return
        _run_steps([x.unbind(2) for x in chunks], begins, None, reverse)
        state = out[:, cut if reverse else cut - 1]
    _run_steps([x[:, rest].unbind(1) for x in (out, gate, value)], state, None, reverse)


def _initial_chunk_states(chunks: Sequence[Tensor], state: Tensor | None, reverse: bool) -> Tensor | None:
    """Compute the initial state (B, C, H) of each chunk, given chunks (B, C, L, H) of out, gate and value.

    First all chunks run in parallel from zeros. Their last states and the products of their gates give the initial
    states, from which the chunks run again by the operations of the plain recurrence: L + C + L steps instead of C * L.

    Returns None if a product of gates could overflow, or underflow before it grows again, although the states do not:
    an overflow times a state of 0 is NaN, and an underflow loses the state.
    """
    _, gate, value = chunks
    within_1 = float(gate.amax()) <= 1 and float(gate.amin()) >= -1  # takes a third less time than aminmax
    if not within_1 and not bool((gate.abs().clamp_(min=1).prod(2) <= _MAX_GROWTH).all()):
        return None
    ends = torch.empty_like(value[:, :, 0], memory_format=torch.contiguous_format)  # (B, C, H)
    _run_steps([[ends] * gate.shape[2], gate.unbind(2), value.unbind(2)], None, None, reverse)
    begins = torch.empty_like(ends)
    first = begins[:, -1 if reverse else 0]
    first.copy_(torch.zeros_like(first) if state is None else state)
    before, after = (slice(1, None), slice(-1)) if reverse else (slice(-1), slice(1, None))
    carries = begins[:, after], gate.prod(2)[:, before], ends[:, before]
    _run_steps([x.unbind(1) for x in carries], first, None, reverse)
    return begins if bool(begins.isfinite().all()) else None


def _run_steps(
    steps: Sequence[Sequence[Tensor]], state: Tensor | None, starts: Sequence[Tensor] | None, reverse: bool
) -> None:
    """Run the recurrence step by step; ``steps`` holds the steps of out, gate and value."""
    outs, gates, values = steps
    for t in range(len(outs) - 1, -1, -1) if reverse else range(len(outs)):
        if state is None:
            outs[t].copy_(values[t])
        else:
            if starts is not None:
                state = state.masked_fill(starts[t], 0)
            torch.addcmul(values[t], gates[t], state, out=outs[t])
        state = outs[t]


@lru_cache(1024)
def _chunk_length(num_steps: int, size: int, device: str) -> int:
    """Return the fastest number of steps per chunk, given ``size`` elements per step; ``num_steps`` for no chunks.

    Chunks read each element three times, so they are faster only if steps are small. Lengths are odd, so that the
    chunks of one operation do not compete for the same cache lines.
    """
    overhead = _OVERHEAD.get(device, _OVERHEAD["other"])

    def cost(length: int) -> int:
        num_operations = 2 * length + num_steps // length + num_steps % length + 10
        return num_operations * overhead + 3 * num_steps * size

    best = min(range(3, 2 * isqrt(num_steps) + 4, 2), key=cost)
    return best if cost(best) < num_steps * (overhead + size) else num_steps


def empty_as(like: Tensor, dtype: torch.dtype, num_channels: int | None = None) -> Tensor:
    """Allocate a tensor that is time-major in memory if ``like`` is, else batch-major."""
    num_rows, num_steps, width = like.shape
    width = width if num_channels is None else num_channels
    if like.is_contiguous() or not like.transpose(0, 1).is_contiguous():
        return torch.empty(num_rows, num_steps, width, dtype=dtype, device=like.device)
    return torch.empty(num_steps, num_rows, width, dtype=dtype, device=like.device).transpose(0, 1)


def _zero_steps_(x: Tensor, rows: Tensor) -> None:
    """Set the steps of ``x``, allocated by :func:`empty_as`, to zero where ``rows`` (B, T) is True."""
    if x.device.type != "cpu":
        x.masked_fill_(rows.unsqueeze(2), 0)  # nonzero() would wait for the device
        return
    if not x.is_contiguous():
        x, rows = x.transpose(0, 1), rows.t()
    x.view(-1, x.shape[2]).index_fill_(0, rows.flatten().nonzero().squeeze(1), 0)


def _use_triton(x: Tensor) -> bool:
    return runs_triton(x)


# The recurrence as a custom op, for graphs: torch.compile would break at the Function's loop, or unroll it.


@torch.library.custom_op("lightning_accel::linear_scan", mutates_args=())
def _scan_op(gate: Tensor, value: Tensor, state: Tensor | None, starts: Tensor | None) -> Tensor:
    return _forward(gate, value, state, starts).contiguous()


@_scan_op.register_fake
def _(gate: Tensor, value: Tensor, state: Tensor | None, starts: Tensor | None) -> Tensor:
    return value.new_empty(value.shape)


@torch.library.custom_op("lightning_accel::linear_scan_backward", mutates_args=())
def _backward_op(
    grad: Tensor, gate: Tensor, out: Tensor, state: Tensor | None, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    d_gate, d_value, d_state = _backward(grad, gate, out, state, starts)
    return d_gate.contiguous(), d_value.contiguous(), d_state


@_backward_op.register_fake
def _(
    grad: Tensor, gate: Tensor, out: Tensor, state: Tensor | None, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, _, num_channels = out.shape
    return out.new_empty(out.shape), out.new_empty(out.shape), out.new_empty(num_rows, num_channels)


def _op_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _gradients(ctx, grad, _backward_op)


_scan_op.register_autograd(_op_backward, setup_context=_LinearScan.setup_context)
