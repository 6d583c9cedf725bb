"""Attention weights that ``nn.MultiheadAttention`` returns, computed only where a program uses them.

By default, the layer computes scores and their softmax as tensors of all pairs of queries and keys, and averages them
over heads, to return weights that most programs drop. Without them it calls ``scaled_dot_product_attention``.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel._private.torch import change_count, tree_map_only


def defer_weights_(module: nn.Module) -> list[nn.MultiheadAttention]:
    """Let each ``nn.MultiheadAttention`` inside ``module`` compute its weights when they are used; return these layers.

    Outputs and gradients are equal up to rounding, except that queries without a key give 0 in place of NaN. Weights
    are those of the call that returned them, with their gradient, and a RuntimeError if the parameters or the inputs
    have changed since. Layers with dropout, whose weights have masks, are left as they are, and so are layers in
    programs that ``torch.compile`` traces, since it drops what is not used itself.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, nn.MultiheadAttention) and is_deferrable(layer)]
    for layer in layers:
        layer.forward = partial(_forward, layer)  # type: ignore[method-assign]
    return layers


def restore_weights_(layers: Iterable[nn.MultiheadAttention]) -> None:
    """Return ``layers``, which :func:`defer_weights_` has changed, to their own execution."""
    for layer in layers:
        if is_deferring(layer):
            del layer.forward


def is_deferring(layer: nn.Module) -> bool:
    """Return whether :func:`defer_weights_` has changed ``layer``."""
    replaced = vars(layer).get("forward")
    return isinstance(replaced, partial) and replaced.func is _forward


def is_deferrable(layer: nn.Module) -> bool:
    """Return whether ``layer`` is torch's own ``nn.MultiheadAttention``, without dropout."""
    return (
        isinstance(layer, nn.MultiheadAttention)
        and type(layer).forward is nn.MultiheadAttention.forward
        and "forward" not in vars(layer)
        and layer.dropout == 0
    )


def _forward(
    layer: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    def run(need_weights: bool) -> tuple[Tensor, Tensor | None]:
        return nn.MultiheadAttention.forward(
            layer, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )

    if not need_weights or torch.compiler.is_compiling():
        return run(need_weights)
    used = [one for one in (query, key, value, key_padding_mask, attn_mask, *layer.parameters()) if one is not None]
    kind = query.device.type
    modes = torch.is_grad_enabled(), torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    weights = torch.empty(0).as_subclass(_DeferredWeights)
    weights.make = cache(partial(_compute, run, used, _changes(used), *modes))
    return run(need_weights=False)[0], weights


class _DeferredWeights(Tensor):
    """Stand for a tensor that is computed when anything is done with it."""

    make: Callable[[], Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(_DeferredWeights, lambda weights: weights.make(), (args, kwargs or {}))
        return func(*args, **kwargs)


def _compute(
    run: Callable[[bool], tuple[Tensor, Tensor | None]],
    used: Sequence[Tensor],
    changes: list[int],
    has_gradient: bool,
    dtype: torch.dtype,
    is_mixed: bool,
) -> Tensor:
    if _changes(used) != changes:
        raise RuntimeError(
            "attention weights are used after the parameters or the inputs of their layer have changed, and are not "
            "computed yet: use them before the optimizer steps, or train without defer_attention_weights of Speedups"
        )
    with torch.set_grad_enabled(has_gradient), torch.autocast(used[0].device.type, dtype, is_mixed):
        weights = run(True)[1]
    assert weights is not None
    return weights


def _changes(tensors: Sequence[Tensor]) -> list[int]:
    return [0 if one.is_inference() else change_count(one) for one in tensors]
