"""Paths of two edges in a graph, in bounded memory. Shapes: N nodes, E edges, P paths, S samples, G graphs."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_accel.ops.triples import Triples


class TwoPaths(NamedTuple):
    """Hold paths leaf - centre - other with leaf < other."""

    leaf: Tensor  # (P,)
    centre: Tensor  # (P,)
    other: Tensor  # (P,)
    closed: Tensor  # (P,) bool, whether leaf and other are neighbours, so that the path is part of a triangle


def num_two_paths(triples: Triples) -> int:
    """Count the paths of two edges: d (d - 1) / 2 for a centre of degree d."""
    return int(_num_paths(triples).sum())


class TwoPathIndex(NamedTuple):
    """Find any path by its position in the order of :func:`two_paths`, in O(E) memory."""

    triples: Triples
    num_paths: int
    ends: Tensor  # (2 E,)
    keys: Tensor  # (E,)

    def between(self, start: int, stop: int) -> TwoPaths:
        index = torch.arange(start, stop, device=self.ends.device)
        return _paths(index, self.ends, self.keys, self.triples)


def index_two_paths(triples: Triples) -> TwoPathIndex:
    ends = _path_ends(triples)
    return TwoPathIndex(triples, int(ends[-1]) if len(ends) else 0, ends, _edge_keys(triples))


def two_paths(triples: Triples, max_paths: int) -> Iterator[TwoPaths]:
    """Yield all paths of two edges once, ordered by centre, leaf and other, in chunks of ``max_paths``.

    The last chunk may be smaller. A chunk may end within the paths of a centre, so memory does not depend on degrees.

    >>> from lightning_accel.ops import find_triples
    >>> triples = find_triples(torch.tensor([[0, 1, 2, 2], [1, 2, 0, 3]]), num_nodes=4)
    >>> [paths.centre.tolist() for paths in two_paths(triples, max_paths=3)]
    [[0, 1, 2], [2, 2]]
    """
    if max_paths < 1:
        raise ValueError(f"max_paths must be at least 1; got {max_paths}")
    index = index_two_paths(triples)
    for start in range(0, index.num_paths, max_paths):
        yield index.between(start, min(start + max_paths, index.num_paths))


def sample_two_paths(
    triples: Triples, num_samples: int, generator: torch.Generator | None = None, batch: Tensor | None = None
) -> TwoPaths:
    """Draw paths of two edges uniformly and independently, with replacement.

    Args:
        triples: edges and triangles of the graph.
        num_samples: S.
        generator: random number generator on the device of ``triples``.
        batch: (N,), the graph of each node, ascending: S paths are drawn from each graph that has any.

    Returns:
        S paths; with ``batch``, G * S paths in the order of the graphs, where G graphs have paths. Empty without paths.
    """
    ends = _path_ends(triples)
    if batch is None:
        batch = triples.rowptr.new_zeros(triples.num_nodes)
    count = _num_paths(triples)
    sizes = count.new_zeros(int(batch[-1]) + 1 if len(batch) else 0).index_add_(0, batch, count)
    starts = sizes.cumsum(0) - sizes
    some = sizes > 0
    starts, sizes = starts[some, None], sizes[some, None]
    # sizes are far below 2**62, so the bias of the remainder is below 1e-12
    index = starts + torch.randint(2**62, (len(sizes), num_samples), device=ends.device, generator=generator) % sizes
    return _paths(index.flatten(), ends, _edge_keys(triples), triples)


def _num_paths(triples: Triples) -> Tensor:
    degree = triples.rowptr.diff()
    return degree * (degree - 1) // 2


def _path_ends(triples: Triples) -> Tensor:
    """Count the paths whose leaf is at each entry of col, each with a later entry of its row, cumulatively: (2 E,)."""
    row_ends = torch.repeat_interleave(triples.rowptr[1:], triples.rowptr.diff(), output_size=len(triples.col))
    return (row_ends - torch.arange(1, len(row_ends) + 1, device=row_ends.device)).cumsum(0)


def _edge_keys(triples: Triples) -> Tensor:
    u, v = triples.edge
    return u * triples.num_nodes + v


def _paths(index: Tensor, ends: Tensor, keys: Tensor, triples: Triples) -> TwoPaths:
    """Return the paths at positions ``index`` in the order of :func:`two_paths`."""
    if not len(index):
        return TwoPaths(index, index, index, index.bool())
    first = torch.searchsorted(ends, index, right=True)
    # ends - index counts the remaining paths with this leaf, including this one; the last one ends with the row
    row = torch.searchsorted(triples.rowptr, first, right=True) - 1
    second = triples.rowptr[row + 1] - (ends[first] - index)
    leaf, other = triples.col[first], triples.col[second]
    closing = leaf * triples.num_nodes + other
    closed = keys[torch.searchsorted(keys, closing).clamp(max=len(keys) - 1)] == closing
    return TwoPaths(leaf, row, other, closed)
