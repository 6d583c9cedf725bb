"""The recurrences of minGRU and minLSTM. Shapes: B samples, T steps, H channels, G gates."""

from typing import Any

import torch
from torch import Tensor

from lightning_accel._private.torch import in_transform
from lightning_accel.ops.native import KERNELS, check_one_device
from lightning_accel.ops.scan.linear import NUM_GATES, check_state_and_starts, empty_as, gated_scan_reference


def gated_scan(
    cell: str,
    gates: Tensor,
    state: Tensor | None = None,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Compute the states of a minGRU or minLSTM at all steps from the output of its linear layer.

    On CPU, a C++ kernel computes gates and recurrence in one pass for float32, if it could be built. Transforms of
    torch.func use the formula in torch.

    Args:
        cell: ``mingru`` or ``minlstm``.
        gates: (B, T, G * H), floating: update gate and candidate of ``mingru``; forget gate, input gate and candidate
            of ``minlstm``.
        state: (B, H), the state before the first step; zeros by default.
        starts: (B, T) bool, True where a new sequence begins: the previous state counts as 0, even if NaN or infinite.
        lengths: (B,) int64, number of valid steps; after these the state of a sample stays unchanged.

    Returns:
        (B, T, H), dtype of ``gates``.

    Raises:
        TypeError: if ``gates`` are not floating, ``starts`` not bool or ``lengths`` not int64.
        ValueError: if ``cell`` is unknown, or shapes disagree.

    Source: Feng et al. 2024, Were RNNs All We Needed?, https://arxiv.org/abs/2410.01201, sections 3.1 and 3.2.

    >>> gated_scan("mingru", torch.tensor([[[0.0, 1.0], [0.0, 1.0]]])).flatten()
    tensor([0.5000, 0.7500])
    """
    _check_gates(cell, gates)
    num_rows, num_steps, width = gates.shape
    check_state_and_starts(num_rows, num_steps, width // NUM_GATES[cell], state, starts)
    _check_lengths(num_rows, lengths)
    state = None if state is None else state.to(gates.dtype)
    if _use_kernel(gates):
        return _GatedScan.apply(gates, state, starts, lengths, NUM_GATES[cell])
    return gated_scan_reference(cell, gates, state, starts, lengths)


def _check_gates(cell: str, gates: Tensor) -> None:
    if cell not in NUM_GATES or gates.ndim != 3 or gates.shape[2] % NUM_GATES[cell]:
        raise ValueError(
            f"gated_scan needs gates (B, T, G * H), G one of {NUM_GATES}; got {tuple(gates.shape)} and cell={cell!r}"
        )
    if not gates.is_floating_point():
        raise TypeError(f"gated_scan needs floating gates; got {gates.dtype}. Call gates.float()")


def _check_lengths(num_rows: int, lengths: Tensor | None) -> None:
    if lengths is not None and lengths.dtype != torch.int64:
        raise TypeError(f"lengths must be int64; got {lengths.dtype}. Call lengths.long()")
    if lengths is not None and lengths.shape != (num_rows,):
        raise ValueError(
            f"lengths must be (B,), here {(num_rows,)}; got {tuple(lengths.shape)}. "
            "Give the number of steps of each row, or None for all"
        )


def _use_kernel(gates: Tensor) -> bool:
    if gates.device.type != "cpu" or gates.dtype != torch.float32 or torch.compiler.is_compiling() or in_transform():
        return False
    return KERNELS.serves(gates.device)


class _GatedScan(torch.autograd.Function):
    """Call the C++ kernel; backward computes the activations of the gates again, which is faster than reading them."""

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
    # aliases: what reaches the gates from the state is the affair of the nodes in between
    gates, state = gates.view_as(gates), None if state is None else state.view_as(state)
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
