"""Two-layer perceptrons that each process their own tokens: the computation of a mixture of experts.

Shapes: N tokens, D features, E experts, S slots (pairs of a token and an expert), H hidden features, U = H outputs of
the first layer, or 2 * H where it is gated.
"""

import ctypes
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lightning_accel._private.torch import is_batched
from lightning_accel.ops.extras import planned_capability, runs_triton
from lightning_accel.ops.few_tokens import count_flops, experts_of_few_tokens, has_few_slots
from lightning_accel.ops.grouped_linear import (
    cast_for_autocast,
    choose_grouped_backend,
    grouped_linear,
    multiply_by_torch,
    needs_formula,
)
from lightning_accel.ops.grouped_products import gather_rows, multiply_rows, sort_by_source, sum_rows
from lightning_accel.ops.native import KERNELS, runs_kernel

Activation: TypeAlias = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"]
Backend: TypeAlias = Literal["auto", "blocks", "dense", "grouped_mm", "loop", "triton"]

_BLOCK_BYTES = 1024  # bytes per feature and thread: a block's activations stay in cache from one product to the next
# Without the kernel: slots per expert below which blocks cost more Python overhead than they save memory traffic,
_FEW_SLOTS = 128
_SMALL_EXPERT_BYTES = 512 << 10  # and weights whose gradients take the loop longer to copy than all else
_PAGE = 4096
_MADV_HUGEPAGE = 14  # linux/mman.h
_QUICK = 1.702  # of quick_gelu
_PANEL = 2048  # rows of one product for the gradient of a weight: bounds the memory of an expert that got most tokens


def expert_mlp(
    tokens: Tensor,
    token_of_slot: Tensor,
    weight_of_slot: Tensor,
    counts: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: Activation = "gelu",
    backend: Backend = "auto",
) -> Tensor:
    """Compute for each token the weighted sum of the outputs of its experts.

    Expert e computes ``down[e] @ act(up[e] @ x)``; where U is 2 * H its first layer is gated (Shazeer 2020,
    https://arxiv.org/abs/2002.05202): ``down[e] @ (act(gate[e] @ x) * up[e] @ x)``, ``gate`` being the first H rows
    of ``up_weight[e]``. Sums over slots are accumulated in float32 or wider. Under autocast, products run in its dtype.

    Args:
        tokens: (N, D), any floating dtype.
        token_of_slot: (S,) int64 in [0, N), slots sorted by expert; slots past ``counts.sum()`` are ignored.
        weight_of_slot: (S,) floating.
        counts: (E,) int64, slots of each expert; any may be 0.
        up_weight: (E, U, D).
        down_weight: (E, D, H).
        up_bias: (E, U).
        down_bias: (E, D).
        activation: ``gelu`` (exact), ``gelu_tanh`` (approximated by tanh), ``quick_gelu`` (x * sigmoid(1.702 * x), both
            of Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415), ``relu`` or ``silu``.
        backend: ``loop`` is the reference formula. ``grouped_mm`` and ``triton`` are the kernels for CUDA of
            :func:`~lightning_accel.ops.grouped_linear`, which leave ``counts`` on its device; the latter has second
            derivatives. ``blocks``, for the CPU, runs a block of tokens through both layers while it is in cache, and
            stores half of what autograd would; where a second derivative is asked for, it computes gradients by the
            loop, as it does all within torch.func and in forward mode. ``dense`` runs every expert on every token, in
            products that any runtime supports: for exported programs. ``auto`` calls :func:`choose_backend`, except for
            a few slots without gradients on the CPU, which a kernel of their own computes in float32.

    Returns:
        (N, D), in the dtype of the products; 0 for a token without slots.

    Raises:
        ValueError: if ``activation`` or ``backend`` is unknown, or the backend cannot run on the device.

    >>> counts, tokens = torch.tensor([1, 2]), torch.tensor([[1.0], [10.0]])
    >>> up, down = torch.ones(2, 1, 1), torch.tensor([[[1.0]], [[2.0]]])
    >>> expert_mlp(tokens, torch.tensor([0, 0, 1]), torch.tensor([0.5, 0.5, 1]), counts, up, down, activation="relu")
    tensor([[ 1.5000],
            [20.0000]])
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}")
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be one of {', '.join(get_args(Backend))}; got {backend!r}")
    layers = [weight for weight in (up_weight, down_weight, up_bias, down_bias) if weight is not None]
    if backend == "auto" and has_few_slots(token_of_slot.shape[0], tokens, *layers):
        slots = token_of_slot, weight_of_slot, counts
        few = experts_of_few_tokens(tokens, *slots, up_weight, down_weight, up_bias, down_bias, activation)
        return few.to(cast_for_autocast(tokens)[0].dtype)
    tokens, up_weight, down_weight = cast_for_autocast(tokens, up_weight, down_weight)
    up_bias, down_bias = (None if bias is None else bias.to(tokens.dtype) for bias in (up_bias, down_bias))
    if backend == "auto":
        backend = choose_backend(up_weight, down_weight, token_of_slot.shape[0])
    if backend in ("blocks", "grouped_mm", "triton") and needs_formula():
        backend = "loop"
    with torch.autocast(tokens.device.type, enabled=False):
        if backend == "dense":
            slots = token_of_slot, weight_of_slot, counts
            return _dense(tokens, *slots, up_weight, down_weight, up_bias, down_bias, activation)
        if backend == "blocks":
            if tokens.device.type not in ("cpu", "meta"):
                raise ValueError(f"the backend 'blocks' runs on the CPU; the tokens are on {tokens.device}. Use 'auto'")
            if (up_bias is None) != (down_bias is None):
                raise ValueError("give both biases, or none")
            biases = [bias for bias in (up_bias, down_bias) if bias is not None]
            tensors = tokens, token_of_slot, weight_of_slot, counts, up_weight, down_weight
            keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*tensors, *biases))
            if torch.compiler.is_compiling():
                return _blocks_op(*tensors, biases, activation, keep)[0]
            return _Blocks.apply(activation, keep, *tensors, *biases)  # a custom op takes hundreds of microseconds more
        if runs_triton(tokens) and backend != "loop":
            slots = token_of_slot, weight_of_slot, counts
            return _on_gpu(tokens, *slots, up_weight, down_weight, up_bias, down_bias, activation, backend)
        rows = tokens.index_select(0, token_of_slot)  # (S, D)
        hidden = grouped_linear(rows, up_weight, counts, up_bias, backend)
        hidden = _activate(hidden, down_weight.shape[2], activation)
        visited = grouped_linear(hidden, down_weight, counts, down_bias, backend)
        wide = torch.promote_types(tokens.dtype, torch.float32)
        taken = torch.arange(rows.shape[0], device=rows.device) < counts.sum()
        weights = torch.where(taken, weight_of_slot, 0).to(wide)  # the weight of an ignored slot may be NaN
        out = torch.zeros(tokens.shape, dtype=wide, device=tokens.device)
        return out.index_add(0, token_of_slot, visited.to(wide) * weights.unsqueeze(1)).to(tokens.dtype)


def _on_gpu(
    tokens: Tensor,
    token_of_slot: Tensor,
    weight_of_slot: Tensor,
    counts: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: Activation,
    backend: Backend,
) -> Tensor:
    """Compute with the first product gathering its rows, and sums over the slots of each token in one order.

    Rows of ignored slots may hold anything: neither products nor sums read them, forward or backward.
    """
    ends = counts.cumsum(0)
    slots = sort_by_source(token_of_slot, ends[-1], len(tokens))
    if backend == "triton":
        hidden = multiply_rows(tokens, up_weight, ends, up_bias, slots)
        visited = multiply_rows(_activate(hidden, down_weight.shape[2], activation), down_weight, ends, down_bias)
    else:
        hidden = multiply_by_torch(gather_rows(tokens, slots), up_weight, ends, up_bias)
        visited = multiply_by_torch(_activate(hidden, down_weight.shape[2], activation), down_weight, ends, down_bias)
    return sum_rows(visited, weight_of_slot, slots)


def _dense(
    tokens: Tensor,
    token_of_slot: Tensor,
    weight_of_slot: Tensor,
    counts: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: Activation,
) -> Tensor:
    num_experts, wide = up_weight.shape[0], torch.promote_types(tokens.dtype, torch.float32)
    slots = torch.arange(token_of_slot.shape[0], device=tokens.device)
    expert_of_slot = (slots.unsqueeze(1) >= counts.cumsum(0)).sum(dim=1)  # (S,); E for an ignored slot
    weights = torch.zeros(num_experts + 1, tokens.shape[0], dtype=wide, device=tokens.device)
    place = expert_of_slot * tokens.shape[0] + token_of_slot
    weights = weights.flatten().scatter_add(0, place, weight_of_slot.to(wide)).view(num_experts + 1, -1)[:-1]
    before = tokens @ up_weight.transpose(1, 2)  # (E, N, U)
    before = before if up_bias is None else before + up_bias.unsqueeze(1)
    hidden_dim = down_weight.shape[2]
    hidden = ACTIVATIONS[activation].function(before[..., :hidden_dim])
    hidden = hidden if before.shape[2] == hidden_dim else hidden * before[..., hidden_dim:]
    visited = hidden @ down_weight.transpose(1, 2)  # (E, N, D)
    visited = visited if down_bias is None else visited + down_bias.unsqueeze(1)
    return (visited.to(wide) * weights.unsqueeze(2)).sum(dim=0).to(tokens.dtype)


def choose_backend(up_weight: Tensor, down_weight: Tensor, num_slots: int) -> Backend:
    """Return the fastest backend of :func:`expert_mlp` for these weights (device, dtype, shape) and number of slots."""
    if up_weight.device.type != "cpu" or planned_capability() is not None:
        return choose_grouped_backend(up_weight, down_weight)
    if torch.compiler.is_compiling():  # a loop would break the graph, a choice would put a guard on the number of slots
        return "blocks"
    if runs_kernel(up_weight, down_weight) or num_slots >= _FEW_SLOTS * len(up_weight):
        return "blocks"
    is_large = (up_weight.nbytes + down_weight.nbytes) // len(up_weight) >= _SMALL_EXPERT_BYTES
    learns = torch.is_grad_enabled() and (up_weight.requires_grad or down_weight.requires_grad)
    return "blocks" if learns and is_large else "loop"


def _activate(hidden: Tensor, hidden_dim: int, activation: Activation) -> Tensor:
    function = ACTIVATIONS[activation].function
    if hidden.shape[1] == hidden_dim:
        return function(hidden)
    first, factor = hidden.split(hidden_dim, 1)  # not slices, each of whose gradients is filled up with zeros
    return function(first) * factor


class _ActivationFn(NamedTuple):
    function: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor, Tensor, Tensor], object]  # (gradient, input, where to write the product)


ACTIVATIONS: dict[str, _ActivationFn] = {
    "gelu": _ActivationFn(F.gelu, lambda grad, x, out: torch.ops.aten.gelu_backward(grad, x, grad_input=out)),
    "gelu_tanh": _ActivationFn(
        partial(F.gelu, approximate="tanh"),
        lambda grad, x, out: torch.ops.aten.gelu_backward(grad, x, approximate="tanh", grad_input=out),
    ),
    "quick_gelu": _ActivationFn(
        lambda x: F.silu(_QUICK * x) / _QUICK,
        lambda grad, x, out: torch.ops.aten.silu_backward(grad, _QUICK * x, grad_input=out),
    ),
    "relu": _ActivationFn(F.relu, lambda grad, x, out: torch.ops.aten.threshold_backward(grad, x, 0, grad_input=out)),
    "silu": _ActivationFn(F.silu, lambda grad, x, out: torch.ops.aten.silu_backward(grad, x, grad_input=out)),
}


_NAMES = tuple(ACTIVATIONS)  # in the order of the kernel


def _blocks(
    tokens: Tensor,
    token_of_slot: Tensor,
    weight_of_slot: Tensor,
    counts: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    biases: list[Tensor],
    activation: str,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output (N, D), and for the backward pass the outputs of the first (S, U) and second layers (S, D).

    The last two tensors have extra rows at the end: the padding of a block extends into the rows of the next block,
    which overwrites it before it is read. Without ``keep`` they hold the rows of a single block.
    """
    if runs_kernel(tokens, up_weight, down_weight, *biases):
        run = torch.ops.lightning_accel_native.expert_blocks.default
        slots = token_of_slot, weight_of_slot, counts
        options = _NAMES.index(activation), keep, _block_rows(tokens.dtype)
        found: tuple[Tensor, Tensor, Tensor] = run(tokens, *slots, up_weight, down_weight, biases, *options)
        return found
    hidden_dim, up_dim = down_weight.shape[2], up_weight.shape[1]
    act = ACTIVATIONS[activation].function
    spare = _pad_rows(_block_rows(tokens.dtype), tokens.dtype)
    before, visited = _allocate_saved(tokens, token_of_slot, up_dim, keep)
    wide = torch.promote_types(tokens.dtype, torch.float32)
    out = torch.zeros(tokens.shape, dtype=wide, device=tokens.device)
    rows, hidden = tokens.new_empty(spare, tokens.shape[1]), tokens.new_empty(spare, hidden_dim)
    weights = weight_of_slot.to(wide).unsqueeze(1)
    layers = _per_expert(up_weight, down_weight, biases)
    for (first, last), (up, down, up_bias, down_bias) in zip(_segments(counts), layers, strict=True):
        for start, stop in _split_range(first, last, _block_rows(tokens.dtype)):
            padded = _pad_rows(stop - start, tokens.dtype)
            kept = slice(start, start + padded) if keep else slice(padded)
            index, x_up = token_of_slot[start:stop], before[kept]
            torch.index_select(tokens, 0, index, out=rows[: stop - start])
            _linear(rows[:padded], up, up_bias, out=x_up)
            h = act(x_up[:, :hidden_dim])
            if up_dim > hidden_dim:
                h = torch.mul(h, x_up[:, hidden_dim:], out=hidden[:padded])
            y = _linear(h, down, down_bias, out=visited[kept])[: stop - start]
            out.index_add_(0, index, y.to(wide) * weights[start:stop])
    return out.to(tokens.dtype), before, visited


def _blocks_backward(
    grad: Tensor,
    tokens: Tensor,
    token_of_slot: Tensor,
    weight_of_slot: Tensor,
    counts: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    biases: list[Tensor],
    before: Tensor,
    visited: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """Return the gradients of tokens (N, D), weights of slots (S,), and the experts' weights and biases."""
    d_up_weight, d_down_weight = _empty_like(up_weight), _empty_like(down_weight)
    d_biases = [torch.zeros_like(bias) for bias in biases]
    if runs_kernel(grad, tokens, up_weight, down_weight):
        run = torch.ops.lightning_accel_native.expert_blocks_backward.default
        slots = token_of_slot, weight_of_slot, counts
        options = _NAMES.index(activation), _block_rows(tokens.dtype), _PANEL
        layers = d_up_weight, d_down_weight, d_biases
        found = run(grad, tokens, *slots, up_weight, down_weight, before, visited, *options, *layers)
        return *found, *layers
    dtype, wide = tokens.dtype, torch.promote_types(tokens.dtype, torch.float32)
    d_tokens = torch.zeros(tokens.shape, dtype=wide, device=tokens.device)
    d_weights = torch.zeros(len(token_of_slot), 1, dtype=wide, device=tokens.device)
    weights = weight_of_slot.to(dtype).unsqueeze(1)  # a product of mixed dtypes takes many times as long
    longest = _pad_rows(min(int(counts.max()), _PANEL), dtype)
    widths = tokens.shape[1], tokens.shape[1], down_weight.shape[2], up_weight.shape[1]
    panels = x, d_y, h, d_up = [tokens.new_empty(longest, width) for width in widths]
    weights_of = _per_expert(up_weight, down_weight, [])
    d_layers = _per_expert(d_up_weight, d_down_weight, d_biases)
    for (first, last), (up, down, *_), d_layer in zip(_segments(counts), weights_of, d_layers, strict=True):
        if first == last:
            d_layer[0].zero_()
            d_layer[1].zero_()
        for panel_start, panel_stop in _split_range(first, last, _PANEL):
            num = panel_stop - panel_start
            padded = _pad_rows(num, dtype)
            for panel in panels if padded > num else ():  # all four, since the padding may hold the NaN of an expert
                panel[num:padded].zero_()
            for start, stop in _split_range(panel_start, panel_stop, _block_rows(tokens.dtype)):
                index, at = token_of_slot[start:stop], slice(start - panel_start, stop - panel_start)
                at_padded = slice(at.start, at.start + _pad_rows(stop - start, dtype))
                torch.index_select(tokens, 0, index, out=x[at])
                block_d_y = torch.index_select(grad, 0, index, out=d_y[at])
                torch.sum(block_d_y * visited[start:stop], 1, keepdim=True, dtype=wide, out=d_weights[start:stop])
                block_d_y.mul_(weights[start:stop])
                d_h = torch.mm(d_y[at_padded], down)[: stop - start]
                _activate_backward(d_h, before[start:stop], h[at], d_up[at], ACTIVATIONS[activation])
                d_x = torch.mm(d_up[at_padded], up)[: stop - start]
                d_tokens.index_add_(0, index, d_x.to(wide))
            _add_products(d_layer, x[:padded], h[:padded], d_up[:padded], d_y[:padded], is_first=panel_start == first)
    return d_tokens.to(dtype), d_weights.squeeze(1).to(weight_of_slot.dtype), d_up_weight, d_down_weight, d_biases


def _activate_backward(d_h: Tensor, before: Tensor, h: Tensor, d_up: Tensor, act: _ActivationFn) -> None:
    """Write the hidden features to ``h`` and the gradient of ``before`` to ``d_up``; overwrites ``d_h``."""
    hidden_dim = h.shape[1]
    first = before[:, :hidden_dim]
    if before.shape[1] == hidden_dim:
        h.copy_(act.function(first))
    else:
        activated, factor = act.function(first), before[:, hidden_dim:]
        torch.mul(activated, factor, out=h)
        torch.mul(d_h, activated, out=d_up[:, hidden_dim:])
        d_h.mul_(factor)
    act.derivative(d_h, first, d_up[:, :hidden_dim])


def _add_products(d_layer: "_Layers", x: Tensor, h: Tensor, d_up: Tensor, d_y: Tensor, is_first: bool) -> None:
    d_up_weight, d_down_weight, d_up_bias, d_down_bias = d_layer
    torch.addmm(d_up_weight, d_up.t(), x, beta=not is_first, out=d_up_weight)
    torch.addmm(d_down_weight, d_y.t(), h, beta=not is_first, out=d_down_weight)
    if d_up_bias is not None:
        d_up_bias.add_(d_up.sum(0))
    if d_down_bias is not None:
        d_down_bias.add_(d_y.sum(0))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


_Layers: TypeAlias = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def _per_expert(up_weight: Tensor, down_weight: Tensor, biases: list[Tensor]) -> list[_Layers]:
    """List, for each expert, the weights and biases of its two layers; biases are None if ``biases`` is empty."""
    up_biases, down_biases = (bias.unbind() for bias in biases) if biases else [(None,) * len(up_weight)] * 2
    return list(zip(up_weight.unbind(), down_weight.unbind(), up_biases, down_biases, strict=True))


def _segments(counts: Tensor) -> list[tuple[int, int]]:
    ends = [0, *counts.cumsum(0).tolist()]
    return list(pairwise(ends))


def _split_range(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    return [(at, min(at + size, stop)) for at in range(start, stop, size)]


def _block_rows(dtype: torch.dtype) -> int:
    return _BLOCK_BYTES // dtype.itemsize * torch.get_num_threads()


def _pad_rows(rows: int, dtype: torch.dtype) -> int:
    """Round a number of rows up, so that matrix products see few different shapes.

    For 16-bit products oneDNN compiles a kernel for each new shape, which takes several times as long as running it,
    and the number of rows of an expert changes at every step. With 32 sizes per power of two, in tiles of 16, padding
    adds a sixtieth of the rows on average. Up to 16 rows, each number has its kernel: padded, they take a third longer.
    """
    if dtype.itemsize > 2 or rows <= 16:
        return rows
    unit = max(16, 1 << max(0, rows.bit_length() - 6))
    return -(-rows // unit) * unit


def _empty_like(weight: Tensor) -> Tensor:
    """Allocate a tensor like ``weight``, in huge pages if it is large and the system supports them.

    The C library returns blocks of 32 MiB and more to the system when they are freed, and the gradients of all experts
    are freed at every step: mapping their pages again, 4 KiB at a time, took a tenth of a step.
    """
    fresh = torch.empty_like(weight)
    if fresh.nbytes >= 32 << 20 and sys.platform == "linux":
        start = -(-fresh.data_ptr() // _PAGE) * _PAGE
        size = fresh.data_ptr() + fresh.nbytes - start
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_HUGEPAGE)  # advice: it may fail
    return fresh


def _allocate_saved(tokens: Tensor, token_of_slot: Tensor, up_dim: int, keep: bool) -> tuple[Tensor, Tensor]:
    rows = (token_of_slot.shape[0] if keep else 0) + _pad_rows(_block_rows(tokens.dtype), tokens.dtype)
    return tokens.new_empty(rows, up_dim), tokens.new_empty(rows, tokens.shape[1])


@KERNELS.on_load
def _register() -> None:
    register_flop_formula(torch.ops.lightning_accel_native.expert_blocks)(count_flops)
    register_flop_formula(torch.ops.lightning_accel_native.expert_blocks_backward)(
        lambda grad, *rest, **options: 2 * count_flops(*rest)
    )


_cpu_op = partial(torch.library.custom_op, mutates_args=(), device_types="cpu")
_blocks_op = _cpu_op("lightning_accel::expert_mlp_blocks")(_blocks)
_blocks_backward_op = _cpu_op("lightning_accel::expert_mlp_blocks_backward")(_blocks_backward)


@_blocks_op.register_fake
def _(tokens: Tensor, token_of_slot: Tensor, _: Tensor, __: Tensor, up_weight: Tensor, *rest: Any) -> Any:
    return tokens.new_empty(tokens.shape), *_allocate_saved(tokens, token_of_slot, up_weight.shape[1], keep=rest[-1])


@_blocks_backward_op.register_fake
def _(grad: Tensor, tokens: Tensor, _: Tensor, weights: Tensor, __: Tensor, *layers: Any) -> Any:
    up_weight, down_weight, biases = layers[:3]
    like = torch.empty_like
    return (
        tokens.new_empty(tokens.shape),
        weights.new_empty(weights.shape),
        like(up_weight),
        like(down_weight),
        [like(bias) for bias in biases],
    )


class _Blocks(torch.autograd.Function):
    """Run :func:`_blocks`, saving for backward only the first layers' and the second layers' outputs."""

    @staticmethod
    def forward(ctx: Any, activation: str, keep: bool, *tensors: Tensor) -> Tensor:
        tokens, token_of_slot, weight_of_slot, counts, up, down, *biases = tensors
        slots = token_of_slot, weight_of_slot, counts
        out, before, visited = _blocks(tokens, *slots, up, down, biases, activation, keep)
        ctx.activation = activation
        ctx.save_for_backward(*tensors, before, visited)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled() or is_batched(grad):
            return None, None, *_gradients_of_loop(ctx, grad)
        *inputs, d_biases = _gradients(ctx, grad, _blocks_backward)
        return None, None, *inputs, *d_biases


def _gradients_of_loop(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    """Return the gradients of all tensors by a loop over experts, which can be differentiated again."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
        tensors = [one.view_as(one) for one in ctx.saved_tensors[:-2]]  # whose gradients call no hooks of the others
        tokens, token_of_slot, weight_of_slot, counts, up, down, *biases = tensors
        slots, (up_bias, down_bias) = (token_of_slot, weight_of_slot, counts), biases or (None, None)
        out = expert_mlp(tokens, *slots, up, down, up_bias, down_bias, ctx.activation, "loop")
    learned = [one for one in tensors if one.requires_grad]
    found = iter(torch.autograd.grad(out, learned, grad, create_graph=create_graph))
    return [next(found) if one.requires_grad else None for one in tensors]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, biases, ctx.activation, _ = inputs
    ctx.num_biases = len(biases)
    _, before, visited = output
    ctx.save_for_backward(*tensors, *biases, before, visited)
    ctx.mark_non_differentiable(before, visited)
    ctx.set_materialize_grads(False)


def _op_backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Any, ...]:
    if grad is None:
        return *(None,) * 6, [None] * ctx.num_biases, None, None
    return *_gradients(ctx, grad, _blocks_backward_op), None, None


def _gradients(ctx: Any, grad: Tensor, run: Callable[..., Any]) -> tuple[Any, ...]:
    """Return the gradients of the six tensors, None for integer tensors, and a list of those of the biases."""
    saved = ctx.saved_tensors  # read once: activation checkpointing recomputes them at each access
    tensors, biases, (before, visited) = saved[:6], list(saved[6:-2]), saved[-2:]
    d_tokens, d_weights, *d_layers = run(grad.contiguous(), *tensors, biases, before, visited, ctx.activation)
    return d_tokens, None, d_weights, None, *d_layers


_blocks_op.register_autograd(_op_backward, setup_context=_setup_context)
