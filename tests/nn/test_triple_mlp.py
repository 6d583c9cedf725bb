"""The MLP kernel of order-3 pooling: against all paths one by one, in chunks, and sampled."""

import itertools
import weakref

import pytest
import torch
from torch import Tensor

from lightning_accel.nn.invariance import assert_permutation_invariant
from lightning_accel.nn.relational import RO3Pooling
from lightning_accel.nn.triple_kernels import TripleMLP
from lightning_accel.ops import find_triples

EDGES = [{}, {"edge_dim": 3}, {"num_relations": 4}]
EDGE_NAMES = ["plain", "features", "typed"]


def simple_graph(n: int, density: float, options: dict) -> tuple[Tensor, Tensor, Tensor | None]:
    pairs = torch.combinations(torch.arange(n)).T
    edge_index = pairs[:, torch.rand(pairs.shape[1]) < density]
    attr = None
    if "edge_dim" in options:
        attr = torch.randn(edge_index.shape[1], 3, dtype=torch.float64)
    elif options:
        attr = torch.randint(4, (edge_index.shape[1],))
    return torch.randn(n, 2, dtype=torch.float64), edge_index, attr


def sums_one_by_one(pool: RO3Pooling, x: Tensor, edge_index: Tensor, attr: Tensor | None) -> Tensor:
    """As one MLP of everything that a path is made of."""
    terms, n = pool.terms, len(x)
    as_centre, as_leaf, as_other = terms.nodes(x).chunk(3, dim=1)
    near, far, third = {}, {}, {}
    for entry, (u, v) in enumerate(edge_index.T.tolist()):
        mapped = torch.zeros(3 * 64, dtype=x.dtype) if attr is None else 1 + terms.edges.map(attr[entry])
        for pair in ((u, v), (v, u)):
            near[pair], far[pair], third[pair] = mapped.chunk(3)
    totals = {"triangle": torch.zeros(pool.rank, dtype=x.dtype), "wedge": torch.zeros(pool.rank, dtype=x.dtype)}
    for centre, (one, other) in itertools.product(range(n), itertools.combinations(range(n), 2)):
        if (centre, one) in near and (centre, other) in near:
            closed = (one, other) in near
            for leaf, last in ((one, other), (other, one)):
                hidden = as_centre[centre] + as_leaf[leaf] + as_other[last] + near[centre, leaf] + far[centre, last]
                hidden = hidden + terms.closed + third[leaf, last] if closed else hidden
                totals["triangle" if closed else "wedge"] += terms.mlp(hidden).detach() / 2
    return torch.cat([totals[name] for name in pool.types])


@pytest.mark.parametrize("options", EDGES, ids=EDGE_NAMES)
@pytest.mark.parametrize("max_paths", [3, 2**16])
def test_equals_the_sum_over_paths_one_by_one(options, max_paths):
    for n in (0, 2, 3, 7, 11):
        graph = simple_graph(n, 0.5, options)
        pool = RO3Pooling(2, 5, rank=3, kernel="mlp", max_paths=max_paths, **options).double()
        torch.testing.assert_close(pool.sums(*graph)[0], sums_one_by_one(pool, *graph), atol=1e-10, rtol=1e-10)


def test_means_are_over_paths():
    graph = simple_graph(9, 0.5, {})
    triples = find_triples(graph[1], 9)
    triangles = 3 * triples.triangle.shape[1]
    degree = triples.rowptr.diff()
    wedges = int((degree * (degree - 1) // 2).sum()) - triangles
    pool = RO3Pooling(2, 5, rank=3, kernel="mlp").double()
    counts = torch.tensor([triangles] * 3 + [wedges] * 3)
    expected = pool.sums(*graph) / counts
    pool.reduce = "mean"
    torch.testing.assert_close(pool.sums(*graph), expected)


def test_chunks_have_the_gradient_of_the_whole():
    x, edge_index, attr = simple_graph(8, 0.6, {"edge_dim": 3})
    pool = RO3Pooling(2, 2, rank=2, kernel="mlp", hidden_channels=4, mlp=torch.nn.Sequential(
        torch.nn.Tanh(), torch.nn.Linear(4, 2)), edge_dim=3).double()  # fmt: skip
    given = [x.requires_grad_(), *pool.parameters()]
    whole = torch.autograd.grad(pool(x, edge_index, attr).square().sum(), given)
    pool.terms.max_paths = 5
    torch.testing.assert_close(torch.autograd.grad(pool(x, edge_index, attr).square().sum(), given), whole)
    assert torch.autograd.gradcheck(lambda x: pool(x, edge_index, attr), [x])


@pytest.mark.parametrize("options", [{}, {"edge_dim": 3}], ids=["plain", "features"])
def test_memory_is_bounded_by_a_chunk(options, monkeypatch):
    """Neither hidden units nor indices of paths stay for the backward pass, but those of the last chunk."""
    star = torch.stack([torch.zeros(300).long(), torch.arange(1, 301)])
    chunks, kept = [], []
    values = TripleMLP._values

    def watched(self, tables, paths, triples):
        chunks.append([weakref.ref(tensor) for tensor in paths])
        return values(self, tables, paths, triples)

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    monkeypatch.setattr(TripleMLP, "_values", watched)
    pool = RO3Pooling(2, 3, kernel="mlp", max_paths=1000, **options)
    x = torch.randn(301, 2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = pool(x, star, torch.randn(300, 3) if options else None).sum()
    assert len(chunks) == 45  # of 300 * 299 / 2 paths
    alive = [sum(reference() is not None for reference in chunk) for chunk in chunks]
    assert alive[:-1] == [0] * 44
    assert sum(kept) < 300 * 299 / 2 * 25  # hidden units of all paths would be some 500 numbers each
    loss.backward()
    assert len(chunks) == 45 + 44


def test_too_many_paths_are_refused():
    leaves = torch.arange(1, 30_001)
    star = torch.stack([torch.zeros_like(leaves), leaves])
    message = "have 449985000 paths of two edges, more than the 268435456.*samples="
    with pytest.raises(ValueError, match=message):
        RO3Pooling(2, 3, kernel="mlp")(torch.ones(30_001, 2), star)
    assert RO3Pooling(2, 3, kernel="mlp", samples=2)(torch.ones(30_001, 2), star).shape == (1, 3)


@pytest.mark.parametrize("options", EDGES, ids=EDGE_NAMES)
def test_does_not_depend_on_an_order(options):
    x, edge_index, attr = simple_graph(12, 0.5, options)
    batch = torch.arange(12) // 4
    edge_index = edge_index[:, batch[edge_index[0]] == batch[edge_index[1]]]
    attr = attr if attr is None else attr[: edge_index.shape[1]]
    assert_permutation_invariant(RO3Pooling(2, 5, kernel="mlp", max_paths=4, **options), x, edge_index, attr, batch)


def sampled_batch():
    """A graph with triangles and wedges, one without a path, one without a node, and a star."""
    x, first, _ = simple_graph(9, 0.5, {})
    edge_index = torch.cat([first, torch.tensor([[9, 11, 11, 11], [10, 12, 13, 14]])], dim=1)
    batch = torch.repeat_interleave(torch.tensor([9, 2, 0, 4]))
    return torch.cat([x, torch.randn(6, 2, dtype=torch.float64)]), edge_index, None, batch, 5


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_estimates_are_unbiased_and_know_their_error(reduce):
    graph = sampled_batch()
    pool = RO3Pooling(2, 3, rank=4, kernel="mlp", samples=50, reduce=reduce).double()
    estimates = [pool.estimate(*graph) for _ in range(400)]
    means = torch.stack([estimate.mean for estimate in estimates]).detach()
    errors = torch.stack([estimate.standard_error for estimate in estimates]).detach()
    pool.samples = None
    exact = pool.estimate(*graph)
    assert not exact.standard_error.any()
    offset = (means.mean(0) - exact.mean.detach()).abs() * 400**0.5
    spread = means.std(0)
    assert (offset[[0, 3]] < 4 * spread[[0, 3]]).all()
    torch.testing.assert_close(errors.square().mean(0).sqrt(), spread, rtol=0.15, atol=1e-12)
    for nothing in (1, 2, 4):  # no path: the sum is 0, and known to be
        assert not means[:, nothing].any()
        assert not errors[:, nothing].any()


def test_samples_come_from_the_generator_and_are_trained_on():
    graph = sampled_batch()
    pool = RO3Pooling(2, 3, rank=4, kernel="mlp", samples=5).double()
    one, same, other = (pool.estimate(*graph, generator=torch.Generator().manual_seed(s)).mean for s in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    pool(*graph).sum().backward()
    assert all(parameter.grad is not None for parameter in pool.parameters())


def test_samples_need_graphs_in_order():
    pool = RO3Pooling(2, 3, kernel="mlp", samples=5)
    with pytest.raises(ValueError, match="order of its graphs; sort its nodes by batch"):
        pool(torch.randn(3, 2), torch.tensor([[0], [2]]), batch=torch.tensor([0, 1, 0]))


def test_nothing_is_sampled_from_graphs_without_nodes():
    pool = RO3Pooling(2, 3, kernel="mlp", samples=5)
    empty = torch.zeros(2, 0, dtype=torch.long)
    assert not pool(torch.zeros(0, 2), empty, batch=empty[0], size=2).any()
    assert not pool(torch.zeros(3, 2), empty).any()


def test_mixed_precision_sums_in_float32():
    x, edge_index, _ = simple_graph(12, 0.6, {})
    pool = RO3Pooling(2, 3, kernel="mlp", max_paths=7)
    expected = pool(x.float(), edge_index)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = pool(x.float(), edge_index)
        found.sum().backward()
    assert found.dtype == torch.float32
    assert (found - expected).detach().abs().max() < 2**-6 * expected.detach().abs().max()


def test_reset_draws_all_parameters_anew():
    pool = RO3Pooling(2, 3, kernel="mlp")
    before = [parameter.clone() for parameter in pool.parameters()]
    pool.reset_parameters()
    assert not any(torch.equal(old, new) for old, new in zip(before, pool.parameters(), strict=True))
