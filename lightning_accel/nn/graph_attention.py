"""Blocks of GPS (Rampášek et al. 2022, https://arxiv.org/abs/2205.12454) whose attention pads no graph, or is traced.

Shapes: N nodes, B graphs, L nodes of the largest graph, D features, H heads.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GPSConv

from lightning_accel._private.torch import has_call_hooks
from lightning_accel.nn.deferred_weights import is_deferring
from lightning_accel.ops.segment_attention import segment_attention, serves_segments


def replace_gps_(module: nn.Module) -> list[GPSConv]:
    """Compute each ``GPSConv`` inside ``module`` by :func:`run_gps`; return these layers."""
    layers = _own_gps(module)
    for layer in layers:
        layer.forward = partial(run_gps, layer)
    return layers


def restore_gps_(layers: Iterable[GPSConv]) -> None:
    """Return ``layers``, which :func:`replace_gps_` has changed, to their own execution."""
    for layer in layers:
        replaced = vars(layer).get("forward")
        if isinstance(replaced, partial) and replaced.func is run_gps:
            del layer.forward


def padding_gps(module: nn.Module) -> list[GPSConv]:
    """Return each ``GPSConv`` inside ``module`` that pads, and which :func:`replace_gps_` would compute without."""
    return [layer for layer in _own_gps(module) if _is_plain(layer.attn) and not layer.attn.dropout]


def _own_gps(module: nn.Module) -> list[GPSConv]:
    """Return each ``GPSConv`` inside ``module`` with PyTorch Geometric's own forward pass."""
    return [
        layer
        for layer in module.modules()
        if isinstance(layer, GPSConv) and type(layer).forward is GPSConv.forward and "forward" not in vars(layer)
    ]


def run_gps(layer: GPSConv, x: Tensor, edge_index: Any, batch: Tensor | None = None, **edges: Any) -> Tensor:
    """Compute ``layer``, with nodes that attend within their graph by :func:`segment_attention` where it serves.

    PyTorch Geometric pads graphs to the largest one of a batch. Its own forward pass remains where attention has
    dropout, hooks or another class, and on other devices. Outputs and gradients are equal up to rounding. In
    ``torch.export`` graphs are padded by operators that a trace holds, for any number of graphs and nodes; PyTorch
    Geometric's own pass has branches on these.

    Args:
        layer: with its own convolution, attention, perceptron and norms.
        x: (N, D).
        edge_index: as the convolution takes it.
        batch: (N,) int64, the graph of each node, ascending; None for a single graph.
        **edges: further arguments of the convolution.
    """
    is_exporting = torch.compiler.is_exporting()
    if not (_may_replace(layer.attn) if is_exporting else _serves(layer, x, batch)):
        out: Tensor = GPSConv.forward(layer, x, edge_index, batch, **edges)
        return out
    attended = (_attend_padded if is_exporting else _attend)(layer.attn, x, batch)
    branches = [] if layer.conv is None else [_branch(layer, layer.norm1, layer.conv(x, edge_index, **edges), x, batch)]
    branches.append(_branch(layer, layer.norm2, attended, x, batch))
    total = branches[0] if len(branches) == 1 else branches[0] + branches[1]
    return _norm(layer, layer.norm3, total + layer.mlp(total), batch)


def _serves(layer: GPSConv, x: Tensor, batch: Tensor | None) -> bool:
    return (
        _may_replace(layer.attn)
        and serves_segments(x)
        and (batch is None or bool((batch[1:] >= batch[:-1]).all()))  # otherwise it raises
    )


def _may_replace(attention: nn.Module) -> bool:
    return _is_plain(attention) and not (attention.training and attention.dropout) and not has_call_hooks(attention)


def _is_plain(attention: nn.Module) -> bool:
    return (
        type(attention) is nn.MultiheadAttention
        and ("forward" not in vars(attention) or is_deferring(attention))  # GPSConv asks for no weights
        and attention.in_proj_weight is not None
        and attention.bias_k is None
        and not attention.add_zero_attn
        and (
            torch.compiler.is_exporting()  # a trace has tensors of its own kind in the place of weights
            or {type(attention.in_proj_weight), type(attention.out_proj.weight)} <= {Tensor, nn.Parameter}
        )
    )


def _attend(attention: nn.MultiheadAttention, x: Tensor, batch: Tensor | None) -> Tensor:
    begins = torch.tensor([0, len(x)]) if batch is None else F.pad(torch.bincount(batch).cumsum(0), (1, 0))
    joined = F.linear(x, attention.in_proj_weight, attention.in_proj_bias)
    query, key, value = joined.unflatten(1, (3, attention.num_heads, attention.head_dim)).unbind(1)
    out = segment_attention(query, key, value, begins).flatten(1)
    return F.linear(out, attention.out_proj.weight, attention.out_proj.bias)


def _attend_padded(attention: nn.MultiheadAttention, x: Tensor, batch: Tensor | None) -> Tensor:
    """Attend within graphs padded to L nodes; B and L are sizes that a trace leaves unknown."""
    joined = F.linear(x, attention.in_proj_weight, attention.in_proj_bias)
    if batch is None:
        out = _attend_in_rows(attention, joined[None])[0]
    else:
        # int() and len() would be constants of a trace
        graphs: int = batch.max().item() + 1  # type: ignore[assignment]
        counts = batch.new_zeros(graphs).index_add(0, batch, torch.ones_like(batch))  # (B,)
        longest: int = counts.max().item()  # type: ignore[assignment]
        begins = counts.cumsum(0) - counts
        places = batch * longest + torch.arange(x.shape[0], device=x.device) - begins[batch]  # (N,) of B * L
        padded = joined.new_zeros(graphs * longest, joined.shape[1]).index_copy(0, places, joined)
        is_padding = torch.arange(longest, device=x.device) >= counts[:, None]  # (B, L)
        rows = _attend_in_rows(attention, padded.view(graphs, longest, joined.shape[1]), is_padding)
        out = rows.reshape(graphs * longest, attention.embed_dim)[places]
    return F.linear(out, attention.out_proj.weight, attention.out_proj.bias)


def _attend_in_rows(attention: nn.MultiheadAttention, joined: Tensor, is_padding: Tensor | None = None) -> Tensor:
    """Attend within each row of queries, keys and values (B, L, 3 D), but not to padding (B, L); return (B, L, D).

    Products and a softmax stand in for ``scaled_dot_product_attention``, whose trace has a branch on L.
    """
    heads = joined.unflatten(2, (3, attention.num_heads, attention.head_dim))
    query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, L, D / H)
    scores = query * attention.head_dim**-0.5 @ key.transpose(2, 3)
    if is_padding is not None:
        scores = scores.masked_fill(is_padding[:, None, None], -torch.inf)
    return (scores.softmax(3) @ value).transpose(1, 2).flatten(2)


def _branch(layer: GPSConv, norm: nn.Module | None, change: Tensor, x: Tensor, batch: Tensor | None) -> Tensor:
    return _norm(layer, norm, F.dropout(change, layer.dropout, layer.training) + x, batch)


def _norm(layer: GPSConv, norm: nn.Module | None, x: Tensor, batch: Tensor | None) -> Tensor:
    if norm is None:
        return x
    out: Tensor = norm(x, batch=batch) if layer.norm_with_batch else norm(x)
    return out
