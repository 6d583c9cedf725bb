"""Sums of messages in PyTorch Geometric's convolutions on the CPU, without a tensor of all messages, in place.

Shapes: S nodes that send, R nodes that receive, E edges, F features.
"""

import inspect
from collections.abc import Iterable
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from torch_geometric.nn import MeanAggregation, MessagePassing, SumAggregation

from lightning_accel._private.others import has_message_hooks
from lightning_accel._private.torch import change_count
from lightning_accel.ops.triples.csr import bag_sum

_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}
_HALF_TOLERANCE = 0.1  # scatters in 16 bits, as PyTorch Geometric's, round after each message
_STEPS = ("aggregate", "update", "edge_update")  # weights of edges that the last one computes need gradients
_cache: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class _Message(NamedTuple):
    """Name what edges carry: features of the sender, times a weight if it has a name."""

    features: str
    weight: str | None


def fuse_messages_(module: nn.Module) -> list[nn.Module]:
    """Sum the messages of each convolution inside ``module`` in one pass on the CPU; return the changed ones.

    These are subclasses of PyTorch Geometric's MessagePassing, users' own included, with a sum or a mean of the
    features of their neighbors, times the weights of edges at most: GINConv, SAGEConv, GCNConv, GraphConv and others.
    Outputs and gradients are equal up to rounding; sums of 16-bit features are accumulated in float32. The first call
    of each kind is computed both ways, and a convolution whose outputs deviate stays as it was. Its own execution also
    serves weights that need a gradient, sparse adjacency matrices, other devices, and compiled programs.
    """
    layers = []
    for layer in module.modules():
        if message := _message_of(layer):
            layer.propagate = partial(_propagate, layer, message, set())  # type: ignore[assignment]
            layers.append(layer)
    return layers


def unfuse_messages_(layers: Iterable[nn.Module]) -> None:
    """Return ``layers``, which :func:`fuse_messages_` has changed, to their own execution."""
    for layer in layers:
        replaced = vars(layer).get("propagate")
        if isinstance(replaced, partial) and replaced.func is _propagate:
            del layer.propagate


def has_fusible_messages(layer: nn.Module) -> bool:
    """Return whether :func:`fuse_messages_` changes ``layer``."""
    return _message_of(layer) is not None


def _message_of(layer: nn.Module) -> _Message | None:
    """Return what the messages of ``layer`` are, by trying it, if they are of this kind, and summed or averaged."""
    if not isinstance(layer, MessagePassing) or "propagate" in vars(layer) or layer.decomposed_layers != 1:
        return None
    kind = type(layer)
    replaced = [name for name in _STEPS if getattr(kind, name) is not getattr(MessagePassing, name)]
    if replaced or type(layer.aggr_module) not in (SumAggregation, MeanAggregation):
        return None
    names = list(inspect.signature(layer.message).parameters)
    features = [name for name in names if name.endswith("_j")]
    others = [name for name in names if name not in features]
    if len(features) != 1 or len(others) > 1:
        return None
    x = (1e6 * torch.linspace(-1, 1, 15) ** 9).view(5, 3).requires_grad_()  # of many magnitudes, for bounds
    weights = torch.linspace(-2, 1, 5)
    factors = weights[:, None].expand(5, 3) if others else torch.ones(5, 3)
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            sent = layer.message(x, *([weights] if others else []))
            (gradient,) = torch.autograd.grad(sent.sum(), x)
    except Exception:  # of any kind, by a message that takes something else, or passes no gradient on
        return None
    if not torch.equal(sent, x * factors) or not torch.equal(gradient, factors):
        return None
    return _Message(features[0].removesuffix("_j"), others[0] if others else None)


def _propagate(
    layer: MessagePassing, message: _Message, checked: set[Any], edge_index: Any, *args: Any, **given: Any
) -> Tensor:
    original = partial(type(layer).propagate, layer, edge_index, *args, **given)
    if args or torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return original()
    x: Any = given.get(message.features)
    weight: Any = given.get(message.weight) if message.weight else None
    sender, receiver = (0, 1) if layer.flow == "source_to_target" else (1, 0)
    source: Any = x[sender] if isinstance(x, tuple | list) else x
    if not _serves(layer, edge_index, source, weight):
        return original()
    num_receivers = _num_receivers(x, receiver, given.get("size"))
    edges = None if num_receivers is None else _edges_of(edge_index, sender, len(source), num_receivers)
    if edges is None:
        return original()  # which raises where nodes are missing
    out = _aggregate(layer, edges, source, weight)
    kind = (layer.training, weight is None, out.dtype)
    if kind in checked:
        return out
    expected = original()
    tolerance = _TOLERANCES.get(out.dtype, _HALF_TOLERANCE)
    bound = tolerance * float(expected.detach().abs().max()) if expected.numel() else 0.0
    is_equal = expected.shape == out.shape and expected.dtype == out.dtype
    if is_equal and torch.allclose(out, expected, rtol=tolerance, atol=bound):
        checked.add(kind)
        return out
    unfuse_messages_([layer])
    return expected


def _serves(layer: MessagePassing, edge_index: Any, source: Any, weight: Any) -> bool:
    """Return whether the sum of messages takes these tensors."""
    tensors = [edge_index, source] if weight is None else [edge_index, source, weight]
    if not all(type(one) in (Tensor, nn.Parameter) and one.device.type == "cpu" for one in tensors):
        return False
    is_weighted_alike = weight is None or (
        weight.is_floating_point() and not weight.requires_grad and weight.numel() == edge_index.shape[-1]
    )
    return (
        is_weighted_alike
        and edge_index.dtype == torch.int64
        and edge_index.dim() == 2
        and len(edge_index) == 2
        and source.dim() == 2
        and source.is_floating_point()
        and layer.node_dim in (-2, 0)
        and not layer.explain
        and not has_message_hooks(layer)
    )


def _num_receivers(x: Any, receiver: int, size: Any) -> int | None:
    """Return the number of nodes that receive, or None where it is not known, or known in two ways that differ."""
    known = x[receiver] if isinstance(x, tuple | list) else x
    numbers = {len(known)} if isinstance(known, Tensor) else set()
    if size is not None and size[receiver] is not None:
        numbers.add(size[receiver])
    return numbers.pop() if len(numbers) == 1 else None


def _aggregate(layer: MessagePassing, edges: "_Edges", source: Tensor, weight: Tensor | None) -> Tensor:
    dtype = source.dtype if weight is None else torch.promote_types(source.dtype, weight.dtype)
    x = source.to(dtype)
    out: Tensor = _MessageSum.apply(x, None if weight is None else weight.reshape(-1).to(dtype), edges)
    if type(layer.aggr_module) is MeanAggregation:
        return out / edges.by_receiver.begins.diff().clamp(min=1).to(dtype)[:, None]
    return out


class _MessageSum(torch.autograd.Function):
    """Sum ``weight`` (E,) times the rows of ``x`` (S, F) that the edges of each receiver begin at, to (R, F).

    The sums of 16-bit rows are accumulated in float32 (by embedding_bag).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, edges: "_Edges") -> Tensor:
        ctx.weight, ctx.edges = weight, edges
        begins, senders, order = edges.by_receiver
        weights = weight if weight is None or order is None else weight[order]
        return bag_sum(begins, senders, x.contiguous(), weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _MessageSum.apply(grad, ctx.weight, ctx.edges.reversed), None, None


class _Compressed(NamedTuple):
    """Hold where the edges of each receiver begin (R + 1,), their senders (E,), and their order among those given."""

    begins: Tensor
    senders: Tensor
    order: Tensor | None


class _Edges:
    """Hold edges between S senders and R receivers, and order them by either when that is needed."""

    def __init__(self, sender: Tensor, receiver: Tensor, num_senders: int, num_receivers: int) -> None:
        self.sender, self.receiver = sender, receiver
        self.num_senders, self.num_receivers = num_senders, num_receivers

    @cached_property
    def by_receiver(self) -> _Compressed:
        receiver, begins = self.receiver, torch.zeros(self.num_receivers + 1, dtype=torch.int64)
        torch.cumsum(torch.bincount(receiver, minlength=self.num_receivers), 0, out=begins[1:])
        if (receiver[1:] >= receiver[:-1]).all():
            return _Compressed(begins, self.sender.contiguous(), None)
        order = _stable_order(receiver, self.num_receivers)
        return _Compressed(begins, self.sender[order], order)

    @cached_property
    def reversed(self) -> "_Edges":
        edges = _Edges(self.receiver, self.sender, self.num_receivers, self.num_senders)
        edges.reversed = self
        return edges


def _edges_of(edge_index: Tensor, sender: int, num_senders: int, num_receivers: int) -> _Edges | None:
    """Return the edges, which layers of one batch share, or None if one ends at no node."""
    key = (sender, num_senders, num_receivers)
    is_countable = not edge_index.is_inference()  # torch counts no changes of those
    found = _cache.get(edge_index) if is_countable else None
    if found is not None and found[:2] == (key, change_count(edge_index)):
        edges: _Edges = found[2]
        return edges
    with torch.inference_mode(False):  # a first call in validation may come before one in training
        ends = edge_index[sender].clone(), edge_index[1 - sender].clone()
        for end, number in zip(ends, (num_senders, num_receivers), strict=True):
            if len(end) and (int(end.min()) < 0 or int(end.max()) >= number):
                return None
        edges = _Edges(*ends, num_senders, num_receivers)
        if is_countable:
            _cache[edge_index] = key, change_count(edge_index), edges
        return edges


def _stable_order(index: Tensor, size: int) -> Tensor:
    """Return the stable order of ``index``, in [0, size), by 16 bits at a time: numpy sorts those by radix."""
    keys = index.numpy()
    order = np.argsort(keys.astype(np.uint16), kind="stable")
    for shift in range(16, (size - 1).bit_length(), 16):
        order = order[np.argsort((keys[order] >> shift).astype(np.uint16), kind="stable")]
    return torch.from_numpy(order)
