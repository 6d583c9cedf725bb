"""Constructions of graphs that are hard to distinguish; ``edge_index`` holds each edge in both directions."""

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, permutations, product

import torch
from torch import Tensor
from torch_geometric.data import Data


def graph_of(edges: Iterable[tuple[int, int]], num_nodes: int) -> Data:
    """Make an undirected graph without features from edges that are listed in one direction.

    >>> graph_of([(0, 1), (1, 2)], 3).edge_index.tolist()
    [[0, 1, 1, 2], [1, 0, 2, 1]]
    """
    pairs = sorted({pair for i, j in edges for pair in ((i, j), (j, i))})
    edge_index = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).t().contiguous()
    return Data(edge_index=edge_index, num_nodes=num_nodes)


def relabelled(graph: Data, order: Tensor) -> Data:
    """Return the graph with node ``i`` renamed to ``order[i]``, edges sorted, without other attributes.

    Args:
        graph: a graph of n nodes.
        order: (n,) a permutation.
    """
    edge_index = order[graph.edge_index]
    edge_index = edge_index[:, torch.argsort(edge_index[0] * len(order) + edge_index[1])]
    return Data(edge_index=edge_index, num_nodes=graph.num_nodes)


def circular_skip_link(num_nodes: int, skip: int) -> Data:
    """Make a cycle of ``num_nodes`` nodes, each also joined to the nodes ``skip`` steps away; 4-regular.

    Source: Murphy et al. 2019, https://arxiv.org/abs/1903.02541, definition 4.1.

    Raises:
        ValueError: unless 1 < skip < num_nodes - 1, as others repeat edges of the cycle; 2 skip = num_nodes gives
            degree 3.
    """
    if not 1 < skip < num_nodes - 1:
        raise ValueError(f"skip must be from 2 to num_nodes - 2; got skip={skip} of num_nodes={num_nodes}")
    return graph_of(((i, (i + step) % num_nodes) for i in range(num_nodes) for step in (1, skip)), num_nodes)


def _graph_from_adjacency(nodes: Sequence[object], adjacent: Callable[..., bool]) -> Data:
    """Make a graph of ``nodes`` with an edge where ``adjacent(first, second)``."""
    pairs = combinations(range(len(nodes)), 2)
    return graph_of(((i, j) for i, j in pairs if adjacent(nodes[i], nodes[j])), len(nodes))


def rook_graph(size: int = 4) -> Data:
    """Make the graph of a board's squares, joined within rows and columns; strongly regular, (16, 6, 2, 2) for 4."""
    squares = list(product(range(size), repeat=2))
    return _graph_from_adjacency(squares, lambda a, b: a[0] == b[0] or a[1] == b[1])


def shrikhande_graph() -> Data:
    """Make the other strongly regular graph with parameters (16, 6, 2, 2), indistinguishable by 2-FWL from Rook's."""
    steps = {(0, 1), (0, 3), (1, 0), (3, 0), (1, 1), (3, 3)}
    return _graph_from_adjacency(
        list(product(range(4), repeat=2)), lambda a, b: ((a[0] - b[0]) % 4, (a[1] - b[1]) % 4) in steps
    )


def triangular_graph(size: int = 8) -> Data:
    """Make the graph of pairs of ``size`` things, joined if they share one; strongly regular, (28, 12, 6, 4) for 8."""
    return _graph_from_adjacency([{*pair} for pair in combinations(range(size), 2)], lambda a, b: len(a & b) == 1)


def chang_graph(number: int) -> Data:
    """Make one of the three other strongly regular graphs with the parameters of ``triangular_graph(8)``.

    They are switchings of it with respect to a set of pairs: a perfect matching, an 8-cycle, or a triangle and a
    5-cycle.

    Source: Brouwer & Van Maldeghem 2022, Strongly Regular Graphs, sec. 10.11.

    Args:
        number: 1, 2 or 3.
    """
    cycles = {1: [], 2: [range(8)], 3: [range(3), range(3, 8)]}
    if number not in cycles:
        raise ValueError(f"there are the Chang graphs 1, 2 and 3; got {number}")
    switched = [{i, i + 4} for i in range(4)] if number == 1 else []
    for cycle in cycles[number]:
        nodes = list(cycle)
        switched += [{node, nodes[place - 1]} for place, node in enumerate(nodes)]
    pairs = [{*pair} for pair in combinations(range(8), 2)]
    return _graph_from_adjacency(pairs, lambda a, b: (len(a & b) == 1) != ((a in switched) != (b in switched)))


def latin_square_graph(square: Sequence[Sequence[int]]) -> Data:
    """Make the graph of a Latin square's cells, joined if they share a row, a column or a symbol; strongly regular.

    Its parameters are (n^2, 3n - 3, n, 6) for order n.
    """
    cells = [(row, column, symbol) for row, line in enumerate(square) for column, symbol in enumerate(line)]
    return _graph_from_adjacency(cells, lambda a, b: sum(x == y for x, y in zip(a, b, strict=True)) == 1)


def cyclic_square(order: int) -> list[list[int]]:
    """Return the addition table modulo ``order``, a Latin square."""
    return [[(i + j) % order for j in range(order)] for i in range(order)]


def symmetric_square() -> list[list[int]]:
    """Return the multiplication table of the symmetric group of three elements, a Latin square that is not cyclic."""
    elements = list(permutations(range(3)))
    return [[elements.index((a[b[0]], a[b[1]], a[b[2]])) for b in elements] for a in elements]


def strongly_regular_graphs() -> dict[str, Data]:
    """Return eight graphs by name, of three families that neither 2-FWL nor message passing distinguishes inside."""
    return {
        "rook": rook_graph(4),
        "shrikhande": shrikhande_graph(),
        "triangular": triangular_graph(8),
        "chang 1": chang_graph(1),
        "chang 2": chang_graph(2),
        "chang 3": chang_graph(3),
        "latin cyclic": latin_square_graph(cyclic_square(6)),
        "latin symmetric": latin_square_graph(symmetric_square()),
    }


def cfi_pair(base: Data) -> tuple[Data, Data]:
    """Make the Cai-Fuerer-Immerman pair over a connected graph: the straight and the twisted graph.

    There is a node (v, S) for each node v of ``base`` and each even set S of its edges, except that the first node of
    the twisted graph has the odd sets; (u, S) and (v, T) are joined if u v is an edge in both sets or in neither. A
    base of minimum degree 2 and treewidth above k gives a pair that k-FWL (the folklore variant) does not distinguish.

    Source: Cai, Fuerer & Immerman 1992, https://doi.org/10.1007/BF01305232, in the form without outer nodes of Fuerer
    2001.

    Raises:
        ValueError: if the base has a loop, or a node of degree above 10, which would become 2^10 or more nodes.
    """
    edges = [(i, j) for i, j in base.edge_index.t().tolist() if i < j]
    incident = [[edge for edge in edges if node in edge] for node in range(base.num_nodes or 0)]
    most = max(map(len, incident), default=0)
    if base.has_self_loops() or most > 10:
        raise ValueError(f"a base graph without loops, of degree 10 at most, is needed; got degree {most}")
    return _cfi_graph(incident, twisted=False), _cfi_graph(incident, twisted=True)


def _cfi_graph(incident: list[list[tuple[int, int]]], twisted: bool) -> Data:
    nodes = [
        (node, {*chosen})
        for node, edges in enumerate(incident)
        for size in range(int(twisted and node == 0), len(edges) + 1, 2)
        for chosen in combinations(edges, size)
    ]

    def adjacent(a: tuple[int, set[tuple[int, int]]], b: tuple[int, set[tuple[int, int]]]) -> bool:
        edge = a[0], b[0]
        return edge in incident[a[0]] and (edge in a[1]) == (edge in b[1])

    return _graph_from_adjacency(nodes, adjacent)  # nodes are in the order of the base, so an edge is (smaller, larger)


def cfi_bases() -> dict[str, Data]:
    """Return base graphs by name: K4, the prism, K3,3, the cube and the Petersen graph, all 3-regular, and K5."""
    subsets = [{*pair} for pair in combinations(range(5), 2)]
    return {
        "K4": _graph_from_adjacency(range(4), lambda a, b: True),
        "prism": graph_of([(0, 1), (1, 2), (0, 2), (3, 4), (4, 5), (3, 5), (0, 3), (1, 4), (2, 5)], 6),
        "K3,3": _graph_from_adjacency(range(6), lambda a, b: (a < 3) != (b < 3)),
        "cube": _graph_from_adjacency(range(8), lambda a, b: (a ^ b).bit_count() == 1),
        "Petersen": _graph_from_adjacency(subsets, lambda a, b: not a & b),
        "K5": _graph_from_adjacency(range(5), lambda a, b: True),
    }


def random_regular_graph(num_nodes: int, degree: int, generator: torch.Generator) -> Data:
    """Draw a graph whose nodes all have ``degree``, nearly uniformly.

    Source: Steger & Wormald 1999, https://doi.org/10.1017/S0963548399003867: stubs are paired at random, and those
    that would make a loop or repeat an edge are drawn again.

    Raises:
        ValueError: unless 0 <= degree < num_nodes and their product is even.
    """
    if not 0 <= degree < num_nodes or num_nodes * degree % 2:
        raise ValueError(
            f"degree must be below num_nodes, and their product even; got degree={degree}, num_nodes={num_nodes}"
        )
    while (edges := _pair_stubs(num_nodes, degree, generator)) is None:
        pass
    return graph_of(edges, num_nodes)


def _pair_stubs(num_nodes: int, degree: int, generator: torch.Generator) -> set[tuple[int, int]] | None:
    edges: set[tuple[int, int]] = set()
    stubs = list(range(num_nodes)) * degree
    while stubs:
        stubs = [stubs[place] for place in torch.randperm(len(stubs), generator=generator).tolist()]
        left = []
        for first, second in zip(stubs[::2], stubs[1::2], strict=True):
            edge = min(first, second), max(first, second)
            if first == second or edge in edges:
                left += [first, second]
            else:
                edges.add(edge)
        if len(left) == len(stubs) and not any(
            pair not in edges for pair in combinations(sorted({*left}), 2)
        ):  # no remaining pair may be joined
            return None
        stubs = left
    return edges
