"""The recurrences of minGRU and minLSTM. Shapes: B samples, T steps, H channels, G gates."""

import torch
from torch import Tensor

from lightning_accel.ops.native import KERNELS
from lightning_accel.ops.scan.linear import NUM_GATES, check_state_and_starts, gated_scan_reference
from lightning_accel.ops.scan.native import scan_by_kernel
from lightning_accel.ops.transforms import in_transform


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
        return scan_by_kernel(cell, gates, state, starts, lengths)
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
