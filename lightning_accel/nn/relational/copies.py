"""Copies of graphs, one for each tuple of marked nodes.

Shapes: N nodes, M arcs, B graphs, k marks, T copies, R nodes of all copies.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from lightning_accel.nn.relational.marked_tuples import Tuples

_MAX_COPIES = 2**23


class GraphLayout(NamedTuple):
    """Hold the nodes and arcs of a batch sorted by graph, in their given order within each graph."""

    node: Tensor
    """(N,): nodes sorted by graph; a place is a position in this tensor."""
    graph: Tensor
    """(N,): the graph of each place."""
    place: Tensor
    """(N,): the place of each node."""
    ptr: Tensor
    """(B + 1,): the first place of each graph."""
    arc: Tensor
    """(M,): columns of ``edge_index``, sorted by graph."""
    arc_ptr: Tensor
    """(B + 1,): the first arc of each graph."""
    ends: Tensor
    """(2, M): places of the ends of each arc."""


class Copies(NamedTuple):
    """Hold a batch of T copies of graphs."""

    node: Tensor
    """(R,): the original of each node."""
    edge_index: Tensor
    arc: Tensor
    """The original arc of each column of ``edge_index``."""
    copy: Tensor
    """(R,): the copy of each node, from 0 to T - 1."""
    marked: Tensor
    """(T, k): the node of the copies under each mark, -1 for none."""


class Plan(NamedTuple):
    """Hold the tuples of all copies, as numbers or as drawn tuples."""

    graph: Tensor
    """(T,), sorted."""
    number: Tensor | None
    tuples: Tensor | None

    def part(self, space: Tuples, begin: int, end: int) -> tuple[Tensor, Tensor]:
        graph = self.graph[begin:end]
        if self.tuples is not None:
            return graph, self.tuples[begin:end]
        assert self.number is not None
        return graph, space.at(graph, self.number[begin:end])


def plan_tuples(space: Tuples, samples: int | None, generator: Generator | None) -> Plan:
    if samples is not None:
        graph, tuples = space.draw(samples, generator)
        return Plan(graph, None, tuples)
    if (total := float(space.total.sum())) > _MAX_COPIES:
        raise ValueError(f"a mean over all {total:.3g} tuples takes too long: give samples, or fewer marks or graphs")
    count = space.total.long()
    graph = torch.repeat_interleave(count)
    return Plan(graph, torch.arange(len(graph), device=graph.device) - (count.cumsum(0) - count)[graph], None)


def chunk_bounds(layout: GraphLayout, plan: Plan, chunk_size: int | None) -> Iterator[tuple[int, int]]:
    """Yield first and last copy of each chunk; there is at least one chunk, for the output width of the base GNN."""
    copies = len(plan.graph)
    if chunk_size is None or copies == 0:
        yield 0, copies
        return
    total = (layout.ptr.diff() + layout.arc_ptr.diff())[plan.graph].cumsum(0)
    begin = 0
    while begin < copies:
        limit = chunk_size + (total[begin - 1] if begin else 0)
        end = max(int(torch.searchsorted(total, limit, right=True)), begin + 1)
        yield begin, end
        begin = end


def sort_by_graph(edge_index: Tensor, batch: Tensor, num_graphs: int) -> GraphLayout:
    """Sort nodes and arcs by graph.

    Raises:
        ValueError: if an arc joins two graphs or refers to a missing node, or ``batch`` has numbers outside of 0 to
            ``num_graphs - 1``.
    """
    _check_ranges(edge_index, batch, num_graphs)
    if not torch.equal(batch[edge_index[0]], batch[edge_index[1]]):
        raise ValueError("every edge must join nodes of one graph: edge_index and batch do not belong together")
    graph, node = batch.sort(stable=True)
    arc_graph, arc = batch[edge_index[0]].sort(stable=True)
    place = torch.empty_like(node)
    place[node] = torch.arange(len(node), device=node.device)
    bounds = torch.arange(num_graphs + 1, device=node.device)
    return GraphLayout(
        node, graph, place, torch.searchsorted(graph, bounds), arc, torch.searchsorted(arc_graph, bounds),
        place[edge_index[:, arc]],
    )  # fmt: skip


def _check_ranges(edge_index: Tensor, batch: Tensor, num_graphs: int) -> None:
    ranges = [torch.stack(values.aminmax()) for values in (edge_index, batch) if values.numel()]
    found = torch.stack(ranges).tolist() if ranges else []  # on CUDA, waits for the device once
    if edge_index.numel():
        low, high = found[0]
        if low < 0 or high >= len(batch):
            raise ValueError(f"edge_index must hold nodes from 0 to {len(batch) - 1}; found {low} to {high}")
    if batch.numel():
        low, high = found[-1]
        if low < 0 or high >= num_graphs:
            raise ValueError(f"batch must number {num_graphs} graphs from 0, got {low} to {high}")


def copy_graphs(layout: GraphLayout, graph: Tensor, tuples: Tensor) -> Copies:
    """Copy the graphs ``graph`` (T,), sorted, with marks on the places ``tuples`` (T, k)."""
    copy, place, first = _expand(layout.ptr, graph)
    shift = first - layout.ptr[graph]
    if len(graph) and graph[0] == graph[-1]:  # chunks of large graphs: many times as fast as indexing each arc
        begin, end = layout.arc_ptr[graph[0]], layout.arc_ptr[graph[0] + 1]
        edge_index = (layout.ends[:, None, begin:end] + shift[:, None]).flatten(1)
        arc = layout.arc[begin:end].expand(len(graph), -1).flatten()
    else:
        arc_copy, arc, _ = _expand(layout.arc_ptr, graph)
        edge_index, arc = layout.ends[:, arc] + shift[arc_copy], layout.arc[arc]
    marked = torch.where(tuples < 0, -1, tuples + shift[:, None])
    return Copies(layout.node[place], edge_index, arc, copy, marked)


def _expand(ptr: Tensor, graph: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for the elements of all copies, the copy and the original; and the first element of each copy (T,)."""
    count = ptr.diff()[graph]
    first = count.cumsum(0) - count
    copy = torch.repeat_interleave(count)
    return copy, torch.arange(len(copy), device=graph.device) + (ptr[graph] - first)[copy], first
