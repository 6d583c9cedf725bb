from itertools import combinations, permutations

import networkx as nx
import pytest
import torch

from lightning_accel.data.graphs.files import read_graph6
from lightning_accel.data.graphs.substructures import SUBSTRUCTURES, count_of_graph, count_substructures
from lightning_accel.data.graphs.tasks import (
    CSL_SKIPS,
    adjacency_of,
    circular_skip_link,
    csl_fold,
    csl_graphs,
    karate_club,
    random_regular_graph,
    relabelled,
    substructure_set,
)

PATTERNS = {  # edges of one copy, among the nodes 0, 1, ...
    "triangle": [(0, 1), (1, 2), (0, 2)],
    "tailed_triangle": [(0, 1), (1, 2), (0, 2), (2, 3)],
    "star_3": [(0, 1), (0, 2), (0, 3)],
    "chordal_cycle_4": [(0, 1), (1, 2), (2, 3), (0, 3), (0, 2)],
    "cycle_4": [(0, 1), (1, 2), (2, 3), (0, 3)],
    "cycle_5": [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)],
}


def brute_force(adjacency):
    """Counts of each kind for each node, by every subset of nodes and every way of laying the pattern on it."""
    n = len(adjacency)
    edge = {frozenset(pair) for pair in adjacency.nonzero().tolist()}
    counts = torch.zeros(n, len(SUBSTRUCTURES), dtype=torch.float64)
    for column, (name, size) in enumerate(SUBSTRUCTURES.items()):
        for nodes in combinations(range(n), size):
            if name == "induced_wedge":
                copies = int(sum(frozenset(pair) in edge for pair in combinations(nodes, 2)) == 2)
            else:
                laid = {
                    frozenset(frozenset((order[a], order[b])) for a, b in PATTERNS[name])
                    for order in permutations(nodes)
                }
                copies = sum(edges <= edge for edges in laid)
            counts[list(nodes), column] += copies
    return counts


def test_counts_equal_every_subset():
    graphs = torch.triu((torch.rand(4, 7, 7) < torch.tensor([0.0, 0.4, 0.7, 1.1])[:, None, None]).double(), 1)
    graphs = graphs + graphs.mT
    found = count_substructures(graphs)
    for graph, counts in zip(graphs, found, strict=True):
        assert counts.equal(brute_force(graph))
        assert counts.equal(count_substructures(graph))
        sizes = torch.tensor(list(SUBSTRUCTURES.values()))
        assert count_of_graph(counts).equal(brute_force(graph).sum(0) / sizes)
    assert count_of_graph(count_substructures(1 - torch.eye(4))).tolist() == [4, 0, 12, 4, 6, 3, 0]


@pytest.mark.parametrize(
    ("adjacency", "said"),
    [
        (torch.eye(3), "no loops"),
        (torch.tensor([[0, 2], [2, 0]]), "zeros and ones"),
        (torch.tensor([[0, 1], [0, 0]]), "symmetric"),
        (torch.zeros(2, 3), "symmetric"),
    ],
)
def test_no_counts_of_what_is_no_simple_graph(adjacency, said):
    with pytest.raises(ValueError, match=said):
        count_substructures(adjacency)


def networkx_of(graph):
    found = nx.Graph(graph.edge_index.t().tolist())
    found.add_nodes_from(range(graph.num_nodes))
    assert graph.num_edges == 2 * found.number_of_edges()  # each edge both ways, once
    return found


def test_circular_skip_links():
    for skip in CSL_SKIPS:
        expected = nx.circulant_graph(41, [1, skip])
        assert {*map(frozenset, networkx_of(circular_skip_link(41, skip)).edges)} == {*map(frozenset, expected.edges)}
    for first, second in combinations(CSL_SKIPS, 2):  # eigenvalues tell them all apart
        a, b = (torch.linalg.eigvalsh(adjacency_of(circular_skip_link(41, skip)).double()) for skip in (first, second))
        assert (a - b).abs().max() > 1e-3
    with pytest.raises(ValueError, match="skip=40 of num_nodes=41"):
        circular_skip_link(41, 40)


def test_random_regular_graphs():
    generator = torch.Generator().manual_seed(0)
    for n, degree in ((10, 6), (15, 6), (7, 2), (5, 4), (4, 0)):
        graph = networkx_of(random_regular_graph(n, degree, generator))
        assert {value for _, value in graph.degree} == {degree}
        assert len(graph) == n
    for n, degree in ((5, 3), (4, 4)):
        with pytest.raises(ValueError, match=f"degree={degree}, num_nodes={n}"):
            random_regular_graph(n, degree, generator)
    found = sum(count_triangles(networkx_of(random_regular_graph(20, 5, generator))) for _ in range(200)) / 200
    expected = sum(count_triangles(nx.random_regular_graph(5, 20, seed)) for seed in range(200)) / 200
    assert found == pytest.approx(expected, abs=0.9)  # the deviation of a mean is 0.25


def count_triangles(graph):
    return sum(nx.triangles(graph).values()) / 3


def test_relabelling_keeps_the_graph():
    graph, order = circular_skip_link(9, 2), torch.randperm(9)
    a = adjacency_of(relabelled(graph, order))
    assert a[order][:, order].equal(adjacency_of(graph))


def test_csl_is_ten_classes_in_five_folds():
    graphs, names = csl_graphs()
    assert [int(graph.y) for graph in graphs] == [i for i in range(10) for _ in range(15)]
    assert names == [f"skip {skip}" for skip in CSL_SKIPS]
    eigenvalues = {
        i: torch.linalg.eigvalsh(adjacency_of(circular_skip_link(41, s)).double()) for i, s in enumerate(CSL_SKIPS)
    }
    for graph in graphs[::7]:
        assert torch.linalg.eigvalsh(adjacency_of(graph).double()).allclose(eigenvalues[int(graph.y)], atol=1e-5)
    assert len({str(graph.edge_index.tolist()) for graph in graphs}) == 150
    again, other = csl_graphs(), csl_graphs(seed=1)
    assert all(a.edge_index.equal(b.edge_index) for a, b in zip(graphs, again[0], strict=True))
    assert not all(a.edge_index.equal(b.edge_index) for a, b in zip(graphs, other[0], strict=True))
    tested = []
    for fold in range(5):
        train, val, test = csl_fold(fold)
        assert [len(part) for part in (train, val, test)] == [90, 30, 30]
        assert sorted([*train, *val, *test]) == list(range(150))
        for part, copies in ((train, 9), (val, 3), (test, 3)):
            assert torch.tensor(part // 15).bincount().tolist() == [copies] * 10
        tested += test.tolist()
        assert val.tolist() == csl_fold((fold + 1) % 5)[2].tolist()
    assert sorted(tested) == list(range(150))


@pytest.mark.parametrize("family", ["erdos_renyi", "regular"])
def test_targets_of_random_graphs_are_their_counts(family):
    whole, names = substructure_set(8, family, "graph", seed=2)
    nodes, _ = substructure_set(8, family, "node", seed=2)
    assert names == list(SUBSTRUCTURES)
    for graph, same in zip(whole, nodes, strict=True):
        assert graph.edge_index.equal(same.edge_index)
        assert graph.y.shape == (1, 7)
        assert graph.y[0].double().equal(count_of_graph(same.y.double()))
        assert same.y.double().equal(count_substructures(adjacency_of(graph)))
        triangles = nx.triangles(networkx_of(graph))
        assert same.y[:, 0].tolist() == [triangles[i] for i in range(graph.num_nodes)]
    sizes = {10} if family == "erdos_renyi" else {10, 15, 20, 30}
    assert {graph.num_nodes for graph in whole} == sizes
    if family == "erdos_renyi":
        many, _ = substructure_set(400, family, "graph", seed=0)
        assert sum(graph.num_edges for graph in many) / 2 / 400 / 45 == pytest.approx(0.3, abs=0.015)
    else:
        assert {(graph.num_nodes, graph.num_edges // 2) for graph in whole} == {(10, 20), (15, 30), (20, 30), (30, 45)}


def test_the_club_is_the_one_of_networkx():
    graph, names = karate_club()
    club = nx.karate_club_graph()
    assert {*map(frozenset, networkx_of(graph).edges)} == {*map(frozenset, club.edges)}
    assert [names[side] for side in graph.y.tolist()] == [club.nodes[i]["club"] for i in club]


def test_graph6_is_that_of_networkx():
    for n in (0, 1, 2, 5, 62, 63, 70):
        graph = nx.gnp_random_graph(n, 0.3, seed=n)
        text = nx.to_graph6_bytes(graph, header=False).decode().strip()
        found = read_graph6(text)
        assert found.num_nodes == n
        assert {*map(frozenset, networkx_of(found).edges)} == {*map(frozenset, graph.edges)}
    for text, said in (
        ("", "no graph6"),
        ("B", "must have 1 characters .* 3; got 0"),
        ("Bww", "got 2"),
        ("B w", "no graph6"),
        ("~?", "got 0"),
    ):
        with pytest.raises(ValueError, match=said):
            read_graph6(text)
