"""Generators of graphs, equal on every machine for equal arguments. Shapes: n nodes of a graph.

``edge_index`` holds each edge in both directions.
"""

from collections.abc import Iterable
from itertools import combinations
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.datasets import KarateClub

from lightning_accel.data.graphs.substructures import SUBSTRUCTURES, count_of_graph, count_substructures

Family = Literal["erdos_renyi", "regular"]
Level = Literal["graph", "node"]
TargetKind = Literal["classification", "multilabel", "regression"]

CSL_SKIPS = (2, 3, 4, 5, 6, 9, 11, 12, 13, 16)
_CSL_NODES = 41
_CSL_COPIES = 15
_FOLDS = 5
_REGULAR_SIZES = ((10, 6), (15, 6), (20, 5), (30, 5))  # nodes and degree, of Chen et al.
_OFFICER = [9, 14, 15, 18, 20, *range(22, 34)]  # by club joined: member 8, of this faction, joined the other club


def csl_graphs(seed: int = 0) -> tuple[list[Data], list[str]]:
    """Generate 150 circular skip links of 41 nodes, 15 random relabellings for each of ten skips, and class names.

    Source: Murphy et al. 2019, https://arxiv.org/abs/1903.02541, sec. 4.1.
    """
    generator = torch.Generator().manual_seed(seed)
    graphs = []
    for number, skip in enumerate(CSL_SKIPS):
        graph = circular_skip_link(_CSL_NODES, skip)
        for _ in range(_CSL_COPIES):
            graphs.append(relabelled(graph, torch.randperm(_CSL_NODES, generator=generator)))
            graphs[-1].y = torch.tensor([number])
    return graphs, [f"skip {skip}" for skip in CSL_SKIPS]


def csl_fold(fold: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the 90 training, 30 validation and 30 test graphs of one of five folds, stratified by class.

    The copies of each class are split into five parts: ``fold`` tests, the next part validates, the other three train.

    Source: Murphy et al. 2019; Dwivedi et al. 2020, https://arxiv.org/abs/2003.00982.
    """
    generator = np.random.default_rng(seed)
    of = np.concatenate([generator.permutation(_CSL_COPIES) % _FOLDS for _ in CSL_SKIPS])
    test, val = of == fold, of == (fold + 1) % _FOLDS
    return np.flatnonzero(~test & ~val), np.flatnonzero(val), np.flatnonzero(test)


def substructure_set(num_graphs: int, family: Family, level: Level, seed: int) -> tuple[list[Data], list[str]]:
    """Generate random graphs with ``y``, the counts of seven substructures: (1, 7), or (n, 7) for each node.

    ``erdos_renyi``: 10 nodes, each edge with probability .3. ``regular``: 10 nodes of degree 6, 15 of 6, 20 of 5 or 30
    of 5, a quarter of the graphs each, with as many random edges removed as there are nodes. The substructures are
    those of :func:`~lightning_accel.data.graphs.substructures.count_substructures`.

    Source: Chen et al. 2020, https://arxiv.org/abs/2002.04025, sec. 6 and appendix.
    """
    generator = torch.Generator().manual_seed(seed)
    if family == "erdos_renyi":
        graphs = [_erdos_renyi(10, 0.3, generator) for _ in range(num_graphs)]
    else:
        graphs = [_thinned_regular(*_REGULAR_SIZES[i % 4], generator) for i in range(num_graphs)]
    sizes = np.array([graph.num_nodes for graph in graphs])
    for size in np.unique(sizes).tolist():
        alike = np.flatnonzero(sizes == size).tolist()
        for start in range(0, len(alike), 256):  # 60 MB at a time for 30 nodes
            these = [graphs[i] for i in alike[start : start + 256]]
            counts = count_substructures(torch.stack([adjacency_of(graph) for graph in these]))
            counts = (counts if level == "node" else count_of_graph(counts)[:, None]).float()
            for graph, count in zip(these, counts, strict=True):
                graph.y = count
    return graphs, list(SUBSTRUCTURES)


def karate_club() -> tuple[Data, list[str]]:
    """Return Zachary's karate club: 34 members, one-hot ``x`` (34, 34), and the faction that each member joined.

    Source: Zachary 1977, https://doi.org/10.1086/jar.33.4.3629752; the edges are those of PyG.
    """
    club = KarateClub()[0]
    y = torch.zeros(34, dtype=torch.int64)
    y[_OFFICER] = 1
    return Data(x=club.x, edge_index=club.edge_index, y=y), ["Mr. Hi", "Officer"]


def adjacency_of(graph: Data) -> torch.Tensor:
    """Return the adjacency matrix, (n, n), of zeros and ones."""
    adjacency = torch.zeros(graph.num_nodes, graph.num_nodes)
    adjacency[graph.edge_index[0], graph.edge_index[1]] = 1
    return adjacency


def _erdos_renyi(num_nodes: int, probability: float, generator: torch.Generator) -> Data:
    pairs = torch.triu_indices(num_nodes, num_nodes, 1)
    chosen = torch.rand(pairs.shape[1], generator=generator) < probability
    return graph_of(map(tuple, pairs[:, chosen].t().tolist()), num_nodes)


def _thinned_regular(num_nodes: int, degree: int, generator: torch.Generator) -> Data:
    """Generate a random regular graph without ``num_nodes`` of its edges, so that nodes differ in their stars."""
    ends = random_regular_graph(num_nodes, degree, generator).edge_index
    edges = ends[:, ends[0] < ends[1]].t()
    kept = torch.randperm(len(edges), generator=generator)[num_nodes:]
    return graph_of(map(tuple, edges[kept].tolist()), num_nodes)


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
