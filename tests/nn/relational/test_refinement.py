import networkx as nx
import pytest
import torch
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GIN
from torch_geometric.utils import from_networkx

from lightning_accel import RO3Conv
from lightning_accel.data.graphs.tasks import circular_skip_link
from lightning_accel.nn import RelationalPooling, refinement_hash
from lightning_accel.nn.relational import refinement as module


def as_data(graph, node_types=None, edge_types=None):
    data = from_networkx(graph)
    x = torch.zeros(graph.number_of_nodes(), 1) if node_types is None else torch.tensor(node_types)[:, None].float()
    return Data(x, data.edge_index, edge_types)


def small_graphs(with_types):
    """All graphs of four and five nodes, and two triangles and a hexagon, with types of nodes and edges at random."""
    graphs = [g for g in nx.graph_atlas_g() if 4 <= len(g) <= 5] + [
        nx.disjoint_union(nx.cycle_graph(3), nx.cycle_graph(3)), nx.cycle_graph(6),
    ]  # fmt: skip
    draw = torch.Generator().manual_seed(1)
    found = []
    for graph in graphs * (2 if with_types else 1):
        if not with_types:
            found.append(as_data(graph))
            continue
        types = torch.randint(2, (len(graph),), generator=draw).tolist()
        data = as_data(graph, types)
        arcs = data.edge_index
        code = arcs.min(0).values * 10 + arcs.max(0).values  # both directions of an edge have its type
        data.edge_attr = torch.randint(2, (100,), generator=draw)[code]
        found.append(data)
    return found


NUMBERS: dict[str, int] = {}  # of the colours so far, which would grow without


def colours_by_hand(data, num_layers, triples, marked=()):
    """Colours as nested tuples, which are equal where all that a node has seen is."""
    nodes = range(data.num_nodes)
    colour = {v: (float(data.x[v]), tuple(v == m for m in marked)) for v in nodes}
    near, kind = {v: [] for v in nodes}, {}
    types = [0] * data.num_edges if data.edge_attr is None else data.edge_attr.tolist()
    for (u, v), t in zip(data.edge_index.T.tolist(), types, strict=True):
        near[v].append(u)
        kind[u, v] = t
    for _ in range(num_layers):
        after = {}
        for i in nodes:
            seen = [tuple(sorted((colour[j], kind[j, i]) for j in near[i]))]
            if triples:
                pairs = [(j, k) for j in near[i] for k in near[i] if j < k and (j, k) in kind]
                ends = [(sorted([(colour[j], kind[j, i]), (colour[k], kind[k, i])]), kind[j, k]) for j, k in pairs]
                seen.append(tuple(sorted(map(str, ends))))
                walks = [(colour[j], kind[j, i], colour[k], kind[k, j]) for j in near[i] for k in near[j]]
                seen.append(tuple(sorted(map(str, walks))))
            after[i] = str((colour[i], seen))
        colour = {v: NUMBERS.setdefault(text, len(NUMBERS)) for v, text in after.items()}
    return colour


def by_hand(data, num_layers, triples, marks, tuples):
    nodes = range(data.num_nodes)
    edges = data.edge_index.T.tolist()
    of = {
        None: [()],
        "nodes": [(v,) for v in nodes],
        "edges": [tuple(edge) for edge in edges] or [()],
        "all": [(u, v) for u in nodes for v in nodes if u != v],
    }[tuples]
    copies = []
    for marked in of:
        colour = colours_by_hand(data, num_layers, triples, marked)
        copies.append(str((sorted(map(str, colour.values())), [colour[m] for m in marked])))
    return tuple(sorted(copies))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_layers", "triples", "marks", "tuples", "with_types"),
    [
        (3, False, 0, None, True),
        (1, True, 0, None, True),
        (2, True, 0, None, True),
        (2, False, 1, "nodes", True),
        (1, True, 2, "edges", True),
        (1, False, 2, "all", False),
    ],
)
def test_numbers_are_equal_where_nested_multisets_are(num_layers, triples, marks, tuples, with_types, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 500)
    graphs = small_graphs(with_types)
    batch = Batch.from_data_list(graphs)
    kind = {"num_layers": num_layers, "triples": triples, "marks": marks, "tuples": tuples}
    found = refinement_hash(batch.x, batch.edge_index, batch.edge_attr, batch.batch, **kind)
    expected = [by_hand(graph, num_layers, triples, marks, tuples) for graph in graphs]
    assert len(set(expected)) > 1
    assert partition(found.tolist()) == partition(expected)
    if not marks:
        found = refinement_hash(batch.x, batch.edge_index, batch.edge_attr, batch.batch, level="node", **kind)
        of_nodes = [colour for graph in graphs for colour in colours_by_hand(graph, num_layers, triples).values()]
        assert partition(found.tolist()) == partition(of_nodes)


def partition(values):
    first = {value: i for i, value in enumerate(dict.fromkeys(values))}
    return [first[value] for value in values]


def rook_and_shrikhande():
    rook = nx.cartesian_product(nx.complete_graph(4), nx.complete_graph(4))
    steps = [(0, 1), (0, 3), (1, 0), (3, 0), (1, 1), (3, 3)]
    shrikhande = nx.Graph(
        ((a, b), ((a + c) % 4, (b + d) % 4)) for a in range(4) for b in range(4) for c, d in steps
    )  # fmt: skip
    return as_data(nx.convert_node_labels_to_integers(rook)), as_data(nx.convert_node_labels_to_integers(shrikhande))


def circulants():
    return tuple(Data(torch.zeros(41, 1), circular_skip_link(41, skip).edge_index) for skip in (9, 12))


class Triples(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.layers = nn.ModuleList(RO3Conv(width if i == 0 else 8, 8) for i in range(layers))

    def forward(self, x, edge_index):
        for layer in self.layers:
            x = torch.tanh(layer(x, edge_index))
        return x


@pytest.mark.sampled(default=3)
@pytest.mark.parametrize(
    ("triples", "marks", "tuples", "num_layers", "rook", "circulant"),
    [
        (False, 0, None, 3, False, False),
        (True, 0, None, 3, False, False),
        (False, 1, "nodes", 2, False, False),
        (False, 1, "nodes", 4, False, True),  # in circular graphs the marks are seen after three steps
        (True, 1, "nodes", 2, True, True),
        (False, 2, "edges", 2, True, False),
        (True, 2, "edges", 2, True, True),
        (False, 2, "all", 2, True, True),
    ],
)
def test_networks_of_random_weights_tell_apart_what_has_different_numbers(
    triples, marks, tuples, num_layers, rook, circulant
):
    torch.manual_seed(0)
    for pair, told in ((rook_and_shrikhande(), rook), (circulants(), circulant)):
        kind = {"num_layers": num_layers, "triples": triples, "marks": marks, "tuples": tuples}
        first, second = (refinement_hash(g.x, g.edge_index, **kind) for g in pair)
        base = Triples(1 + marks, num_layers) if triples else GIN(1 + marks, 8, num_layers, act="tanh")
        head = nn.Sequential(nn.Linear(8 * (1 + marks), 8), nn.Tanh()).double()
        base = base.double().eval()
        if marks:
            network = RelationalPooling(base, marks, tuples, head=head, chunk_size=2**14).eval()
        else:
            network = lambda x, edges, run=base, head=head: head(run(x, edges).sum(0, keepdim=True))  # noqa: E731
        with torch.no_grad():
            values = [network(1 + g.x.double(), g.edge_index) for g in pair]
        differ = float((values[0] - values[1]).abs().max()) > 1e-13
        assert differ == (int(first) != int(second)) == told


@pytest.mark.slow
def test_does_not_depend_on_the_order_of_nodes_and_arcs_nor_on_the_batch():
    graphs = small_graphs(with_types=True)
    kinds = [{}, {"triples": True}, {"marks": 2, "tuples": "all"}, {"triples": True, "marks": 1}]
    batch = Batch.from_data_list(graphs)
    order = torch.randperm(batch.num_nodes)  # new name of each node
    arcs = torch.randperm(batch.num_edges)
    x, of = torch.empty_like(batch.x), torch.empty_like(batch.batch)
    x[order], of[order] = batch.x, batch.batch
    for kind in kinds:
        found = refinement_hash(batch.x, batch.edge_index, batch.edge_attr, batch.batch, num_layers=2, **kind)
        moved = order[batch.edge_index[:, arcs]], batch.edge_attr[arcs]
        assert torch.equal(refinement_hash(x, *moved, of, num_layers=2, **kind), found)
        alone = [refinement_hash(g.x, g.edge_index, g.edge_attr, num_layers=2, **kind) for g in graphs[:5]]
        assert torch.equal(torch.cat(alone), found[:5])
        nodes = refinement_hash(
            batch.x, batch.edge_index, batch.edge_attr, batch.batch, num_layers=2, level="node", **kind
        )
        again = refinement_hash(x, *moved, of, num_layers=2, level="node", **kind)
        assert torch.equal(again[order], nodes)


def test_graphs_without_nodes_and_without_edges_have_numbers():
    none = torch.zeros(0, 2), torch.zeros(2, 0, dtype=torch.int64)
    for kind in ({}, {"triples": True}, {"marks": 1}, {"marks": 2, "tuples": "all"}):
        found = refinement_hash(*none, num_layers=2, **kind)
        assert found.shape == (1,)
        batch = torch.zeros(1, dtype=torch.int64)
        two = refinement_hash(torch.ones(1, 2), none[1], batch=batch, size=2, num_layers=2, **kind)
        assert two[1] == found[0] != two[0]


def test_zero_has_no_sign_and_columns_have_an_order():
    none = torch.zeros(2, 0, dtype=torch.int64)
    rows = torch.tensor([[0.0, 1.0], [-0.0, 1.0], [1.0, 0.0]])
    found = refinement_hash(rows, none, num_layers=0, level="node")
    assert found[0] == found[1] != found[2]


def test_means_see_proportions_alone():
    """An isolated node beside one edge and beside two, and edges whose arcs are listed once or twice."""
    one, two = torch.tensor([[0, 1], [1, 0]]), torch.tensor([[0, 1, 3, 4], [1, 0, 4, 3]])
    kind = {"num_layers": 2, "marks": 2, "level": "node"}
    assert refinement_hash(torch.ones(3, 1), one, **kind)[2] == refinement_hash(torch.ones(5, 1), two, **kind)[2]
    once, mixed = torch.tensor([1]), torch.tensor([1, 2])
    seen = [
        refinement_hash(torch.ones(2, 1), edges, kinds, num_layers=1, triples=True)
        for edges, kinds in ((one[:, :1], once), (one, once.repeat(2)), (one, mixed))
    ]
    assert seen[0] == seen[1] != seen[2]


@pytest.mark.parametrize("options", [{"num_layers": -1}, {"marks": -1}, {"level": "edge"}, {"tuples": "edges"}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match="num_layers and marks must be 0 or more"):
        refinement_hash(torch.ones(2, 1), torch.tensor([[0], [1]]), **{"num_layers": 1} | options)
    with pytest.raises(ValueError, match="must hold nodes from 0 to 1"):
        refinement_hash(torch.ones(2, 1), torch.tensor([[0], [5]]), num_layers=1)


def test_triangles_are_told_by_the_edge_opposite_to_a_node():
    """Node 0 has equal neighbours and paths in both graphs; only the edge that closes its triangle differs."""
    torch.manual_seed(0)
    edge_index = torch.tensor([[0, 0, 1, 1, 2], [1, 2, 2, 3, 4]])
    kinds = torch.tensor([0, 0, 1, 0, 0]), torch.tensor([0, 0, 0, 1, 1])
    conv, x = RO3Conv(1, 8, num_relations=2).double(), torch.ones(5, 1).double()
    found = [refinement_hash(x, edge_index, kind, num_layers=1, triples=True, level="node")[0] for kind in kinds]
    values = [conv(x, edge_index, kind)[0] for kind in kinds]
    assert found[0] != found[1]
    assert (values[0] - values[1]).abs().max() > 1e-6
