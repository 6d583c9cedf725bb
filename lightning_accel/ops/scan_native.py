"""The recurrence of :func:`lightning_accel.ops.linear_scan` on a CPU, in C++. Shapes: B rows, T steps, H channels."""

from typing import Any

import torch
from torch import Tensor

from lightning_accel.ops.native import KERNELS
from lightning_accel.ops.scan import empty_as, saved_gradients


def scan_forward(gate: Tensor, value: Tensor, state: Tensor | None, starts: Tensor | None) -> Tensor:
    """States, (B, T, H), of inputs of one dtype."""
    return torch.ops.lightning_accel_native.linear_scan(gate, value, state, starts)


def scan_backward(
    grad: Tensor, gate: Tensor, out: Tensor, state: Tensor | None, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gate, value, (B, T, H), and state, (B, H)."""
    return torch.ops.lightning_accel_native.linear_scan_backward(grad, gate, out, state, starts)


def _fake_forward(gate: Tensor, value: Tensor, state: Tensor | None, starts: Tensor | None) -> Tensor:
    return empty_as(value, value.dtype)


def _fake_backward(
    grad: Tensor, gate: Tensor, out: Tensor, state: Tensor | None, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_as(out, out.dtype), empty_as(out, out.dtype), out.new_empty(out.shape[0], out.shape[2])


def _setup_context(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
    gate, _, state, starts = inputs
    ctx.save_for_backward(gate, output, state, starts)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return saved_gradients(ctx, grad, scan_backward)


@KERNELS.on_load
def _register() -> None:
    torch.library.register_fake("lightning_accel_native::linear_scan", _fake_forward)
    torch.library.register_fake("lightning_accel_native::linear_scan_backward", _fake_backward)
    torch.library.register_autograd("lightning_accel_native::linear_scan", _gradients, setup_context=_setup_context)
