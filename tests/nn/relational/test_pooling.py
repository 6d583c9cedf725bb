import itertools
import math
from collections import Counter
from contextlib import nullcontext

import jsonargparse
import networkx as nx
import pytest
import torch
from torch import nn
from torch_geometric.nn import GIN, MLP, GINEConv, GPSConv, GraphNorm, LayerNorm, Sequential

from lightning_accel.nn.relational.pooling import RelationalPooling, find_tuples

KINDS = {"nodes": 1, "edges": 2, "two_paths": 3, "all": 2}


class Sums(nn.Module):
    """Message passing by sums alone, with a smooth nonlinearity; weights of its own for arcs."""

    def __init__(self, inputs: int, width: int = 4, rounds: int = 3) -> None:
        super().__init__()
        self.first, self.own, self.other = nn.Linear(inputs, width), nn.Linear(width, width), nn.Linear(width, width)
        self.edge = nn.Linear(1, width)
        self.rounds = rounds

    def forward(self, x, edge_index, edge_attr=None):
        h = self.first(x)
        for _ in range(self.rounds):
            message = self.other(h)[edge_index[0]]
            if edge_attr is not None:
                message = message * self.edge(edge_attr)
            h = torch.tanh(self.own(h) + torch.zeros_like(h).index_add(0, edge_index[1], message))
        return h


def pooling_of(kind: str, inputs: int = 2, width: int = 4, **options) -> RelationalPooling:
    """With a head that is not linear, in evaluation."""
    marks = KINDS[kind]
    head = nn.Sequential(nn.Linear(width * (1 if options.get("level") == "node" else 1 + marks), 5), nn.Tanh())
    pooling = RelationalPooling(Sums(inputs + marks, width), marks, kind, head=head, **options)
    return pooling.double().eval()


def as_tensors(*graphs: nx.Graph, features: int = 2):
    """x, edge_index in both directions, edge_attr and batch of ``graphs``."""
    sizes = [len(graph) for graph in graphs]
    edges = [torch.tensor(list(graph.edges), dtype=torch.long).reshape(-1, 2).T for graph in graphs]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    edge_index = torch.cat([edge + start for edge, start in zip(edges, starts, strict=True)], dim=1)
    edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
    batch = torch.repeat_interleave(torch.tensor(sizes))
    x = torch.randn(len(batch), features, dtype=torch.float64)
    return x, edge_index, torch.randn(edge_index.shape[1], 1, dtype=torch.float64), batch


def tuples_by_loop(kind: str, nodes: list[int], edge_index: torch.Tensor, marks: int) -> list[tuple[int, ...]]:
    joined = {(u, v) for u, v in edge_index.T.tolist() if u != v}
    joined |= {(v, u) for u, v in joined}
    if kind == "all":
        return list(itertools.permutations(nodes, min(marks, len(nodes))))
    found = [
        t
        for t in itertools.permutations(nodes, KINDS[kind])
        if all(pair in joined for pair in itertools.pairwise(t))
    ]  # fmt: skip
    return found or [()]


def mean_by_loop(pooling: RelationalPooling, x, edge_index, edge_attr=None, batch=None, size=None) -> torch.Tensor:
    """One graph and one tuple after another."""
    batch = torch.zeros(len(x), dtype=torch.long) if batch is None else batch
    size = int(batch.max()) + 1 if size is None else size
    rows, node_rows = [], torch.zeros(len(x), 5, dtype=x.dtype)
    for graph in range(size):
        nodes = (batch == graph).nonzero()[:, 0].tolist()
        here = (batch[edge_index[0]] == graph).nonzero()[:, 0]
        local = torch.tensor([[nodes.index(i) for i in end] for end in edge_index[:, here].tolist()]).reshape(2, -1)
        values = []
        for chosen in tuples_by_loop(pooling.tuples, list(range(len(nodes))), local, pooling.marks):
            marked = torch.zeros(len(nodes), pooling.marks, dtype=x.dtype)
            for place, node in enumerate(chosen):
                marked[node, place] = 1
            inputs = (torch.cat([x[nodes], marked], dim=1), local.long())
            h = pooling.base_gnn(*inputs) if edge_attr is None else pooling.base_gnn(*inputs, edge_attr[here])
            if pooling.level == "node":
                values.append(pooling.head(h))
                continue
            seen = [h[node] for node in chosen] + [torch.zeros_like(h.sum(0))] * (pooling.marks - len(chosen))
            values.append(pooling.head(torch.cat([h.sum(0), *seen])))
        mean = torch.stack(values).mean(0)
        if pooling.level == "node":
            node_rows[nodes] = mean
        rows.append(mean)
    return node_rows if pooling.level == "node" else torch.stack(rows)


UNEQUAL = (
    nx.gnp_random_graph(6, 0.5, seed=1), nx.path_graph(3), nx.empty_graph(4), nx.empty_graph(1), nx.star_graph(4),
    nx.path_graph(2),
)  # fmt: skip


@pytest.mark.sampled(default=13)
@pytest.mark.parametrize("level", ["graph", "node"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_size", [1, 50, 10**6])
def test_equals_a_loop_over_tuples(kind, level, chunk_size):
    x, edge_index, edge_attr, batch = as_tensors(*UNEQUAL)
    pooling = pooling_of(kind, level=level, chunk_size=chunk_size)
    for attributes in (None, edge_attr):
        expected = mean_by_loop(pooling, x, edge_index, attributes, batch)
        got = pooling.estimate(x, edge_index, attributes, batch)
        torch.testing.assert_close(got.mean, expected, rtol=0, atol=1e-10)
        assert not got.standard_error.any()


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_without_tuples(kind):
    """No nodes at all, no nodes in the last graphs, no graphs."""
    pooling = pooling_of(kind)
    x, edge_index, _, batch = as_tensors(nx.empty_graph(0), nx.path_graph(2), nx.empty_graph(0))
    expected = mean_by_loop(pooling, x, edge_index, batch=batch, size=4)
    for training in (False, True):
        pooling.train(training)
        got = pooling(x, edge_index, batch=batch, size=4)
        torch.testing.assert_close(got[[0, 2, 3]], expected[[0, 2, 3]], rtol=0, atol=1e-10)
        nothing, no_edges = x[:0], edge_index[:, :0]
        torch.testing.assert_close(pooling(nothing, no_edges), expected[:1], rtol=0, atol=1e-10)
        assert pooling(nothing, no_edges, batch=batch[:0]).shape == (0, 5)


@pytest.mark.parametrize("kind", ["edges", "two_paths"])
def test_loops_duplicates_and_directions_make_no_tuples(kind):
    arcs = torch.tensor([[0, 0, 0, 1, 2, 2, 1, 3], [0, 1, 1, 0, 1, 2, 3, 1]])
    space = find_tuples(kind, KINDS[kind], torch.tensor([0, 4]), *arcs)
    listed = space.at(torch.zeros(int(space.total), dtype=torch.long), torch.arange(int(space.total)))
    assert sorted(map(tuple, listed.tolist())) == sorted(tuples_by_loop(kind, [0, 1, 2, 3], arcs, KINDS[kind]))
    pooling = pooling_of(kind)
    x = torch.randn(4, 2, dtype=torch.float64)
    torch.testing.assert_close(pooling(x, arcs), mean_by_loop(pooling, x, arcs), rtol=0, atol=1e-10)


@pytest.mark.parametrize("level", ["graph", "node"])
@pytest.mark.parametrize("kind", KINDS)
def test_order_of_nodes_edges_and_graphs_does_not_matter(kind, level):
    """Nodes of different graphs mixed, too."""
    x, edge_index, edge_attr, batch = as_tensors(*UNEQUAL)
    pooling = pooling_of(kind, level=level, chunk_size=90)
    expected = pooling(x, edge_index, edge_attr, batch)
    nodes, edges, graphs = (torch.randperm(n) for n in (len(x), edge_index.shape[1], len(UNEQUAL)))
    places = nodes.argsort()
    got = pooling(x[nodes], places[edge_index[:, edges]], edge_attr[edges], graphs[batch][nodes])
    expected = expected[nodes] if level == "node" else expected[graphs.argsort()]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kind", "marks"), [("nodes", 1), ("edges", 2), ("two_paths", 3), ("all", 2), ("all", 4)])
def test_each_tuple_is_drawn_as_often(kind, marks):
    """Chi-square at 4 standard deviations, on a graph with unequal degrees, duplicates and a loop; numbers permuted."""
    graph = nx.lollipop_graph(4, 1)
    edge_index = as_tensors(graph)[1]
    edge_index = torch.cat([edge_index, edge_index[:, :3], torch.tensor([[0], [0]])], dim=1)
    copies = 6000
    for order in (torch.arange(5), torch.randperm(5)):
        shifted = (order[edge_index][:, None] + 5 * torch.arange(copies)[:, None]).flatten(1)
        ptr = 5 * torch.arange(copies + 1)
        owner, tuples = find_tuples(kind, marks, ptr, *shifted).draw(1, None)
        assert torch.equal(owner, torch.arange(copies))
        counts = Counter(map(tuple, order.argsort()[tuples - ptr[:-1, None]].tolist()))
        expected = tuples_by_loop(kind, list(range(5)), edge_index, marks)
        assert set(counts) <= set(expected)
        mean = copies / len(expected)
        statistic = sum((counts[t] - mean) ** 2 / mean for t in expected)
        freedom = len(expected) - 1
        assert abs(statistic - freedom) < 4 * math.sqrt(2 * freedom), (statistic, freedom)


@pytest.mark.slow
def test_graphs_of_a_batch_draw_independently():
    """Pairs of tuples of two graphs: all combinations alike."""
    edge_index = as_tensors(nx.path_graph(3))[1]
    pairs = Counter()
    ptr = torch.tensor([0, 3, 6])
    space = find_tuples("edges", 2, ptr, *torch.cat([edge_index, edge_index + 3], dim=1))
    for _ in range(3200):
        pairs[tuple((space.draw(1, None)[1] - ptr[:2, None]).flatten().tolist())] += 1
    assert len(pairs) == 16
    statistic = sum((count - 200) ** 2 / 200 for count in pairs.values())
    assert abs(statistic - 15) < 4 * math.sqrt(30)


@pytest.mark.slow
def test_samples_are_different_and_every_set_is_as_likely():
    ptr = torch.tensor([0, 4, 6])
    space = find_tuples("nodes", 1, ptr, ptr[:0], ptr[:0])
    sets = Counter()
    for _ in range(3000):
        graph, tuples = space.draw(2, None)
        assert graph.tolist() == [0, 0, 1, 1]
        assert set(tuples[2:, 0].tolist()) == {4, 5}  # all there are
        sets[frozenset(tuples[:2, 0].tolist())] += 1
    assert len(sets) == 6
    assert sum((count - 500) ** 2 / 500 for count in sets.values()) < 5 + 4 * math.sqrt(10)


@pytest.mark.parametrize("level", ["graph", "node"])
@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_unbiased_and_their_error_is_known(kind, level):
    """Many estimates at once, of copies of one graph: within 4 of their errors; errors cover as often as they say."""
    copies, samples = 800, 8
    graph = nx.gnp_random_graph(12, 0.3, seed=3)
    x, edge_index, _, _ = as_tensors(graph)
    shift = 12 * torch.arange(copies)[:, None]
    pooling = pooling_of(kind, level=level, chunk_size=10**6)
    with torch.no_grad():
        exact = pooling(x, edge_index)
        found = pooling.estimate(
            x.repeat(copies, 1), (edge_index[:, None] + shift).flatten(1), samples=samples,
            batch=torch.arange(copies).repeat_interleave(12),
        )  # fmt: skip
    mean, error, low, high = (
        part.reshape(copies, -1) for part in (found.mean, found.standard_error, *found.interval(0.9))
    )
    spread = mean.std(0)
    assert (mean.mean(0) - exact.flatten()).abs().max() < 4.5 * (spread / copies**0.5).max()
    torch.testing.assert_close(error.square().mean(0).sqrt(), spread, rtol=0.15, atol=1e-12)
    covered = ((mean - exact.flatten()).abs() < 1.96 * error).double().mean()
    assert 0.85 < covered < 0.97, covered  # 8 samples: Student's t has 0.91
    covered = ((low < exact.flatten() + 1e-12) & (exact.flatten() - 1e-12 < high)).double().mean()
    assert 0.85 < covered < 0.95, covered


@pytest.mark.parametrize("level", ["graph", "node"])
def test_errors_do_not_depend_on_chunks(level):
    """Nodes of the graphs are mixed; drawn from the same numbers."""
    x, edge_index, _, batch = as_tensors(*UNEQUAL)
    nodes = torch.randperm(len(x))
    inputs = (x[nodes], nodes.argsort()[edge_index], None, batch[nodes])
    pooling = pooling_of("edges", level=level)
    expected = pooling.estimate(*inputs, samples=7, generator=torch.Generator().manual_seed(1))
    for pooling.chunk_size in (1, 40):
        got = pooling.estimate(*inputs, samples=7, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    drawn_all = batch[nodes] if level == "node" else torch.arange(6)
    error = expected.standard_error[(drawn_all != 0) & (drawn_all != 4)]  # no more than 7 tuples
    assert not error.any()
    assert expected.standard_error.any()


@pytest.mark.slow
def test_one_draw_a_step_is_unbiased():
    """Training: the mean of many steps, against the exact one."""
    pooling = pooling_of("two_paths")
    x, edge_index, _, batch = as_tensors(*UNEQUAL)
    with torch.no_grad():
        exact = pooling(x, edge_index, batch=batch)
        draws = torch.stack([pooling.train()(x, edge_index, batch=batch) for _ in range(600)])
    error = draws.std(0) / 600**0.5
    assert ((draws.mean(0) - exact).abs() <= 4 * error + 1e-12).all()
    assert error[0].min() > 0


def test_more_samples_than_tuples_is_exact():
    pooling = pooling_of("edges", samples=30)
    x, edge_index, _, batch = as_tensors(nx.path_graph(3), nx.complete_graph(6))
    mean, error, number = pooling.estimate(x, edge_index, batch=batch)
    assert not error.any()
    assert number.tolist() == [[4], [30]]
    pooling.samples = None
    assert torch.equal(pooling.estimate(x, edge_index, batch=batch).num_samples, number)
    torch.testing.assert_close(mean, mean_by_loop(pooling, x, edge_index, batch=batch), rtol=0, atol=1e-10)
    _, error, number = found = pooling.estimate(x, edge_index, batch=batch, samples=10)
    assert number.tolist() == [[4], [10]]
    low, high = found.interval()
    torch.testing.assert_close((high - low)[1], 2 * 2.2621572 * error[1], rtol=1e-6, atol=0)  # nine degrees of freedom
    assert torch.equal(low[0], high[0])
    assert not error[0].any()
    assert error[1].all()


def test_random_numbers_come_from_the_generator():
    x, edge_index, _, batch = as_tensors(*UNEQUAL)
    pooling = pooling_of("two_paths").train()

    def outcome(seed):
        return pooling(x, edge_index, batch=batch, generator=torch.Generator().manual_seed(seed))

    state = torch.get_rng_state()
    assert torch.equal(outcome(1), outcome(1))
    assert not torch.equal(outcome(1), outcome(2))
    assert torch.equal(state, torch.get_rng_state())
    first = pooling(x, edge_index, batch=batch)
    torch.set_rng_state(state)
    assert torch.equal(first, pooling(x, edge_index, batch=batch))


def test_full_order_is_the_mean_over_all_permutations():
    head = nn.Sequential(nn.Linear(4 * 6, 5), nn.Tanh())
    pooling = RelationalPooling(Sums(2 + 5), "full", max_nodes=5, head=head).double().eval()
    x, edge_index, _, batch = as_tensors(nx.gnp_random_graph(5, 0.6, seed=2), nx.path_graph(3), nx.empty_graph(0))
    expected = mean_by_loop(pooling, x, edge_index, batch=batch, size=3)
    torch.testing.assert_close(pooling(x, edge_index, batch=batch, size=3), expected, rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="max_nodes is 5, and a graph has 6 nodes"):
        pooling(*as_tensors(nx.path_graph(6))[:2])


def test_more_permutations_than_can_be_numbered():
    """25! of them: every place is as likely to have every node; the exact mean is refused."""
    ptr = torch.tensor([0, 25, 27])
    space = find_tuples("all", 25, ptr, ptr[:0], ptr[:0])
    graph, tuples = space.draw(3000, None)
    large = tuples[graph == 0]
    assert len(large) == 3000
    assert (tuples[graph == 1][:, :2].sort().values == torch.tensor([25, 26])).all()
    assert (large.sort(dim=1).values == torch.arange(25)).all()
    for place in (0, 11, 24):
        counts = torch.bincount(large[:, place], minlength=25)
        assert abs(float(((counts - 120) ** 2 / 120).sum()) - 24) < 4 * math.sqrt(48)
    pooling = RelationalPooling(Sums(1 + 25), "full", max_nodes=25).eval()
    with pytest.raises(ValueError, match="give samples"):
        pooling(torch.ones(25, 1), ptr.new_zeros(2, 0))
    mean, error, _ = pooling.estimate(torch.ones(25, 1), ptr.new_zeros(2, 0), samples=3)
    assert mean.shape == (1, 4 * 26)
    assert error.any()


@pytest.mark.sampled(default=1)
@pytest.mark.parametrize("chunk_size", [20, 10**6])
def test_gradients(chunk_size):
    """Of chunks that are computed again, too."""
    pooling = pooling_of("edges", chunk_size=chunk_size)
    x, edge_index, edge_attr, batch = as_tensors(nx.path_graph(3), nx.cycle_graph(3))
    inputs = (x.requires_grad_(), edge_attr.requires_grad_())
    assert torch.autograd.gradcheck(lambda x, attributes: pooling(x, edge_index, attributes, batch), inputs)
    pooling.zero_grad()
    calls = []
    pooling.base_gnn.register_forward_hook(lambda *_: calls.append(1))
    pooling(x, edge_index, edge_attr, batch).sum().backward()
    assert len(calls) == (1 if chunk_size > 100 else 2 * 5)  # 20 hold two copies of 7, or 2 of 9
    got = [weight.grad.clone() for weight in pooling.parameters()]
    pooling.zero_grad()
    mean_by_loop(pooling, x, edge_index, edge_attr, batch).sum().backward()
    for gradient, weight in zip(got, pooling.parameters(), strict=True):
        torch.testing.assert_close(gradient, weight.grad, rtol=0, atol=1e-10)


def distance(pooling: RelationalPooling, first: nx.Graph, second: nx.Graph) -> float:
    """Between two graphs, by that of one and its relabelled copy."""
    x, edge_index, _, batch = as_tensors(
        first, second, nx.relabel_nodes(first, dict(enumerate(torch.randperm(len(first)).tolist())))
    )
    with torch.no_grad():
        a, b, a_again = pooling(torch.ones_like(x[:, :1]), edge_index, batch=batch)
    assert (a - a_again).abs().max() < 1e-11 * a.abs().max()
    return float((a - b).abs().max() / a.abs().max())


def rook_and_shrikhande() -> tuple[nx.Graph, nx.Graph]:
    rook = nx.line_graph(nx.complete_bipartite_graph(4, 4))
    steps = [(0, 1), (1, 0), (1, 1)]
    shrikhande = nx.Graph(
        [(4 * a + b, 4 * ((a + c) % 4) + (b + d) % 4) for a in range(4) for b in range(4) for c, d in steps]
    )
    return nx.convert_node_labels_to_integers(rook), shrikhande


@pytest.mark.parametrize(
    ("kind", "tells_apart"), [("nodes", False), ("edges", True), ("two_paths", True), ("all", True)]
)
def test_marked_edges_tell_rook_from_shrikhande(kind, tells_apart):
    gap = distance(pooling_of(kind, inputs=1, width=8), *rook_and_shrikhande())
    assert gap > 1e-9 if tells_apart else gap < 1e-12


def test_one_mark_tells_circulants_apart():
    """All ten classes of CSL, which GIN gives one value."""
    graphs = [nx.circulant_graph(41, [1, skip]) for skip in (2, 3, 4, 5, 6, 9, 11, 12, 13, 16)]
    base = Sums(2, 8, rounds=6)
    pooling = RelationalPooling(base, 1).double().eval()
    _, edge_index, _, batch = as_tensors(*graphs)
    with torch.no_grad():
        values = pooling(torch.ones(410, 1, dtype=torch.float64), edge_index, batch=batch)
        plain = base(torch.tensor([1.0, 0.0], dtype=torch.float64).expand(410, 2), edge_index)
    gaps = torch.cdist(values, values) + torch.eye(10)
    assert gaps.min() > 1e-6 * values.abs().max()
    assert (plain - plain[0]).abs().max() < 1e-12


def test_bases_of_pyg():
    """Called with what they take."""
    x, edge_index, edge_attr, batch = as_tensors(*UNEQUAL)
    x, edge_attr = x.float(), edge_attr.float()

    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GINEConv(nn.Linear(4, 3), edge_dim=1)

        def forward(self, x, edge_index, edge_attr, batch):
            assert len(batch) == len(x)
            return self.conv(x, edge_index, edge_attr)

    sequential = Sequential("x, edge_index", [(nn.Linear(4, 3), "x -> x"), nn.ReLU()])
    for base, attributes in ((GIN(4, 3, 2), None), (Convolution(), edge_attr), (sequential, None)):
        pooling = RelationalPooling(base, tuples="edges", head=nn.Linear(9, 9))
        assert pooling(x, edge_index, attributes, batch).shape == (6, 9)
        before = [weight.clone() for weight in pooling.parameters()]
        pooling.reset_parameters()
        assert not any(torch.equal(*pair) for pair in zip(before, pooling.parameters(), strict=True) if pair[0].any())
        assert pooling.eval()(x, edge_index, attributes, batch).dtype == torch.float32


@pytest.mark.slow
def test_compiled_base():
    base = Sums(4)
    pooling = RelationalPooling(base, tuples="edges").eval()
    compiled = RelationalPooling(torch.compile(base, backend="eager", dynamic=True), tuples="edges").eval()
    x, edge_index, edge_attr, batch = as_tensors(*UNEQUAL)
    inputs = (x.float(), edge_index, edge_attr.float(), batch)
    torch.testing.assert_close(compiled(*inputs), pooling(*inputs))


def test_bfloat16_keeps_sums_and_means_in_float32():
    x, edge_index, _, batch = as_tensors(*UNEQUAL)

    class Constant(nn.Module):
        def forward(self, x, edge_index):
            return torch.full((len(x), 2), 1.0, dtype=torch.bfloat16)

    ones, arcs, _, _ = as_tensors(nx.path_graph(301))  # no number of bfloat16
    sums = RelationalPooling(Constant(), 1).eval()(ones, arcs)
    assert torch.equal(sums, torch.tensor([[301.0, 301, 1, 1]]))
    pooling = RelationalPooling(Sums(4), tuples="edges", head=nn.Linear(12, 3)).eval()
    exact = pooling(x.float(), edge_index, batch=batch)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = pooling(x.float(), edge_index, batch=batch)
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, exact, rtol=0.05, atol=0.05)
    assert pooling.bfloat16()(x.bfloat16(), edge_index, batch=batch).dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"marks": 4}, "must be 1, 2 or 3 for connected tuples; got 4"),
        ({"marks": 1, "tuples": "edges"}, "'edges' have 2 marks, got 1"),
        ({"tuples": "all"}, "needs marks"),
        ({"tuples": "triangles"}, "must be one of"),
        ({"marks": "full"}, "needs max_nodes"),
        ({"marks": 2, "max_nodes": 3}, "leave it out"),
        ({"samples": 1}, "at least 2"),
        ({"train_samples": 0}, "at least 1"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
        ({"samples": 2.5}, "samples must be a whole number"),
        ({"marks": True}, "marks must be a whole number"),
        ({"head": 3}, "head must be a module"),
        ({"level": "edge"}, "'graph' or 'node'"),
    ],
)
def test_refuses_options(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        RelationalPooling(Sums(2), **options)


@pytest.mark.parametrize("norm", [GraphNorm(8), LayerNorm(8, mode="node"), None])
def test_graphs_of_a_batch_and_chunks_are_computed_independently(norm):
    graphs = list(UNEQUAL)
    x, edge_index, _, batch = as_tensors(*graphs)
    pooling = RelationalPooling(GIN(x.shape[1] + 2, 8, 3, norm=norm), tuples="edges").double().eval()
    together = pooling(x, edge_index, batch=batch, size=len(graphs))
    alone = [pooling(x[batch == number], as_tensors(one)[1]) for number, one in enumerate(graphs)]
    torch.testing.assert_close(together, torch.cat(alone))
    pooling.chunk_size = 1
    torch.testing.assert_close(pooling(x, edge_index, batch=batch, size=len(graphs)), together)


@pytest.mark.parametrize(
    ("base", "head", "message"),
    [
        (GIN(3, 8, 2, norm="graph_norm"), None, r"GINConv of the base_gnn .* GraphNorm.*norm=GraphNorm\(hidden"),
        (GIN(3, 8, 2, norm="layer_norm"), None, "GINConv of the base_gnn .* LayerNorm within"),
        (GIN(3, 8, 2, norm="pair_norm"), None, "PairNorm within would normalise all copies"),
        (Sequential("x, edge_index", [(GraphNorm(3), "x -> x")]), None, "the base_gnn, is called without batch"),
        (Sums(3), MLP([12, 8, 8], norm="instance_norm"), "MLP, the head, is called without batch"),
    ],
)
def test_refuses_norms_that_would_mix_graphs(base, head, message):
    with pytest.raises(ValueError, match=message):
        RelationalPooling(base, tuples="edges", head=head)


class Forgetful(nn.Module):
    """Normalise without ``batch``, which is a parameter."""

    def __init__(self):
        super().__init__()
        self.norm = GraphNorm(3)

    def forward(self, x, edge_index, batch):
        return self.norm(x)


@pytest.mark.parametrize(
    "base", [Sequential("x, edge_index, batch", [(nn.Identity(), "x -> x"), (GraphNorm(3), "x -> x")]), Forgetful()]
)
def test_refuses_norms_that_are_called_without_batch(base):
    x, edge_index = torch.ones(2, 1), torch.tensor([[0], [1]])
    pooling = RelationalPooling(base, tuples="edges")
    with pytest.raises(ValueError, match=rf"GraphNorm of {type(base).__name__}.*, is called without batch and would"):
        pooling(x, edge_index)
    passing = RelationalPooling(Sequential("x, edge_index, batch", [(GraphNorm(3), "x, batch -> x")]), tuples="edges")
    passing(x, edge_index)
    assert not any(module._forward_pre_hooks for module in passing.modules())


class Centred(nn.Module):
    """Subtract the mean of all nodes, of each graph if it takes ``batch``, and drop some in training."""

    def forward(self, x, edge_index):
        return nn.functional.dropout(x - x.mean(0), 0.5, self.training)


class Noisy(nn.Module):
    def forward(self, x, edge_index):
        return x + torch.randn_like(x)


@pytest.mark.parametrize(
    ("base", "is_refused"),
    [
        (Sequential("x, edge_index", [(GPSConv(3, None, heads=1, norm=None), "x, edge_index -> x")]), True),
        (Sequential("x, edge_index, batch", [(GPSConv(3, None, heads=1), "x, edge_index, batch -> x")]), False),
        (Centred(), True),
        (Sequential("x, edge_index", [(nn.BatchNorm1d(3, track_running_stats=False), "x -> x")]), True),
        (Sequential("x, edge_index", [(nn.BatchNorm1d(3), "x -> x"), (nn.Dropout(0.5), "x -> x")]), False),
        (Noisy(), False),  # nothing can be compared
        (GIN(3, 4, 2).bfloat16(), False),
    ],
    ids=["attention", "attention in graphs", "mean", "untracked norm", "norm", "noise", "bfloat16"],
)
def test_refuses_networks_that_mix_copies_at_the_first_call_with_several(base, is_refused):
    dtype = next((parameter.dtype for parameter in base.parameters()), torch.float32)
    x, edge_index = torch.randn(3, 1).to(dtype), torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    pooling = RelationalPooling(base, tuples="edges")
    before = {name: value.clone() for name, value in base.state_dict().items()}
    pooling(x, edge_index)  # one copy alone
    told = pytest.raises(
        ValueError, match="mixes the copies of graphs: beside another copy, the output for one changes"
    )
    with told if is_refused else nullcontext():
        pooling.eval()(x, edge_index)
    after = base.state_dict()
    assert {name: value.dtype for name, value in after.items()} == {name: value.dtype for name, value in before.items()}
    assert all(
        value.equal(after[name]) for name, value in before.items() if "running" not in name and "num_" not in name
    )


def test_refuses_inputs():
    pooling = RelationalPooling(GIN(2, 3, 1), 1)
    x, edge_index, batch = torch.ones(3, 1), torch.tensor([[0], [1]]), torch.tensor([0, 1, 1])
    with pytest.raises(ValueError, match="join nodes of one graph"):
        pooling(x, edge_index, batch=batch)
    with pytest.raises(ValueError, match="must number 1 graphs from 0, got 0 to 1"):
        pooling(x, edge_index, batch=batch, size=1)
    with pytest.raises(ValueError, match="one number for each of 3 nodes, got 2"):
        pooling(x, edge_index, batch=batch[:2])
    with pytest.raises(ValueError, match="x must be floating"):
        pooling(x.long(), edge_index)
    with pytest.raises(ValueError, match="takes none: leave it out"):
        RelationalPooling(Sequential("x, edge_index", [(nn.Linear(2, 3), "x -> x")]))(x, edge_index, torch.ones(1, 1))
    with pytest.raises(TypeError, match=r"called with x, edge_index.*Linear.forward has input"):
        RelationalPooling(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="forward has x, edge_index, edge_weight"):
        RelationalPooling(Sequential("x, edge_index, edge_weight", [(nn.Linear(2, 3), "x -> x")]))
    with pytest.raises(ValueError, match="at least 2"):
        pooling.estimate(x, edge_index, samples=1)
    pooled = RelationalPooling(Sequential("x, edge_index", [(nn.Flatten(0), "x -> x")]))
    with pytest.raises(ValueError, match="one row for each of 3 nodes"):
        pooled.train()(x, edge_index)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("edge_index", "message"),
    [
        (torch.tensor([[0, -1], [1, 2]]), "nodes from 0 to 2; found -1 to 2"),
        (torch.tensor([[0, 1], [1, 3]]), "nodes from 0 to 2; found 0 to 3"),
        (torch.tensor([[0, 1], [1, 2], [2, 0]]), r"RelationalPooling needs edge_index \(2, M\) int64; got \(3, 2\)"),
        (torch.tensor([[0], [1]]).int(), r"\(2, M\) int64; got torch.int32"),
        (torch.tensor([[0.0], [1]]), r"\(2, M\) int64; got torch.float32"),
        ([[0], [1]], r"\(2, M\) int64; got list"),
    ],
    ids=range(6),
)
def test_refuses_what_is_no_edge_index(edge_index, message, training):
    pooling = RelationalPooling(GIN(2, 3, 1), 1).train(training)
    with pytest.raises(ValueError, match=message):
        pooling(torch.ones(3, 1), edge_index)
    with pytest.raises(ValueError, match=message):
        pooling(torch.ones(3, 1), edge_index, batch=torch.zeros(3).long())


def test_config_builds_it():
    parser = jsonargparse.ArgumentParser()
    parser.add_subclass_arguments(RelationalPooling, "pooling")
    gin = {
        "class_path": "torch_geometric.nn.GIN",
        "init_args": {"in_channels": 3, "hidden_channels": 4, "num_layers": 2},
    }
    head = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 12, "out_features": 2}}
    options = {"base_gnn": gin, "head": head, "tuples": "edges", "samples": 8}
    path = "lightning_accel.nn.relational.pooling.RelationalPooling"
    config = parser.parse_object({"pooling": {"class_path": path, "init_args": options}})
    pooling = parser.instantiate(config).pooling
    assert (pooling.marks, pooling.samples) == (2, 8)
    assert pooling(torch.ones(2, 1), torch.tensor([[0, 1], [1, 0]])).shape == (1, 2)
