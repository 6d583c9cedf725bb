import gzip
import json
import re
import warnings

import lightning as L
import networkx as nx
import numpy as np
import pytest
import torch

from lightning_accel.data import GraphBatches, GraphLayout
from lightning_accel.data.graphs.datamodule import GraphDataModule
from lightning_accel.data.graphs.files import read_graphs
from tests.data.graphs.grouped import grouped

RING, PATH = [[0, 1], [1, 2], [0, 2]], [[0, 1], [1, 2]]


def lines(number=12):
    """Triangles and paths, with two features of each node, of which one is 0 or 1, and the id of the graph."""
    return [
        {
            "id": f"g{i}",
            "edges": RING if i % 2 else PATH,
            "x": [[100.0 * i + node, node % 2] for node in range(3)],
            "edge_attr": [i % 3, 0, 1][: 3 if i % 2 else 2],
            "y": "ring" if i % 2 else "path",
        }
        for i in range(number)
    ]


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        if isinstance(content, list):
            content = "".join(one if isinstance(one, str) else json.dumps(one) + "\n" for one in content)
        path = tmp_path / name
        path.write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
        return path

    return write


@pytest.fixture
def make(write):
    def make(found=None, name="graphs.jsonl", **options):
        data = GraphDataModule(write(name, lines() if found is None else found), **grouped(options))
        data.setup()
        return data

    return make


def test_a_run_tells_how_graphs_are_read(make, caplog):
    for options, target in [
        ({}, "target of 2 classes, path, ring (always ring: accuracy 0.5 in validation); 7 graphs train"),
        (
            {"target_kind": "regression"},
            "target, a quantity of mean {:.4g} and standard deviation {:.4g}; 7 graphs train",
        ),
    ]:
        kinds = lines() if not options else [{**line, "y": number} for number, line in enumerate(lines())]
        data = make(kinds, **options)
        assert not caplog.text  # tune and others set data up again and again
        del data.train_rows
        data.trainer = L.Trainer(accelerator="cpu", logger=False)
        caplog.clear()
        with caplog.at_level("INFO"):
            data.setup()
        target = target.format(*(data.target_mean or []), *(data.target_std or []))
        assert caplog.messages == [f"{data.path}: {target}, {len(data.val_rows)} validate, {len(data.test_rows)} test"]
        caplog.clear()
        written = {line["id"]: line["y"] for line in kinds}
        assert data.predict_columns.to_dict("list") == {"y": [written[name] for name in data.predict_ids]}


def test_edges_that_stand_twice_are_told_unless_their_attributes_differ(make):
    twice = [{**line, "edges": [*line["edges"], line["edges"][0]]} for line in lines()]
    plain = [{name: value for name, value in line.items() if name != "edge_attr"} for line in twice]
    with pytest.warns(UserWarning, match=r"^12 of 12 graphs of .* list an edge more than once: layers that"):
        make(plain)
    make([{**line, "edge_attr": [*line["edge_attr"], 5]} for line in twice])
    with pytest.warns(UserWarning, match=r"^12 of 12 graphs of .* list an edge more than once: layers that"):
        make([{**line, "edge_attr": [*line["edge_attr"], line["edge_attr"][0]]} for line in twice])
    reverse = [{**line, "edges": [*line["edges"], line["edges"][0][::-1]]} for line in lines()]
    make([{name: value for name, value in line.items() if name != "edge_attr"} for line in reverse])


def random_graphs(number=60, leak=None, seed=0):
    """Graphs of ten nodes with a random feature and another, ``leak(class, node)``."""
    generator = torch.Generator().manual_seed(seed)
    leak = leak or (lambda y, node: 0.0)
    return [
        {
            "edges": torch.randint(0, 10, (30, 2), generator=generator).unique(dim=0).tolist(),
            "x": [[torch.rand(1, generator=generator).item(), leak(i % 3, node)] for node in range(10)],
            "y": i % 3,
        }
        for i in range(number)
    ]


def told(make, found, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(found, **options)
    return [str(one.message) for one in caught if "list an edge" not in str(one.message)]


@pytest.mark.slow
def test_copies_of_training_graphs_and_graphs_without_nodes_are_told(make):
    found = random_graphs(leak=lambda y, node: node % 3)
    for line in found:  # whose means depend on the order of nodes, by rounding
        line["x"] = [[value * 2.0 ** (40 * (node > 6)), kind] for node, (value, kind) in enumerate(line["x"])]
    assert not told(make, found)
    turned = [{**line, "edges": [pair[::-1] for pair in reversed(line["edges"])]} for line in found]
    assert (
        told(make, [*found, *turned])[0].partition("graphs of")[2]
        == told(make, [*found, *found])[0].partition("graphs of")[2]
    )
    numbered = np.random.default_rng(0).permutation(10)
    renumbered = [
        {
            **line,
            "edges": [[int(numbered[a]), int(numbered[b])] for a, b in line["edges"]],
            "x": [line["x"][old] for old in np.argsort(numbered)],
        }
        for line in found
    ]
    (copies,) = told(make, [*found, *renumbered])
    for line in renumbered:
        line["edges"][0][0] = (line["edges"][0][0] + 1) % 10
    assert not told(make, [*found, *renumbered])
    assert re.match(r"\d+ of the 36 graphs of .* that validate and test \(\d+%\) are copies of training graphs", copies)
    assert not told(
        make, [{**line, "x": [[node % 2, node % 2] for node in range(10)], "edges": RING} for line in found]
    )  # equal by design
    (empty,) = told(make, [*found, {"edges": [], "num_nodes": 0, "x": [], "y": 0}])
    assert re.match("1 of 61 graphs of .* have no nodes, so that they all get one prediction", empty)


@pytest.mark.slow
def test_features_that_tell_the_target_are_told(make):
    (of_graphs,) = told(make, random_graphs(leak=lambda y, node: float(y)))
    assert "that tell the target of the training rows on their own" in of_graphs
    assert "class alone: x 1. If one" in of_graphs
    assert of_graphs.endswith("leave it out of the file")
    for line in (leaking := random_graphs()):  # by the mean of noise
        line["x"] = [[value, 10 * line["y"] + value] for value, _ in line["x"]]
    assert "class alone: x 1. If one" in told(make, leaking)[0]
    nodes = [{**line, "y": [node % 3 for node in range(10)]} for line in random_graphs()]
    for line in nodes:
        line["x"] = [[value, float(y)] for (value, _), y in zip(line["x"], line["y"], strict=True)]
    (of_nodes,) = told(make, nodes, level="node")
    assert "class alone: x 1. If one" in of_nodes
    values = [{**line, "y": 2.5 * number} for number, line in enumerate(random_graphs())]
    for line in values:
        line["x"] = [[value, line["y"] + 1] for value, _ in line["x"]]
    (of_values,) = told(make, values, target_kind="regression")
    assert "a correlation above 0.9999 with it" in of_values


def test_one_hot_features_of_a_table_are_one_text(write):
    nodes = "node,kind,size,y\n" + "".join(f"{i},{'abc'[i % 3]},{i * 37 % 11},{'uvw'[i % 3]}\n" for i in range(60))
    edges = "source,target\n" + "".join(f"{i},{(i + 7) % 60}\n" for i in range(60))
    data = GraphDataModule(write("edges.csv", edges), layout=GraphLayout(nodes_path=write("nodes.csv", nodes)))
    with pytest.warns(UserWarning, match=r"tell the target .* kind\. If one"):
        data.setup()


@pytest.mark.slow
def test_edges_that_tell_the_target_constant_features_and_codes_are_told(make):
    found = random_graphs(leak=lambda y, node: node % 3)
    typed = [{**line, "edge_attr": [line["y"]] * len(line["edges"])} for line in found]
    (of_edges,) = told(make, typed)
    assert "class alone: edge_attr 0. If one" in of_edges
    typed[5] = {**typed[5], "edges": [], "edge_attr": []}
    assert "class alone: edge_attr 0. If one" in told(make, typed)[0]
    alone = [{"num_nodes": 10, **{key: line[key] for key in ("edges", "edge_attr", "y")}} for line in typed]
    assert "class alone: edge_attr 0. If one" in told(make, alone)[0]
    assert not told(make, [{**line, "edge_attr": [*range(len(line["edges"]))]} for line in found])
    (constant,) = told(make, random_graphs())
    assert re.match("features of nodes of .* that hold one value everywhere: x 1. Models learn", constant)
    assert not told(make, [{**line, "x": [[1.0]] * 10} for line in found])  # nothing else is left
    found[50]["x"][2][0] = -999.0
    (code,) = told(make, found)
    assert re.match("column 'x 0' of .* holds -999 in 1 of 600 rows", code)
    edges = [{**line, "edge_attr": [[node / 9] for node in range(len(line["edges"]))]} for line in random_graphs(30)]
    edges[7]["edge_attr"][3] = [-999.0]
    assert [one for one in told(make, edges) if re.match("column 'edge_attr 0' of .* holds -999 in", one)]


def test_a_missing_target_is_told_by_its_line(make):
    found = random_graphs(9)
    found[4]["y"] = None
    with pytest.raises(ValueError, match=r"lacks 1 of 9 values, the first in line 5\."):
        make(found)
    with pytest.raises(ValueError, match=r"lacks a value in line 5;"):
        make(found, target_kind="regression")


def test_targets_of_nodes_name_the_option(make):
    nodes = [{**line, "num_nodes": 3 + i, "y": [0.5] * (3 + i)} for i, line in enumerate(lines())]
    nodes = [{name: line[name] for name in ("edges", "num_nodes", "y")} for line in nodes]
    with pytest.raises(ValueError, match=r"as many targets 'y' as nodes; if they are .* set layout\.level to node"):
        make(nodes, target_kind="regression")


def graphs_of(data):
    return [graph for rows in (data.train_rows, data.val_rows, data.test_rows) for graph in rows.graphs]


@pytest.mark.parametrize("name", ["graphs.jsonl", "graphs.ndjson.gz"])
def test_json_lines(make, name):
    data = make(name=name, val_share=0.25, test_share=0.25)
    assert [len(rows) for rows in (data.train_rows, data.val_rows, data.test_rows)] == [6, 3, 3]
    assert (data.level, data.target_kind, data.class_names) == ("graph", "classification", ["path", "ring"])
    assert (data.num_features, data.edge_dim, data.num_relations, data.num_classes) == (2, None, 3, 2)
    assert data.num_targets is data.target_mean is None
    for graph in graphs_of(data):
        assert graph.num_edges == (6 if int(graph.y) else 4)  # each both ways
        assert graph.x[:, 1].tolist() == [0, 1, 0]  # as it was
        pairs = {(a, b): t for (a, b), t in zip(graph.edge_index.t().tolist(), graph.edge_attr.tolist(), strict=True)}
        assert all(pairs[b, a] == kind for (a, b), kind in pairs.items())
    scaled = torch.cat([graph.x[:, 0] for graph in data.train_rows.graphs]).double()
    assert scaled.mean().abs() < 1e-6
    assert scaled.std(correction=0) == pytest.approx(1)
    others = torch.cat([graph.x[:, 0] for rows in (data.val_rows, data.test_rows) for graph in rows.graphs])
    assert others.mean().abs() > 1e-3  # what trains alone was fitted
    assert len({*data.predict_ids}) == 3


def test_edges_written_both_ways_stay(make):
    both = [
        line | {"edges": line["edges"] + [[b, a] for a, b in line["edges"]] + [[2, 2]], "edge_attr": None}
        for line in lines()
    ]
    assert {graph.num_edges for graph in graphs_of(make(both))} == {5, 7}


def test_only_edges_are_needed(make):
    found = [{"edges": [[0, 1 + i % 2]], "y": i % 2} for i in range(12)] + [{"edges": [], "num_nodes": 2, "y": 0}]
    data = make(found)
    assert (data.num_features, data.edge_dim, data.num_relations, data.class_names) == (1, None, None, ["0", "1"])
    for graph in graphs_of(data):
        assert graph.x.equal(torch.ones(graph.num_nodes, 1))
    assert sorted(graph.num_nodes for graph in graphs_of(data)) == [2] * 7 + [3] * 6


def test_numbers_as_targets(make):
    found = [line | {"y": [i, 2.5 * i]} for i, line in enumerate(lines())]
    data = make(found, target_kind="regression")
    assert (data.num_targets, data.class_names) == (2, None)
    y = torch.cat([graph.y for graph in data.train_rows.graphs])
    assert y.shape == (7, 2)
    assert data.target_mean == pytest.approx(y.mean(0).tolist())
    assert data.target_std == pytest.approx(y.std(0, correction=0).tolist())
    batch = next(iter(data.train_dataloader()))
    assert batch.y.shape == (7, 2)
    two = make([line | {"a": i, "b": 1} for i, line in enumerate(lines())], target=["a", "b"], target_kind="regression")
    assert (two.target_names, two.target_std[1]) == (["a", "b"], 1)
    one = make([line | {"y": i} for i, line in enumerate(lines())], target_kind="regression")
    assert next(iter(one.train_dataloader())).y.shape == (7,)


def test_targets_of_nodes(make):
    found = [line | {"y": ["end", "middle", "end"]} for line in lines()]
    with pytest.warns(UserWarning, match=r"tell the target .*: x 1\. If one"):
        data = make(found, level="node")
    assert (data.level, data.class_names) == ("node", ["end", "middle"])
    batch = next(iter(data.train_dataloader()))
    assert batch.y.tolist() == [0, 1, 0] * 7
    assert batch.target_index.tolist() == list(range(21))
    assert sorted({name.split(":")[1] for name in data.predict_ids}) == ["0", "1", "2"]
    assert len(data.predict_ids) == 9


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_a_node_without_target_in_one_of_several_graphs_is_named(make, kind):
    found = [line | {"y": [i, 1, 2]} for i, line in enumerate(lines())]
    found[4]["y"] = [1, None, 2]
    with pytest.raises(ValueError, match=r"node 1 of graph g4 of .*graphs.jsonl has no y, nor have 0 others"):
        make(found, level="node", target_kind=kind)


def test_features_of_edges(make):
    found = [line | {"edge_attr": [[i, 0.5]] * len(line["edges"])} for i, line in enumerate(lines())]
    with pytest.warns(UserWarning, match=r"features of edges of .* hold one value everywhere: edge_attr 1\."):
        data = make(found)
    assert (data.edge_dim, data.num_relations) == (2, None)
    attr = torch.cat([graph.edge_attr for graph in data.train_rows.graphs])
    assert attr[:, 0].mean().abs() < 1e-6
    assert attr[:, 1].unique().tolist() == [0.5]  # a constant stays


@pytest.mark.filterwarnings("ignore:.* have no nodes:UserWarning")
@pytest.mark.parametrize("kind", ["types", "features", "none"])
@pytest.mark.parametrize("empty", [{}, {"edge_attr": []}, {"edge_attr": None}])
@pytest.mark.parametrize("first", [True, False])
def test_graphs_without_edges_or_nodes_stand_beside_others(make, write, kind, empty, first):
    def attr(line, i):
        size = len(line["edges"])
        return {"types": [i % 3, 0, 1][:size], "features": [[i, i % 2 + 0.5]] * size, "none": None}[kind]

    found = [line | {"edge_attr": attr(line, i)} for i, line in enumerate(lines())]
    more = [{"edges": [], "x": [[1.0, 0]], "y": "ring", "id": "lonely"} | empty, {"edges": [], "x": [], "y": "path"}]
    new = write("new.jsonl", [{key: value for key, value in line.items() if key != "y"} for line in more])
    data = make(more + found if first else found + more, predict_path=new)
    assert (data.num_features, data.edge_dim) == (2, 2 if kind == "features" else None)
    assert (data.num_relations is None) == (kind != "types")
    assert sorted(graph.num_edges for graph in graphs_of(data)) == [0, 0] + [4] * 6 + [6] * 6
    for loader in (data.train_dataloader(), data.test_dataloader(), data.predict_dataloader()):
        for batch in loader:
            assert batch.x.shape == (batch.num_nodes, 2)
            shape = {"types": (batch.num_edges,), "features": (batch.num_edges, 2), "none": None}[kind]
            assert (batch.edge_attr.shape if "edge_attr" in batch else None) == shape


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("{", "line 13 of .*graphs.jsonl is no JSON"),
        ("[1]", "line 13 .* must hold an object"),
        ({"y": "ring"}, "line 13 .* has no field 'edges'. Its fields: y"),
        ({"edges": [[0, 1, 2]], "y": "ring"}, "'edges' in line 13 .* must hold pairs"),
        ({"edges": [[0, 1.5]], "y": "ring"}, "'edges' in line 13 .* whole numbers"),
        (
            {"edges": [[0, 3]], "num_nodes": 3, "y": "ring"},
            r"0 to 2, since num_nodes is 3 and nodes are .*; got \[0, 3\]",
        ),
        (
            {"edges": [[1, 2]], "x": [[1], [2]], "y": "ring"},
            r"0 to 1, since x has 2 rows and nodes are numbered from 0",
        ),
        ({"edges": [[0, -1]], "y": "ring"}, r"got \[0, -1\]"),
        (
            {"edges": [[0, 1]], "x": [[1.0, 2.0]], "num_nodes": 2, "y": "ring"},
            "an entry for each of its 2 nodes; got 1",
        ),
        ({"edges": [[0, 1]], "x": [[1.0], [1.0, 2.0]], "y": "ring"}, r"entry 1, counted from 0, is \[1.0, 2.0\]"),
        ({"edges": [[0, 1]], "x": [["a"], ["b"]], "y": "ring"}, "got 'a' in entry 0"),
        ({"edges": [[0, 1]], "edge_attr": [1, 2], "y": "ring"}, "an entry for each of its 1 edges; got 2"),
        ({"edges": [[0, 1]], "num_nodes": "2", "y": "ring"}, "'num_nodes' in line 13 .* got '2'"),
        (
            {"edges": [[0, 1]], "z": 1},
            r"line 13 .* has no field 'y'. Its fields: edges, z. If one .* layout\.target.*Give the data",
        ),
        ({"edges": [[0, 1]], "y": "ring"}, r"graph 12 \(line 13\) of .* and its first one differ: one alone has x"),
        (
            {"edges": [[0, 1]], "x": [[1], [2]], "edge_attr": [0], "y": "ring"},
            r"x must be alike .* graph 12 \(line 13\) has 1 of torch.float64 a row",
        ),
        (lines()[0], "two lines with id 'g0', 1 and 13"),
        ({"edges": [], "edge_atr": [], "y": "ring"}, "line 13 .* the field 'edge_atr', .*; did you mean 'edge_attr'"),
        ({"edges": [], "nodes": 3, "y": "ring"}, r"the field 'nodes', .* Known ones are edges, num_nodes, .*, y;"),
        ({"edges": [], "zzz": 3, "y": "ring"}, r"would not be read\. Known ones are"),
        ({**lines()[0], "id": "new", "edge_attr": [-1, 0]}, "holds the type -1"),
        ({**lines()[0], "id": "new", "y": 3.0}, "'3.0' has 1 of the rows; .* leave their rows out$"),
        ({**lines()[0], "id": "new", "y": None}, r"lacks 1 of 13 values, the first in line 13\."),
        ({**lines()[0], "id": "new", "y": ["a", "b"]}, "must be equally many; got 1 and 2"),
    ],
)
def test_a_wrong_line_is_named(make, wrong, said):
    with pytest.raises(ValueError, match=said):
        make([*lines(), wrong if isinstance(wrong, dict) else wrong + "\n"])


def test_an_id_that_is_the_number_of_another_line(make):
    named = [{"edges": PATH, "y": 0, "id": "2"}, {"edges": RING, "y": 1}]
    with pytest.raises(ValueError, match="id '2', 1 and 2, where a line without an id has its number"):
        make(named)


def test_graph6(write):
    graphs = [nx.gnp_random_graph(4 + i % 3, 0.5, seed=i) for i in range(12)]
    texts = [nx.to_graph6_bytes(graph, header=False).decode().strip() for graph in graphs]
    inside = write("a.g6", ">>graph6<<" + "\n".join(f"{text} {i % 2}" for i, text in enumerate(texts)))
    beside = write("b.g6", "\n".join(texts))
    data = GraphDataModule(inside, predict_path=beside)
    data.setup()
    assert data.class_names == ["0", "1"]
    found = read_graphs(inside, GraphLayout())
    assert found.ids == data.predict_ids == [str(i) for i in range(1, 13)]
    for graph, expected in zip(found.graphs, graphs, strict=True):
        assert graph.num_nodes == len(expected)
        assert {*map(tuple, graph.edge_index.t().tolist())} == {p for a, b in expected.edges for p in ((a, b), (b, a))}
    for path, more, said in (
        (beside, {}, "line 1 of .*b.g6 has no target"),
        (inside, {"level": "node"}, "no room for targets of nodes"),
        (write("d.g6", "B 0"), {}, "line 1 of .*d.g6 must have 1 characters"),
        (write("e.g6", "\n"), {}, "is empty"),
        (write("f.txt", "B"), {}, "need a .csv or .parquet"),
    ):
        with pytest.raises(ValueError, match=said):
            GraphDataModule(path, **grouped(more)).setup()


EDGES = "source,target,type,weight\n" + "".join(
    f"{i},{(i + 1) % 30},{'single' if i % 2 else 'double'},{i}\n" for i in range(30)
)
ATOMS = "node,y,element,charge\n" + "".join(f"{i},{'xy'[i % 2]},{'CNO'[i % 3]},{i}\n" for i in range(30))


def test_tables_of_edges_and_nodes(write):
    data = GraphDataModule(write("edges.csv", EDGES), layout=GraphLayout(nodes_path=write("atoms.csv", ATOMS)))
    data.setup()
    assert data.feature_names == ["element=C", "element=N", "element=O", "charge"]
    assert (data.relation_names, data.edge_dim, data.num_relations) == (["double", "single"], 3, None)
    found = read_graphs(data.path, data.layout)
    (graph,) = found.graphs
    assert graph.edge_index[:, :30].tolist() == [list(range(30)), [*range(1, 30), 0]]
    assert graph.edge_index[:, 30:].equal(graph.edge_index[:, :30].flip(0))
    assert graph.edge_attr.tolist() == [[i, i % 2 == 0, i % 2 == 1] for i in range(30)] * 2
    assert graph.x[:, 3].tolist() == list(range(30))
    assert graph.x[:, :3].argmax(1).tolist() == [i % 3 for i in range(30)]
    assert [target[0] for target in found.target] == ["xy"[i % 2] for i in range(30)]


def test_one_network_with_labels_of_some_nodes(write):
    edges = write("edges.csv", "source,target\n" + "".join(f"{i},{(i + 1) % 30}\n" for i in range(30)))
    nodes = write("nodes.csv", "node,y,age\n" + "".join(f"{i},{'' if i < 6 else 'xy'[i % 2]},{i}\n" for i in range(30)))
    data = GraphDataModule(edges, layout=GraphLayout(nodes_path=nodes))
    data.setup()
    assert (data.level, data.class_names, data.num_relations) == ("node", ["x", "y"], None)
    parts = [rows.rows.tolist() for rows in (data.train_rows, data.val_rows, data.test_rows)]
    assert sorted(node for part in parts for node in part) == list(
        range(6, 30)
    )  # nodes without a label are in no split
    batch = next(iter(data.train_dataloader()))
    assert batch.num_nodes == 30
    assert sorted(batch.target_index.tolist()) == parts[0]
    assert batch.y[batch.target_index].tolist() == [i % 2 for i in batch.target_index.tolist()]
    ages = batch.x[parts[0], 0].double()
    assert ages.mean().abs() < 1e-6
    assert ages.std(correction=0) == pytest.approx(1)
    assert data.predict_ids == [str(i) for i in range(30)]
    sampled = GraphDataModule(
        edges, layout=GraphLayout(nodes_path=nodes), batches=GraphBatches(num_neighbors=[2, 2]), global_batch_size=5
    )
    sampled.setup()
    seen = []
    for batch in sampled.train_dataloader():
        assert batch.num_nodes <= 5 * 5
        seen += batch.n_id[batch.target_index].tolist()
    assert sorted(seen) == parts[0]


def test_types_alone_are_relations(write):
    edges = write("e.csv", "target,type,source\nx,r10,b\nx,r2,a\n")
    found = read_graphs(edges, GraphLayout(nodes_path=write("n.csv", "node,y\nb,1\na,2\nx,3\n")))
    assert found.relation_names == ["r10", "r2"]
    assert found.graphs[0].edge_index.tolist() == [[0, 1, 2, 2], [2, 2, 0, 1]]
    assert found.graphs[0].edge_attr.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"edges": "source,goal\na,b\n"}, "has no column 'target'"),
        ({"nodes": "name\na\n"}, "has no column 'node'"),
        ({"nodes": "node,z\na,1\n"}, "has no column 'y'"),
        ({"nodes": ATOMS + "1,x,C,1\n"}, "two rows of node '1'"),
        ({"edges": EDGES + "1,z,single,1\n"}, r"row 30 \(from 0\) of .*edges.csv has the node 'z'"),
        ({"edges": EDGES + "1,2,single,x\n"}, r"column 'weight' .* got 'x' in row 30 \(from 0\)"),
        (
            {"edges": EDGES + "1,2,single,\n"},
            r"column 'weight' .* lacks 1 of 31 values, the first in row 30 \(from 0\)",
        ),
        ({"edges": EDGES + ",2,single,1\n"}, r"column 'source' .* the first in row 30 \(from 0\)"),
        ({"nodes": ATOMS + "e,x,C,\n"}, r"column 'charge' .* the first in row 30 \(from 0\)"),
        (
            {"nodes": ATOMS + "e,x,C,few\n"},
            r"column 'charge' .* 'few' in row 30 \(from 0\) among numbers. Mend the value$",
        ),
        (
            {"nodes": "node,y,name\n" + "".join(f"{at},x,name {at}\n" for at in range(31))},
            "column 'name' .* holds 31 different texts in 31 rows; remove it if it is a key$",
        ),
        ({"nodes": None}, "whose nodes have targets: give a table with the columns node and y in layout.nodes_path"),
    ],
)
def test_a_wrong_table_is_named(write, change, said):
    content = {"edges": EDGES, "nodes": ATOMS} | change
    paths = {name: text and write(f"{name}.csv", text) for name, text in content.items()}
    with pytest.raises(ValueError, match=said):
        GraphDataModule(paths["edges"], layout=GraphLayout(nodes_path=paths["nodes"])).setup()


def test_a_file_to_predict_is_read_as_the_training_graphs_were(make, write):
    new = [{key: value for key, value in line.items() if key != "y"} for line in lines()[:3]]
    data = make(predict_path=write("new.jsonl", new))
    assert data.predict_ids == ["g0", "g1", "g2"]
    batch = next(iter(data.predict_dataloader()))
    assert batch.y is None
    trained = {tuple(graph.x.flatten().tolist()) for graph in graphs_of(data)}
    assert all(tuple(graph.x.flatten().tolist()) in trained for graph in batch.to_data_list())  # scaled alike
    for wrong, said in (
        ({"x": [[1.0], [2.0], [3.0]]}, "the 2 features of the training graphs; got 1"),
        ({"x": None}, "got none"),
        ({"edge_attr": [3, 0]}, "holds the type 3; those trained on go up to 2"),
        ({"edge_attr": None}, "must hold 1 whole numbers each"),
    ):
        with pytest.raises(ValueError, match=said):
            make(predict_path=write("new.jsonl", [new[0] | wrong]))


def test_errors_about_a_graph_name_its_line(make, write):
    def written(**change):
        entries = lines()
        entries[5] = entries[5] | change
        return write("graphs.jsonl", entries)

    for change, said in (
        (
            {"x": [[1.0], [2.0], [3.0]]},
            r"in all graphs of .*; graph 5 \(line 6\) has 1 of .* a row, the first one 2 of",
        ),
        ({"x": None}, r"graph 5 \(line 6\) of .* and its first one differ: one alone has x"),
        ({"edge_attr": [-1, 0, 1]}, r"edge_attr of graph 5 \(line 6\) of .* holds the type -1"),
    ):
        with pytest.raises(ValueError, match=said):
            GraphDataModule(written(**change)).setup()
    unlabelled = [{key: value for key, value in line.items() if key != "y"} for line in lines()]
    unlabelled[2] |= {"edge_attr": [3, 0]}
    with pytest.raises(ValueError, match=r"line 3 of .*new.jsonl holds the type 3"):
        make(predict_path=write("new.jsonl", unlabelled))


def test_graphs_to_predict_have_features_if_and_only_if_those_trained_on_have(make, write):
    one = [line | {"x": [[i + 0.5], [1], [2]]} for i, line in enumerate(lines())]
    without = [{key: value for key, value in line.items() if key != "x"} for line in lines()]
    with pytest.raises(ValueError, match=r"x of .*new.jsonl must have the 1 features of the training graphs; got none"):
        make(one, predict_path=write("new.jsonl", without))
    with pytest.raises(ValueError, match=r"new.jsonl has x, .* and the training graphs have none"):
        make(without, predict_path=write("new.jsonl", one))
    data = make(without, predict_path=write("new.jsonl", without))
    assert next(iter(data.predict_dataloader())).x.unique().tolist() == [1]
