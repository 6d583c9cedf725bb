"""The C++ kernel of :func:`lightning_accel.ops.scan.gated`. Shapes: B samples, T steps, H channels, G gates."""

from typing import Any

import torch
from torch import Tensor

from lightning_accel.ops.native import KERNELS, check_one_device
from lightning_accel.ops.scan.linear import NUM_GATES, empty_as, gated_scan_reference


def scan_by_kernel(
    cell: str, gates: Tensor, state: Tensor | None, starts: Tensor | None, lengths: Tensor | None
) -> Tensor:
    """Compute the states (B, T, H) from float32 ``gates`` (B, T, G * H)."""
    return _GatedScan.apply(gates, state, starts, lengths, NUM_GATES[cell])


class _GatedScan(torch.autograd.Function):
    """Call the kernel; backward computes the activations of the gates again, which is faster than reading them."""

    @staticmethod
    def forward(
        gates: Tensor, state: Tensor | None, starts: Tensor | None, lengths: Tensor | None, num_gates: int
    ) -> Tensor:
        return torch.ops.lightning_accel_native.gated_scan(gates, state, starts, lengths, num_gates)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        gates, state, starts, lengths, ctx.num_gates = inputs
        ctx.save_for_backward(gates, output, state, starts, lengths)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gates, out, state, starts, lengths = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted
            return _differentiable_backward(ctx, grad, gates, state, starts, lengths)
        call = torch.ops.lightning_accel_native.gated_scan_backward
        d_gates, d_state = call(grad, gates, out, state, starts, lengths, ctx.num_gates)
        return d_gates, None if state is None else d_state, None, None, None


def _differentiable_backward(
    ctx: Any, grad: Tensor, gates: Tensor, state: Tensor | None, starts: Tensor | None, lengths: Tensor | None
) -> tuple[Tensor | None, ...]:
    cell: str = "mingru" if ctx.num_gates == NUM_GATES["mingru"] else "minlstm"
    learned = [
        x for x, needed in zip((gates, state), ctx.needs_input_grad[:2], strict=True) if x is not None and needed
    ]
    out = gated_scan_reference(cell, gates, state, starts, lengths)
    found = iter(torch.autograd.grad(out, learned, grad, create_graph=True))
    d_gates, d_state = (next(found) if needed else None for needed in ctx.needs_input_grad[:2])
    return d_gates, d_state, None, None, None


def _fake_forward(
    gates: Tensor, state: Tensor | None, starts: Tensor | None, lengths: Tensor | None, num_gates: int
) -> Tensor:
    check_one_device(gates=gates, state=state, starts=starts, lengths=lengths)
    return empty_as(gates, gates.dtype, gates.shape[2] // num_gates)


def _fake_backward(
    grad: Tensor,
    gates: Tensor,
    out: Tensor,
    state: Tensor | None,
    starts: Tensor | None,
    lengths: Tensor | None,
    num_gates: int,
) -> tuple[Tensor, Tensor]:
    check_one_device(grad=grad, gates=gates, out=out, state=state, starts=starts, lengths=lengths)
    return empty_as(gates, gates.dtype), out.new_empty(out.shape[0], out.shape[2])


@KERNELS.on_load
def _register() -> None:
    operation = "lightning_accel_native::gated_scan"
    torch.library.register_fake(operation, _fake_forward)
    torch.library.register_fake(f"{operation}_backward", _fake_backward)
    torch.library.register_autograd(operation, _GatedScan.backward, setup_context=_GatedScan.setup_context)
