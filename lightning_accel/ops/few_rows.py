"""Experts that visit few tokens, without gradients: what a language model computes for each token that it generates.

Shapes: N tokens, D features, U features out, E experts, S slots (pairs of a token and an expert).
"""

import torch
from torch import Tensor, nn

from lightning_accel._private.torch import in_forward_mode, in_transform
from lightning_accel.ops.native import KERNELS

# Slots per expert up to which reading each weight once is faster than matrix products, on Zen 5; in bfloat16 those take
# half of the time, and this none the less.
_MOST_SLOTS = {torch.float32: 4, torch.bfloat16: 1}
_PLAIN = {Tensor, nn.Parameter}


def multiply_few_rows(
    x: Tensor, row_of_slot: Tensor, counts: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Multiply rows by the weights of their slots' experts, reading each weight once, where it is.

    Args:
        x: (N, D) float32, on the CPU.
        row_of_slot: (S,) int64 in [0, N), slots sorted by expert.
        counts: (E,) int64, slots of each expert.
        weight: (E, U, D), float32 or bfloat16.
        bias: (E, U), in the dtype of ``weight``.

    Returns:
        (S, U) float32; 0 from slot ``counts.sum()`` on.

    Raises:
        RuntimeError: if shapes or dtypes disagree, or a row does not exist.
    """
    layer = None if bias is None else bias.contiguous()
    slots = row_of_slot.contiguous(), counts.contiguous()
    found: Tensor = torch.ops.lightning_accel_native.multiply_few_rows.default(
        x.contiguous(), *slots, weight.contiguous(), layer
    )
    return found


def are_few_rows(num_slots: int, tokens: Tensor, *weights: Tensor) -> bool:
    """Return whether :func:`multiply_few_rows` serves, and is the fastest for, ``num_slots`` slots of these weights."""
    first = weights[0]
    if num_slots > _MOST_SLOTS.get(first.dtype, 0) * len(first) or torch.compiler.is_compiling() or in_transform():
        return False
    if torch.jit.is_tracing() or in_forward_mode():  # type: ignore[attr-defined]
        return False
    takes_tokens = tokens.dtype == first.dtype or (torch.is_autocast_enabled("cpu") and tokens.dtype in _MOST_SLOTS)
    if not takes_tokens or any(one.dtype != first.dtype for one in weights):
        return False
    every = (tokens, *weights)
    if torch.is_grad_enabled() and any(one.requires_grad for one in every):
        return False
    is_plain = {*map(type, every)} <= _PLAIN and all(one.is_cpu for one in every)
    return is_plain and KERNELS.serves(first.device)
