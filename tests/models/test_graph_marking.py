import logging

import lightning as L
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.data.lightning import LightningDataset

from lightning_accel import GraphDataModule, RelationalGNN
from lightning_accel.data.graphs.tasks import CSL_SKIPS, circular_skip_link, relabelled
from lightning_accel.models import ConvolutionLayers, Marking, choose_marking, compare_markings
from tests.models.test_relational import HEXAGON, TRIANGLES, triangles_and_hexagons
from tests.strategies.trained import trainer

GIN = ConvolutionLayers("GINConv", num_layers=3, dim=8)


def circulants(copies=2):
    torch.manual_seed(0)
    graphs = [circular_skip_link(41, skip) for skip in CSL_SKIPS]
    return [
        Data(edge_index=relabelled(graph, torch.randperm(41)).edge_index, num_nodes=41, y=torch.tensor([y]))
        for _ in range(copies)
        for y, graph in enumerate(graphs)
    ]


@pytest.mark.slow
def test_the_cheapest_marks_that_tell_circular_graphs_apart():
    graphs = circulants()
    found = compare_markings(graphs, GIN)
    alike = {one.marking: one.alike for one in found}
    # three layers see a third of the 45 pairs of classes by one mark, and any two marks measure distances
    assert alike[Marking()] == 20
    assert 0 < alike[Marking(1)] < 20
    assert [one.copies for one in found] == [1, 41, 164, 492, 1640][: len(found)]
    deeper = ConvolutionLayers("GINConv", num_layers=4)
    assert choose_marking(graphs, deeper, Marking("auto", samples=5)) == Marking(1, samples=5)
    assert choose_marking(graphs, ConvolutionLayers("RO3Conv", num_layers=2)) == Marking(1)


def test_graphs_of_one_target_may_look_alike_and_missing_targets_disagree_with_none():
    hexagon, triangles = (Data(edge_index=edges, num_nodes=6) for edges in (HEXAGON, TRIANGLES))

    def alike(*targets):
        graphs = [hexagon.clone(), triangles.clone()]
        for graph, y in zip(graphs, targets, strict=True):
            graph.y = torch.tensor([y])
        return compare_markings(graphs, GIN)[0].alike

    assert alike(3, 3) == alike(1, -100) == alike(0.5, torch.nan) == 0
    assert alike(1, 2) == alike(0.5, 0.25) == alike([0.0, 1.0], [torch.nan, 2.0]) == 2
    assert alike([0.0, torch.nan], [torch.nan, 2.0]) == 0


def test_equal_graphs_of_unequal_targets_take_no_marks():
    graphs = [Data(edge_index=HEXAGON, num_nodes=6, y=torch.tensor([y])) for y in (0, 1)]
    found = compare_markings(graphs, GIN)
    assert len(found) == 5
    assert {one.alike for one in found} == {2}
    assert choose_marking(graphs, GIN) == Marking()


@pytest.mark.slow
def test_graphs_that_differ_need_no_marks_and_checkpoints_load(tmp_path):
    graphs = [Data(edge_index=HEXAGON[:, :n], num_nodes=6, y=torch.tensor([n % 2])) for n in (2, 3) * 10]
    model = RelationalGNN(layers=GIN, marking=Marking("auto", samples=5, train_samples=2))
    run = trainer(max_steps=1)
    run.fit(model, datamodule=GraphDataModule(dataset=graphs))
    assert model.marking == Marking()
    run.save_checkpoint(tmp_path / "a.ckpt")
    assert RelationalGNN.load_from_checkpoint(tmp_path / "a.ckpt").marked is None


@pytest.mark.filterwarnings("ignore:RelationalGNN ignores edge_attr", "ignore:the nodes of each graph")
@pytest.mark.parametrize("sees_edges", [False, True])
def test_graphs_are_compared_by_what_the_model_sees_of_edges(sees_edges, caplog):
    """Types of edges alone differ, and lie in edge_type, or are features that the model does not take."""
    kinds = [torch.full((6,), y) for y in (0, 1)]
    graphs = [
        Data(
            torch.ones(6, 1), HEXAGON, y=torch.tensor([i % 2]),
            **{"edge_type" if sees_edges else "edge_attr": kinds[i % 2]},
        )
        for i in range(20)
    ]  # fmt: skip
    sizes = {"num_features": 1, "num_classes": 2, "level": "graph", "target_kind": "classification"}
    sizes |= {"num_relations": 2} if sees_edges else {}
    layers = ConvolutionLayers("RO3Conv", num_layers=1, dim=4)
    model = RelationalGNN(layers=layers, marking=Marking("auto"), **sizes)
    data = LightningDataset(graphs, graphs, batch_size=5, pin_memory=False)
    with caplog.at_level(logging.INFO):
        trainer(max_steps=1).fit(model, datamodule=data)
    assert f"another target\n  {0 if sees_edges else 20} with no marks" in caplog.text


def test_readouts_of_triples_and_no_graphs_are_refused():
    with pytest.raises(ValueError, match="got no graphs"):
        compare_markings([], GIN)
    with pytest.raises(ValueError, match="triple_readout=True, which excludes marks"):
        compare_markings(circulants(1), ConvolutionLayers(triple_readout=True))


def test_what_takes_too_long_is_left_out(monkeypatch):
    monkeypatch.setattr("lightning_accel.models.graph_marking._MOST_NODES", 20 * 41 * 164)
    assert [one.marking.num_nodes for one in compare_markings(circulants(), GIN)] == [0, 1, 2]


def test_targets_of_nodes_are_refused():
    graph = Data(edge_index=HEXAGON, num_nodes=6, y=torch.zeros(6))
    with pytest.raises(ValueError, match=r"targets of whole graphs.*graph 0 has y=\(6,\)\. Give marking\.num_nodes"):
        compare_markings([graph], GIN)


@pytest.mark.sampled(default=1)
@pytest.mark.parametrize("of_pyg", [False, True])
def test_a_model_marks_what_the_training_graphs_need(of_pyg, tmp_path, caplog):
    torch.manual_seed(0)
    graphs = triangles_and_hexagons(30)
    sizes = {}
    if of_pyg:
        data = LightningDataset(graphs[:20], graphs[20:], batch_size=5, pin_memory=False)
        sizes = {"num_features": 1, "num_classes": 2, "level": "graph", "target_kind": "classification"}
    else:
        data = GraphDataModule(dataset=graphs, global_batch_size=5)
    model = RelationalGNN(layers=GIN, marking=Marking("auto", samples=4), **sizes)
    run = trainer(max_steps=2, default_root_dir=tmp_path)
    with caplog.at_level(logging.INFO):
        run.fit(model, datamodule=data)
    assert model.marking == Marking(1, samples=4)
    assert model.marked.marks == 1
    said = "training graphs, 3 layers of GINConv cannot distinguish from a graph with another target\n"
    assert [said in record.message for record in caplog.records].count(True) == 1
    assert "marking.num_nodes='auto' takes num_nodes=1 (6 copies of a graph). Of " in caplog.text
    assert (
        "\n  0 with num_nodes=1 (6 copies of a graph)\nlayers.conv=RO3Conv needs no marks: 0 with none" in caplog.text
    )
    run.save_checkpoint(tmp_path / "a.ckpt")
    loaded = RelationalGNN.load_from_checkpoint(tmp_path / "a.ckpt")
    assert loaded.marking == model.marking


def test_nodes_and_datamodules_that_do_not_tell_their_graphs_are_asked_for_a_number():
    class Foreign(L.LightningDataModule):
        pass

    model = RelationalGNN(1, 2, level="graph", target_kind="classification", layers=GIN, marking=Marking("auto"))
    with pytest.raises(ValueError, match="in a Trainer; without one, give the number"):
        model.configure_model()
    with pytest.raises(ValueError, match=r"Foreign without any\. Give the number of nodes to mark"):
        trainer().fit(model, datamodule=Foreign())
    karate = GraphDataModule(task="karate")
    with pytest.raises(ValueError, match=r"got level='node'\. Give the number of nodes to mark"):
        trainer().fit(RelationalGNN(layers=GIN, marking=Marking("auto")), datamodule=karate)
