"""Triangles of graphs, and sums over them.

Shapes: N nodes, M entries of edge_index, E edges, T triangles, S edges in triangles, R channels.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_accel.ops.native import KERNELS, check_one_device, runs_kernel
from lightning_accel.ops.triples.csr import csr_sum
from lightning_accel.ops.triples.products import triangle_product, with_common_dtype

MAX_WEDGES = 2**21  # candidates that are tested at a time, about 60 bytes each; C++ kernels store none


class Triples(NamedTuple):
    """Hold a simple undirected graph with its edges and triangles, each listed once, as int64 tensors.

    The nodes in a column of ``edge`` and ``triangle`` are in ascending order, and the columns in lexicographic order.
    """

    rowptr: Tensor  # (N + 1,) where the neighbours of each node begin in col
    col: Tensor  # (2 E,) neighbours, ascending
    edge: Tensor  # (2, E)
    edge_of: Tensor  # (2 E,) the edge of each entry of col
    triangle: Tensor  # (3, T)
    num_triangles: Tensor  # (N,) number of triangles of each node
    third_rowptr: Tensor  # (E + 1,) where the third nodes of each edge begin in third
    third: Tensor  # (3 T,) for each edge, the nodes that form a triangle with it
    side: Tensor  # (3, T) the edges of each triangle; row r holds the edge opposite to the node in row r
    triangle_edge: Tensor  # (S,) the edges in triangles, ascending

    @property
    def num_nodes(self) -> int:
        return len(self.rowptr) - 1


def find_triples(edge_index: Tensor, num_nodes: int, triangle_index: Tensor | None = None) -> Triples:
    """List the edges and triangles of a graph, ignoring directions, self-loops and duplicate edges.

    Each triangle is found once, from its node of lowest degree, in O(E**1.5 log E) in the worst case. Memory is linear
    in edges and triangles, whatever the degrees. On CPU, C++ kernels are used if available. On CUDA it waits for the
    device a few times, as sizes depend on the data.

    Args:
        edge_index: (2, M) int64 in [0, N).
        num_nodes: N.
        triangle_index: (3, T) int64, all triangles if they are known, each column ascending. No triangles are searched
            then, so the result lacks any that are missing here.

    Raises:
        TypeError: if ``edge_index`` is not int64.
        ValueError: if it is not (2, M), N is negative, a node is not in [0, N), or a column of ``triangle_index`` is
            not a triangle with ascending nodes, or is a duplicate.

    >>> find_triples(torch.tensor([[0, 1, 2, 2], [1, 2, 0, 3]]), num_nodes=4).triangle.T
    tensor([[0, 1, 2]])
    """
    _check_nodes(edge_index, num_nodes)
    native = _use_kernel(edge_index)
    kernels: Any = torch.ops.lightning_accel_native
    edge, rowptr, col, edge_of = (kernels.simple_graph if native else _simple_graph)(edge_index, num_nodes)
    if triangle_index is not None:
        triangle, side = _check_triangles(triangle_index, edge, num_nodes)
    elif native:
        triangle, side = kernels.find_triangles(edge, num_nodes)
    else:
        triangle, side = _find_triangles(edge, rowptr, col, edge_of)
    group = kernels.group_triangles if native else _group_triangles
    num_triangles, third_rowptr, third, triangle_edge = group(triangle, side, num_nodes, edge.shape[1])
    return Triples(rowptr, col, edge, edge_of, triangle, num_triangles, third_rowptr, third, side, triangle_edge)


def neighbour_sum(x: Tensor, triples: Triples) -> Tensor:
    """Sum ``x`` (N, R) over the neighbours of each node; return (N, R), float32 for narrower ``x``."""
    return csr_sum(triples.rowptr, triples.col, x, triples.rowptr, triples.col)


def triangle_sum(x: Tensor, y: Tensor | None, triples: Triples) -> Tensor:
    """Sum ``x_j y_k + x_k y_j``, or ``x_j x_k`` without ``y``, over the triangles {i, j, k} of each node i.

    Args:
        x: (N, R).
        y: (N, R).
        triples: edges and triangles of the graph.

    Returns:
        (N, R), float32 for narrower factors.
    """
    x, y = with_common_dtype(x, y)
    if runs_kernel(*([x] if y is None else [x, y]), triples.triangle):
        out: Tensor = _TriangleSum.apply(x, y, triples)
        return out
    return triangle_product(x, y, triples.edge, triples.triangle_edge, triples.third_rowptr, triples.third)


class _TriangleSum(torch.autograd.Function):
    """Compute :func:`triangle_sum` by the kernel, triangle by triangle; its gradients are such sums, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor | None, triples: Triples) -> Tensor:
        ctx.triples = triples
        ctx.save_for_backward(x, y)
        out: Tensor = torch.ops.lightning_accel_native.triangle_products.default(x, y, triples.triangle)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, y = ctx.saved_tensors
        d_x = triangle_sum(x if y is None else y, grad, ctx.triples) if ctx.needs_input_grad[0] else None
        d_y = triangle_sum(x, grad, ctx.triples) if ctx.needs_input_grad[1] else None
        return d_x, d_y, None


def _check_nodes(edge_index: Tensor, num_nodes: int) -> None:
    if edge_index.ndim != 2 or edge_index.shape[0] != 2:
        raise ValueError(
            f"edge_index must be (2, M), a column for each edge; got {tuple(edge_index.shape)}. "
            "Stack sources and targets, or transpose a list of pairs"
        )
    if edge_index.dtype != torch.int64:
        raise TypeError(f"edge_index must be int64; got {edge_index.dtype}. Call edge_index.long()")
    if num_nodes < 0:
        raise ValueError(f"num_nodes must be 0 or more; got {num_nodes}. Give the number of nodes of the graph")
    if not edge_index.numel():
        return
    low, high = (int(end) for end in edge_index.aminmax())
    if low < 0 or high >= num_nodes:
        raise ValueError(f"edge_index must hold nodes from 0 to num_nodes - 1 = {num_nodes - 1}; found {low} to {high}")


def _use_kernel(edge_index: Tensor) -> bool:
    if edge_index.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return KERNELS.serves(edge_index.device)


def _simple_graph(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the sorted edges u < v, (2, E), and the result of :func:`_symmetric_csr`."""
    low, high = torch.minimum(edge_index[0], edge_index[1]), torch.maximum(edge_index[0], edge_index[1])
    keys = torch.unique(low * num_nodes + high)
    keys = keys[keys % (num_nodes + 1) != 0] if num_nodes else keys
    edge = torch.stack([keys // num_nodes, keys % num_nodes]) if num_nodes else keys.new_empty(2, 0)
    return edge, *_symmetric_csr(edge, num_nodes)


def _symmetric_csr(edge: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return row pointers (N + 1,), neighbours and edges (2 E,) of the symmetric graph; columns ascend in each row."""
    u, v = edge
    high_rowptr = _group_starts(u, num_nodes)
    low_rowptr, by_end = _group_by(v, num_nodes)
    place = torch.arange(len(u), device=u.device)
    high_place = place + low_rowptr.index_select(0, u + 1)
    low_place = place + high_rowptr.index_select(0, v.index_select(0, by_end))
    col, edge_of = u.new_empty(2, 2 * len(u))
    col[high_place], col[low_place] = v, u.index_select(0, by_end)
    edge_of[high_place], edge_of[low_place] = place, by_end
    return low_rowptr + high_rowptr, col, edge_of


def _find_triangles(edge: Tensor, rowptr: Tensor, col: Tensor, edge_of: Tensor) -> tuple[Tensor, Tensor]:
    """Return the triangles in lexicographic order and their sides, (3, T) each, as in :class:`Triples`."""
    num_nodes = len(rowptr) - 1
    keys = edge[0] * num_nodes + edge[1]
    return _sort_triangles(_find_sides(keys, rowptr, col, edge_of), edge, num_nodes)[:2]


def _sort_triangles(side: Tensor, edge: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort triangles; return triangles and sides in lexicographic order, their sorted keys, and the permutation."""
    # by the edge between the lower nodes, then by the highest
    place, order = (side[2] * num_nodes + edge[1].index_select(0, side[0])).sort()
    side = side.index_select(1, order)
    triangle = torch.cat([edge.index_select(1, side[2]), edge[1].index_select(0, side[0])[None]])
    return triangle, side, place, order


def _group_triangles(
    triangle: Tensor, side: Tensor, num_nodes: int, num_edges: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute ``num_triangles``, ``third_rowptr``, ``third`` and ``triangle_edge`` of :class:`Triples`."""
    third_rowptr, by_edge = _group_by(side.flatten(), num_edges)
    return (
        torch.bincount(triangle.flatten(), minlength=num_nodes),
        third_rowptr,
        triangle.flatten().index_select(0, by_edge),
        third_rowptr.diff().nonzero().squeeze(1),
    )


def _find_sides(keys: Tensor, rowptr: Tensor, col: Tensor, edge_of: Tensor) -> Tensor:
    """Find the sides of all triangles, (3, T) as in :class:`Triples`, in no particular order."""
    num_nodes, degree = len(rowptr) - 1, rowptr.diff()
    row = torch.repeat_interleave(degree, output_size=len(col))
    row_degree, col_degree = degree.index_select(0, row), degree.index_select(0, col)
    # start at the end of lower degree: a node then has at most sqrt(2 E) such edges
    chosen = ((row_degree < col_degree) | ((row_degree == col_degree) & (row < col))).nonzero().squeeze(1)
    tail, head, edge = (tensor.index_select(0, chosen) for tensor in (row, col, edge_of))
    del row, row_degree, col_degree, chosen
    place = torch.arange(len(tail), device=tail.device)
    # pair each edge with each later edge of the same tail: its head is below the other's
    num_later = _group_starts(tail, num_nodes).index_select(0, tail + 1) - place - 1
    test = _EdgeTest(keys, num_nodes)
    found = []
    for start, stop, size in _chunks(num_later, MAX_WEDGES):
        count = num_later[start:stop]
        first = torch.repeat_interleave(place[start:stop], count, output_size=size)
        skipped = place[start:stop] + 1 - (count.cumsum(0) - count)
        second = torch.arange(size, device=tail.device) + torch.repeat_interleave(skipped, count, output_size=size)
        wedge, closing = test(head.index_select(0, first), head.index_select(0, second))
        first, second = first.index_select(0, wedge), second.index_select(0, wedge)
        i, j, k = tail.index_select(0, first), head.index_select(0, first), head.index_select(0, second)
        ij, ik = edge.index_select(0, first), edge.index_select(0, second)
        middle = torch.where(i < j, ik, torch.where(i < k, closing, ij))
        found.append(torch.stack([torch.where(i < j, closing, ik), middle, torch.where(i < k, ij, closing)]))
    return torch.cat(found, dim=1) if found else keys.new_empty(3, 0)


def _chunks(count: Tensor, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield start, stop and sum of consecutive runs of ``count`` that each sum to about ``size``."""
    ends = F.pad(count.cumsum(0), (1, 0))
    total = int(ends[-1])
    borders = torch.searchsorted(ends, torch.arange(0, total, size, device=ends.device), right=True) - 1
    borders = F.pad(borders, (0, 1), value=len(count))
    places, sums = borders.tolist(), ends.index_select(0, borders).diff().tolist()
    for start, stop, summed in zip(places, places[1:], sums, strict=False):
        if summed:
            yield start, stop, summed


class _EdgeTest:
    """Find which of many pairs of nodes are edges.

    A hash table rejects nearly all other pairs by one memory access each, instead of a binary search.
    """

    def __init__(self, keys: Tensor, num_nodes: int) -> None:
        self.keys, self.num_nodes = keys, num_nodes
        self.mask = 2 ** (8 * len(keys)).bit_length() - 1
        self.table = torch.zeros(self.mask + 1, dtype=torch.bool, device=keys.device)
        if num_nodes:
            self.table.index_fill_(0, self._hash(keys // num_nodes, keys % num_nodes), True)

    def _hash(self, u: Tensor, v: Tensor) -> Tensor:
        return (u * 2654435761 + v) & self.mask

    def __call__(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions of the pairs u < v that are edges, and the numbers of these edges."""
        maybe = self.table.index_select(0, self._hash(u, v)).nonzero().squeeze(1)
        wanted = u.index_select(0, maybe) * self.num_nodes + v.index_select(0, maybe)
        wanted, order = wanted.sort()  # takes less time than it saves: searches of neighbouring keys share cache lines
        place = torch.searchsorted(self.keys, wanted).clamp(max=len(self.keys) - 1)
        right = (self.keys.index_select(0, place) == wanted).nonzero().squeeze(1)
        return maybe.index_select(0, order.index_select(0, right)), place.index_select(0, right)


def _check_triangles(triangle_index: Tensor, edge: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Check and sort the given triangles; return them and their sides, (3, T) each."""
    i, j, k = triangle_index
    keys = edge[0] * num_nodes + edge[1]
    wanted = torch.stack([j, i, i]) * num_nodes + torch.stack([k, k, j])
    side = torch.searchsorted(keys, wanted)
    ends = keys.index_select(0, side.flatten().clamp(max=len(keys) - 1)) if len(keys) else wanted.flatten() - 1
    wrong = ((ends.view(3, -1) != wanted).any(dim=0) | (i >= j) | (j >= k)).nonzero()
    if len(wrong):
        nodes = triangle_index[:, wrong[0, 0]].tolist()
        raise ValueError(
            f"triangle_index must list triangles of the graph, nodes ascending; column {int(wrong[0, 0])} is {nodes}. "
            "Find them again after a change of edges or of the numbers of nodes"
        )
    triangle, side, place, order = _sort_triangles(side, edge, num_nodes)
    again = (place[1:] == place[:-1]).nonzero()
    if len(again):
        columns = sorted(order[again[0, 0] : again[0, 0] + 2].tolist())
        nodes = triangle_index[:, columns[0]].tolist()
        raise ValueError(f"triangle_index must list each triangle once; columns {columns} are both {nodes}")
    return triangle, side


def _group_starts(index: Tensor, size: int) -> Tensor:
    return torch.cat([index.new_zeros(1), torch.bincount(index, minlength=size).cumsum(0)])


def _group_by(index: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return where each group begins, (size + 1,), and the stable order that sorts ``index`` by group."""
    # it is a radix sort: int32 takes half the time of int64
    return _group_starts(index, size), torch.argsort(index.int() if size < 2**31 else index, stable=True)


def _fake_graph(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_edges = torch.library.get_ctx().new_dynamic_size()
    col, edge_of = edge_index.new_empty(2 * num_edges), edge_index.new_empty(2 * num_edges)
    return edge_index.new_empty(2, num_edges), edge_index.new_empty(num_nodes + 1), col, edge_of


def _fake_triangles(edge: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    num_triangles = torch.library.get_ctx().new_dynamic_size()
    return edge.new_empty(3, num_triangles), edge.new_empty(3, num_triangles)


def _fake_groups(
    triangle: Tensor, side: Tensor, num_nodes: int, num_edges: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_one_device(triangle=triangle, side=side)
    num_used = torch.library.get_ctx().new_dynamic_size()
    of_nodes, of_edges = triangle.new_empty(num_nodes), triangle.new_empty(num_edges + 1)
    return of_nodes, of_edges, triangle.new_empty(triangle.shape[1] * 3), triangle.new_empty(num_used)


@KERNELS.on_load
def _register() -> None:
    for name, fake in (
        ("simple_graph", _fake_graph),
        ("find_triangles", _fake_triangles),
        ("group_triangles", _fake_groups),
        ("triangle_products", lambda x, y, triangle: torch.empty_like(x, memory_format=torch.contiguous_format)),
    ):
        torch.library.register_fake(f"lightning_accel_native::{name}", fake)
