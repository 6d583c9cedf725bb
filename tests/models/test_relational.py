import copy
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.transforms import AddRandomWalkPE

from lightning_accel import ExactResume, GraphDataModule, RelationalGNN
from lightning_accel.data import AddRelationalTriples, GeneratedGraphs, GraphBatches, GraphLayout
from lightning_accel.models import ConvolutionLayers, Marking
from lightning_accel.models.graph_layers import GraphBlock, has_equal_nodes
from lightning_accel.models.masked_loss import MeanAUROC
from lightning_accel.strategies import PipelineStrategy
from tests.ranks import run_ranks
from tests.strategies.trained import SGD, fit, trainer
from tests.tolerance import CLOSE

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")

GRAPHS = {"level": "graph", "target_kind": "classification"}
TRIANGLES = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 0, 4, 5, 3]])
HEXAGON = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]])


def graph(edge_index, y=0, nodes=6, **more):
    return Data(torch.ones(nodes, 1), edge_index, y=torch.tensor([y]), **more)


def triangles_and_hexagons(number=10):
    both = torch.cat([TRIANGLES, TRIANGLES.flip(0)], dim=1), torch.cat([HEXAGON, HEXAGON.flip(0)], dim=1)
    shuffles = [torch.randperm(6) for _ in range(number)]
    return [graph(order[both[i % 2]], i % 2) for i, order in enumerate(shuffles)]


class Graphs(L.LightningDataModule):
    def __init__(self, graphs, **told):
        super().__init__()
        self.graphs = graphs
        for name, value in told.items():
            setattr(self, name, value)

    def train_dataloader(self):
        return DataLoader(self.graphs, batch_size=len(self.graphs))

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def accuracy_after(model, graphs, steps=60):
    run = trainer(max_steps=steps)
    run.fit(model, train_dataloaders=DataLoader(graphs, batch_size=len(graphs)))
    return run.test(model, DataLoader(graphs, batch_size=4), verbose=False)[0]["test/accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("conv", "options", "learns"),
    [
        ("GINConv", {}, False),
        ("RO3Conv", {}, True),
        pytest.param("GINConv", {"layers.triple_readout": True}, True, marks=pytest.mark.slow),
        pytest.param("GINConv", {"marking": Marking(1)}, True, marks=pytest.mark.slow),
        pytest.param("GINConv", {"marking": Marking(2)}, True, marks=pytest.mark.slow),
        ("GINConv", {"marking": Marking(3)}, True),
    ],
)
def test_two_triangles_and_a_hexagon(conv, options, learns):
    readout = options.pop("layers.triple_readout", False)
    layers = ConvolutionLayers(conv, dim=16, num_layers=3, norm="none", triple_readout=readout)
    model = RelationalGNN(1, 2, **GRAPHS, layers=layers, **options)
    accuracy = accuracy_after(model, triangles_and_hexagons())
    assert accuracy == 1 if learns else accuracy == 0.5


def test_matches_the_layers_called_one_by_one():
    model = RelationalGNN(
        3, 4, **GRAPHS, layers=ConvolutionLayers(conv="GINConv", dim=5, num_layers=2, norm="layer")
    ).eval()
    x = torch.randn(6, 3)
    nodes = model.layers.encoder(x)
    for block in model.layers.blocks:
        mlp = block.conv.nn
        summed = nodes + torch.zeros_like(nodes).index_add(0, HEXAGON[1], nodes[HEXAGON[0]])
        nodes = F.layer_norm(mlp(summed), (5,)).relu()
    expected = model.head(torch.stack([nodes[:2].sum(0), nodes[2:].sum(0), torch.zeros(5)]))
    actual = model(x, HEXAGON, batch=torch.tensor([0, 0, 1, 1, 1, 1]), size=3)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("edges", "conv", "options"),
    [
        ({"edge_dim": 2}, "RO3Conv", {}),
        ({"edge_dim": 2}, "GINEConv", {}),
        ({"edge_dim": 2}, "GATv2Conv", {"heads": 3, "concat": False}),
        ({"num_relations": 3}, "RO3Conv", {}),
        ({"num_relations": 3}, "RGCNConv", {}),
        ({"num_relations": 3}, "torch_geometric.nn.conv.TransformerConv", {}),
        ({}, "EdgeConv", {}),
        ({}, "SAGEConv", {"aggr": "max"}),
    ],
)
@pytest.mark.parametrize("marks", [0, 1])
def test_convolutions_of_edges(edges, conv, options, marks):
    """What edges carry counts, where a convolution takes it."""
    model = RelationalGNN(
        2,
        3,
        **GRAPHS,
        **edges,
        layers=ConvolutionLayers(conv=conv, conv_options=options, dim=8, num_layers=2, norm="none"),
        marking=Marking(marks),
    ).eval()
    x, both = torch.randn(6, 2), torch.cat([HEXAGON, HEXAGON.flip(0)], dim=1)
    if not edges:
        assert model(x, both).shape == (1, 3)
        return
    first, second = (torch.zeros(12, 2), torch.ones(12, 2)) if "edge_dim" in edges else (both[0] % 1, both[0] % 1 + 2)
    assert not torch.allclose(model(x, both, first), model(x, both, second), atol=1e-4)


PLAIN = [
    "RO3Conv",
    "AGNNConv",
    "ARMAConv",
    "AntiSymmetricConv",
    "ClusterGCNConv",
    "EGConv",
    "EdgeConv",
    "FeaStConv",
    "GATConv",
    "GATv2Conv",
    "GCNConv",
    "GENConv",
    "GINConv",
    "GeneralConv",
    "GraphConv",
    "LEConv",
    "LGConv",
    "MFConv",
    "ResGatedGraphConv",
    "SAGEConv",
    "SGConv",
    "SimpleConv",
    "SuperGATConv",
    "TAGConv",
    "TransformerConv",
]
CONVS = [(name, {}) for name in PLAIN] + [
    ("ChebConv", {"K": 3}),
    ("GPSConv", {"channels": 8, "conv": None, "heads": 2}),
    *(("GPSConv", {"channels": 8, "conv": None, "norm": norm}) for norm in ("GraphNorm", "InstanceNorm", "PairNorm")),
]


def test_marked_models_normalize_each_graph_alone():
    """In training, too, where a batch norm mixes the graphs of a batch."""
    graphs = [graph(HEXAGON, nodes=7), graph(TRIANGLES)]
    batch = Batch.from_data_list(graphs)
    for heads in (0, 2):
        layers = ConvolutionLayers(dim=8, num_layers=2, conv="GINConv", attention_heads=heads)
        model = RelationalGNN(1, 3, **GRAPHS, layers=layers, marking=Marking(1, train_samples=None)).double()
        together = model(torch.ones(13, 1).double(), batch.edge_index, None, batch.batch, 3)
        alone = torch.cat([model(torch.ones(one.num_nodes, 1).double(), one.edge_index) for one in graphs])
        torch.testing.assert_close(together[:2], alone)
        assert together[2].isfinite().all()
    unmarked = RelationalGNN(1, 3, **GRAPHS, layers=ConvolutionLayers(dim=8))
    assert isinstance(unmarked.layers.blocks[0].norm, nn.BatchNorm1d)


def test_graph_norms_tell_nodes_apart_in_sixteen_bits():
    """Of a regular graph in which one node is marked, where the others are equal."""
    block = GraphBlock(nn.Identity(), 1, "graph", 0.0)
    block.conv.forward = lambda x, *_: x
    x = torch.full((500, 1), 3.0).index_fill(0, torch.tensor([4]), 5.0)
    torch.testing.assert_close(block(x.bfloat16(), None).float(), block(x, None), rtol=1e-2, atol=1e-2)


def test_unknown_norms_are_refused():
    with pytest.raises(ValueError, match=r"layers\.norm must be one of batch, layer, graph, none; got 'graph_norm'"):
        RelationalGNN(layers=ConvolutionLayers(norm="graph_norm"))


@pytest.mark.slow
@pytest.mark.parametrize("marks", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_graphs_of_a_batch_get_what_they_get_alone(marks):
    graphs = [graph(HEXAGON, nodes=7), graph(TRIANGLES), graph(torch.tensor([[0, 1, 0, 2], [1, 0, 2, 0]]), nodes=3)]
    for one in graphs:
        one.x = torch.randn(one.num_nodes, 2, dtype=torch.float64)
    batch = Batch.from_data_list(graphs)
    for conv, options in CONVS:
        model = RelationalGNN(
            2,
            3,
            **GRAPHS,
            layers=ConvolutionLayers(dim=8, num_layers=2, conv=conv, conv_options=options, norm="none"),
            marking=Marking(marks),
        )
        model = model.double().eval()
        together = model(batch.x, batch.edge_index, None, batch.batch, 3)
        alone = torch.cat([model(one.x, one.edge_index) for one in graphs])
        torch.testing.assert_close(together, alone, msg=lambda text, conv=conv: f"{conv}: {text}")


@pytest.mark.slow
def test_values_are_told_in_their_own_unit():
    graphs = triangles_and_hexagons()
    for one in graphs:
        one.y = one.y.float() * 50 + 1000
    told = {"target_mean": [1025.0], "target_std": [25.0]}
    data = Graphs(graphs, num_features=1, level="graph", target_kind="regression", num_targets=1, **told)
    model = RelationalGNN(
        layers=ConvolutionLayers(dim=16, num_layers=2, norm="none"), optimizer=lambda p: torch.optim.Adam(p, lr=0.01)
    )
    run = trainer(max_steps=80)
    run.fit(model, data)
    figures = run.test(model, data, verbose=False)[0]
    assert figures["test/mse"] < 10
    torch.testing.assert_close(figures["test/loss"], figures["test/mse"] / 625, rtol=1e-4, atol=1e-6)
    values = torch.cat([part["value"] for part in run.predict(model, data)])
    torch.testing.assert_close(values, torch.stack([one.y[0] for one in graphs]), atol=10, rtol=0)


def test_outputs_are_standard_deviations_from_the_mean():
    model = RelationalGNN(
        1,
        num_targets=1,
        level="graph",
        target_kind="regression",
        layers=ConvolutionLayers(norm="none", dim=4),
        marking=Marking(1, samples=2),
    )
    batch = Batch.from_data_list([graph(TRIANGLES[:, :4]), graph(HEXAGON[:, :3])])
    torch.manual_seed(2)
    plain = model.eval().estimate(*model._inputs(batch))
    model.target_mean.fill_(1000)
    model.target_std.fill_(5)
    torch.manual_seed(2)
    scaled = model.estimate(*model._inputs(batch))
    torch.testing.assert_close(scaled.mean, plain.mean * 5 + 1000)
    torch.testing.assert_close(scaled.standard_error, plain.standard_error * 5)
    assert plain.standard_error.max() > 0


def test_graphs_without_nodes_have_a_row():
    empty = Data(torch.ones(0, 1), torch.empty(2, 0, dtype=torch.int64), y=torch.tensor([0]))
    batch = Batch.from_data_list([graph(HEXAGON), empty])
    for marks in (0, 1):
        model = RelationalGNN(
            1, 2, **GRAPHS, layers=ConvolutionLayers(dim=4, norm="none"), marking=Marking(marks)
        ).eval()
        assert model(*model._inputs(batch)).shape == (2, 2)
        assert len(model.predict_step(batch, 0)["class"]) == 2


def test_of_batches_of_whole_graphs_all_nodes_count():
    """The ``batch_size`` of a Batch is how many graphs it holds, not how many nodes were asked for."""
    graphs = [Data(torch.ones(6, 1), HEXAGON, y=torch.arange(6) % 2) for _ in range(3)]
    model = RelationalGNN(
        1, 2, level="node", target_kind="classification", layers=ConvolutionLayers(dim=4, norm="none")
    ).eval()
    batch = Batch.from_data_list(graphs)
    assert model._masked_loss(batch, "train").valid == 18
    assert len(model.predict_step(batch, 0)["class"]) == 18


def test_features_of_edges_that_it_was_not_made_for_are_not_looked_at():
    model = RelationalGNN(1, 2, **GRAPHS, layers=ConvolutionLayers(conv="GCNConv", dim=4, norm="none")).eval()
    with pytest.warns(UserWarning, match="ignores edge_attr: pass edge_dim"):
        found = model(torch.ones(6, 1), HEXAGON, torch.rand(6))
    torch.testing.assert_close(found, model(torch.ones(6, 1), HEXAGON))
    with pytest.warns(UserWarning, match="ignores edge_attr: pass edge_dim"):
        model._edges(Data(torch.ones(6, 1), HEXAGON, torch.rand(6)))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(6, 1, dtype=torch.float64), r"takes torch\.float32 x; got torch\.float64\. Convert"),
        (torch.ones(6, 1, dtype=torch.int64), r"takes floating-point x; got torch\.int64"),
        (torch.ones(6, 3), r"RelationalGNN\(num_features=1\) takes x \(N, 1\); got \(6, 3\)"),
    ],
)
def test_features_of_another_kind_are_refused(x, message):
    with pytest.raises((TypeError, ValueError), match=message):
        RelationalGNN(1, 2, **GRAPHS, layers=ConvolutionLayers(conv="GCNConv", dim=4))(x, HEXAGON)


def test_marks_in_a_pipeline_are_refused():
    model = RelationalGNN(1, 2, **GRAPHS, layers=ConvolutionLayers(dim=4), marking=Marking(1))
    model._trainer = SimpleNamespace(strategy=PipelineStrategy(), datamodule=None)
    with pytest.raises(ValueError, match=r"marks run through the layers once for each.*'accel_ddp'"):
        model.setup("fit")


def test_targets_that_are_missing_count_for_nothing():
    model = RelationalGNN(
        1,
        num_targets=2,
        level="graph",
        target_kind="regression",
        layers=ConvolutionLayers(norm="none", dim=4, num_layers=1),
    )
    graphs = [graph(HEXAGON), graph(TRIANGLES), graph(HEXAGON)]
    for one, y in zip(graphs, ([1.0, torch.nan], [2.0, 3.0], [torch.nan, torch.nan]), strict=True):
        one.y = torch.tensor([y])
    batch = Batch.from_data_list(graphs)
    loss = model.training_step(batch, 0)["loss"]
    scores = model(*model._inputs(batch))
    expected = torch.stack([scores[0, 0] - 1, scores[1, 0] - 2, scores[1, 1] - 3]).square().mean()
    torch.testing.assert_close(loss, expected)


def node_data():
    generator = torch.Generator().manual_seed(3)
    masks = torch.tensor([0, 1, 2, 0, 1, 2, 0, 0, 1])
    return Data(
        torch.randn(9, 2, generator=generator),
        torch.randint(9, (2, 30), generator=generator),
        y=torch.randint(3, (9,), generator=generator),
        train_mask=masks == 0,
        val_mask=masks == 1,
        test_mask=masks == 2,
    )


@pytest.mark.parametrize("marks", [0, 1])
def test_nodes_count_in_their_stage(marks):
    data = node_data()
    model = RelationalGNN(
        2,
        3,
        level="node",
        target_kind="classification",
        layers=ConvolutionLayers(dim=6, norm="none"),
        marking=Marking(marks),
    ).eval()
    scores = model(data.x, data.edge_index)
    assert scores.shape == (9, 3)
    for stage in ("train", "val", "test"):
        mask = data[f"{stage}_mask"]
        measured = model._masked_loss(data, stage)
        torch.testing.assert_close(measured.loss / measured.valid, F.cross_entropy(scores[mask], data.y[mask]))
    assert len(model.predict_step(data, 0)["class"]) == 9


def test_of_sampled_neighbours_the_seeds_alone_count():
    data = node_data()
    del data.train_mask
    data.batch_size = 4
    model = RelationalGNN(
        2, 3, level="node", target_kind="classification", layers=ConvolutionLayers(dim=6, norm="none")
    ).eval()
    measured = model._masked_loss(data, "train")
    scores = model(data.x, data.edge_index)[:4]
    torch.testing.assert_close(measured.loss, F.cross_entropy(scores, data.y[:4], reduction="sum"))
    assert len(model.predict_step(data, 0)["class"]) == 4


def test_of_nodes_those_of_target_index_count():
    data = node_data()
    data.target_index = torch.tensor([7, 2])
    model = RelationalGNN(
        2, 3, level="node", target_kind="classification", layers=ConvolutionLayers(dim=6, norm="none")
    ).eval()
    measured = model._masked_loss(data, "train")
    scores = model(data.x, data.edge_index)[[7, 2]]
    torch.testing.assert_close(measured.loss, F.cross_entropy(scores, data.y[[7, 2]], reduction="sum"))
    torch.testing.assert_close(model.predict_step(data, 0)["class"], scores.argmax(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"task": "karate"}, 0.8),
        ({"task": "karate", "batches": GraphBatches(num_neighbors=[5, 5]), "global_batch_size": 4}, 0.8),
    ],
)
def test_nodes_of_the_datamodule(options, least):
    data = GraphDataModule(**options)
    model = RelationalGNN(
        layers=ConvolutionLayers(dim=16, num_layers=2, norm="none"), optimizer=lambda p: torch.optim.Adam(p, lr=0.01)
    )
    run = trainer(max_steps=60, limit_val_batches=0)
    run.fit(model, data)
    assert run.test(model, data, verbose=False)[0]["test/accuracy"] >= least
    assert sum(len(part["class"]) for part in run.predict(model, data)) == 34


@pytest.mark.slow
def test_predictions_tell_the_error_of_samples():
    torch.manual_seed(2)
    data = Batch.from_data_list([graph(TRIANGLES[:, :4]), graph(HEXAGON[:, :3])])
    model = RelationalGNN(
        1,
        2,
        **GRAPHS,
        layers=ConvolutionLayers(dim=8, num_layers=2, norm="none"),
        marking=Marking(1),
        class_names=["a", "b"],
    ).eval()
    exact = model.predict_step(data, 0)
    assert exact["standard_error"].abs().max() == 0
    assert set(exact["class"]) <= {"a", "b"}
    model.marked.samples = 3
    draws = [model.estimate(*model._inputs(data)) for _ in range(300)]
    means, errors, _ = (torch.stack(parts) for parts in zip(*draws, strict=True))
    torch.testing.assert_close(
        means.mean(0), model.marked.eval()(*model._inputs(data)[:2], None, data.batch), atol=1, rtol=1
    )
    torch.testing.assert_close(errors.square().mean(0).sqrt(), means.std(0), rtol=0.15, atol=1e-6)


@pytest.mark.slow
def test_a_checkpoint_gives_the_same_scores(tmp_path):
    data = GraphDataModule(task="csl")
    model = RelationalGNN(layers=ConvolutionLayers(dim=8, num_layers=2), marking=Marking(1))
    run = trainer(max_steps=2, limit_val_batches=0)
    run.fit(model, data)
    run.save_checkpoint(tmp_path / "run.ckpt")
    loaded = RelationalGNN.load_from_checkpoint(tmp_path / "run.ckpt", weights_only=True).eval()
    batch = next(iter(data.test_dataloader()))
    expected = copy.deepcopy(model).eval()(*model._inputs(batch))
    torch.testing.assert_close(loaded(*loaded._inputs(batch)), expected, rtol=0, atol=0)
    assert loaded.num_classes == 10


def test_checkpoints_from_before_sums_were_compressed_give_the_same_scores(tmp_path):
    edges = torch.combinations(torch.arange(6)).T
    for compress_sums in (False, True):
        model = RelationalGNN(3, 4, **GRAPHS, layers=ConvolutionLayers(dim=5, compress_sums=compress_sums)).eval()
        run = trainer()
        run.strategy.connect(model)
        run.save_checkpoint(tmp_path / "new.ckpt", weights_only=True)
        content = torch.load(tmp_path / "new.ckpt", weights_only=True)
        loaded = RelationalGNN.load_from_checkpoint(tmp_path / "new.ckpt").eval()
        x = 9 * torch.randn(6, 3)
        torch.testing.assert_close(loaded(x, edges), model(x, edges), rtol=0, atol=0)
        del content["hyper_parameters"]["layers"]["compress_sums"]
        torch.save(content, tmp_path / "old.ckpt")
        loaded = RelationalGNN.load_from_checkpoint(tmp_path / "old.ckpt").eval()
        assert torch.equal(loaded(x, edges), model(x, edges)) == (not compress_sums)


def layers(**options):
    return {"layers": ConvolutionLayers(**options)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"marking": Marking(samples=3)}, r"say which nodes are marked, but marking\.num_nodes=0"),
        ({"marking": Marking(1), **layers(triple_readout=True)}, "with marked nodes the readout is the sum"),
        (layers(num_layers=0), r"layers\.num_layers=0 leaves the edges out"),
        (layers(num_layers=-1), r"layers\.num_layers must be at least 0.*got -1 and 64"),
        ({"marking": Marking(-1)}, "marking.num_nodes must be 0 or more, or 'auto'; got -1"),
        ({"marking": Marking("auto", "edges")}, "chooses the tuples, too; leave marking.tuples='edges' out"),
        ({"marking": Marking(train_samples=None)}, "say which nodes are marked, but marking.num_nodes=0"),
        (layers(conv="GINKonv"), "conv must be RO3Conv, a convolution of torch_geometric.nn such as GINConv"),
        (layers(conv="no-module.Conv"), "got 'no-module.Conv': no import path"),
        (layers(conv="GATConv", conv_options={"heads": 3}), r"gave \(2, 192\).*concat: false"),
        ({**layers(conv="GCNConv"), "edge_dim": 2}, "edges have 2 features, which GCNConv does not take.*GINEConv"),
        (layers(conv="PNAConv"), "PNAConv cannot be built of.*aggregators"),
        (layers(conv="GPSConv"), "GPSConv cannot be built of.*take the convolution.*attention_heads=4"),
        (layers(conv="GraphNorm"), "GraphNorm takes x and batch, and no edge_index"),
        ({"class_names": ["a"]}, "num_classes is 2, but there are 1 class_names"),
        ({"level": "node", **layers(triple_readout=True)}, "no effect on level='node'"),
        ({"marking": Marking(tuples="edges")}, "say which nodes are marked, but marking.num_nodes=0"),
        (layers(attention_heads=3), "layers.attention_heads must divide layers.dim=64, or be 0; got 3"),
        (layers(attention_heads=4, conv="GPSConv", conv_options={"channels": 64, "conv": None}), "GPSConv takes batch"),
        ({"error": "absolute"}, r"error='absolute' is of target_kind='regression', and this is 'classification'"),
        ({"error": "huber"}, "error must be squared or absolute; got 'huber'"),
        ({"marking": Marking(4)}, "marking.num_nodes of RelationalGNN, must be 1, 2 or 3 for connected tuples; got 4"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RelationalGNN(1, 2, **GRAPHS | options)


def test_sizes_that_nobody_tells_are_asked_for():
    with pytest.raises(ValueError, match=r"needs level, one of graph, node.*Pass them"):
        trainer().fit(RelationalGNN(), Graphs(triangles_and_hexagons()))
    with pytest.raises(ValueError, match=r"needs num_features of nodes, and num_classes or num_targets"):
        trainer().fit(RelationalGNN(level="graph", target_kind="classification"), Graphs(triangles_and_hexagons()))


def test_a_subclass_has_a_step_of_its_own():
    class Constant(RelationalGNN):
        """Trains its readout alone, whatever the classes are."""

        def training_step(self, batch, batch_idx):
            return self(*self._inputs(batch))[:, 0].sum() * 0 + self.readout_sum()

        def readout_sum(self):
            return list(self.parameters())[-1].sum()

    layers = ConvolutionLayers(dim=4, norm="layer")
    model = Constant(1, 2, **GRAPHS, layers=layers, optimizer=lambda p: torch.optim.SGD(p, lr=0.5))
    model.configure_model()
    before = [value.clone() for value in model.parameters()]
    trainer(max_steps=2).fit(model, Graphs(triangles_and_hexagons()))
    *same, last = zip(before, model.parameters(), strict=True)
    torch.testing.assert_close(last[0] - 1, last[1].detach())  # two steps of 0.5 down a slope of 1
    assert all(torch.equal(old, new) for old, new in same)


def weights_after(data, steps, *callbacks, ckpt_path=None, **options):
    torch.manual_seed(4)
    model = RelationalGNN(layers=ConvolutionLayers(dim=6, num_layers=2, norm="batch", dropout=0.2), marking=Marking(1))
    run = trainer(max_steps=steps, limit_val_batches=0, callbacks=list(callbacks), **options)
    run.fit(model, data, ckpt_path=ckpt_path)
    return run, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.slow
def test_a_run_with_marks_resumed_in_mid_epoch_ends_with_the_same_bits(tmp_path):
    """Which node is marked is drawn at random, after the resumption as if there had been none."""

    def data():
        return GraphDataModule(task="csl", global_batch_size=16)

    through = weights_after(data(), 9, ExactResume())[1]
    run, _ = weights_after(data(), 7, ExactResume())
    run.save_checkpoint(tmp_path / "stopped.ckpt")
    torch.manual_seed(99)
    resumed = weights_after(data(), 9, ExactResume(), ckpt_path=tmp_path / "stopped.ckpt")[1]
    assert [name for name in through if not torch.equal(through[name], resumed[name])] == []


def check_nodes_of_two_processes(rank):
    """Two processes, each with half of the nodes that count, take the steps of one with all of them."""
    data, model = GraphDataModule(task="karate"), node_model()
    trainer(max_steps=4, limit_val_batches=0, devices=2, strategy="ddp").fit(model, data)
    return {name: value.detach() for name, value in model.named_parameters()}


def node_model():
    torch.manual_seed(4)
    return RelationalGNN(
        layers=ConvolutionLayers(dim=6, num_layers=2, norm="none"), optimizer=lambda p: torch.optim.SGD(p, lr=0.01)
    )


@pytest.mark.slow
def test_nodes_of_two_processes_train_as_those_of_one():
    first, second = run_ranks(check_nodes_of_two_processes)
    alone = node_model()
    trainer(max_steps=4, limit_val_batches=0).fit(alone, GraphDataModule(task="karate"))
    for name, value in alone.named_parameters():
        torch.testing.assert_close(first[name], value.detach(), **CLOSE)
        torch.testing.assert_close(second[name], first[name], rtol=0, atol=0)


@pytest.mark.weekly
@pytest.mark.slow
def test_bfloat16_counts_triangles_as_well():
    """Sums over triples are float32 under autocast."""
    found = {}
    for precision in ("32-true", "bf16-mixed"):
        torch.manual_seed(1)
        data = GraphDataModule(
            task="substructures",
            layout=GraphLayout(target="triangle"),
            generated=GeneratedGraphs(num_graphs=600),
            global_batch_size=30,
        )
        model = RelationalGNN(
            layers=ConvolutionLayers(dim=16, num_layers=0, triple_readout=True),
            optimizer=lambda p: torch.optim.AdamW(p, lr=0.01),
        )
        run = trainer(max_steps=300, limit_val_batches=0, precision=precision)
        run.fit(model, data)
        found[precision] = run.test(model, data, verbose=False)[0]["test/loss"]
    assert found["bf16-mixed"] < 1e-3 + 2 * found["32-true"]


def test_processes_that_are_seeded_alike_mark_other_nodes():
    batch = Batch.from_data_list([graph(TRIANGLES[:, :4]), graph(HEXAGON[:, :4]), graph(HEXAGON[:, 1:])] * 4)
    model = RelationalGNN(
        1, 2, **GRAPHS, layers=ConvolutionLayers(dim=5, num_layers=2, norm="none"), marking=Marking(1)
    )

    def scores(rank, world_size=2):
        model._trainer = SimpleNamespace(world_size=world_size, global_rank=rank)
        torch.manual_seed(7)
        found = model.train()(*model._inputs(batch))
        model._trainer = None
        return found

    assert not torch.allclose(scores(0), scores(1))
    torch.testing.assert_close(scores(1), scores(1), rtol=0, atol=0)
    alone = scores(0, world_size=1)
    torch.manual_seed(7)
    torch.testing.assert_close(alone, model(*model._inputs(batch)))


def test_all_marks_can_train_at_once():
    torch.manual_seed(3)
    batch = Batch.from_data_list([graph(TRIANGLES[:, :4]), graph(HEXAGON[:, :4])])
    model = RelationalGNN(
        1,
        2,
        **GRAPHS,
        layers=ConvolutionLayers(dim=5, num_layers=2, norm="none"),
        marking=Marking(1, train_samples=None),
    )
    trained = model.train()(*model._inputs(batch))
    torch.testing.assert_close(trained, model.eval()(*model._inputs(batch)))


def test_can_be_fitted_after_a_validation():
    model = RelationalGNN(1, 2, **GRAPHS, layers=ConvolutionLayers(dim=4, norm="layer"))
    data = Graphs(triangles_and_hexagons(4))
    run = trainer(max_steps=2)
    run.validate(model, data, verbose=False)
    run.fit(model, data)
    assert 0 <= run.callback_metrics["val/accuracy"] <= 1


@pytest.mark.parametrize("norm", ["layer", "batch", None])
def test_the_default_norm_warns_of_graphs_whose_nodes_are_equal(norm, recwarn):
    """Their batch norm is another in evaluation: the accuracy with its running statistics stays at chance."""
    model = RelationalGNN(1, 2, **GRAPHS, layers=ConvolutionLayers(dim=4, num_layers=1, norm=norm))
    trainer(max_epochs=2, limit_val_batches=0).fit(model, DataLoader(triangles_and_hexagons(4), batch_size=4))
    found = [str(one.message) for one in recwarn if "Set layers.norm='layer'" in str(one.message)]
    assert len(found) == (norm is None)


def test_nodes_are_equal_within_each_graph():
    triangle, path = torch.tensor([[0, 1, 2], [1, 2, 0]]), torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    graphs = Batch.from_data_list([Data(torch.full((3, 1), value), triangle) for value in (1.0, 2.0)])
    assert has_equal_nodes(graphs.x, graphs.edge_index, graphs.batch)
    assert not has_equal_nodes(graphs.x, graphs.edge_index)
    assert not has_equal_nodes(torch.ones(3, 1), path)


def test_stored_triangles_are_those_that_count():
    """The model goes by ``triangle_index`` where a batch has it, and finds the same without."""
    batch = Batch.from_data_list([AddRelationalTriples()(one) for one in triangles_and_hexagons(4)])
    model = RelationalGNN(
        1, 2, **GRAPHS, layers=ConvolutionLayers(dim=5, num_layers=2, norm="none", triple_readout=True)
    ).eval()
    x, edge_index, _, graph, size, stored = model._inputs(batch)
    assert stored.shape == (3, 4)
    expected = model(x, edge_index, None, graph, size)
    torch.testing.assert_close(model(x, edge_index.clone(), None, graph, size, stored), expected)
    fewer = model(x, edge_index.clone(), None, graph, size, stored[:, :2])
    assert not torch.allclose(fewer, expected)


def test_a_convolution_of_ones_own():
    model = RelationalGNN(1, 2, **GRAPHS, layers=ConvolutionLayers(conv="tests.models.test_relational.Own", dim=4))
    assert isinstance(model.layers.blocks[0].conv, Own)


class Own(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.linear = nn.Linear(in_channels, out_channels)

    def forward(self, x, edge_index):
        return self.linear(x)


def test_trains_in_bf16_parameters_on_graphs_whose_features_no_precision_converts():
    run = fit("graphs", precision="bf16-true", optimizer=SGD, num_rows=8, max_steps=1)
    assert run.global_step == 1
    assert run.lightning_module.dtype == torch.bfloat16


def labelled_graphs(number=40):
    """Graphs with an isolated part for each label that is 1; the third label is missing now and then."""
    found = []
    for i in range(number):
        labels = [i % 2, i // 2 % 2, i // 4 % 2]
        x = torch.tensor([[1.0, 0, 0]] * (1 + labels[0]) + [[0, 1.0, 0]] * (1 + labels[1]) + [[0, 0, 1.0]] * 1)
        y = torch.tensor([[*labels[:2], torch.nan if i % 3 else float(labels[0])]])
        found.append(Data(x, torch.tensor([[0, 1], [1, 0]]), y=y))
    return found


@pytest.mark.slow
def test_labels_are_learned_each_by_itself_and_missing_ones_count_for_nothing():
    torch.manual_seed(0)
    data = GraphDataModule(
        dataset=labelled_graphs(), layout=GraphLayout(target_kind="multilabel"), global_batch_size=14
    )
    layers = ConvolutionLayers("GINConv", dim=8, num_layers=1, norm="none")
    model = RelationalGNN(layers=layers, optimizer=lambda p: torch.optim.AdamW(p, lr=0.03))
    run = trainer(max_steps=90)
    run.fit(model, datamodule=data)
    assert (model.num_targets, model.num_classes) == (3, None)
    figures = run.test(model, datamodule=data, verbose=False)[0]
    assert figures["test/accuracy"] == figures["test/auroc"] == 1
    scores, targets, missing = torch.randn(6, 2), torch.randint(2, (6, 2)).float(), torch.tensor([[torch.nan, 1.0]])
    batch = SimpleNamespace(y=torch.cat([targets, missing]))
    shown = RelationalGNN(1, num_targets=2, level="graph", target_kind="multilabel", layers=layers)
    shown._inputs, shown._target = (lambda batch: ()), (lambda batch, stage: batch.y)
    shown.forward = lambda: torch.cat([scores, torch.zeros(1, 2)])
    measured = shown._masked_loss(batch, "train")
    expected = F.binary_cross_entropy_with_logits(scores, targets, reduction="sum") + torch.tensor(2.0).log()
    torch.testing.assert_close(measured.loss, expected)
    assert measured.valid == 13
    assert measured.score == ((scores > 0) == targets.bool()).sum()
    assert set(run.predict(model, datamodule=data)[0]) == {"probability", "score", "standard_error"}


def test_the_area_under_the_curve_leaves_labels_of_one_value_out():
    metric = MeanAUROC()
    scores = torch.randn(50, 3)
    targets = torch.randint(2, (50, 3)).float()
    targets[:, 1] = 1
    targets[::4, 2] = torch.nan
    metric.update(scores[:20], targets[:20])
    metric.update(scores[20:], targets[20:])
    known = ~targets[:, 2].isnan()
    expected = [roc_auc_score(targets[:, 0], scores[:, 0]), roc_auc_score(targets[known, 2], scores[known, 2])]
    assert float(metric.compute()) == pytest.approx(sum(expected) / 2)
    metric.reset()
    metric.update(scores[:, 1:2], targets[:, 1:2])
    assert metric.compute().isnan()


@pytest.mark.slow
def test_absolute_errors_are_minimized_and_logged():
    torch.manual_seed(0)
    graphs = [Data(torch.ones(2, 1), torch.tensor([[0], [1]]), y=torch.tensor([y])) for y in (0.0, 1.0, 50.0) * 5]
    model = RelationalGNN(
        1, num_targets=1, level="graph", target_kind="regression", error="absolute",
        layers=ConvolutionLayers("GINConv", dim=4, num_layers=1, norm="none"),
        optimizer=lambda p: torch.optim.Adam(p, lr=0.05),
    )  # fmt: skip
    run = trainer(max_steps=300)
    run.fit(model, train_dataloaders=DataLoader(graphs, batch_size=15))
    figures = run.test(model, DataLoader(graphs, batch_size=15), verbose=False)[0]
    assert "test/mse" not in figures
    assert figures["test/mae"] == figures["test/loss"] == pytest.approx(50 / 3, abs=0.3)  # that of the median, 1


@pytest.mark.parametrize(
    ("kind", "y", "message"),
    [
        ("multilabel", [[0.0, 0.5]], r"labels are 0 or 1, and NaN where they are missing; graph 0 of .* has 0\.5"),
        ("classification", [[0, 1]], "for labels of 0 and 1 to multilabel"),
    ],
)
def test_targets_of_another_kind_are_refused(kind, y, message):
    graphs = [Data(torch.ones(1, 1), torch.zeros(2, 0).long(), y=torch.tensor(y)) for _ in range(20)]
    with pytest.raises(ValueError, match=message):
        GraphDataModule(dataset=graphs, layout=GraphLayout(target_kind=kind, level="graph")).setup()


@pytest.mark.parametrize("conv", ["RO3Conv", "GINEConv"])
def test_attention_beside_a_convolution_stays_within_each_graph(conv):
    """Two graphs and one without nodes between them, against each alone and the formula of GPS by hand."""
    torch.manual_seed(0)
    layers = ConvolutionLayers(conv, dim=8, num_layers=2, norm="layer", attention_heads=2)
    model = RelationalGNN(3, 2, **GRAPHS, edge_dim=2, layers=layers).double()
    first, second = (
        (torch.randn(nodes, 3).double(), edges, torch.randn(edges.shape[1], 2).double())
        for nodes, edges in ((6, HEXAGON), (4, torch.tensor([[0, 1], [1, 3]])))
    )
    x, edge_attr = (torch.cat([first[i], second[i]]) for i in (0, 2))
    edge_index = torch.cat([first[1], second[1] + 6], dim=1)
    batch = torch.tensor([0] * 6 + [2] * 4)
    found = model(x, edge_index, edge_attr, batch, 3)
    alone = [model(*graph) for graph in (first, second)]
    torch.testing.assert_close(found[[0, 2]], torch.cat(alone), **CLOSE)
    found[[0, 2]].sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
    nothing = model(x[:0], edge_index[:, :0], edge_attr[:0], batch[:0], 2)
    torch.testing.assert_close(nothing, found[1].expand(2, 2), **CLOSE)

    block = model.layers.blocks[0]
    gps, h = block.block, torch.randn(6, 8).double()
    edges = torch.randn(6, 2).double()
    near = gps.norm1(gps.conv(h, HEXAGON, edges) + h)
    query, key, value = (h @ gps.attn.in_proj_weight.T + gps.attn.in_proj_bias).view(6, 3, 2, 4).permute(1, 2, 0, 3)
    mixed = F.scaled_dot_product_attention(query, key, value).transpose(0, 1).reshape(6, 8)
    far = gps.norm2(gps.attn.out_proj(mixed) + h)
    expected = gps.norm3(near + far + gps.mlp(near + far))
    torch.testing.assert_close(block(h, HEXAGON, edges), expected, **CLOSE)


@pytest.mark.slow
def test_positional_encodings_are_features():
    torch.manual_seed(0)
    graphs = [graph(edges, y) for edges, y in ((TRIANGLES, 0), (HEXAGON, 1)) for _ in range(10)]
    for one in graphs:
        one.edge_index = torch.cat([one.edge_index, one.edge_index.flip(0)], dim=1)
        one.x = torch.randint(2, (6, 1))
    walk = AddRandomWalkPE(4)
    data = GraphDataModule(dataset=graphs, transform=walk, global_batch_size=10)
    layers = ConvolutionLayers("GINConv", dim=8, num_layers=1, attention_heads=2)
    model = RelationalGNN(layers=layers, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01))
    run = trainer(max_steps=30)
    run.fit(model, datamodule=data)
    assert data.num_features == 2 + 4
    sample = data.train_dataset[0]
    alone = walk(Data(edge_index=sample.edge_index, num_nodes=6)).random_walk_pe
    assert torch.equal(sample.x[:, 2:], alone)
    assert "random_walk_pe" not in sample
    assert run.test(model, datamodule=data, verbose=False)[0]["test/accuracy"] == 1  # message passing has .5
    graphs[3].random_walk_pe = torch.zeros(6, 4)
    with pytest.raises(ValueError, match="one alone has random_walk_pe"):
        GraphDataModule(dataset=graphs).setup()


def test_labels_of_whole_numbers_may_be_missing_and_others_are_refused_in_a_batch():
    layers = ConvolutionLayers("GINConv", dim=4, num_layers=1)
    model = RelationalGNN(1, num_targets=2, level="graph", target_kind="multilabel", layers=layers)
    single = Data(torch.ones(1, 1), HEXAGON[:, :0])
    batch = Batch.from_data_list([single, single])
    batch.y = torch.tensor([[1, -100], [0, 1]])
    assert model._masked_loss(batch, "train").valid == 3
    batch.y = torch.tensor([[-1, 1], [0, 1]])
    with pytest.raises(ValueError, match=r"labels are 0 or 1.*a batch of train has -1\.0"):
        model._masked_loss(batch, "train")


@pytest.mark.slow
def test_metrics_are_float32_where_parameters_are_bf16():
    """Sums in bf16 stop at 256."""
    graphs = [graph(TRIANGLES, 0) for _ in range(300)] + [graph(HEXAGON, 1) for _ in range(100)]
    model = RelationalGNN(1, 2, **GRAPHS, layers=ConvolutionLayers("GINConv", dim=4, num_layers=1))
    run = trainer(precision="bf16-true")
    figures = run.test(model, DataLoader(graphs, batch_size=1), verbose=False)[0]
    figures |= run.validate(model, DataLoader(graphs, batch_size=1), verbose=False)[0]
    assert {figures["test/accuracy"], figures["val/accuracy"]} <= {0.25, 0.75}
