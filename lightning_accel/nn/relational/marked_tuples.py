"""Ordered tuples of joined nodes that are marked together: counting, numbering and drawing.

Shapes: N nodes, B graphs, k marks, S draws, T tuples.
"""

from typing import NamedTuple

import torch
from torch import Generator, Tensor


class Tuples(NamedTuple):
    """Represent all nodes, edges or paths of two edges in a batch of graphs, without listing them.

    Nodes are sorted by graph. A graph without tuples gets one tuple without marks, with entries -1.
    """

    marks: int
    """k: 1 for nodes, 2 for edges in both directions, 3 for paths (end, centre, end)."""
    ptr: Tensor
    """(B + 1,): the first node of each graph."""
    rowptr: Tensor
    """(N + 1,): where the neighbours of each node begin in ``col``; all 0 for single nodes."""
    col: Tensor
    """Neighbours, sorted by node."""
    rank: Tensor
    """(N + 1,): number of 2-paths with a centre before each node."""
    total: Tensor
    """(B,): number of tuples of each graph, at least 1."""

    def at(self, graph: Tensor, number: Tensor) -> Tensor:
        """Return the tuples (T, k) with the given numbers (T,), from 0 to total - 1, in the given graphs (T,)."""
        first = self.ptr[graph]
        if self.marks == 1:
            found = first + number
            exists = found < self.ptr[graph + 1]
            return torch.where(exists, found, -1)[:, None]
        if self.marks == 2:
            arc = self.rowptr[first] + number
            exists = arc < self.rowptr[self.ptr[graph + 1]]
            arc = arc[exists]
            listed = torch.stack([_owner(self.rowptr, arc), self.col[arc]], dim=1)
        else:
            path = self.rank[first] + number
            exists = path < self.rank[self.ptr[graph + 1]]
            listed = self._two_path(path[exists])
        tuples = number.new_full((len(number), self.marks), -1)
        tuples[exists] = listed
        return tuples

    def draw(self, samples: int, generator: Generator | None) -> tuple[Tensor, Tensor]:
        """Draw ``samples`` tuples of each graph uniformly without replacement, or all tuples if there are fewer.

        Returns:
            The graph of each tuple (T,), sorted, and the tuples (T, k).

        Source: Floyd's algorithm (Bentley and Floyd 1987, Communications of the ACM 30, 9), for all graphs at once.
        """
        drawn = self.total.clamp(max=samples)
        numbers = drawn.new_full((len(drawn), samples), -1)
        start = self.total - drawn
        device = self.ptr.device if generator is None else generator.device
        # float64, so that many tuples have equal probabilities, on any device
        uniform = torch.rand(len(drawn), samples, dtype=torch.float64, device=device, generator=generator)
        uniform = uniform.to(self.ptr.device)
        for step in range(samples):
            last = start + step
            number = torch.minimum((uniform[:, step] * (last + 1)).long(), last)
            taken = (numbers[:, :step] == number[:, None]).any(dim=1)
            numbers[:, step] = torch.where(step < drawn, torch.where(taken, last, number), -1)
        graph, _ = (numbers >= 0).nonzero(as_tuple=True)
        return graph, self.at(graph, numbers[numbers >= 0])

    def _two_path(self, path: Tensor) -> Tensor:
        """Return walks u, c, v by their numbers, with u != v both neighbours of c."""
        centre = _owner(self.rank, path)
        first, degree = self.rowptr[centre], self.rowptr[centre + 1] - self.rowptr[centre]
        left, right = (path - self.rank[centre]) // (degree - 1), (path - self.rank[centre]) % (degree - 1)
        right = right + (right >= left)
        return torch.stack([self.col[first + left], centre, self.col[first + right]], dim=1)


def find_tuples(marks: int, ptr: Tensor, source: Tensor, target: Tensor) -> Tuples:
    """Prepare the tuples of graphs whose nodes begin at ``ptr`` (B + 1,), with arcs ``source`` -> ``target`` (M,).

    Directions, self-loops and duplicates are ignored: two nodes are neighbours if an arc joins them in either
    direction.
    """
    num_nodes = int(ptr[-1])
    none = ptr.new_zeros(num_nodes + 1)
    if marks == 1:
        return Tuples(marks, ptr, none, none[:0], none, ptr.diff().clamp(min=1))
    proper = source != target
    source, target = source[proper], target[proper]
    key = torch.cat([source * num_nodes + target, target * num_nodes + source]).unique()
    degree = torch.bincount(key // max(num_nodes, 1), minlength=num_nodes)
    rowptr = _starts(degree)
    rank = _starts(degree * (degree - 1))
    count = (rowptr if marks == 2 else rank)[ptr].diff()
    return Tuples(marks, ptr, rowptr, key % max(num_nodes, 1), rank, count.clamp(min=1))


def _starts(count: Tensor) -> Tensor:
    return torch.cat([count.new_zeros(1), count.cumsum(0)])


def _owner(starts: Tensor, number: Tensor) -> Tensor:
    return torch.searchsorted(starts, number, right=True) - 1
