"""A recurrent layer over sequences of unequal lengths. Shapes: S steps, B samples, I inputs, H hidden, G gates.

Weights have the layout of ``torch.nn.RNN`` (tanh, G = 1), ``GRU`` (3) and ``LSTM`` (4): ``weight_ih`` (G * H, I),
``weight_hh`` (G * H, H), ``bias_ih`` and ``bias_hh`` (G * H,).
"""

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_accel.ops.recurrent_steps import has_fused_steps, recurrent_steps, runs_in_bfloat16

# Torch lays weights in bfloat16 in no one piece, nor is there one where a padded LSTM gets a column for lengths
warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk", module=__name__)

KERNELS = {"rnn": torch.rnn_tanh, "gru": torch.gru, "lstm": torch.lstm}
_SATURATED = 1e4  # its sigmoid is 1, and that of its negative 0, in every dtype; representable in float16


def run_kernel(
    cell: str,
    x: Tensor,
    states: Sequence[Tensor],
    weights: list[Tensor],
    batch_sizes: Tensor | None = None,
    training: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run torch's kernel on ``x`` (S, B, I); return the outputs of all steps (S, B, H) and the last states (B, H).

    With ``batch_sizes``, int64 on the CPU, ``x`` (N, I) and the outputs have the layout of a PackedSequence; LSTM and
    GRU then run by :func:`recurrent_steps` where its kernel serves.
    """
    batched = [state[None] for state in states]
    layout = () if batch_sizes is None else (batch_sizes,)
    once = (True, 1, 0.0, training, False)  # biases, layers, dropout, training, bidirectional
    first = (False,) * (batch_sizes is None)  # batch_first
    if batch_sizes is not None and has_fused_steps(cell, x, *states, *weights):
        return recurrent_steps(x, states, weights, batch_sizes)
    kernel: Any = KERNELS[cell]
    with _kernel_precision(cell, x):
        out, *new = kernel(x, *layout, batched if cell == "lstm" else batched[0], weights, *once, *first)
    # torch 2.11 compiles an LSTM on a GPU to states with one more dimension
    return out, tuple(state.reshape(state.shape[-2:]) for state in new)


def run_padded(
    cell: str,
    x: Tensor,
    states: Sequence[Tensor],
    weights: list[Tensor],
    lengths: Tensor | None = None,
    training: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run :func:`run_kernel` on a padded batch; states stay unchanged after ``lengths`` (B,), on the device of ``x``.

    Outputs after the length of a sample are undefined.
    """
    if lengths is None:
        return run_kernel(cell, x, states, weights, training=training)
    if cell == "lstm":  # its kernel does not return the c of each step
        x = torch.cat([x, past_end(x, lengths).to(x.dtype)], dim=-1)
        hidden_size = states[0].shape[-1]
        stay = x.new_tensor([-_SATURATED, _SATURATED, 0, 0]).repeat_interleave(hidden_size)
        weights = [torch.cat([weights[0], stay[:, None]], dim=1), *weights[1:]]
    out, new = run_kernel(cell, x, states, weights, training=training)
    last = out[(lengths - 1).clamp(min=0), torch.arange(lengths.shape[0], device=x.device)]
    return out, (torch.where(lengths[:, None] > 0, last, states[0]), *new[1:])


def recurrent_layer(
    cell: str,
    x: Tensor,
    states: Sequence[Tensor] | None,
    weights: list[Tensor],
    lengths: Tensor | None = None,
    backwards: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run a layer in one direction as one operation, so that graphs that contain it accept any number of steps.

    Args:
        cell: ``rnn``, ``gru`` or ``lstm``.
        x: (S, B, I), in the dtype of the weights.
        states: one state (B, H), or h and c of an LSTM; None for zeros.
        weights: ``weight_ih``, ``weight_hh``, ``bias_ih``, ``bias_hh``.
        lengths: (B,) int64 in [0, S], on the device of ``x``; None if all steps are valid.
        backwards: whether samples are read from the last valid step to the first.

    Returns:
        The outputs of all steps (S, B, H), zero after the length of a sample; and the states (B, H) after the last step
        that was read, which are the given ones for a sample of length 0.

    >>> weights = [torch.ones(1, 1), torch.zeros(1, 1), torch.zeros(1), torch.zeros(1)]
    >>> recurrent_layer("rnn", torch.ones(2, 1, 1), None, weights, torch.tensor([1]))[0].flatten()
    tensor([0.7616, 0.0000])
    """
    h, c = (None, None) if states is None else (*states, None)[:2]
    out, *new = torch.ops.lightning_accel.recurrent_layer(x, lengths, h, c, *weights, cell, backwards)
    return out, tuple(new[: 2 if cell == "lstm" else 1])


def _layer(
    x: Tensor,
    lengths: Tensor | None,
    h: Tensor | None,
    c: Tensor | None,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor,
    bias_hh: Tensor,
    cell: str,
    backwards: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs, h, and c, which is empty except for an LSTM."""
    steps, rows = x.shape[:2]
    hidden_size = weight_hh.shape[1]
    zeros = x.new_zeros(rows, hidden_size)
    states = [zeros if one is None else one for one in ((h, c) if cell == "lstm" else (h,))]
    none = x.new_empty(0)
    if not steps or not rows:
        return x.new_zeros(steps, rows, hidden_size), states[0].clone(), states[1].clone() if cell == "lstm" else none
    if lengths is not None and x.device.type == "cpu" and bool((lengths == steps).all()):
        lengths = None  # kernels without lengths are faster; on a GPU the check would wait for the device
    turned = reverse_valid_steps(x, lengths) if backwards else x
    with torch.autocast(x.device.type, enabled=False):  # all tensors have one dtype
        out, new = run_padded(cell, turned, states, [weight_ih, weight_hh, bias_ih, bias_hh], lengths)
    out = reverse_valid_steps(out, lengths) if backwards else out
    out = out if lengths is None else out.masked_fill(past_end(out, lengths), 0)
    return out.contiguous(), new[0].contiguous(), new[1].contiguous() if cell == "lstm" else none


_layer_op = torch.library.custom_op("lightning_accel::recurrent_layer", mutates_args=())(_layer)


@_layer_op.register_fake
def _(x: Tensor, _: Any, __: Any, ___: Any, ____: Tensor, weight_hh: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    steps, rows = x.shape[:2]
    state = x.new_empty(rows, weight_hh.shape[1])
    c = torch.empty_like(state) if rest[-2] == "lstm" else x.new_empty(0)
    return x.new_empty(steps, rows, weight_hh.shape[1]), state, c


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:8])
    ctx.options = inputs[8:]


def _op_backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    """Compute gradients by running the kernels again under autograd, since exported programs are rarely trained."""
    with torch.enable_grad():
        inputs: list[Any] = [
            None if one is None else one.detach().requires_grad_(one.is_floating_point()) for one in ctx.saved_tensors
        ]
        outputs = _layer(*inputs, *ctx.options)
    used = 3 if ctx.options[0] == "lstm" else 2
    wanted = [one for one in inputs if one is not None and one.requires_grad]
    found = iter(torch.autograd.grad(outputs[:used], wanted, gradients[:used], allow_unused=True))
    return *(next(found) if one is not None and one.requires_grad else None for one in inputs), None, None


_layer_op.register_autograd(_op_backward, setup_context=_setup_context)


def reverse_valid_steps(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Reverse the valid steps of each sample of ``x`` (S, B, ...); ``lengths`` is (B,), or None if all are valid."""
    if lengths is None:
        return x.flip(0)
    step = torch.arange(x.shape[0], device=x.device)[:, None]
    source = torch.where(step < lengths, lengths - 1 - step, step)  # (S, B)
    return x[source, torch.arange(x.shape[1], device=x.device)]


def _kernel_precision(cell: str, x: Tensor) -> AbstractContextManager[object]:
    """Return a context without autocast where torch's kernel on a CPU would fail in its dtype or be no faster."""
    if x.device.type != "cpu" or (cell != "rnn" and x.dtype == torch.float32 and runs_in_bfloat16()):
        return nullcontext()
    return torch.autocast("cpu", enabled=False)


def past_end(x: Tensor, lengths: Tensor) -> Tensor:
    """Return where steps of ``x`` are past the end of their sample: (S, B, 1) bool."""
    return torch.arange(x.shape[0], device=x.device)[:, None, None] >= lengths[:, None]
