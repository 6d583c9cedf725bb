"""Ordered tuples of nodes that are marked together: counting, numbering and drawing.

Shapes: N nodes, B graphs, k marks, S draws, T tuples.
"""

from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor

TupleKind = Literal["nodes", "edges", "two_paths", "all"]
MARKS: dict[TupleKind, int] = {"nodes": 1, "edges": 2, "two_paths": 3}
_EXACT = 2.0**52  # integers up to here are exact in float64, which counts tuples


class Tuples(NamedTuple):
    """Represent all tuples of one kind in a batch of graphs, without listing them.

    Nodes are sorted by graph. A graph without tuples gets one tuple without marks, with entries -1. In graphs with
    fewer nodes than marks, tuples of kind ``"all"`` end in entries -1.
    """

    kind: TupleKind
    marks: int
    ptr: Tensor
    """(B + 1,): the first node of each graph."""
    rowptr: Tensor
    """(N + 1,): where the neighbours of each node begin in ``col``; all 0 for kinds that do not need them."""
    col: Tensor
    """Neighbours, sorted by node."""
    rank: Tensor
    """(N + 1,): number of 2-paths with a centre before each node."""
    total: Tensor
    """(B,) float64: number of tuples of each graph, at least 1."""

    def at(self, graph: Tensor, number: Tensor) -> Tensor:
        """Return the tuples (T, k) with the given numbers (T,), from 0 to total - 1, in the given graphs (T,)."""
        if self.kind == "all":
            size = self.ptr.diff()[graph]
            return self._arrange(graph, self._digits(size, number))
        first = self.ptr[graph]
        if self.kind == "nodes":
            found = first + number
            exists = found < self.ptr[graph + 1]
            return torch.where(exists, found, -1)[:, None]
        if self.kind == "edges":
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
            The graph of each tuple (T,), sorted, and the tuples (T, k). For graphs with more than 2**52 tuples, they
            are drawn with replacement.

        Source: Floyd's algorithm (Bentley and Floyd 1987, Communications of the ACM 30, 9), for all graphs at once.
        """
        drawn = self.total.clamp(max=samples).long()
        numbers = drawn.new_full((len(drawn), samples), -1)
        start = self.total.clamp(max=_EXACT).long() - drawn
        uniform = _uniform((len(drawn), samples), self.ptr, generator)
        for step in range(samples):
            last = start + step
            number = torch.minimum((uniform[:, step] * (last + 1)).long(), last)
            taken = (numbers[:, :step] == number[:, None]).any(dim=1)
            numbers[:, step] = torch.where(step < drawn, torch.where(taken, last, number), -1)
        graph, _ = (numbers >= 0).nonzero(as_tuple=True)
        tuples = self.at(graph, numbers[numbers >= 0])
        if self.kind == "all":
            tuples = self._redraw(graph, tuples, generator)
        return graph, tuples

    def _redraw(self, graph: Tensor, tuples: Tensor, generator: Generator | None) -> Tensor:
        """Draw tuples again, with replacement, for graphs with too many tuples to number."""
        uniform = _uniform((len(graph), self.marks), self.ptr, generator)
        left = self.ptr.diff()[graph][:, None] - torch.arange(self.marks, device=graph.device)
        digits = torch.minimum((uniform * left).long(), left - 1)
        return torch.where((self.total[graph] > _EXACT)[:, None], self._arrange(graph, digits), tuples)

    def _two_path(self, path: Tensor) -> Tensor:
        """Return walks u, c, v by their numbers, with u != v both neighbours of c."""
        centre = _owner(self.rank, path)
        first, degree = self.rowptr[centre], self.rowptr[centre + 1] - self.rowptr[centre]
        left, right = (path - self.rank[centre]) // (degree - 1), (path - self.rank[centre]) % (degree - 1)
        right = right + (right >= left)
        return torch.stack([self.col[first + left], centre, self.col[first + right]], dim=1)

    def _digits(self, size: Tensor, number: Tensor) -> Tensor:
        """Split ``number`` into digits: digit p selects one of the ``size - p`` remaining nodes; -1 if none remains."""
        digits = []
        for place in range(self.marks):
            left = size - place
            base = left.clamp(min=1)
            digits.append(torch.where(left > 0, number % base, -1))
            number = number // base
        return torch.stack(digits, dim=1)

    def _arrange(self, graph: Tensor, digits: Tensor) -> Tensor:
        """Return the nodes (T, k) that ``digits`` (T, k) select, each among the remaining nodes in ascending order."""
        chosen: list[Tensor] = []
        earlier = digits[:, :0]  # sorted
        for digit in digits.unbind(dim=1):
            node = digit
            for taken in earlier.unbind(dim=1):
                node = node + (node >= taken)
            chosen.append(torch.where(digit < 0, -1, node))
            # missing nodes sort last
            padded = torch.where(digit < 0, torch.iinfo(torch.int64).max, node)
            earlier = torch.cat([earlier, padded[:, None]], dim=1).sort(dim=1).values
        nodes = torch.stack(chosen, dim=1)
        return torch.where(nodes < 0, -1, nodes + self.ptr[graph][:, None])


def resolve_marks(
    marks: int | Literal["full"] | None, tuples: TupleKind | None, max_nodes: int | None = None
) -> tuple[int, TupleKind]:
    """Return the number of marks and the kind of tuples."""
    if marks == "full":
        if tuples not in (None, "all") or max_nodes is None or max_nodes < 1:
            raise ValueError(f"marks='full' needs max_nodes, and tuples='all', got {max_nodes} and {tuples!r}")
        return max_nodes, "all"
    if max_nodes is not None:
        raise ValueError("max_nodes is the width of marks='full': leave it out")
    if tuples is None:
        marks = 1 if marks is None else marks
        tuples = next((kind for kind, size in MARKS.items() if size == marks), None)
        if tuples is None:
            raise ValueError(
                f"marks, or marking.num_nodes of RelationalGNN, must be 1, 2 or 3 for connected tuples; got {marks}. "
                "For others set tuples='all'"
            )
    if tuples not in (*MARKS, "all"):
        raise ValueError(f"tuples must be one of {[*MARKS, 'all']}, got {tuples!r}")
    if tuples == "all":
        if marks is None or marks < 1:
            raise ValueError(f"tuples='all' needs marks, at least 1, or 'full', got {marks}")
        return marks, tuples
    if marks not in (None, MARKS[tuples]):
        raise ValueError(f"tuples={tuples!r} have {MARKS[tuples]} marks, got {marks}")
    return MARKS[tuples], tuples


def find_tuples(kind: TupleKind, marks: int, ptr: Tensor, source: Tensor, target: Tensor) -> Tuples:
    """Prepare the tuples of graphs whose nodes begin at ``ptr`` (B + 1,), with arcs ``source`` -> ``target`` (M,).

    Directions, self-loops and duplicates are ignored: two nodes are neighbours if an arc joins them in either
    direction.
    """
    num_nodes = int(ptr[-1])
    none = ptr.new_zeros(num_nodes + 1)
    if kind in ("nodes", "all"):
        count = _arrangements(ptr.diff(), 1 if kind == "nodes" else marks)
        return Tuples(kind, marks, ptr, none, none[:0], none, count.clamp(min=1))
    proper = source != target
    source, target = source[proper], target[proper]
    key = torch.cat([source * num_nodes + target, target * num_nodes + source]).unique()
    degree = torch.bincount(key // max(num_nodes, 1), minlength=num_nodes)
    rowptr = _starts(degree)
    rank = _starts(degree * (degree - 1))
    total = rowptr if kind == "edges" else rank
    count = total[ptr].diff().double()
    return Tuples(kind, marks, ptr, rowptr, key % max(num_nodes, 1), rank, count.clamp(min=1))


def _arrangements(size: Tensor, marks: int) -> Tensor:
    """Count the ordered choices of ``marks`` out of ``size`` nodes, or of all nodes if they are fewer."""
    left = size.double()[:, None] - torch.arange(marks, device=size.device)
    return left.clamp(min=1).prod(dim=1)


def _starts(count: Tensor) -> Tensor:
    return torch.cat([count.new_zeros(1), count.cumsum(0)])


def _owner(starts: Tensor, number: Tensor) -> Tensor:
    return torch.searchsorted(starts, number, right=True) - 1


def _uniform(shape: tuple[int, int], like: Tensor, generator: Generator | None) -> Tensor:
    """Draw uniform numbers in [0, 1), in float64 so that many tuples have equal probabilities, on any device."""
    device = like.device if generator is None else generator.device
    return torch.rand(shape, dtype=torch.float64, device=device, generator=generator).to(like.device)
