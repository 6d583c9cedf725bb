"""Training of attention on the CPU, in any module, by a kernel in place of torch's.

With dropout, torch's ``scaled_dot_product_attention`` makes tensors of all pairs of queries and keys on the CPU; its
kernel without such tensors (flash) takes no dropout, and its backward pass is slow in bfloat16. The kernel here
computes blocks of scores that stay in the cache, and computes them again in the backward pass, with sums in float32.

Dropout keeps the weight of a pair where 16 bits of Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011, Parallel Random
Numbers: As Easy as 1, 2, 3, https://doi.org/10.1145/2063384.2063405) are small enough, with a key that is drawn from
torch's generator for each call. Equal seeds give equal masks on any number of threads. Probabilities are rounded to
multiples of 2^-16, and kept weights are divided by the rounded one.

Shapes: B samples, H heads of queries, G heads of keys and values, L queries, S keys, D and V features.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from lightning_accel._private.torch import cpu_attention, is_traceable_wrapper_subclass, replace_cpu_kernel
from lightning_accel.ops.native import KERNELS, Replacement, check_one_device, missing_kernel

Shape = tuple[int, ...]
_DTYPES = (torch.float32, torch.bfloat16)


def replace_attention() -> None:
    """Let ``scaled_dot_product_attention`` train by the kernel in this process, in whatever module.

    The kernel serves calls that record gradients, of four-dimensional tensors in float32 or bfloat16 on the CPU, whose
    mask has no gradient; torch computes all others. It has first derivatives alone. It counts: after n calls, torch's
    kernel is back with the nth call of :func:`restore_attention`.

    Raises:
        RuntimeError: if there is no kernel.
    """
    if reason := missing_kernel():
        raise RuntimeError(f"attention has no native kernel: {reason}. Mend that, or choose another attention")
    _REPLACEMENT.begin()


def restore_attention() -> None:
    """Take back one call of :func:`replace_attention`."""
    _REPLACEMENT.end()


def _attention(
    keys: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if not _is_served(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa):
        return torch.ops.aten.scaled_dot_product_attention.default.decompose(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    mask = None if attn_mask is None else _additive(attn_mask).expand(*query.shape[:3], key.shape[2])
    seed = torch.empty(1, dtype=torch.int64, device="cpu").random_() if dropout_p else None
    scale = query.shape[3] ** -0.5 if scale is None else scale
    out, _ = torch.ops.lightning_accel_native.attention(query, key, value, mask, seed, dropout_p, is_causal, scale)
    return out


def _is_served(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, enable_gqa: bool
) -> bool:
    """Return whether the kernel computes a call; what is no valid call is not served, so that torch's errors appear."""
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))):
        return False
    if not KERNELS.serves(query.device):
        return False
    if any(x.dim() != 4 or x.numel() == 0 or is_traceable_wrapper_subclass(x) for x in (query, key, value)):
        return False
    if query.dtype not in _DTYPES or not query.dtype == key.dtype == value.dtype or not 0 <= dropout <= 1 - 2**-16:
        return False
    (samples, heads, rows, features), (_, groups, columns, _) = query.shape, key.shape
    if key.shape != (samples, groups, columns, features) or value.shape[:3] != key.shape[:3]:
        return False
    if heads != groups and not (enable_gqa and heads % groups == 0):
        return False
    if mask is None:
        return True
    is_broadcast = mask.dim() <= 4 and all(
        size in (1, whole) for size, whole in zip(mask.shape[::-1], (columns, rows, heads, samples), strict=False)
    )
    return is_broadcast and not causal and not mask.requires_grad and mask.dtype in (torch.bool, query.dtype)


def _additive(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.float()
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -torch.inf)


_REPLACEMENT = Replacement(partial(replace_cpu_kernel, "scaled_dot_product_attention", _attention, "AutogradCPU"))


def _fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    check_one_device(query=query, key=key, value=value, mask=mask, seed=seed)
    rows = query.shape[:3]
    return _empty_heads(query, query.shape[1], value.shape[3]), query.new_empty(*rows, 2, dtype=torch.float32)


def _empty_heads(like: Tensor, heads: int, features: int) -> Tensor:
    return like.new_empty(like.shape[0], like.shape[2], heads, features).transpose(1, 2)


def _fake_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(_empty_heads(x, x.shape[1], x.shape[3]) for x in (query, key, value))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, dropout, causal, scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.options = dropout, causal, scale
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "native attention has first derivatives alone, and create_graph=True asks for second ones: train with "
            "another attention of Speedups"
        )
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    gradients = torch.ops.lightning_accel_native.attention_backward(grad, *ctx.saved_tensors, *ctx.options)
    return (*gradients, None, None, None, None, None)


def _count_flops(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Count two operations for each term of the products of all queries and keys, masked ones included."""
    return 2 * math.prod(query[:3]) * key[2] * (query[3] + value[3])


def _count_backward_flops(grad: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Count scores that are computed again, and the two products for the gradients of each of the two."""
    return 2 * math.prod(query[:3]) * key[2] * (3 * query[3] + 2 * value[3])


# torch has formulas for its kernels of CUDA alone
if cpu_attention()[0] not in flop_registry:
    register_flop_formula(cpu_attention()[0])(_count_flops)
    register_flop_formula(cpu_attention()[1])(_count_backward_flops)


@KERNELS.on_load
def _register() -> None:
    torch.library.register_fake("lightning_accel_native::attention", _fake)
    torch.library.register_fake("lightning_accel_native::attention_backward", _fake_backward)
    torch.library.register_autograd("lightning_accel_native::attention", _backward, setup_context=_setup)
    register_flop_formula(torch.ops.lightning_accel_native.attention)(_count_flops)
    register_flop_formula(torch.ops.lightning_accel_native.attention_backward)(_count_backward_flops)
