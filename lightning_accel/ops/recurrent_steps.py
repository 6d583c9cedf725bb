"""An LSTM or GRU layer in one direction, fused for training on the CPU.

Shapes: N valid steps of all samples, B samples, T steps, I inputs, H hidden, G gates.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lightning_accel._private.torch import is_batched, multiplies_bfloat16
from lightning_accel.ops.gradients import gradients_of_formula
from lightning_accel.ops.native import KERNELS, runs_kernel

Weights = Sequence[Tensor | None]
_CELLS: dict[str, Any] = {"rnn": torch.rnn_tanh_cell, "gru": torch.gru_cell, "lstm": torch.lstm_cell}
_FEW_SAMPLES = 4  # up to which a product with weights where they are is faster than torch's


def recurrent_steps(
    x: Tensor, states: Sequence[Tensor], weights: Weights, batch_sizes: Tensor, reverse: bool = False
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run a layer over the packed steps of all samples, as two products and one pass over time.

    The backward pass is one pass over time, too, and one product for each gradient; torch records each gate of each
    step in place of it. Second derivatives, of ``create_graph=True``, are those of torch's cells, a step at a time. All
    tensors are on the CPU, in one dtype: float32 or float64. Under autocast in bfloat16 the products over all steps are
    computed in it, on CPUs that multiply it; the pass over time is not.

    Args:
        x: (N, I) in the layout of a PackedSequence.
        states: h (B, H) of a GRU, h and c of an LSTM.
        weights: ``weight_ih`` (G * H, I), ``weight_hh`` (G * H, H), and ``bias_ih`` and ``bias_hh`` (G * H,) or None,
            in the layout of ``torch.nn.LSTM`` (G = 4) and ``torch.nn.GRU`` (3).
        batch_sizes: (T,) int64, the samples of each step.
        reverse: whether samples are read from their last step to the first.

    Returns:
        The outputs of all steps (N, H), and the states after the last step that was read.

    Raises:
        RuntimeError: if shapes disagree.

    >>> x, states, weights = torch.zeros(2, 1), (torch.ones(1, 1),), (torch.zeros(3, 1), torch.zeros(3, 1), None, None)
    >>> recurrent_steps(x, states, weights, torch.tensor([1, 1]))[0].flatten()
    tensor([0.5000, 0.2500])
    """
    h, c = (*states, None)[:2]
    out, *new = _Layer.apply(x, h, c, *weights, batch_sizes, reverse)
    return out, tuple(new[: len(states)])


def recurrent_step(cell: str, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run one step of a layer without gradients, by one operation: for streams.

    Args:
        cell: ``rnn`` (tanh), ``gru`` or ``lstm``.
        x: (B, I), in the dtype of the weights.
        states: h (B, H), and c of an LSTM.
        weights: ``weight_ih``, ``weight_hh``, ``bias_ih`` and ``bias_hh``, as of :func:`recurrent_steps`.

    Returns:
        The new states.

    >>> weights = torch.zeros(3, 1), torch.zeros(3, 1), torch.zeros(3), torch.zeros(3)
    >>> recurrent_step("gru", torch.zeros(1, 1), (torch.ones(1, 1),), weights)[0]
    tensor([[0.5000]])
    """
    if x.shape[0] <= _FEW_SAMPLES and has_fused_steps(cell, x, *states, *weights):
        new = tuple([state.contiguous().clone() for state in states])
        c = new[1] if len(new) == 2 else None
        factors = [weight.contiguous() for weight in weights]
        torch.ops.lightning_accel_native.recurrent_step.default(x.contiguous(), new[0], c, *factors)
        return new
    found = _CELLS[cell](x, states if cell == "lstm" else states[0], *weights)
    return found if cell == "lstm" else (found,)


def runs_in_bfloat16() -> bool:
    """Return whether kernels of LSTM and GRU on this CPU run in bfloat16: if autocast asks for it and it saves time."""
    is_asked = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    return is_asked and multiplies_bfloat16()


def has_fused_steps(cell: str, *tensors: Tensor) -> bool:
    """Return whether the kernel of :func:`recurrent_steps` serves ``cell`` and ``tensors``, and nothing traces it.

    All of ``tensors`` have the device and dtype of the first.
    """
    return cell in ("gru", "lstm") and tensors[0].dtype == torch.float32 and runs_kernel(*tensors)


class _Layer(torch.autograd.Function):
    """Save the values of the gates (N, G * H), h before each step, and c or what a GRU's reset gate multiplies."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor | None, ...]:
        x, h, c, weight_ih, weight_hh, bias_ih, bias_hh, batch_sizes, reverse = inputs
        ctx.dtype = torch.bfloat16 if x.dtype == torch.float32 and runs_in_bfloat16() else x.dtype
        with torch.autocast("cpu", enabled=False):
            gates, bias = _enter(x, h, c, weight_ih, bias_ih, bias_hh, ctx.dtype)
        first = h, c
        h, c = h.clone(memory_format=torch.contiguous_format), c
        c = None if c is None else c.clone(memory_format=torch.contiguous_format)
        run = torch.ops.lightning_accel_native.recurrent_steps if _kernel_serves(x) else _run_reference
        out, before, extra = run(gates, weight_hh.contiguous(), bias, h, c, batch_sizes, reverse)
        ctx.save_for_backward(x, *first, weight_ih, weight_hh, bias_ih, bias_hh, batch_sizes, gates, before, extra)
        ctx.reverse, ctx.has_cell = reverse, c is not None
        return out, h, c

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or any(is_batched(one) for one in gradients if one is not None):
            return _differentiable_gradients(ctx, gradients)
        x, _, _, weight_ih, weight_hh, _, _, batch_sizes, gates, before, extra = ctx.saved_tensors
        d_out, d_h = gradients[0].contiguous(), gradients[1].clone(memory_format=torch.contiguous_format)
        d_c = gradients[2].clone(memory_format=torch.contiguous_format) if ctx.has_cell else None
        run = torch.ops.lightning_accel_native.recurrent_steps_backward if _kernel_serves(x) else _run_back_reference
        d_gates, d_hidden = run(d_out, d_h, d_c, gates, before, extra, weight_hh.contiguous(), batch_sizes, ctx.reverse)
        d_hidden = d_gates if ctx.has_cell else d_hidden
        wanted = ctx.needs_input_grad
        factor = d_gates.to(ctx.dtype)
        hidden_factor = factor if ctx.has_cell else d_hidden.to(ctx.dtype)
        return (
            (factor @ weight_ih.to(ctx.dtype)).to(x.dtype) if wanted[0] else None,
            d_h,
            d_c,
            _weight_gradient(factor, x) if wanted[3] else None,
            _weight_gradient(hidden_factor, before) if wanted[4] else None,
            d_gates.sum(0) if wanted[5] else None,
            d_hidden.sum(0) if wanted[6] else None,
            None,
            None,
        )


def _flops_of_steps(gates: Sequence[int], weight: Sequence[int], *rest: Any, **options: Any) -> int:
    """Count the operations of the pass over time: those of the products over all steps are counted on their own."""
    return 2 * gates[0] * weight[0] * weight[1]


def _flops_of_steps_backward(
    grad: Any, d_h: Any, d_c: Any, gates: Any, before: Any, extra: Any, weight: Any, *rest: Any, **options: Any
) -> int:
    return _flops_of_steps(gates, weight)


def _flops_of_step(
    x: Sequence[int], h: Any, c: Any, weight_ih: Sequence[int], weight_hh: Sequence[int], *rest: Any, **options: Any
) -> int:
    return 2 * x[0] * (prod(weight_ih) + prod(weight_hh))


@KERNELS.on_load
def _count_flops() -> None:
    register_flop_formula(torch.ops.lightning_accel_native.recurrent_steps)(_flops_of_steps)
    register_flop_formula(torch.ops.lightning_accel_native.recurrent_steps_backward)(_flops_of_steps_backward)
    register_flop_formula(torch.ops.lightning_accel_native.recurrent_step)(_flops_of_step)


def _kernel_serves(x: Tensor) -> bool:
    return x.dtype == torch.float32 and KERNELS.serves(x.device)


def _weight_gradient(d_gates: Tensor, x: Tensor) -> Tensor:
    """Return the gradient (G * H, I) of weights that multiply ``x`` (N, I), computed in the dtype of ``d_gates``."""
    factor = x.to(d_gates.dtype)
    if x.shape[1] < 32:  # the product of few columns takes several times as long the other way round
        return (factor.t() @ d_gates).t().to(x.dtype)
    return (d_gates.t() @ factor).to(x.dtype)


def _differentiable_gradients(ctx: Any, gradients: Any) -> tuple[Tensor | None, ...]:
    """Compute gradients by running torch's cells again."""
    *saved, batch_sizes, _, _, _ = ctx.saved_tensors

    def run(x: Tensor, h: Tensor, c: Tensor | None, *weights: Any) -> list[Tensor]:
        parts: dict[int, Tensor] = {}
        states: tuple[Tensor, ...] = (h,) if c is None else (h, c)
        for size, at in _steps(batch_sizes, ctx.reverse):
            some = tuple(state[:size] for state in states)
            new = (torch.gru_cell(x[at], *some, *weights),) if c is None else torch.lstm_cell(x[at], some, *weights)
            states = tuple(torch.cat([one, state[size:]]) for one, state in zip(new, states, strict=True))
            parts[at.start] = new[0]
        return [torch.cat([parts[start] for start in sorted(parts)]), *states]

    return gradients_of_formula(run, saved, ctx.needs_input_grad, gradients)


def _enter(
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    weight_ih: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return what the gates get from the input, with all biases but one: that of the state in a GRU's last gate."""
    last = 2 * h.shape[1] if c is None else len(weight_ih)
    bias = None
    if bias_ih is not None and bias_hh is not None:
        bias = torch.cat([bias_ih[:last] + bias_hh[:last], bias_ih[last:]])
    own = x.new_zeros(len(weight_ih) - last) if bias_hh is None else bias_hh[last:].contiguous()
    if dtype == x.dtype:
        return F.linear(x, weight_ih, bias), own
    gates = F.linear(x.to(dtype), weight_ih.to(dtype)).to(x.dtype)
    return gates if bias is None else gates.add_(bias), own


def _steps(batch_sizes: Tensor, reverse: bool) -> list[tuple[int, slice]]:
    """Return the number of samples and the position of each step, in the order in which they are read."""
    sizes = batch_sizes.tolist()
    ends = batch_sizes.cumsum(0).tolist()
    steps = [(size, slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    return steps[::-1] if reverse else steps


def _run_reference(
    gates: Tensor, weight: Tensor, bias: Tensor, h: Tensor, c: Tensor | None, batch_sizes: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute in torch what the kernel computes: overwrite ``gates`` and the states, return the rest."""
    out, before, extra = (gates.new_empty(len(gates), h.shape[1]) for _ in range(3))
    for size, at in _steps(batch_sizes, reverse):
        state = h[:size]
        before[at] = state
        products = (state @ weight.t()).chunk(3 if c is None else 4, dim=1)
        values = gates[at].chunk(len(products), dim=1)
        if c is None:
            reset, update, new = values
            extra[at] = products[2] + bias
            reset.add_(products[0]).sigmoid_()
            update.add_(products[1]).sigmoid_()
            new.add_(reset * extra[at]).tanh_()
            state.sub_(new).mul_(update).add_(new)
        else:
            for value, product in zip(values, products, strict=True):
                value.add_(product)
            entry, keep, new, show = values[0].sigmoid_(), values[1].sigmoid_(), values[2].tanh_(), values[3].sigmoid_()
            extra[at] = c[:size]
            c[:size].mul_(keep).addcmul_(entry, new)
            state.copy_(show * c[:size].tanh())
        out[at] = state
    return out, before, extra


def _run_back_reference(
    grad: Tensor,
    d_h: Tensor,
    d_c: Tensor | None,
    gates: Tensor,
    before: Tensor,
    extra: Tensor,
    weight: Tensor,
    batch_sizes: Tensor,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """Compute in torch what the kernel computes: overwrite the gradients of the states, return those of the gates."""
    d_gates = torch.empty_like(gates)
    d_hidden = torch.empty_like(gates) if d_c is None else gates.new_empty(0, gates.shape[1])
    for size, at in reversed(_steps(batch_sizes, reverse)):
        d = grad[at] + d_h[:size]
        if d_c is None:
            reset, update, new = gates[at].chunk(3, dim=1)
            d_new = d * (1 - update) * (1 - new * new)
            d_reset = d_new * extra[at] * reset * (1 - reset)
            d_update = d * (before[at] - new) * update * (1 - update)
            d_gates[at] = torch.cat([d_reset, d_update, d_new], dim=1)
            d_hidden[at] = torch.cat([d_reset, d_update, d_new * reset], dim=1)
            d_h[:size] = d * update + d_hidden[at] @ weight
        else:
            entry, keep, new, show = gates[at].chunk(4, dim=1)
            shown = (keep * extra[at] + entry * new).tanh()
            d_cell = d_c[:size] + d * show * (1 - shown * shown)
            d_entry, d_keep = d_cell * new * entry * (1 - entry), d_cell * extra[at] * keep * (1 - keep)
            d_new, d_show = d_cell * entry * (1 - new * new), d * shown * show * (1 - show)
            d_gates[at] = torch.cat([d_entry, d_keep, d_new, d_show], dim=1)
            d_c[:size] = d_cell * keep
            d_h[:size] = d_gates[at] @ weight
    return d_gates, d_hidden
