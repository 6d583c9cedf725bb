"""Generators of sets of graphs, equal on every machine for equal arguments. Shapes: n nodes of a graph."""

from typing import Literal

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.datasets import KarateClub

from lightning_accel.data.graphs.families import (
    circular_skip_link,
    graph_of,
    random_regular_graph,
    relabelled,
)
from lightning_accel.data.graphs.substructures import SUBSTRUCTURES, count_of_graph, count_substructures

Family = Literal["erdos_renyi", "regular"]
Level = Literal["graph", "node"]

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
    if not 0 <= fold < _FOLDS:
        raise ValueError(f"fold must be from 0 to {_FOLDS - 1}; got {fold}")
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
