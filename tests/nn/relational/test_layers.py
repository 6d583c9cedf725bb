"""Order-3 pooling: against all subsets one by one, and what it can and cannot tell apart."""

import copy
import itertools
import pickle

import pytest
import torch
import torch_geometric
from torch import Tensor
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks
from torch_geometric.nn import GINConv, Sequential, global_add_pool, to_hetero

from lightning_accel.nn.relational.invariance import assert_permutation_invariant
from lightning_accel.nn.relational.layers import RO3Conv, RO3Pooling
from lightning_accel.nn.relational.sums import rooted_sums
from lightning_accel.ops import find_triples

TYPES = ("triangle", "wedge", "edge", "empty")
EDGES = [{}, {"edge_dim": 3}, {"num_relations": 4}]
EDGE_NAMES = ["plain", "features", "typed"]


def random_graph(n: int, density: float, options: dict | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Directed, with loops and repetitions."""
    edge_index = torch.randint(max(n, 1), (2, int(density * n * n)))
    attr = None
    if options and "edge_dim" in options:
        attr = torch.randn(edge_index.shape[1], 3, dtype=torch.float64)
    elif options:
        attr = torch.randint(4, (edge_index.shape[1],))
    return torch.randn(n, 2, dtype=torch.float64), edge_index, attr


class PlainGraph:
    """Edges and their weights, by pairs of nodes."""

    def __init__(self, edge_index: Tensor, mapped: Tensor | None = None) -> None:
        self.entries: dict[frozenset, list[int]] = {}
        for entry, (u, v) in enumerate(edge_index.T.tolist()):
            if u != v:
                self.entries.setdefault(frozenset((u, v)), []).append(entry)
        self.mapped = mapped

    def __contains__(self, pair: tuple[int, int]) -> bool:
        return frozenset(pair) in self.entries

    def weight(self, *pairs: tuple[int, int]) -> Tensor | float:
        product = 1.0
        for pair in pairs:
            if self.mapped is not None:
                product = product * (1 + self.mapped[self.entries[frozenset(pair)]].mean(0))
        return product


def sums_one_by_one(pool: RO3Pooling, x: Tensor, edge_index: Tensor, attr: Tensor | None) -> Tensor:
    mapped = [None] * 4
    if attr is not None:
        mapped = pool.terms.edge_weights.map(attr).split(pool.rank, dim=1)
    graph = {name: PlainGraph(edge_index, part) for name, part in zip(TYPES, mapped, strict=True)}
    a, b, c, p, q, r = pool.terms.maps(x).split(pool.rank, dim=1)
    terms = {name: [torch.zeros(pool.rank, dtype=x.dtype)] for name in TYPES}
    for i, j, k in itertools.combinations(range(len(x)), 3):
        pairs = [pair for pair in ((i, j), (i, k), (j, k)) if pair in graph["empty"]]
        if len(pairs) == 3:
            terms["triangle"].append(a[i] * a[j] * a[k] * graph["triangle"].weight(*pairs))
        elif len(pairs) == 2:
            (centre,) = set(pairs[0]) & set(pairs[1])
            u, v = {i, j, k} - {centre}
            terms["wedge"].append(c[centre] * b[u] * b[v] * graph["wedge"].weight(*pairs))
        elif len(pairs) == 1:
            (u, v), (alone,) = pairs[0], {i, j, k} - set(pairs[0])
            terms["edge"].append(p[u] * p[v] * q[alone] * graph["edge"].weight(*pairs))
        else:
            terms["empty"].append(r[i] * r[j] * r[k])
    totals = [torch.stack(terms[name]).sum(0) for name in pool.types]
    return torch.cat(totals)


@pytest.mark.parametrize("options", EDGES, ids=EDGE_NAMES)
def test_equals_the_sum_over_all_subsets_one_by_one(options):
    for n in range(13):
        x, edge_index, attr = random_graph(n, 0.05 + 0.04 * n if n < 12 else 3.0, options)
        pool = RO3Pooling(2, 5, rank=3, types=TYPES, **options).double()
        expected = sums_one_by_one(pool, x, edge_index, attr)
        torch.testing.assert_close(pool.sums(x, edge_index, attr)[0], expected, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(pool(x, edge_index, attr)[0], pool.out(expected), atol=1e-10, rtol=1e-10)


def test_types_come_in_the_order_they_are_named():
    x, edge_index, _ = random_graph(9, 0.3)
    pool = RO3Pooling(2, 5, rank=3, types=("empty", "triangle")).double()
    maps = pool.terms.maps(x)
    full = RO3Pooling(2, 5, rank=3, types=TYPES).double()
    full.terms.maps.weight.data[:3], full.terms.maps.bias.data[:3] = (
        pool.terms.maps.weight[3:],
        pool.terms.maps.bias[3:],
    )
    full.terms.maps.weight.data[15:], full.terms.maps.bias.data[15:] = (
        pool.terms.maps.weight[:3],
        pool.terms.maps.bias[:3],
    )
    assert maps.shape == (9, 6)
    sums = full.sums(x, edge_index)
    torch.testing.assert_close(pool.sums(x, edge_index), torch.cat([sums[:, 9:], sums[:, :3]], dim=1))


@pytest.mark.parametrize("options", EDGES, ids=EDGE_NAMES)
def test_a_batch_equals_its_graphs_one_by_one(options):
    graphs = [random_graph(n, 0.4, options) for n in (5, 0, 1, 8, 2)]
    pool = RO3Pooling(2, 4, rank=3, types=TYPES, **options).double()
    shifts = torch.tensor([0, 5, 5, 6, 14])
    x = torch.cat([graph[0] for graph in graphs])
    edge_index = torch.cat([graph[1] + shift for graph, shift in zip(graphs, shifts, strict=True)], dim=1)
    attr = torch.cat([graph[2] for graph in graphs]) if options else None
    batch = torch.repeat_interleave(torch.tensor([5, 0, 1, 8, 2]))
    found = pool(x, edge_index, attr, batch, size=6)
    expected = torch.cat([pool(*graph) for graph in graphs])
    torch.testing.assert_close(found[:5], expected, atol=1e-10, rtol=1e-10)
    assert not found[[1, 2, 4, 5]].any()  # too few nodes for a triple, or none
    torch.testing.assert_close(pool(x, edge_index, attr, batch), found[:5])


def test_no_rounding_error_is_left_where_there_is_no_subset():
    complete = torch.combinations(torch.arange(60)).T
    x = torch.randn(60, 4) * 10
    assert not RO3Pooling(types=("wedge", "edge", "empty"))(x, complete).any()


@pytest.mark.parametrize("options", EDGES, ids=EDGE_NAMES)
def test_rooted_sums_equal_triples_one_by_one(options):
    for n in (1, 4, 9, 12):
        x, edge_index, attr = random_graph(n, 0.25, options)
        conv = RO3Conv(2, 4, rank=3, **options).double()
        b, c = conv.maps(x).split(3, dim=1)
        graph = PlainGraph(edge_index, None if attr is None else conv.edge_weights.map(attr))
        terms: dict[str, list] = {name: [[torch.zeros(3, dtype=x.dtype)] for _ in range(n)] for name in "tclw"}
        for i, j, k in itertools.permutations(range(n), 3):
            if (i, j) in graph and (j, k) in graph and (i, k) not in graph:
                terms["l"][i].append(c[j] * b[k] * graph.weight((i, j), (j, k)))
                if i < k:
                    terms["c"][j].append(b[i] * b[k] * graph.weight((i, j), (j, k)))
            elif (i, j) in graph and (j, k) in graph and j < k:
                terms["t"][i].append(b[j] * b[k] * graph.weight((i, j), (j, k), (i, k)))
        neighbours = [[torch.zeros(2, dtype=x.dtype)] for _ in range(n)]
        for i, j in itertools.permutations(range(n), 2):
            if (i, j) in graph:
                terms["w"][i].append(b[j] * graph.weight((i, j)))
                neighbours[i].append(x[j])

        def total(rows: list[list[Tensor]]) -> Tensor:
            return torch.stack([torch.stack(row).sum(0) for row in rows])

        joined = torch.cat([total(terms[name]) for name in ("tclw" if options else "tcl")], dim=1)
        compressed = torch.cat([joined[:, :9].asinh(), joined[:, 9:]], dim=1)
        for conv.compress_sums, sums in ((False, joined), (True, compressed)):
            hidden = conv.joined(torch.cat([x + total(neighbours), b, sums], dim=1))
            torch.testing.assert_close(conv(x, edge_index, attr), conv.out(hidden.relu()), atol=1e-10, rtol=1e-10)


def test_pooling_the_rooted_sums_gives_the_pooled_ones():
    x, edge_index, _ = random_graph(11, 0.2)
    pool = RO3Pooling(2, 1, rank=3).double()
    ((a,), (b, c)) = pool.terms.node_maps(x).values()
    triples = find_triples(edge_index, 11)
    triangle, wedge = pool.sums(x, edge_index)[0].split(3)
    torch.testing.assert_close((a * rooted_sums(torch.cat([a, a], dim=1), None, triples).triangle).sum(0) / 3, triangle)
    rooted = rooted_sums(torch.cat([b, c], dim=1), None, triples)
    torch.testing.assert_close((c * rooted.centre).sum(0), wedge)
    torch.testing.assert_close((b * rooted.leaf).sum(0) / 2, wedge)


def test_many_triangles_are_summed_in_chunks(monkeypatch):
    x, edge_index, attr = random_graph(12, 1.0, {"edge_dim": 3})
    layers = [RO3Pooling(2, 5, rank=3, edge_dim=3).double(), RO3Conv(2, 5, rank=3, edge_dim=3).double()]
    whole = [layer(x, edge_index, attr) for layer in layers]
    gradients = [
        torch.autograd.grad(y.square().sum(), list(m.parameters())) for y, m in zip(whole, layers, strict=True)
    ]
    monkeypatch.setattr("lightning_accel.nn.relational.sums._TRIANGLES_AT_A_TIME", 7)
    for layer, output, gradient in zip(layers, whole, gradients, strict=True):
        found = layer(x, edge_index, attr)
        torch.testing.assert_close(found, output)
        torch.testing.assert_close(torch.autograd.grad(found.square().sum(), list(layer.parameters())), gradient)


@pytest.mark.parametrize(
    "options",
    [pytest.param(options, marks=[pytest.mark.slow] * bool(options)) for options in EDGES],
    ids=EDGE_NAMES,
)
def test_gradients(options):
    x, edge_index, attr = random_graph(6, 0.5, options)
    pool = RO3Pooling(2, 2, rank=2, types=TYPES, **options).double()
    conv = RO3Conv(2, 2, rank=2, **options).double()
    given = [x.requires_grad_()]
    if "edge_dim" in options:
        given.append(attr.requires_grad_())
    for layer in (pool, conv):
        call = lambda *given, layer=layer: layer(given[0], edge_index, given[1] if len(given) > 1 else attr)  # noqa: E731
        assert torch.autograd.gradcheck(call, given)
        assert torch.autograd.gradgradcheck(call, given)


@pytest.mark.parametrize("options", EDGES, ids=EDGE_NAMES)
def test_do_not_depend_on_an_order(options):
    x, edge_index, attr = random_graph(12, 0.2, options)
    batch = torch.arange(12) // 4
    edge_index = edge_index[:, batch[edge_index[0]] == batch[edge_index[1]]]
    attr = attr if attr is None else attr[: edge_index.shape[1]]
    pool = RO3Pooling(2, 5, rank=4, types=TYPES, **options)
    assert_permutation_invariant(pool, x, edge_index, attr, batch)
    assert_permutation_invariant(RO3Conv(2, 5, rank=4, **options), x, edge_index, attr, level="node")


def test_direction_repetition_and_loops_do_not_count():
    x, edge_index, attr = random_graph(8, 0.3, {"edge_dim": 3})
    simple = find_triples(edge_index, 8).edge
    loops = torch.arange(8).repeat(2, 1)
    messy = torch.cat([simple.flip(0), simple, loops], dim=1)
    for layer in (RO3Pooling(2, 5, types=TYPES).double(), RO3Conv(2, 5).double()):
        torch.testing.assert_close(layer(x, messy), layer(x, simple))
    attr = torch.randn(simple.shape[1], 3, dtype=torch.float64)
    apart = torch.randn_like(attr)
    both = torch.cat([attr + apart, attr - apart, torch.randn(8, 3, dtype=torch.float64)])
    for layer in (RO3Pooling(2, 5, types=TYPES, edge_dim=3).double(), RO3Conv(2, 5, edge_dim=3).double()):
        torch.testing.assert_close(layer(x, messy, both), layer(x, simple, attr))


# -- what it tells apart ----------------------------------------------------------------------------------------------


def cycle(*lengths: int) -> Tensor:
    nodes, start = [], 0
    for length in lengths:
        ring = torch.arange(length)
        nodes.append(torch.stack([ring, (ring + 1) % length]) + start)
        start += length
    return torch.cat(nodes, dim=1)


def circulant(n: int, skip: int) -> Tensor:
    ring = torch.arange(n)
    return torch.cat([torch.stack([ring, (ring + step) % n]) for step in (1, skip)], dim=1)


def on_a_torus(adjacent) -> Tensor:
    cells = list(itertools.product(range(4), repeat=2))
    pairs = [(u, v) for u, v in itertools.combinations(range(16), 2) if adjacent(cells[u], cells[v])]
    return torch.tensor(pairs).T


def rook() -> Tensor:
    return on_a_torus(lambda u, v: (u[0] == v[0]) != (u[1] == v[1]))


def shrikhande() -> Tensor:
    steps = {(0, 1), (0, 3), (1, 0), (3, 0), (1, 1), (3, 3)}
    return on_a_torus(lambda u, v: ((v[0] - u[0]) % 4, (v[1] - u[1]) % 4) in steps)


class Convs(torch.nn.Module):
    def __init__(self, make, layers: int) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList([make() for _ in range(layers)])

    def forward(self, edge_index: Tensor) -> Tensor:
        x = torch.ones(int(edge_index.max()) + 1, 8, dtype=torch.float64)
        edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
        for conv in self.convs:
            x = conv(x, edge_index)
            x = x / (1 + x.norm(dim=1, keepdim=True))  # of each node alone, so that six layers stay in range
        return x.sum(0)


def gin() -> GINConv:
    return GINConv(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)))


def tell_apart(model, one: Tensor, other: Tensor) -> bool:
    one, other = model.double()(one), model(other)
    difference = float((one - other).detach().abs().max() / one.detach().abs().max())
    assert difference < 1e-10 or difference > 1e-4, f"neither equal nor different: {difference}"
    return difference > 1e-4


def pooled(types=TYPES):
    pool = RO3Pooling(1, 8, types=types)

    class Pooled(torch.nn.Module):
        pooling = pool

        def __init__(self) -> None:
            super().__init__()
            self.pool = pool

        def forward(self, edge_index: Tensor) -> Tensor:
            return self.pool(torch.ones(int(edge_index.max()) + 1, 1, dtype=torch.float64), edge_index)

    return Pooled()


def test_tells_two_triangles_from_a_hexagon_which_message_passing_cannot():
    assert not tell_apart(Convs(gin, 4), cycle(3, 3), cycle(6))
    assert tell_apart(Convs(lambda: RO3Conv(8, 8), 1), cycle(3, 3), cycle(6))
    assert tell_apart(pooled(), cycle(3, 3), cycle(6))
    assert tell_apart(pooled(("triangle",)), cycle(3, 3), cycle(6))


def test_tells_what_message_passing_tells():
    conv = RO3Conv(8, 8)
    plain = gin()
    with torch.no_grad():  # the layer that looks at no triple is GIN's
        conv.joined.weight.zero_()
        conv.joined.weight[:, :8] = plain.nn[0].weight
        conv.joined.bias.copy_(plain.nn[0].bias)
        conv.out.load_state_dict(plain.nn[2].state_dict())
    x, edge_index = torch.randn(9, 8), cycle(4, 5)
    both = torch.cat([edge_index, edge_index.flip(0)], dim=1)
    torch.testing.assert_close(conv(x, both), plain(x, both))
    star = torch.tensor([[0, 0, 0], [1, 2, 3]])
    path = torch.tensor([[0, 1, 2], [1, 2, 3]])
    assert tell_apart(Convs(gin, 2), star, path)
    assert tell_apart(Convs(lambda: RO3Conv(8, 8), 2), star, path)
    conv.reset_parameters()
    ends = conv(torch.eye(2, 8), torch.tensor([[0], [1]]))  # what is a node's own is told from its neighbour's
    assert not torch.allclose(*ends)


def test_does_not_tell_strongly_regular_graphs_apart():
    for graph in (rook(), shrikhande()):
        assert find_triples(graph, 16).triangle.shape[1] == 32
    assert not tell_apart(pooled(), rook(), shrikhande())
    assert not tell_apart(Convs(lambda: RO3Conv(8, 8), 3), rook(), shrikhande())


def test_of_circulant_graphs_tells_those_with_triangles_apart():
    model = Convs(lambda: RO3Conv(8, 8), 3)
    for skip in (4, 5, 6, 9, 11, 12, 13, 16):
        assert not tell_apart(model, circulant(41, 3), circulant(41, skip)), skip
    assert tell_apart(model, circulant(41, 3), circulant(41, 2))


# -- how it behaves as a module ---------------------------------------------------------------------------------------


def test_two_lines_are_enough():
    x, edge_index = torch.randn(5, 7), cycle(5)
    assert RO3Pooling()(x, edge_index).shape == (1, 64)
    assert repr(RO3Pooling()) == ("RelationalOrder3Pooling(-1, 64, rank=32, types=['triangle', 'wedge'])")
    assert repr(RO3Conv(3, 8)) == "RO3Conv(3, 8, rank=16)"


@pytest.mark.parametrize(
    "make", [lambda c: RO3Pooling(c, 4, rank=2), lambda c: RO3Conv(c, 4, rank=2)], ids=["pool", "conv"]
)
def test_lazy_layers_are_copied_saved_and_loaded(make):
    x, edge_index = torch.randn(5, 3), cycle(5)
    lazy = make(-1)
    copied = copy.deepcopy(lazy)
    assert lazy(x, edge_index).shape[1] == copied(x, edge_index).shape[1] == 4
    for loaded in (make(-1), make(3)):
        loaded.load_state_dict(lazy.state_dict())
        torch.testing.assert_close(loaded(x, edge_index), lazy(x, edge_index))
    unpickled = pickle.loads(pickle.dumps(lazy))
    torch.testing.assert_close(unpickled(x, edge_index), lazy(x, edge_index))
    before = lazy(x, edge_index)
    lazy.reset_parameters()
    assert not torch.allclose(lazy(x, edge_index), before)


def test_works_in_a_sequential_of_pyg():
    model = Sequential(
        "x, edge_index, edge_attr, batch",
        [
            (RO3Conv(-1, 8, rank=4), "x, edge_index -> x"),
            torch.nn.ReLU(),
            (RO3Conv(8, 8, rank=4), "x, edge_index -> x"),
            (RO3Pooling(8, 3, rank=4), "x, edge_index, edge_attr, batch -> x"),
        ],
    )
    assert model(torch.randn(6, 2), cycle(3, 3), None, torch.arange(6) // 3).shape == (2, 3)


@pytest.mark.parametrize("options", EDGES, ids=EDGE_NAMES)
def test_low_precision_costs_no_accuracy(options):
    x, edge_index, attr = random_graph(40, 0.2, options)
    # a count that bfloat16 cannot hold, from features that it can
    x = x.bfloat16().float()
    attr = attr.bfloat16().float() if "edge_dim" in options else attr
    pool, conv = RO3Pooling(2, 5, types=TYPES, **options), RO3Conv(2, 5, **options)
    expected_pooled, expected_nodes = pool(x, edge_index, attr), conv(x, edge_index, attr)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(pool(x.bfloat16(), edge_index, attr), expected_pooled)
        nodes = conv(x.bfloat16(), edge_index, attr)
        nodes.float().sum().backward()
    assert nodes.dtype == torch.bfloat16  # its last layer is a Linear as any
    difference = (nodes.float() - expected_nodes).detach().abs().max()
    assert difference < 2**-6 * expected_nodes.detach().abs().max()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in conv.parameters())


def almost_complete(num_nodes, num_missing):
    edge = torch.combinations(torch.arange(num_nodes)).T
    return edge[:, torch.randperm(edge.shape[1])[num_missing:]]


def dense_sums(maps, linked):
    """Each type's sum over all triples, from dense matrices: ``linked`` (N, N) 0/1."""
    apart = 1 - linked - torch.eye(len(linked), dtype=linked.dtype)
    (a,), (b, c), (p, q), (r,) = (maps[name] for name in ("triangle", "wedge", "edge", "empty"))
    of_three = "ij,ik,jk,ir,jr,kr->r"
    return [
        torch.einsum(of_three, linked, linked, linked, a, a, a) / 6,
        torch.einsum(of_three, linked, linked, apart, c, b, b) / 2,
        torch.einsum(of_three, linked, apart, apart, p, p, q) / 2,
        torch.einsum(of_three, apart, apart, apart, r, r, r) / 6,
    ]


def dense_rooted_sums(b, c, linked):
    apart = 1 - linked - torch.eye(len(linked), dtype=linked.dtype)
    of_root = "ij,ik,jk,jr,kr->ir"
    return [
        torch.einsum(of_root, linked, linked, linked, b, b) / 2,
        torch.einsum(of_root, linked, linked, apart, b, b) / 2,
        torch.einsum(of_root, linked, apart, linked, c, b),
    ]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("num_nodes", "num_missing"), [(20, 1), (100, 10), pytest.param(200, 50, marks=pytest.mark.slow)]
)
def test_little_is_left_without_loss_of_accuracy(num_nodes, num_missing, autocast):
    """Of nearly complete graphs, where nearly all paths are closed, beside a sparse one."""
    edge_index = torch.cat([almost_complete(num_nodes, num_missing), num_nodes + torch.tensor([[0, 1], [1, 2]])], dim=1)
    x, batch = 1 + torch.randn(num_nodes + 3, 4), torch.arange(num_nodes + 3).ge(num_nodes).long()
    linked = torch.zeros(num_nodes, num_nodes, dtype=torch.float64)
    linked[edge_index[0, :-2], edge_index[1, :-2]] = 1
    linked += linked.T.clone()
    pooling, conv = RO3Pooling(4, 3, rank=5, types=("triangle", "wedge", "edge", "empty")), RO3Conv(4, 3, rank=5)
    read = []
    conv.joined.register_forward_pre_hook(lambda _, args: read.append(args[0][:num_nodes].double()))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        sums = pooling.sums(x, edge_index, batch=batch, size=2)[0].double()
        conv(x, edge_index)
    with torch.no_grad():
        maps = {name: [one[:num_nodes].double() for one in of] for name, of in pooling.terms.node_maps(x).items()}
        b, c = conv.maps(x)[:num_nodes].double().chunk(2, dim=1)
    for actual, expected in zip(sums.split(5), dense_sums(maps, linked), strict=True):
        assert (actual - expected).abs().max() <= 5e-6 * expected.abs().max()
    for actual, expected in zip(read[0][:, 9:].split(5, dim=1), dense_rooted_sums(b, c, linked), strict=True):
        assert ((actual - expected).abs().amax(0) <= 5e-6 * expected.abs().amax(0)).all()


def test_masks_of_explainers_count():
    """A mask of 0 on an edge of no triple leaves the edge out; all masks have gradients, in a stack as well."""
    edge_index = torch.tensor([[0, 1, 2, 3, 4, 4], [1, 2, 0, 1, 5, 5]])
    x = torch.randn(6, 4)
    for options in ({}, {"edge_dim": 2}):
        conv = RO3Conv(4, 3, **options).double()
        attr = torch.randn(6, 2, dtype=torch.float64) if "edge_dim" in options else None
        given = x.double(), edge_index, attr
        plain = conv(*given)
        mask = torch.nn.Parameter(torch.ones(6, dtype=torch.float64))
        set_masks(conv, mask, edge_index, apply_sigmoid=False)
        torch.testing.assert_close(conv(*given), plain)
        (gradient,) = torch.autograd.grad(conv(*given).square().sum(), mask)
        assert (gradient != 0).all()
        mask.data[4:] = 0
        masked = conv(*given)
        with pytest.raises(ValueError, match="edge mask of an explainer must have one number for each of 4 columns"):
            conv(x.double(), edge_index[:, :4], None if attr is None else attr[:4])
        clear_masks(conv)
        without = conv(x.double(), edge_index[:, :4], None if attr is None else attr[:4])
        torch.testing.assert_close(masked, without)


def test_bfloat16_modules_sum_in_float32():
    n = 600
    x, edge_index = torch.ones(n, 1, dtype=torch.bfloat16), torch.stack([torch.zeros(n - 1).long(), torch.arange(1, n)])
    pool = RO3Pooling(1, 1, rank=1, types=("wedge",)).bfloat16()
    for parameter in pool.parameters():
        torch.nn.init.ones_(parameter)
    torch.nn.init.zeros_(pool.terms.maps.bias)
    count = (n - 1) * (n - 2) // 2
    assert float(pool.sums(x, edge_index).detach()) == count
    assert float(pool(x, edge_index).detach()) == pytest.approx(count, rel=2**-8)


def test_counts_to_the_last_digit_of_float32():
    x, edge_index = torch.ones(30, 1), random_graph(30, 0.4)[1]
    triples = find_triples(edge_index, 30)
    conv = RO3Conv(1, 1, rank=1)
    torch.nn.init.ones_(conv.maps.weight)
    torch.nn.init.zeros_(conv.maps.bias)
    triangle = conv._joined_input(x, None, edge_index, triples)[:, 2]
    assert torch.equal(triangle, triples.num_triangles.float())


def test_deep_stack_with_normalisation_trains():
    torch.manual_seed(1)
    convs = torch.nn.ModuleList([RO3Conv(1 if i == 0 else 16, 16, rank=8) for i in range(6)])
    norms = torch.nn.ModuleList([torch.nn.BatchNorm1d(16) for _ in range(6)])
    head = torch.nn.Linear(16, 1)
    edge_index = random_graph(40, 0.1)[1]
    target = find_triples(edge_index, 40).num_triangles.float().unsqueeze(1)
    target = (target - target.mean()) / target.std()
    modules = torch.nn.ModuleList([convs, norms, head])
    optimizer = torch.optim.Adam(modules.parameters(), lr=0.01)
    triples = find_triples(edge_index, 40)
    losses = []
    for _ in range(60):
        x = torch.ones(40, 1)
        for conv, norm in zip(convs, norms, strict=True):
            x = norm(conv(x, edge_index, triples=triples)).relu()
        loss = (head(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.05 * losses[0], losses


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.parametrize(
    "typed", [pytest.param(False, id="plain"), pytest.param(True, id="typed", marks=pytest.mark.weekly)]
)
def test_compiles_with_dynamic_shapes(typed):
    options = {"num_relations": 4} if typed else {}
    pool, conv = RO3Pooling(2, 3, rank=2, types=TYPES, **options), RO3Conv(2, 3, rank=2, **options)

    def both(x, edge_index, attr, batch, triples):
        nodes = conv(x, edge_index, attr, triples)
        return nodes, pool(x, edge_index, attr, batch, 2, triples)

    compiled = torch.compile(both, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (9, 14, 23):
        x, edge_index, attr = random_graph(n, 0.2, options)
        x, batch = x.float(), torch.arange(n) * 2 // n
        within = batch[edge_index[0]] == batch[edge_index[1]]
        edge_index, attr = edge_index[:, within], attr if attr is None else attr[within]
        triples = find_triples(edge_index, n)
        found, expected = compiled(x, edge_index, attr, batch, triples), both(x, edge_index, attr, batch, triples)
        torch.testing.assert_close(found, expected)
    whole = torch.compile(conv, dynamic=True, backend="aot_eager")  # finds triples as well, with breaks
    torch.testing.assert_close(whole(x, edge_index, attr), conv(x, edge_index, attr))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [lambda: RO3Conv(2, 3), pytest.param(lambda: RO3Pooling(2, 3), marks=pytest.mark.slow)],
    ids=["conv", "pooling"],
)
def test_compiled_it_looks_for_triples_with_one_break(make):
    layer, graphs = make(), []

    def backend(module, inputs):
        graphs.append(module)
        return module.forward

    x, edge_index = torch.randn(6, 2), cycle(3, 3)
    expected = layer(x, edge_index)
    torch.testing.assert_close(torch.compile(layer, backend=backend)(x, edge_index), expected)
    assert len(graphs) <= 2
    whole = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(whole(x, edge_index, triples=find_triples(edge_index, 6)), expected)


@pytest.mark.skipif(
    not hasattr(torch.fx._symbolic_trace, "List") and torch_geometric.__version__ < "2.7",
    reason="old PyG's to_hetero fails with new torch, whatever the layer",
)
def test_hetero_works_within_node_types_and_is_refused_between_them():
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = RO3Conv(-1, 4, rank=2)

        def forward(self, x, edge_index):
            return self.conv(x, edge_index)

    x = {"paper": torch.randn(5, 3), "author": torch.randn(6, 2)}
    edges = {("paper", "cites", "paper"): cycle(5), ("author", "knows", "author"): cycle(3, 3)}
    model = to_hetero(Model(), (list(x), list(edges)))
    found = model(x, edges)
    own = getattr(model.conv, "paper__cites__paper")  # noqa: B009
    torch.testing.assert_close(found["paper"], own(x["paper"], edges["paper", "cites", "paper"]))
    edges["author", "writes", "paper"] = torch.tensor([[0, 1], [2, 3]])
    model = to_hetero(Model(), (list(x), list(edges)))
    with pytest.raises(TypeError, match=r"RO3Conv joins triples of nodes of one type.*data\.to_homogeneous\(\)"):
        model(x, edges)


def test_time_is_linear_in_nodes():
    """Pool 2e10 subsets of all four types, which would take hours one by one."""
    pool = RO3Pooling(4, 8, rank=8, types=TYPES)
    x, edge_index = torch.randn(5000, 4), torch.randint(5000, (2, 20000))
    found = pool(x, edge_index)
    exact = copy.deepcopy(pool).double()(x.double(), edge_index)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4 * float(exact.detach().abs().max()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RO3Pooling(types=()), r"types must be some of .*got \[\]"),
        (lambda: RO3Pooling(types=("triangle", "triangle")), "each once at most"),
        (lambda: RO3Pooling(types=("star",)), r"got \['star'\]"),
        (lambda: RO3Conv(2, 3, edge_dim=2, num_relations=3), "edge_dim or num_relations"),
    ],
    ids=range(4),
)
def test_wrong_options_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "attr", "message"),
    [
        ({"edge_dim": 2}, None, r"needs floating edge_attr of shape \(5, 2\), as edge_dim=2; got none"),
        ({"edge_dim": 2}, torch.randn(5, 3), r"got torch.float32 of shape \(5, 3\)"),
        (
            {"num_relations": 2},
            torch.zeros(5, 1).long(),
            r"int64 edge_attr of shape \(5,\).*got torch.int64 .*\(5, 1\)",
        ),
        ({"num_relations": 2}, torch.arange(5), r"lie in \[0, 2\).*got types from 0 to 4"),
    ],
    ids=range(4),
)
def test_wrong_edge_attributes_are_named(options, attr, message):
    for layer in (RO3Pooling(2, 3, **options), RO3Conv(2, 3, **options)):
        with pytest.raises(ValueError, match=message):
            layer(torch.randn(5, 2), cycle(5), attr)


def test_sparse_adjacency_is_refused():
    with pytest.raises(ValueError, match=r"RO3Conv needs edge_index \(2, M\) int64; got a sparse tensor \(3, 3\)"):
        RO3Conv(2, 3)(torch.randn(3, 2), torch.eye(3).to_sparse())


@pytest.mark.parametrize(
    ("x", "edge_index", "message"),
    [
        (torch.ones(3, 2), cycle(3).int(), r"needs edge_index \(2, M\) int64; got torch.int32"),
        (torch.ones(3, 2), cycle(3).float(), r"needs edge_index \(2, M\) int64; got torch.float32"),
        (torch.ones(3, 2), cycle(3).tolist(), r"needs edge_index \(2, M\) int64; got list"),
        (torch.ones(3), cycle(3), r"needs x \(N, F\), one row for each node; got \(3,\)"),
        (None, cycle(3), r"needs x \(N, F\), one row for each node; got NoneType"),
    ],
    ids=range(5),
)
def test_wrong_inputs_are_named(x, edge_index, message):
    for layer in (RO3Pooling(2, 3), RO3Conv(2, 3)):
        with pytest.raises(ValueError, match=message):
            layer(x, edge_index)


def test_batches_that_do_not_fit_are_refused():
    layer = RO3Pooling(2, 3)
    with pytest.raises(ValueError, match="every edge must join nodes of one graph"):
        layer(torch.ones(6, 2), cycle(6), batch=torch.arange(6) // 3)
    with pytest.raises(ValueError, match=r"needs batch of shape \(6,\).*got \(5,\)"):
        layer(torch.ones(6, 2), cycle(6), batch=torch.zeros(5).long())
    assert layer(torch.ones(6, 2), cycle(3, 3), batch=torch.arange(6) // 3).shape == (2, 3)


def test_reads_out_what_convs_made():
    """An order-3 layer between ordinary ones, and their readout besides."""
    x, edge_index = torch.randn(6, 8), cycle(6)
    nodes = RO3Conv(8, 8)(gin()(x, edge_index), edge_index)
    assert torch.cat([global_add_pool(nodes, None), RO3Pooling()(nodes, edge_index)], dim=1).shape == (1, 72)


def test_what_does_not_fit_the_layer_is_named():
    x, edge_index = torch.randn(3, 4), torch.tensor([[0, 1], [1, 2]])
    for layer in (RO3Conv(4, 8), RO3Pooling(4, 8)):
        name = type(layer).__name__
        with pytest.raises(ValueError, match=rf"{name} got edge_attr \(2, 5\), which counts only with edge_dim"):
            layer(x, edge_index, torch.randn(2, 5))
        with pytest.raises(ValueError, match=rf"{name}\(in_channels=4\) takes x \(N, 4\); got \(3, 5\)"):
            layer(torch.randn(3, 5), edge_index)
    with pytest.raises(TypeError, match=r"in_channels is one width, or -1; got \(-1, -1\)"):
        RO3Conv((-1, -1), 8)
    with pytest.raises(ValueError, match="size=1 graphs, but batch numbers them from 0 to 1"):
        RO3Pooling(4, 8)(x, edge_index[:, :1], batch=torch.tensor([0, 0, 1]), size=1)


@pytest.mark.parametrize("options", EDGES, ids=EDGE_NAMES)
def test_pooling_in_transforms_and_forward_mode_agrees_with_gradients(options):
    x, edge_index, attr = random_graph(9, 0.5, options)
    pool = RO3Pooling(2, 3, rank=3, types=TYPES, **options).double()
    x, tangent = x.detach(), torch.randn_like(x)

    def of(x):
        return pool(x, edge_index, attr)

    jacobian = torch.autograd.functional.jacobian(of, x)
    torch.testing.assert_close(torch.func.jacrev(of)(x), jacobian)
    torch.testing.assert_close(torch.func.jvp(of, (x,), (tangent,))[1], (jacobian * tangent).sum((2, 3)))
    torch.testing.assert_close(torch.func.vmap(of)(torch.stack([x, tangent]))[1], of(tangent))
