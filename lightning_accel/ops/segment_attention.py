"""Attention within segments of rows, such as the nodes of each graph of a batch, without padding.

Shapes: N rows, B segments, H heads of queries, G heads of keys and values (H is a multiple of G), D and V features.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lightning_accel.ops.float32 import at_least_float32, without_autocast
from lightning_accel.ops.gradients import gradients_of_formula
from lightning_accel.ops.native import KERNELS, check_one_device, runs_kernel

_DTYPES = (torch.float32, torch.bfloat16)


def segment_attention(query: Tensor, key: Tensor, value: Tensor, begins: Tensor, causal: bool = False) -> Tensor:
    """Let each row attend to the rows of its segment, by scaled dot products (Vaswani et al. 2017).

    On the CPU a C++ kernel computes it in float32 and bfloat16, with sums in float32, and derivatives of any order
    exist; elsewhere segments are padded to the longest one, and torch computes it.

    Args:
        query: (N, H, D) floating.
        key: (N, G, D), of the same dtype.
        value: (N, G, V), of the same dtype.
        begins: (B + 1,) int64, ascending from 0 to N: where segments begin, and where the last one ends.
        causal: let rows attend to themselves and to rows before them alone.

    Returns:
        (N, H, V), of the dtype of ``query``.

    Raises:
        ValueError: if shapes or dtypes disagree.
        RuntimeError: if ``begins`` does not ascend from 0 to N.

    >>> x = torch.randn(5, 2, 8)
    >>> segment_attention(x, x, x, torch.tensor([0, 2, 5])).shape
    torch.Size([5, 2, 8])
    """
    _check(query, key, value, begins)
    if not serves_segments(query, key, value):
        return _attend_padded(query, key, value, begins, causal)
    of_heads = [_by_head(one) for one in (query, key, value)]
    run = torch.ops.lightning_accel_native.segment_attention.default
    out: Tensor = run(*of_heads, begins.contiguous(), causal, query.shape[2] ** -0.5)[0]
    return out.squeeze(0).transpose(0, 1)


def _check(query: Tensor, key: Tensor, value: Tensor, begins: Tensor) -> None:
    tensors = query, key, value
    is_right = (
        all(one.ndim == 3 and one.is_floating_point() and one.dtype == query.dtype for one in tensors)
        and len(query) == len(key) == len(value)
        and query.shape[2] == key.shape[2]
        and 0 < key.shape[1] == value.shape[1]
        and query.shape[1] % key.shape[1] == 0
        and begins.ndim == 1
        and len(begins) > 0
    )
    if not is_right:
        found = ", ".join(f"{one.dtype} {tuple(one.shape)}" for one in (*tensors, begins))
        raise ValueError(
            "segment_attention needs query (N, H, D), key (N, G, D) and value (N, G, V), floating and of one dtype, H "
            f"a multiple of G, and begins (B + 1,); got {found}"
        )


def serves_segments(*tensors: Tensor) -> bool:
    """Return whether the kernel of :func:`segment_attention` computes with these ``tensors``."""
    first = tensors[0]
    is_alike = first.dtype in _DTYPES and all(one.dtype == first.dtype for one in tensors)
    return is_alike and first.numel() > 0 and runs_kernel(*tensors)


def _by_head(x: Tensor) -> Tensor:
    """Return ``x`` (N, H, D) as (1, H, N, D), with features side by side, as the kernel takes it."""
    return (x if x.stride(2) == 1 else x.contiguous()).transpose(0, 1).unsqueeze(0)


def _attend_padded(query: Tensor, key: Tensor, value: Tensor, begins: Tensor, causal: bool) -> Tensor:
    lengths = begins.diff()
    if begins.dtype != torch.int64 or begins[0] != 0 or begins[-1] != len(query) or (lengths < 0).any():
        raise RuntimeError(f"begins must be int64, and ascend from 0 to the number of rows, {len(query)}; got {begins}")
    longest = int(lengths.max()) if len(lengths) else 0
    segment = torch.repeat_interleave(lengths, output_size=len(query))
    place = torch.arange(len(query), device=query.device) - begins[segment] + segment * longest
    query, key, value = (
        x.new_zeros(len(lengths) * longest, *x.shape[1:])
        .index_copy(0, place, x)
        .unflatten(0, (len(lengths), longest))
        .transpose(1, 2)
        for x in (query, key, value)
    )
    position = torch.arange(longest, device=query.device)
    mask = (position < lengths[:, None])[:, None, None]  # of keys, (B, 1, 1, longest)
    if causal:
        mask = mask & (position <= position[:, None])
    if query.is_cpu:
        out = _formula(query, key, value, mask)
    else:
        is_grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=is_grouped)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, place)


def _formula(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Compute attention of heads (B, H, L, D) with derivatives of any order, which torch's implementations have not."""
    with without_autocast(query):
        key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], dim=1) for one in (key, value))
        scores = at_least_float32(query @ key.transpose(2, 3)) * query.shape[3] ** -0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=3)
        return weights.to(value.dtype) @ value


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, causal, scale = inputs
    ctx.options = causal, scale
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    *inputs, begins, out, statistics = ctx.saved_tensors
    if torch.is_grad_enabled():
        return gradients_of_formula(partial(_run_padded, begins, ctx.options[0]), inputs, ctx.needs_input_grad, [grad])
    grad = grad if grad.stride(3) == 1 else grad.contiguous()
    run = torch.ops.lightning_accel_native.segment_attention_backward.default
    return *run(grad, *inputs, begins, out, statistics, *ctx.options), None, None, None


def _run_padded(begins: Tensor, causal: bool, *by_head: Tensor) -> list[Tensor]:
    """Compute the operation, whose tensors are (1, H, N, D), by padding."""
    query, key, value = (one[0].transpose(0, 1) for one in by_head)
    return [_attend_padded(query, key, value, begins, causal).transpose(0, 1).unsqueeze(0)]


def _fake(
    query: Tensor, key: Tensor, value: Tensor, begins: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    check_one_device(query=query, key=key, value=value, begins=begins)
    out = _empty_heads(query, value.shape[3])
    return out, query.new_empty(*query.shape[:3], 2, dtype=torch.float32)


def _fake_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(_empty_heads(one, one.shape[3]) for one in (query, key, value))


def _empty_heads(like: Tensor, features: int) -> Tensor:
    return like.new_empty(1, like.shape[2], like.shape[1], features).transpose(1, 2)


def _count_flops(query: Any, key: Any, value: Any, begins: Any, *_: Any, **__: Any) -> int:
    """Count two operations for each term of the products of all queries and keys, as of segments of equal length."""
    return 2 * query[1] * query[2] * query[2] // max(1, begins[0] - 1) * (query[3] + value[3])


def _count_backward_flops(grad: Any, query: Any, key: Any, value: Any, begins: Any, *_: Any, **__: Any) -> int:
    """Count scores that are computed again, and the two products for the gradients of each of the two."""
    pairs = query[1] * query[2] * query[2] // max(1, begins[0] - 1)
    return 2 * pairs * (3 * query[3] + 2 * value[3])


@KERNELS.on_load
def _register() -> None:
    torch.library.register_fake("lightning_accel_native::segment_attention", _fake)
    torch.library.register_fake("lightning_accel_native::segment_attention_backward", _fake_backward)
    torch.library.register_autograd("lightning_accel_native::segment_attention", _backward, setup_context=_setup)
    register_flop_formula(torch.ops.lightning_accel_native.segment_attention)(_count_flops)
    register_flop_formula(torch.ops.lightning_accel_native.segment_attention_backward)(_count_backward_flops)
