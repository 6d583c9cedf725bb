"""Constructions of graphs; ``edge_index`` holds each edge in both directions."""

from collections.abc import Iterable
from itertools import combinations

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
