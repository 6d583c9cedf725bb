"""Attribution of outputs to triples of nodes.

Shapes: K triples, B graphs, N nodes, T triangles, P paths, R channels.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from lightning_accel.nn.graph_call import call_with_graph
from lightning_accel.nn.relational import RelationalOrder3Pooling
from lightning_accel.nn.triple_kernels import ProductKernel
from lightning_accel.nn.triple_sums import Graphs, count_subsets, edge_keys
from lightning_accel.ops.triple_cache import triples_of
from lightning_accel.ops.triples import Triples
from lightning_accel.ops.two_paths import two_paths

_TERMS_AT_A_TIME = 2**16


class TripleScores(NamedTuple):
    """Hold the contribution of each triangle and each open wedge to an output."""

    triples: Tensor  # (K, 3) int64: nodes of a triangle, ascending; leaf, centre and other leaf of a wedge
    kind: Tensor  # (K,) int64, the number of edges: 3 for a triangle and 2 for a wedge
    score: Tensor  # (K,)


class _Call(NamedTuple):
    arguments: dict[str, Any]
    pooled: Tensor  # (B, out_channels), a leaf of the autograd graph of the output


def attribute_triples(
    model: nn.Module, data: Data, target: int | None = None, pooling: RelationalOrder3Pooling | None = None
) -> TripleScores:
    """Attribute an output to the triangles and open wedges that an order-3 pooling in ``model`` sums.

    The pooling is linear in its triples, so the score of a triple is ``<d output / d pooled, term of the triple>``. For
    a pooling alone, or with a linear head, scores are exact: they add up to the output minus the head's bias. With
    another head they add up to ``<gradient, pooled>``, the linearisation at this graph. The input features of the
    pooling are constants: the effect of triples on them in earlier layers is not included. Subsets with fewer than two
    edges get no scores.

    Args:
        model: an ``RO3Pooling``, or a module with one. It is called in its current mode, with the attributes of
            ``data`` that have the names of its parameters, or with ``data`` if its single required parameter has
            another name.
        data: one graph or a batch; the score of a triple refers to the output of its own graph.
        target: column of the output; not needed if there is only one.
        pooling: the pooling layer, if the model has several.

    Raises:
        ValueError: if not exactly one pooling with ``kernel="product"`` is called once, or the column is ambiguous.
    """
    pooling = _find_pooling(model) if pooling is None else pooling
    if not isinstance(pooling.terms, ProductKernel):
        raise ValueError("scores of triples need a pooling with kernel='product'; got kernel='mlp'")
    calls: list[_Call] = []

    def capture(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        names = ("x", "edge_index", "edge_attr", "batch", "size", "triples")
        pooled = output.detach().requires_grad_()
        calls.append(_Call(dict(zip(names, args, strict=False)) | kwargs, pooled))
        return pooled

    handle = pooling.register_forward_hook(capture, with_kwargs=True)
    try:
        with torch.enable_grad():
            output = _column(call_with_graph(model, data), target).sum()
    finally:
        handle.remove()
    if len(calls) != 1:
        raise ValueError(f"the pooling must be called once for one call of the model; it was called {len(calls)} times")
    (gradient,) = torch.autograd.grad(output, calls[0].pooled)
    with torch.no_grad():
        return _scores(pooling, pooling.terms, gradient, **calls[0].arguments)


def _find_pooling(model: nn.Module) -> RelationalOrder3Pooling:
    found = [module for module in model.modules() if isinstance(module, RelationalOrder3Pooling)]
    if len(found) != 1:
        raise ValueError(f"the model must have one RO3Pooling, or name which with pooling=; it has {len(found)}")
    return found[0]


def _column(output: Any, target: int | None) -> Tensor:
    if not isinstance(output, Tensor):
        raise ValueError(f"the model must return a tensor; got a {type(output).__name__}")
    if output.ndim < 2:
        return output
    if target is None and output.shape[1] != 1:
        raise ValueError(f"say which of the {output.shape[1]} columns of the output with target=")
    return output[:, target or 0]


def _scores(
    pooling: RelationalOrder3Pooling,
    terms: ProductKernel,
    gradient: Tensor,
    x: Tensor,
    edge_index: Tensor,
    edge_attr: Tensor | None = None,
    batch: Tensor | None = None,
    size: int | None = None,
    triples: Triples | None = None,
) -> TripleScores:
    triples = triples_of(edge_index, x.shape[0]) if triples is None else triples
    graphs = Graphs(batch, size)
    rates = (gradient.to(pooling.out.weight.dtype) @ pooling.out.weight).split(pooling.rank, dim=1)
    counts = count_subsets(triples, graphs)._asdict()
    maps, weights = terms.node_maps(x), terms.weights(edge_attr, edge_index, triples)
    parts = [TripleScores(edge_index.new_empty(0, 3), edge_index.new_empty(0), gradient.new_empty(0))]
    for name, rate in zip(pooling.types, rates, strict=True):
        if pooling.reduce == "mean":
            rate = rate / counts[name].clamp(min=1)
        if name == "triangle":
            parts += _triangle_scores(maps[name], weights[name], rate, triples, graphs)
        elif name == "wedge":
            parts += _wedge_scores(maps[name], weights[name], rate, triples, graphs)
    joined = TripleScores(*(torch.cat(column) for column in zip(*parts, strict=True)))
    return joined._replace(score=joined.score.to(gradient.dtype))


def _triangle_scores(
    maps: tuple[Tensor, ...], weight: Tensor | None, rate: Tensor, triples: Triples, graphs: Graphs
) -> list[TripleScores]:
    (a,) = maps
    parts = []
    for node in triples.triangle.split(_TERMS_AT_A_TIME, dim=1):
        i, j, k = node
        term = a[i] * a[j] * a[k] * _weights(weight, triples, (i, j), (j, k), (i, k))
        score = (rate[graphs.of(i)] * term).sum(dim=1)
        parts.append(TripleScores(node.T, torch.full_like(i, 3), score))
    return parts


def _wedge_scores(
    maps: tuple[Tensor, ...], weight: Tensor | None, rate: Tensor, triples: Triples, graphs: Graphs
) -> list[TripleScores]:
    b, c = maps
    parts = []
    for paths in two_paths(triples, _TERMS_AT_A_TIME):
        leaf, centre, other = (node[~paths.closed] for node in paths[:3])
        term = c[centre] * b[leaf] * b[other] * _weights(weight, triples, (centre, leaf), (centre, other))
        score = (rate[graphs.of(centre)] * term).sum(dim=1)
        parts.append(TripleScores(torch.stack([leaf, centre, other], dim=1), torch.full_like(leaf, 2), score))
    return parts


def _weights(weight: Tensor | None, triples: Triples, *pairs: tuple[Tensor, Tensor]) -> Tensor | float:
    if weight is None:
        return 1.0
    product = torch.ones_like(weight[:1])
    for u, v in pairs:
        key = torch.minimum(u, v) * triples.num_nodes + torch.maximum(u, v)
        product = product * weight[torch.searchsorted(edge_keys(triples), key)]
    return product
