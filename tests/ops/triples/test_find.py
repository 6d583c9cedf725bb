import itertools

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from lightning_accel.ops import find_triples, neighbour_sum, triangle_sum
from lightning_accel.ops.native import KERNELS
from lightning_accel.ops.triples import find

GRAPHS = [(0, 0), (1, 0), (1, 4), (2, 5), (5, 0), (6, 9), (9, 30), (12, 40), (12, 90), (12, 400)]


@pytest.fixture(autouse=True, params=["formula", "kernel"])
def implementation(request):
    """Both do all of it: the formula in torch, and kernels in C++ where they can be built."""
    if request.param == "kernel":
        request.getfixturevalue("native")
        yield
        return
    with KERNELS.switched_off():
        yield


def random_edges(num_nodes, num_entries):
    """With loops, repetitions, both directions or one, and isolated nodes where there are few."""
    return torch.randint(max(num_nodes, 1), (2, num_entries))


def adjacency(edge_index, num_nodes):
    dense = torch.zeros(num_nodes, num_nodes, dtype=torch.float64)
    dense[edge_index[0], edge_index[1]] = 1
    dense = torch.maximum(dense, dense.T)
    return dense.fill_diagonal_(0)


def triangles(dense):
    nodes = range(len(dense))
    return [[i, j, k] for i, j, k in itertools.combinations(nodes, 3) if dense[i, j] and dense[i, k] and dense[j, k]]


def brute_force_sum(x, y, dense):
    out = torch.zeros_like(x)
    for triangle in triangles(dense):
        for i, j, k in itertools.permutations(triangle):
            out[i] += x[j] * y[k]
    return out


@pytest.mark.parametrize(("num_nodes", "num_entries"), GRAPHS)
@pytest.mark.parametrize("max_wedges", [1, 5, 2**20])
def test_lists_every_edge_and_triangle_once(num_nodes, num_entries, max_wedges, monkeypatch):
    monkeypatch.setattr(find, "MAX_WEDGES", max_wedges)
    edge_index = random_edges(num_nodes, num_entries)
    triples = find_triples(edge_index, num_nodes)
    dense = adjacency(edge_index, num_nodes)
    assert triples.num_nodes == num_nodes
    assert triples.edge.T.tolist() == dense.triu().nonzero().tolist()
    assert triples.triangle.T.tolist() == triangles(dense)
    rows = torch.repeat_interleave(triples.rowptr.diff())
    assert torch.stack([rows, triples.col]).T.tolist() == dense.nonzero().tolist()
    ends = torch.stack([torch.minimum(rows, triples.col), torch.maximum(rows, triples.col)])
    assert triples.edge[:, triples.edge_of].tolist() == ends.tolist()


@pytest.mark.parametrize(("num_nodes", "num_entries"), GRAPHS)
def test_lists_what_makes_a_triangle_with_nodes_and_edges(num_nodes, num_entries):
    edge_index = random_edges(num_nodes, num_entries)
    triples = find_triples(edge_index, num_nodes)
    expected = triangles(adjacency(edge_index, num_nodes))
    corners = [(node, [n for n in nodes if n != node]) for nodes in expected for node in nodes]
    assert triples.num_triangles.tolist() == [sum(node in nodes for nodes in expected) for node in range(num_nodes)]
    third = [
        (node.item(), ends)
        for edge, ends in enumerate(triples.edge.T.tolist())
        for node in triples.third[triples.third_rowptr[edge] : triples.third_rowptr[edge + 1]]
    ]
    assert sorted(third) == sorted(corners)
    sides = [
        (nodes[row].item(), triples.edge[:, side[row]].tolist())
        for nodes, side in zip(triples.triangle.T, triples.side.T, strict=True)
        for row in range(3)
    ]
    assert sorted(sides) == sorted(corners)
    assert triples.triangle_edge.tolist() == sorted(set(triples.side.flatten().tolist()))


def test_triangles_that_are_known_are_not_looked_for():
    edge_index = random_edges(9, 30)
    triples = find_triples(edge_index, 9)
    shuffled = triples.triangle[:, torch.randperm(triples.triangle.shape[1])]
    for known, again in zip(triples, find_triples(edge_index, 9, shuffled), strict=True):
        assert torch.equal(known, again)
    assert find_triples(edge_index, 9, shuffled[:, :2]).triangle.shape == (3, 2)


@pytest.mark.parametrize("known", [[0, 1, 3], [0, 2, 1], [1, 1, 2], [0, 1, 9]])
def test_what_is_no_triangle_is_refused(known):
    edge_index = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 3]])
    with pytest.raises(ValueError, match="column 1 is " + str(known).replace("[", r"\[")):
        find_triples(edge_index, 4, torch.tensor([[0, 1, 2], known]).T)
    with pytest.raises(ValueError, match="column 0 is"):
        find_triples(edge_index[:, :0], 4, torch.tensor([known]).T)


def test_triangles_that_are_known_twice_are_refused():
    edge_index = torch.tensor([[0, 1, 2, 2, 3], [1, 2, 0, 3, 1]])
    with pytest.raises(ValueError, match=r"columns \[0, 2\] are both \[0, 1, 2\]"):
        find_triples(edge_index, 4, torch.tensor([[0, 1, 2], [1, 2, 3], [0, 1, 2]]).T)


@pytest.mark.parametrize("edges", [[[0], [4]], [[-1], [2]]])
def test_nodes_past_the_last_are_refused(edges):
    with pytest.raises(ValueError, match="nodes from 0 to num_nodes - 1 = 3; found"):
        find_triples(torch.tensor(edges), 4)


@pytest.mark.parametrize("num_entries", [0, 3])
def test_what_is_no_edge_index_is_refused(num_entries):
    edge_index = torch.zeros(2, num_entries, dtype=torch.int64)
    with pytest.raises(ValueError, match="num_nodes must be 0 or more; got -1"):
        find_triples(edge_index, -1)
    for dtype in (torch.int32, torch.float32, torch.bool):
        with pytest.raises(TypeError, match=rf"must be int64; got {dtype}. Call edge_index.long\(\)"):
            find_triples(edge_index.to(dtype), 4)
    for wrong in (edge_index[0], edge_index[:1], edge_index.new_zeros(3, 2)):
        with pytest.raises(ValueError, match=r"edge_index must be \(2, M\), .*; got \("):
            find_triples(wrong, 4)


def test_a_hub_of_degree_100_000(monkeypatch):
    monkeypatch.setattr(find, "MAX_WEDGES", 1000)
    hub, leaves = 100_000, torch.arange(100_000)
    path = torch.stack([leaves[:9], leaves[1:10]])
    edge_index = torch.cat([torch.stack([leaves, torch.full_like(leaves, hub)]), path], dim=1)
    triples = find_triples(edge_index, hub + 1)
    assert triples.triangle.T.tolist() == [[i, i + 1, hub] for i in range(9)]
    x = torch.randn(hub + 1, 3, dtype=torch.float64)
    torch.testing.assert_close(neighbour_sum(x, triples)[hub], x[:hub].sum(0))
    torch.testing.assert_close(triangle_sum(x, None, triples)[hub], (x[:9] * x[1:10]).sum(0))


@pytest.mark.parametrize(("num_nodes", "num_entries"), GRAPHS)
def test_sums_match_brute_force(num_nodes, num_entries):
    edge_index = random_edges(num_nodes, num_entries)
    triples, dense = find_triples(edge_index, num_nodes), adjacency(edge_index, num_nodes)
    x, y = torch.randn(2, num_nodes, 3, dtype=torch.float64)
    torch.testing.assert_close(neighbour_sum(x, triples), dense @ x, rtol=0, atol=1e-10)
    for factor, expected in ((y, brute_force_sum(x, y, dense)), (None, brute_force_sum(x, x, dense) / 2)):
        torch.testing.assert_close(triangle_sum(x, factor, triples), expected, rtol=0, atol=1e-10)


@pytest.mark.sampled(default=3)
@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_derivatives(check):
    triples = find_triples(random_edges(6, 20), 6)
    assert triples.triangle.shape[1] > 2
    x, y = torch.randn(2, 6, 2, dtype=torch.float64).unbind()
    x.requires_grad_(), y.requires_grad_()
    assert check(lambda x: neighbour_sum(x, triples), x)
    assert check(lambda x, y: triangle_sum(x, y, triples), (x, y))
    assert check(lambda x: triangle_sum(x, None, triples), x)
