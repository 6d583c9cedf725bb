"""Which graphs and nodes a graph network of a kind cannot tell apart, by refinement of colours.

Shapes: N nodes, M arcs, B graphs, k marks, T copies, F and D features of nodes and arcs.
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lightning_accel.nn.relational.copies import Copies, chunk_bounds, copy_graphs, plan_tuples, sort_by_graph
from lightning_accel.nn.relational.marked_tuples import TupleKind, find_tuples, resolve_marks
from lightning_accel.ops.hashes import hash_neighbours, hash_rows, join_hashes, mix_bits
from lightning_accel.ops.triples.find import Triples, find_triples

_CHUNK = 2**21  # nodes and arcs of the copies in memory at a time, about 60 bytes each


def refinement_hash(
    x: Tensor,
    edge_index: Tensor,
    edge_attr: Tensor | None = None,
    batch: Tensor | None = None,
    size: int | None = None,
    *,
    num_layers: int,
    triples: bool = False,
    marks: int = 0,
    tuples: TupleKind | None = None,
    level: Literal["graph", "node"] = "graph",
) -> Tensor:
    """Compute numbers that are equal for graphs, or nodes, which no graph network of a kind tells apart.

    Equal numbers mean that every network of ``num_layers`` layers and a sum over nodes gives the two equal outputs,
    whatever its weights. Different ones mean that wide enough networks exist which give them different outputs. Kinds
    are message passing (the refinement of colours of Weisfeiler and Leman), layers that also see triangles and paths
    (:class:`~lightning_accel.RO3Conv`), and the mean of either over marked nodes
    (:class:`~lightning_accel.nn.RelationalPooling`). Features of several arcs between two nodes are averaged by
    RO3Conv, and numbers differ where the proportions of these features do.

    Numbers are hashes of 64 bits: two that should differ are equal with a probability of about 2**-60. They are equal
    on every machine.

    Args:
        x: (N, F), compared as float64, bit by bit.
        edge_index: (2, M) int64.
        edge_attr: (M,) or (M, D), likewise.
        batch: (N,) int64, the graph of each node; one graph by default.
        size: B; needed if the last graphs have no nodes.
        num_layers: number of layers, 0 or more.
        triples: whether layers see triangles and paths of two edges.
        marks: number of nodes that are marked together; 0 for none.
        tuples: which nodes are marked, as in :class:`~lightning_accel.nn.RelationalPooling`.
        level: ``"graph"`` for one number a graph, ``"node"`` for one a node.

    Returns:
        (B,) or (N,) int64.

    Raises:
        ValueError: if inputs are invalid, or there are more than 2**23 tuples.

    Source: Weisfeiler and Leman 1968; Xu et al. 2019, How powerful are graph neural networks?,
    https://arxiv.org/abs/1810.00826, theorem 3.

    >>> two_triangles = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 0, 4, 5, 3]])
    >>> hexagon = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]])
    >>> graphs = torch.ones(12, 1), torch.cat([two_triangles, 6 + hexagon], dim=1)
    >>> batch = torch.arange(12) // 6
    >>> [len(refinement_hash(*graphs, batch=batch, num_layers=3, triples=seen).unique()) for seen in (False, True)]
    [1, 2]
    """
    if batch is None:
        batch = edge_index.new_zeros(len(x))
        size = 1 if size is None else size
    if size is None:
        size = int(batch.max()) + 1 if len(batch) else 0
    if num_layers < 0 or marks < 0 or level not in ("graph", "node") or (tuples is not None and not marks):
        raise ValueError(
            f"num_layers and marks must be 0 or more, level 'graph' or 'node', and tuples None without marks; got "
            f"{num_layers}, {marks}, {level!r} and {tuples!r}"
        )
    layout = sort_by_graph(edge_index, batch, size)
    node_colour, arc_colour = hash_rows(x), None if edge_attr is None else hash_rows(edge_attr)
    if not marks:
        whole = Copies(
            torch.arange(len(x), device=x.device), edge_index, edge_index[0], batch, batch.new_empty(size, 0)
        )
        colour = _refine(node_colour, arc_colour, whole, num_layers, triples)
        return _read_out(colour, whole) if level == "graph" else colour
    number, kind = resolve_marks(marks, tuples)
    space = find_tuples(kind, number, layout.ptr, *layout.ends)
    plan = plan_tuples(space, None, None)
    owners, values = list[Tensor](), list[Tensor]()
    for begin, end in chunk_bounds(layout, plan, _CHUNK):
        graph, places = plan.part(space, begin, end)
        copies = copy_graphs(layout, graph, places)
        colour = _mark(node_colour[copies.node], copies.marked)
        arcs = None if arc_colour is None else arc_colour[copies.arc]
        colour = _refine(colour, arcs, copies, num_layers, triples)
        if level == "graph":
            colour = _read_out(colour, copies)
        owners.append(graph if level == "graph" else copies.node)
        values.append(colour)
    return _proportions(torch.cat(owners), torch.cat(values), size if level == "graph" else len(x))


def _refine(colour: Tensor, arc_colour: Tensor | None, copies: Copies, num_layers: int, triples: bool) -> Tensor:
    """Return the colours of nodes after as many layers."""
    found = find_triples(copies.edge_index, len(colour)) if triples and num_layers else None
    edge_colour = None
    if found is not None and arc_colour is not None:
        edge_colour = _edge_colour(arc_colour, copies.edge_index, found)
    for _ in range(num_layers):
        if found is None:
            parts = [hash_neighbours(colour, copies.edge_index, arc_colour)]
        else:
            parts = _sums_over_triples(colour, edge_colour, found)
        colour = join_hashes(colour, *parts)
    return colour


def _sums_over_triples(colour: Tensor, edge_colour: Tensor | None, triples: Triples) -> list[Tensor]:
    """Sum hashes over neighbours, triangles and paths of each node, as RO3Conv sums products of features.

    Sums of products of hashes, modulo 2**64, differ where multisets of pairs do.
    """
    row = torch.repeat_interleave(triples.rowptr.diff(), output_size=len(triples.col))
    near, far, begin = (
        _factor(colour, salt, triples.col, edge_colour, triples.edge_of) for salt in range(3)
    )  # (2 E,): of the neighbour at the end of each entry
    none = torch.zeros_like(colour)
    neighbours = none.index_add(0, row, near)
    paths = none.index_add(0, row, begin * none.index_add(0, row, far)[triples.col])
    triangles = none.clone()
    for corner in range(3):
        left, right = (corner + 1) % 3, (corner + 2) % 3
        # the edge to a corner lies opposite to the third one
        product = _factor(colour, 0, triples.triangle[left], edge_colour, triples.side[right]) * _factor(
            colour, 0, triples.triangle[right], edge_colour, triples.side[left]
        )
        if edge_colour is not None:
            product = join_hashes(product, edge_colour[triples.side[corner]])
        triangles.index_add_(0, triples.triangle[corner], mix_bits(product))
    return [neighbours, paths, triangles]


def _factor(colour: Tensor, salt: int, node: Tensor, edge_colour: Tensor | None, edge: Tensor) -> Tensor:
    """Return odd hashes of nodes, and of the edges to them; products of odd numbers lose no bits."""
    value = colour[node] if edge_colour is None else join_hashes(colour[node], edge_colour[edge])
    return mix_bits(value + salt) | 1


def _edge_colour(arc_colour: Tensor, edge_index: Tensor, triples: Triples) -> Tensor:
    """Return a hash (E,) of the proportions of the colours of all arcs between the ends of each edge."""
    proper = edge_index[0] != edge_index[1]
    low, high = edge_index[:, proper].sort(dim=0).values
    keys = triples.edge[0] * triples.num_nodes + triples.edge[1]
    place = torch.searchsorted(keys, low * triples.num_nodes + high)
    return _proportions(place, arc_colour[proper], len(keys))


def _proportions(owner: Tensor, value: Tensor, owners: int) -> Tensor:
    """Return a hash of the proportions of values that each owner has, since means see no more than these."""
    order = value.argsort(stable=True)
    order = order[owner[order].argsort(stable=True)]
    owner, value = owner[order], value[order]
    if not len(owner):
        return value.new_zeros(owners)
    changes = (owner[1:] != owner[:-1]) | (value[1:] != value[:-1])
    first = torch.cat([changes.new_ones(1), changes]).nonzero()[:, 0]
    count = torch.cat([first, first.new_tensor([len(owner)])]).diff()
    owner, value = owner[first], value[first]
    present, starts = np.unique(owner.cpu().numpy(), return_index=True)
    divisor = torch.ones(owners, dtype=torch.int64)
    divisor[torch.from_numpy(present)] = torch.from_numpy(np.gcd.reduceat(count.cpu().numpy(), starts))
    count = count // divisor.to(count.device)[owner]
    return value.new_zeros(owners).index_add_(0, owner, mix_bits(value) * count)


def _mark(colour: Tensor, marked: Tensor) -> Tensor:
    """Give the marked nodes (T, k) colours of their own for each mark."""
    for mark, nodes in enumerate(marked.unbind(dim=1)):
        nodes = nodes[nodes >= 0]
        colour = colour.index_copy(0, nodes, mix_bits(mix_bits(colour[nodes]) + mark))
    return colour


def _read_out(colour: Tensor, copies: Copies) -> Tensor:
    """Return a hash (T,) of the multiset of the colours of each copy; the colours of marked nodes are their own."""
    return mix_bits(colour.new_zeros(len(copies.marked)).index_add_(0, copies.copy, mix_bits(colour)))
