"""Fused training of ``torch.nn.LSTM`` and ``torch.nn.GRU`` on the CPU, in place.

Shapes: N valid steps of all samples, B samples, T steps, I inputs, H hidden, L layers, D directions.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lightning_accel._private.torch import onednn_has_autocast_dtype
from lightning_accel.ops.recurrent_steps import recurrent_steps

States = tuple[Tensor, ...]  # (L * D, B, H) each: h, and of an LSTM c


def fuse_(module: nn.Module) -> list[nn.RNNBase]:
    """Train each ``nn.LSTM`` and ``nn.GRU`` inside ``module`` by fused steps on the CPU; return the changed layers.

    Outputs, states and gradients are equal up to rounding, and dropout draws the same numbers. Parameters, checkpoints,
    hooks and copies are as before. Torch's own execution runs where it is faster, which is an LSTM on padded tensors by
    oneDNN, if that has code for the dtype of autocast on this CPU; and where no gradient is needed, on other devices,
    in dtypes other than float32 and float64, on a single sample without a batch, and in traced programs. Layers with
    ``proj_size``, and subclasses with a forward of their own, stay unchanged.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, nn.RNNBase) and is_fusible(layer)]
    for layer in layers:
        layer.forward = partial(_forward, layer)
    return layers


def unfuse_(layers: Iterable[nn.RNNBase]) -> None:
    """Return ``layers``, which :func:`fuse_` has changed, to torch's own execution."""
    for layer in layers:
        replaced = vars(layer).get("forward")
        if isinstance(replaced, partial) and replaced.func is _forward:
            del layer.forward


def is_fusible(layer: nn.Module) -> bool:
    """Return whether :func:`fuse_` changes ``layer``."""
    is_known = type(layer).forward in (nn.LSTM.forward, nn.GRU.forward) and "forward" not in vars(layer)
    return is_known and not layer.proj_size


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _forward(layer: nn.RNNBase, input: Any, hx: Any = None) -> Any:  # named as in torch
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
    is_packed = isinstance(input, PackedSequence)
    takes_onednn = layer.mode == "LSTM" and _onednn_serves(layer.all_weights[0][0])
    fails_in_torch = takes_onednn and torch.is_autocast_enabled("cpu") and not onednn_has_autocast_dtype()
    if is_traced or not (torch.is_grad_enabled() or fails_in_torch):
        return type(layer).forward(layer, input, hx)
    x = input.data if is_packed else input
    given = () if hx is None else tuple(hx) if isinstance(hx, list | tuple) else (hx,)
    weights: list[Tensor] = [weight for group in layer.all_weights for weight in group]
    is_faster_in_torch = takes_onednn and not is_packed and not fails_in_torch
    if is_faster_in_torch or not _has_served_tensors(x, given, weights) or x.dim() != (2 if is_packed else 3):
        return type(layer).forward(layer, input, hx)
    steps = x if is_packed or not layer.batch_first else x.transpose(0, 1)
    batch_sizes = input.batch_sizes if is_packed else torch.full((len(steps),), steps.shape[1])
    shape = (layer.num_layers * (1 + layer.bidirectional), int(batch_sizes[0]), layer.hidden_size)
    if x.shape[-1] != layer.input_size or any(state.shape != shape for state in given):
        return type(layer).forward(layer, input, hx)  # which raises
    order, back = (input.sorted_indices, input.unsorted_indices) if is_packed else (None, None)
    states = tuple(_permute(state, order) for state in given) or _zeros(layer, weights[0], shape)
    data, new = _run(layer, steps.reshape(-1, layer.input_size), states, batch_sizes)
    dtype = given[0].dtype if given else x.dtype  # as torch does under autocast
    data, new = data.to(dtype), tuple(_permute(state.to(dtype), back) for state in new)
    hidden = new if len(new) == 2 else new[0]
    if is_packed:
        return PackedSequence(data, batch_sizes, order, back), hidden
    output = data.unflatten(0, steps.shape[:2])
    return output.transpose(0, 1) if layer.batch_first else output, hidden


def _onednn_serves(weight: Tensor) -> bool:
    """Return whether torch runs LSTMs on padded tensors by oneDNN, which takes no other dtype of ``weight``."""
    return (
        bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled) and weight.dtype == torch.float32
    )


def _has_served_tensors(x: Any, states: tuple[Any, ...], weights: list[Tensor]) -> bool:
    tensors = [x, *states, *weights]
    if not all(type(one) in (Tensor, nn.Parameter) and one.device.type == "cpu" and one.numel() for one in tensors):
        return False
    dtype = weights[0].dtype
    if dtype not in (torch.float32, torch.float64) or any(weight.dtype != dtype for weight in weights):
        return False
    is_mixed = torch.is_autocast_enabled("cpu")
    known = (dtype, torch.float32, torch.bfloat16, torch.float16) if is_mixed else (dtype,)
    return all(one.dtype in known for one in tensors) and any(one.requires_grad for one in tensors)


def _zeros(layer: nn.RNNBase, like: Tensor, shape: tuple[int, ...]) -> States:
    return (like.new_zeros(shape),) * (2 if layer.mode == "LSTM" else 1)


def _permute(state: Tensor, order: Tensor | None) -> Tensor:
    return state if order is None else state.index_select(1, order)


def _run(layer: nn.RNNBase, data: Tensor, states: States, batch_sizes: Tensor) -> tuple[Tensor, States]:
    """Run all layers over packed steps (N, I) in the dtype of the weights."""
    directions = 1 + layer.bidirectional
    ends: list[States] = []
    for number in range(layer.num_layers):
        x = F.dropout(data, layer.dropout, layer.training) if number else data
        parts = []
        for reverse in (False, True)[:directions]:
            weight_ih, weight_hh, *biases = layer.all_weights[len(ends)]
            bias_ih, bias_hh = biases or (None, None)
            initial = tuple(state[len(ends)].to(weight_ih.dtype) for state in states)
            weights = (weight_ih, weight_hh, bias_ih, bias_hh)
            out, end = recurrent_steps(x.to(weight_ih.dtype), initial, weights, batch_sizes, reverse)
            parts.append(out)
            ends.append(end)
        data = torch.cat(parts, dim=1) if layer.bidirectional else parts[0]
    return data, tuple(torch.stack(each) for each in zip(*ends, strict=True))
