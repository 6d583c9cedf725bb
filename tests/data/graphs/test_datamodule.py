import copy

import lightning as L
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LightningCLI
from torch_geometric.data import Data, Dataset, HeteroData
from torch_geometric.datasets import FakeDataset, KarateClub
from torch_geometric.nn import GINConv, global_add_pool

from lightning_accel.callbacks import ExactResume, PredictionWriter
from lightning_accel.data import GeneratedGraphs, GraphBatches, GraphLayout, GraphSplitOptions
from lightning_accel.data.graphs.datamodule import GraphDataModule
from lightning_accel.data.graphs.dataset import NeighbourDataset
from tests.data.graphs.grouped import grouped
from tests.ranks import run_ranks


def ready(*arguments, **options):
    data = GraphDataModule(*arguments, **grouped(options))
    data.setup()
    return data


def graphs_of(rows):
    return [(graph.edge_index.tolist(), graph.y.tolist()) for graph in rows.graphs]


def test_csl():
    data = ready()
    assert (data.level, data.target_kind, data.num_classes, data.num_features) == ("graph", "classification", 10, 1)
    assert data.edge_dim is data.num_relations is data.num_targets is data.target_mean is None
    batch = next(iter(data.train_dataloader()))
    assert batch.x.equal(torch.ones(45 * 41, 1))
    assert batch.y.shape == (45,)
    assert [len(rows) for rows in (data.train_rows, data.val_rows, data.test_rows)] == [90, 30, 30]
    other = ready(None, "csl", fold=1)
    assert graphs_of(other.test_rows) == graphs_of(ready(task="csl", fold=1).test_rows) != graphs_of(data.test_rows)
    assert graphs_of(data.val_rows) == graphs_of(other.test_rows)
    assert len(data.predict_ids) == len({*data.predict_ids}) == 30


@pytest.mark.parametrize("level", ["graph", "node"])
def test_substructures(level):
    data = ready(task="substructures", num_graphs=40, level=level)
    assert (data.level, data.target_kind, data.num_targets, data.num_classes) == (level, "regression", 7, None)
    assert data.target_names[:2] == ["triangle", "induced_wedge"]
    y = torch.cat([graph.y for graph in data.train_rows.graphs])
    assert y.shape == (12 if level == "graph" else 120, 7)  # shares of Chen et al.
    assert data.target_mean == pytest.approx(y.mean(0).tolist(), rel=1e-5)
    assert data.target_std == pytest.approx(y.std(0, correction=0).tolist(), rel=1e-5)
    one = ready(task="substructures", num_graphs=40, level=level, target="cycle_4")
    assert torch.cat([graph.y for graph in one.train_rows.graphs]).equal(y[:, 5])
    assert (one.num_targets, one.target_names) == (1, ["cycle_4"])


def test_the_karate_club_is_one_graph():
    data = ready(task="karate")
    batches = [
        next(iter(loader)) for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader())
    ]
    assert len(data.train_dataloader()) == 1
    nodes = [batch.target_index.tolist() for batch in batches]
    assert sorted(node for part in nodes for node in part) == list(range(34))
    assert [len(part) for part in nodes] == [23, 4, 7]
    assert (data.num_features, data.class_names) == (34, ["Mr. Hi", "Officer"])
    assert next(iter(data.predict_dataloader())).target_index.tolist() == list(range(34))
    parts = ready(task="karate", num_neighbors=[3, 3], global_batch_size=10)
    assert isinstance(parts.train_rows, NeighbourDataset)
    assert sorted(len(batch.target_index) for batch in parts.train_dataloader()) == [7, 8, 8]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"task": "cls"}, "task must be one of csl, .*got 'cls'"),
        ({"task": "csl", "dataset": KarateClub()}, "one of them; got task and dataset"),
        ({"fold": 5}, "split.fold of csl must be from 0 to 4; got 5"),
        ({"num_graphs": 100}, "generated.num_graphs would have no effect with task='csl'"),
        ({"val_share": 0.1}, "split.val_share would have no effect with task='csl'"),
        (
            {"task": "karate", "fold": 1},
            "split.fold would have no effect with task='karate'; split.fold is for csl, dataset",
        ),
        ({"task": "substructures", "num_neighbors": [3]}, "num_neighbors would have no effect"),
        ({"task": "karate", "level": "node"}, "layout.level would have no effect"),
        ({"task": "karate", "predict_path": "x.csv"}, "predict_path would have no effect"),
        (
            {"task": "karate", "num_neighbors": [0]},
            r"numbers of 1 or more, or -1 for all, one for each step; got \[0\]",
        ),
        ({"task": "karate", "num_neighbors": [3], "max_nodes": 9}, "would have no effect with num_neighbors"),
        ({"task": "substructures", "level": "edge"}, "layout.level must be one of graph, node; got 'edge'"),
        (
            {"task": "substructures", "family": "tree"},
            "generated.family must be one of erdos_renyi, regular; got 'tree'",
        ),
        ({"task": "substructures", "target": "cycle_6"}, "layout.target must be among triangle, .*; got cycle_6"),
        ({"task": "karate", "val_share": 0.5, "test_share": 0.5}, "val_share=0.5, test_share=0.5"),
        ({"global_batch_size": 0}, "global_batch_size must be at least 1; got 0"),
        ({"max_edges": 0}, "batches.max_edges must be at least 1; got 0"),
        ({"seed": -1}, "at least 0; got -1"),
        (
            {"dataset": KarateClub(), "val_dataset": KarateClub()},
            "split.val_dataset and split.test_dataset go together",
        ),
    ],
)
def test_options_are_refused_before_anything_is_read(options, said):
    with pytest.raises(ValueError, match=said):
        GraphDataModule(**grouped(options))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_nodes": 40}, "max_nodes=40 holds no graph of 41 nodes"),
        ({"max_edges": 100}, "max_edges=100 holds no graph of 164 edges"),
        ({"task": "karate", "global_batch_size": 3}, "no effect on the one graph of the task karate"),
        (
            {"dataset": FakeDataset(60, num_classes=2), "num_neighbors": [3]},
            "num_neighbors needs one graph .* has 60 graphs",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_setup(options, said):
    with pytest.raises(ValueError, match=said):
        GraphDataModule(**grouped(options)).setup()


class Given(Dataset):
    """A dataset of graphs that it keeps."""

    def __init__(self, graphs):
        super().__init__()
        self.graphs = graphs

    def len(self):
        return len(self.graphs)

    def get(self, idx):
        return self.graphs[idx]


def given(number=20, **more):
    edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    made = [Data(edge_index=edges, x=torch.randn(3, 2), y=torch.tensor([5 * (i % 2)])) for i in range(number)]
    for graph in made:
        graph.update({key: value(graph) for key, value in more.items()})
    return made


def test_datasets_of_pyg():
    data = ready(dataset=FakeDataset(40, avg_num_nodes=9, num_channels=5, edge_dim=3, num_classes=4))
    assert (data.level, data.target_kind, data.num_classes, data.num_features, data.edge_dim) == (
        "graph",
        "classification",
        4,
        5,
        3,
    )
    classes = ready(dataset=Given(given()))
    assert classes.class_names == ["0", "5"]
    assert torch.cat([graph.y for graph in classes.train_rows.graphs]).bincount().tolist() == [7, 7]
    nodes = ready(dataset=Given(given(y=lambda graph: torch.randn(3))))
    assert (nodes.level, nodes.target_kind, nodes.num_targets) == ("node", "regression", 1)
    several = ready(dataset=Given(given(y=lambda graph: torch.randn(1, 4))))
    assert next(iter(several.train_dataloader())).y.shape == (14, 4)
    parts = ready(dataset=Given(given(6)), val_dataset=Given(given(4)), test_dataset=Given(given(2)))
    assert [len(rows) for rows in (parts.train_rows, parts.val_rows, parts.test_rows)] == [6, 4, 2]


@pytest.mark.parametrize("one", [[0.0, 1.0, 0.0, 0.0], [1.0]])
def test_floating_targets_of_zeros_and_ones_are_warned_of(one):
    number = iter(range(99))
    graphs = given(y=lambda graph: torch.tensor(one if next(number) % 2 else [0.0, 1.0, 1.0, 1.0][: len(one)]))
    with pytest.warns(UserWarning, match=r"taken for quantities, but .* layout\.target_kind to multilabel; .*argmax"):
        assert ready(dataset=Given(graphs)).target_kind == "regression"
    assert ready(dataset=Given(graphs), target_kind="regression").num_targets == len(one)


def test_whole_numbers_become_features_and_relations():
    number = iter(range(99))
    made = given(
        x=lambda graph: torch.tensor([[0, 1], [1, 0], [2, 2]]),
        edge_attr=lambda graph: torch.full((4, 1), next(number) % 3),
    )
    data = ready(dataset=Given(made))
    assert (data.num_features, data.edge_dim, data.num_relations) == (6, None, 3)
    batch = next(iter(data.train_dataloader()))
    assert batch.x[:3].tolist() == [[1, 0, 0, 0, 1, 0], [0, 1, 0, 1, 0, 0], [0, 0, 1, 0, 0, 1]]
    assert batch.edge_attr.dtype == torch.int64
    assert batch.edge_attr.shape == (14 * 4,)
    many = ready(dataset=Given(given(edge_attr=lambda graph: torch.tensor([[0, 1]] * 4))))
    assert (many.edge_dim, many.num_relations) == (3, None)
    flags = ready(dataset=Given(given(x=lambda graph: torch.tensor([True, False, True]))))
    assert next(iter(flags.train_dataloader())).x[:3].tolist() == [[1], [0], [1]]


def test_masks_of_a_dataset_split_its_nodes():
    graph = KarateClub()[0]
    graph.y[3] = -1  # not known
    for name, start in (("train", 0), ("val", 10), ("test", 20)):
        graph[f"{name}_mask"] = (torch.arange(34) >= start) & (torch.arange(34) < start + 10)
    data = ready(dataset=Given([graph]))
    assert data.train_rows.rows.tolist() == [0, 1, 2, *range(4, 10)]
    assert data.val_rows.rows.tolist() == list(range(10, 20))
    assert "train_mask" not in next(iter(data.train_dataloader()))
    assert "train_mask" in graph
    for name in ("train", "val", "test"):
        graph[f"{name}_mask"] = torch.stack([graph[f"{name}_mask"], graph[f"{name}_mask"].flip(0)], dim=1)
    assert ready(dataset=Given([graph]), fold=1).test_rows.rows.tolist() == list(range(4, 14))
    state = data.state_dict()
    graph.train_mask[0] = False
    with pytest.raises(ValueError, match="digest"):
        ready(dataset=Given([graph]), fold=0).load_state_dict(state)
    with pytest.raises(ValueError, match="holds 2 splits; got fold=2"):
        ready(dataset=Given([graph]), fold=2)
    with pytest.raises(ValueError, match="has train_mask and no val_mask, test_mask"):
        ready(dataset=KarateClub())


def test_datasets_that_cannot_be_used_are_refused():
    for change, said in (
        ({"y": lambda graph: None}, "graph 0 of the dataset .* has no target y"),
        ({"y": lambda graph: torch.tensor([1])}, "holds one class only, .1."),
        ({"y": lambda graph: torch.tensor([[1, 0]])}, "must hold one class each"),
        ({"x": lambda graph: torch.full((3, 1), torch.nan)}, "x of graph 0 of .* holds nan"),
        (
            {"edge_index": lambda graph: torch.zeros(2, 3)},
            r"edge_index of graph 0 of .* int64; got .2, 3. of torch.float32",
        ),
        (
            {"edge_attr": lambda graph: torch.zeros(3)},
            r"edge_attr of graph 0 of .* must be \(4, ...\) of numbers; got \(3,\)",
        ),
        ({"x": lambda graph: torch.full((3, 1), 99999)}, "whole numbers up to 99999"),
        ({"x": lambda graph: torch.zeros(2, 1)}, "edge_index of graph 0 of .* names node 2 of 2"),
    ):
        with pytest.raises(ValueError, match=said):
            ready(dataset=Given(given(**change)))
    graphs = given()
    graphs[4].y = torch.tensor([1, 0])
    with pytest.raises(ValueError, match=r"y of graph 4 of .* as many values"):
        ready(dataset=Given(graphs))
    with pytest.raises(TypeError, match=r"nodes of one kind, .* HeteroData"):
        ready(dataset=Given([HeteroData()]))


class AddDegree:
    calls = 0

    def __call__(self, graph):
        AddDegree.calls += 1
        graph.x = torch.bincount(graph.edge_index[1], minlength=graph.num_nodes).float()[:, None]
        return graph


def test_a_transform_is_called_once_a_graph_and_leaves_the_dataset_alone():
    AddDegree.calls = 0
    made = given()
    before = copy.deepcopy(made)
    data = ready(dataset=Given(made), transform=AddDegree())
    for _ in range(2):
        assert {value for batch in data.train_dataloader() for value in batch.x.flatten().tolist()} == {1, 2}
    data.setup("test")  # a trainer calls it once a stage
    assert AddDegree.calls == 20
    assert all(a.x.equal(b.x) and a.y.equal(b.y) for a, b in zip(made, before, strict=True))
    assert next(iter(ready(transform=AddDegree()).train_dataloader())).x.unique().tolist() == [4]


class Plain(L.LightningModule):
    """A module that knows nothing of this package but its batches."""

    def __init__(self, num_features: int = 1, num_classes: int = 10, level: str = "graph"):
        super().__init__()
        self.conv = GINConv(torch.nn.Linear(num_features, num_classes))
        self.level = level
        self.seen: list[list[int]] = []

    def out(self, batch):
        out = self.conv(batch.x, batch.edge_index)
        return out[batch.target_index] if self.level == "node" else global_add_pool(out, batch.batch)

    def training_step(self, batch, batch_idx):
        if self.level == "node":
            self.seen.append(batch.n_id[batch.target_index].tolist())
            return F.cross_entropy(self.out(batch), batch.y[batch.target_index])
        ends = batch.edge_index[:, :: max(1, batch.num_edges // 50)]
        self.seen.append([*batch.y.tolist(), int((ends[0] * ends[1]).sum())])
        return F.cross_entropy(self.out(batch), batch.y)

    def validation_step(self, batch, batch_idx):
        y = batch.y[batch.target_index] if self.level == "node" else batch.y
        self.log("val/loss", F.cross_entropy(self.out(batch), y), batch_size=len(y))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        assert batch.y is None
        nodes = batch.x[batch.target_index].argmax(1) if self.level == "node" else batch.ptr.diff()
        return {"label": self.out(batch).argmax(1), "what": nodes}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trainer(folder, **options):
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(default_root_dir=folder, **{**quiet, "enable_checkpointing": False, **options})


def test_a_plain_module_trains_validates_tests_and_predicts(tmp_path):
    data = GraphDataModule(global_batch_size=30)
    module = Plain()
    trained = trainer(tmp_path, max_epochs=2, callbacks=[PredictionWriter()])
    trained.fit(module, datamodule=data)
    first, second = module.seen[:3], module.seen[3:]
    assert len(second) == 3
    assert sorted(y for row in first for y in row[:-1]) == sorted(y for row in second for y in row[:-1])
    assert first != second
    trained.test(module, datamodule=data, verbose=False)
    trained.predict(module, datamodule=data)
    table = pd.read_csv(tmp_path / "predictions.csv")
    assert table["id"].astype(str).tolist() == data.predict_ids
    assert set(table["what"]) == {41}


@pytest.mark.parametrize("neighbours", [None, [3, 3]])
def test_predictions_of_nodes_are_in_order(tmp_path, neighbours):
    data = GraphDataModule(
        task="karate", batches=GraphBatches(num_neighbors=neighbours), global_batch_size=5 if neighbours else None
    )
    trained = trainer(tmp_path, callbacks=[PredictionWriter()])
    trained.predict(Plain(34, 2, "node"), datamodule=data)
    table = pd.read_csv(tmp_path / "predictions.csv")
    assert table["id"].tolist() == table["what"].tolist() == list(range(34))


def test_nodes_of_several_graphs_are_predicted_in_order():
    data = ready(task="substructures", num_graphs=20, level="node", max_nodes=30)
    batches = list(data.predict_dataloader())
    assert sum(len(batch.target_index) for batch in batches) == len(data.predict_ids) == 100
    assert len({*data.predict_ids}) == 100
    x = torch.cat([batch.batch[batch.target_index] for batch in batches])
    assert len(x) == 100


class SaveAfterTwo(L.Callback):
    def on_train_batch_end(self, trainer, *unused):
        if trainer.global_step == 2:
            trainer.save_checkpoint(f"{trainer.default_root_dir}/second.ckpt")


@pytest.mark.sampled(default=2)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("kind", ["graphs", "budget", "neighbours"])
def test_a_run_stopped_in_mid_epoch_goes_on_with_the_next_batch(tmp_path, kind, exact):
    options = {
        "graphs": {"global_batch_size": 30},
        "budget": {"max_nodes": 1300},
        "neighbours": {"task": "karate", "num_neighbors": [3, 3], "global_batch_size": 8},
    }[kind]
    shape = (34, 2, "node") if kind == "neighbours" else ()
    callbacks = [ExactResume()] if exact else []
    torch.manual_seed(0)
    whole = Plain(*shape)
    trainer(tmp_path, max_epochs=2, callbacks=[SaveAfterTwo(), *callbacks]).fit(
        whole, datamodule=GraphDataModule(**grouped(options))
    )
    resumed = Plain(*shape)
    saved = {"ckpt_path": tmp_path / "second.ckpt", "weights_only": True}
    callbacks = [ExactResume()] if exact else []
    trainer(tmp_path, max_epochs=2, callbacks=callbacks).fit(
        resumed, datamodule=GraphDataModule(**grouped(options)), **saved
    )
    assert len(whole.seen) == 6
    assert resumed.seen == whole.seen[2:]
    for parameter, same in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert parameter.equal(same)
    with pytest.raises(ValueError, match="trained on other graphs than those of the task"):
        trainer(tmp_path, max_epochs=2).fit(
            Plain(*shape), datamodule=GraphDataModule(**grouped(options), seed=3), **saved
        )


def test_a_checkpoint_of_other_graphs_is_refused():
    made = given()
    state = ready(dataset=Given(made)).state_dict()
    ready(dataset=Given(made)).load_state_dict(state)
    for change, said in (
        ({"dataset": Given(made[1:])}, "digest"),
        ({"dataset": Given(given(edge_index=lambda graph: graph.edge_index.flip(1)))}, "digest"),
        ({"dataset": Given(made), "test_share": 0.3}, "split"),
        ({"dataset": Given(given(x=lambda graph: torch.randn(3, 4)))}, "features"),
        ({"dataset": Given(given(y=lambda graph: torch.randn(1)))}, "target"),
        ({"task": "csl"}, "source"),
    ):
        with pytest.raises(ValueError, match=f"trained on other graphs .*: {said}"):
            ready(**change).load_state_dict(state)


@pytest.mark.slow
def test_options_are_read_from_a_command_line(monkeypatch):
    monkeypatch.setattr("sys.argv", ["fit"])

    def data(*arguments):
        return LightningCLI(
            Plain,
            GraphDataModule,
            run=False,
            save_config_callback=None,
            args=list(arguments),
            seed_everything_default=1,
        ).datamodule

    assert data("--data.task=substructures", "--data.layout.target=[triangle,cycle_4]").counted == (
        "triangle",
        "cycle_4",
    )
    made = data(
        "--data.dataset=torch_geometric.datasets.FakeDataset",
        "--data.dataset.num_graphs=30",
        "--data.dataset.num_classes=2",
        "--data.transform=torch_geometric.transforms.OneHotDegree",
        "--data.transform.init_args.max_degree=99",
    )
    made.setup()
    assert made.num_features == 64 + 100
    assert data("--data.task=karate", "--data.batches.num_neighbors=[15,10]").num_neighbors == [15, 10]


def test_old_names_of_options_work():
    with pytest.warns(FutureWarning) as warned:
        old = GraphDataModule(
            task="substructures",
            target="triangle",
            level="node",
            num_graphs=40,
            family="regular",
            val_share=0.3,
            max_nodes=99,
        )
    said = {str(one.message).partition(";")[0] for one in warned}
    assert {
        "GraphDataModule: target is now called layout.target",
        "GraphDataModule: max_nodes is now called batches.max_nodes",
    } < said
    new = GraphDataModule(
        task="substructures",
        layout=GraphLayout(target="triangle", level="node"),
        generated=GeneratedGraphs("regular", 40),
        split=GraphSplitOptions(0.3),
        batches=GraphBatches(99),
    )
    assert vars(old) == vars(new)


def check_processes_share_graphs(rank, folder):
    data = GraphDataModule(global_batch_size=31)
    module = Plain()
    options = {"strategy": "ddp", "devices": 2, "max_epochs": 1, "num_sanity_val_steps": 0}
    trainer(folder, **options).fit(module, datamodule=data)
    seen = [None, None]
    torch.distributed.all_gather_object(seen, module.seen)
    assert [len(batches) for batches in seen] == [3, 3]
    assert sorted(y for batches in seen for batch in batches for y in batch[:-1]) == sorted([*range(10)] * 9)
    trainer(folder, **options, callbacks=[PredictionWriter(f"{folder}/two.csv")]).predict(module, datamodule=data)
    if rank == 0:
        assert pd.read_csv(f"{folder}/two.csv")["id"].astype(str).tolist() == data.predict_ids
    for number, neighbours in enumerate((None, [3, 3])):
        nodes = GraphDataModule(task="karate", batches=GraphBatches(num_neighbors=neighbours))
        module = Plain(34, 2, "node")
        writer = PredictionWriter(f"{folder}/nodes{number}.csv")
        trainer(folder, **options, callbacks=[writer]).predict(module, datamodule=nodes)
        if rank == 0:
            table = pd.read_csv(f"{folder}/nodes{number}.csv")
            assert table["id"].tolist() == table["what"].tolist() == list(range(34))


@pytest.mark.slow
def test_processes_share_graphs(tmp_path):
    run_ranks(check_processes_share_graphs, str(tmp_path))
