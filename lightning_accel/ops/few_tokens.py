"""A mixture of experts for few tokens, without gradients: what a language model computes for each token it generates.

Shapes: N tokens, D features, E experts, K experts per token, S slots (pairs of a token and an expert), H hidden
features, U = H outputs of the first layer, or 2 * H where it is gated.
"""

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from lightning_accel._private.torch import is_traced
from lightning_accel.ops.native import KERNELS

# Slots per expert up to which reading each weight once is faster than matrix products, measured on Zen 5. In bfloat16
# the products take half of the time, and the sums here, which are in float32, do not.
_MOST_SLOTS = {torch.float32: 4, torch.bfloat16: 2}
_MOST_SCORES = 1 << 14  # tokens times experts, up to which one thread routes them faster than torch's operations
_ACTIVATIONS = "gelu", "gelu_tanh", "quick_gelu", "relu", "silu"  # in the order of the kernel
_PLAIN = {Tensor, nn.Parameter}


class FewSlots(NamedTuple):
    """Hold the slots of few tokens and what a gate reports of them."""

    token_of_slot: Tensor  # (S,) int64; the first choices of all tokens come first
    expert_of_slot: Tensor  # (S,) int64
    weight_of_slot: Tensor  # (S,) float32
    counts: Tensor  # (E,) int64, slots of each expert
    statistics: Tensor  # (3,) float32: balance loss, z-loss, and the mean of the largest probabilities


def experts_of_few_tokens(
    tokens: Tensor,
    token_of_slot: Tensor,
    weight_of_slot: Tensor,
    counts: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
) -> Tensor:
    """Compute :func:`expert_mlp` in float32, reading each weight once, where it is.

    Args:
        tokens: (N, D) floating, on the CPU.
        token_of_slot: (S,) int64 in [0, N), slots sorted by expert; slots past ``counts.sum()`` are ignored.
        weight_of_slot: (S,) floating.
        counts: (E,) int64.
        up_weight: (E, U, D), float32 or bfloat16, as the next three.
        down_weight: (E, D, H).
        up_bias: (E, U).
        down_bias: (E, D).
        activation: as of :func:`expert_mlp`.

    Returns:
        (N, D) float32.

    Raises:
        RuntimeError: if shapes or dtypes disagree, or a slot has no token.
    """
    floating = tokens.float().contiguous(), token_of_slot.contiguous(), weight_of_slot.float().contiguous()
    layers = [None if one is None else one.contiguous() for one in (up_weight, down_weight, up_bias, down_bias)]
    run = torch.ops.lightning_accel_native.experts_of_few_tokens.default
    found: Tensor = run(*floating, counts.contiguous(), *layers, _ACTIVATIONS.index(activation))
    return found


def route_few_tokens(
    logits: Tensor, bias: Tensor | None, k: int, is_sigmoid: bool, normalize: bool, scale: float
) -> FewSlots:
    """Choose the ``k`` experts of each token with the highest scores, as :class:`lightning_accel.TopKGate` does.

    Args:
        logits: (N, E) float32, on the CPU; N is 1 or more.
        bias: (E,) float32, added to the scores for the choice alone.
        k: K.
        is_sigmoid: whether scores are sigmoids; else they are the softmax over experts.
        normalize: whether the weights of a token are divided by their sum.
        scale: factor on the weights.
    """
    run = torch.ops.lightning_accel_native.route_few_tokens.default
    return FewSlots(*run(logits.contiguous(), bias, k, is_sigmoid, normalize, scale))


def has_few_slots(num_slots: int, tokens: Tensor, *weights: Tensor) -> bool:
    """Return whether :func:`experts_of_few_tokens` serves, and is the fastest for, ``num_slots`` of these weights."""
    if is_traced():  # before comparisons of sizes, which would become guards
        return False
    first = weights[0]
    if num_slots > _MOST_SLOTS.get(first.dtype, 0) * len(first):
        return False
    takes_tokens = tokens.dtype == first.dtype or (torch.is_autocast_enabled("cpu") and tokens.dtype in _MOST_SLOTS)
    return takes_tokens and all(one.dtype == first.dtype for one in weights) and _serves(tokens, *weights)


def has_few_tokens(logits: Tensor) -> bool:
    """Return whether :func:`route_few_tokens` serves, and is the fastest for, ``logits`` (N, E)."""
    return not is_traced() and 0 < logits.numel() <= _MOST_SCORES and logits.dtype == torch.float32 and _serves(logits)


def count_flops(
    tokens: Any, token_of_slot: Any, weight_of_slot: Any, counts: Any, up: Any, down: Any, *rest: Any, **options: Any
) -> int:
    """Count the operations of both layers from shapes, those of ignored slots included."""
    return 2 * token_of_slot[0] * (prod(up[1:]) + prod(down[1:]))


@KERNELS.on_load
def _register() -> None:
    register_flop_formula(torch.ops.lightning_accel_native.experts_of_few_tokens)(count_flops)


def _serves(*tensors: Tensor) -> bool:
    """Return whether ``tensors`` are plain ones without gradients, on a CPU that has kernels."""
    if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
        return False
    is_plain = {*map(type, tensors)} <= _PLAIN and all(one.is_cpu for one in tensors)
    return is_plain and KERNELS.serves(tensors[0].device)
