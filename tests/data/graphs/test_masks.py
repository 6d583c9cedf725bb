"""Masks of a dataset are honoured or refused."""

import pytest
import torch
from torch_geometric.data import Data

from lightning_accel.data.graphs.datamodule import GraphDataModule
from tests.data.graphs.grouped import grouped
from tests.data.graphs.test_datamodule import Given, given


def network(*masks: str) -> Data:
    """60 nodes in a ring, the first 40 of which train where there is a mask of them, the last 10 test."""
    ends = torch.arange(60)
    graph = Data(x=torch.randn(60, 2), edge_index=torch.stack([ends, (ends + 1) % 60]), y=ends % 2)
    places = {"train_mask": ends < 40, "val_mask": (ends >= 40) & (ends < 50), "test_mask": ends >= 50}
    graph.update({name: places[name] for name in masks})
    return graph


def ready(graphs, **options):
    data = GraphDataModule(dataset=Given(graphs), **grouped(options))
    data.setup()
    return data


def test_without_a_validation_mask_training_nodes_validate():
    data = ready([network("train_mask", "test_mask")], val_share=0.25)
    train, val, test = (rows.rows.tolist() for rows in (data.train_rows, data.val_rows, data.test_rows))
    assert sorted(train + val) == list(range(40))
    assert len(val) == 10
    assert sum(node % 2 for node in val) == 5  # classes in proportion
    assert test == list(range(50, 60))


@pytest.mark.parametrize(
    ("masks", "said"),
    [
        (["train_mask"], "has train_mask and no val_mask, test_mask: .* Add test_mask"),
        (["test_mask"], "has test_mask and no train_mask, val_mask"),
        (["train_mask", "val_mask"], "has train_mask, val_mask and no test_mask"),
    ],
)
def test_incomplete_masks_are_refused(masks, said):
    with pytest.raises(ValueError, match=said):
        ready([network(*masks)])


def test_masks_of_several_graphs_are_refused():
    masks = ("train_mask", "val_mask", "test_mask")
    with pytest.raises(ValueError, match="have train_mask, val_mask, test_mask, which would have no effect"):
        ready([network(*masks) for _ in range(20)])
    with pytest.raises(ValueError, match="have train_mask, which would have no effect"):
        ready(given(train_mask=lambda graph: torch.ones(3).bool()))
    with pytest.raises(ValueError, match=r"Give split\.val_dataset and split\.test_dataset without masks"):
        ready([network(*masks)], val_dataset=Given([network()]), test_dataset=Given([network()]))


def test_a_node_that_no_longer_trains_is_other_data():
    graph = network("train_mask", "val_mask", "test_mask")
    state = ready([graph]).state_dict()
    ready([graph.clone()]).load_state_dict(state)
    changed = graph.clone()
    changed.train_mask[39], changed.val_mask[39] = False, True
    with pytest.raises(ValueError, match=r"trained on other graphs .*: digest of the graphs"):
        ready([changed]).load_state_dict(state)


def test_each_target_counts_where_it_is_known():
    graph = network()
    graph.y = torch.stack([torch.arange(60.0), torch.ones(60)], 1)
    graph.y[::2, 0] = graph.y[1::2, 1] = torch.nan
    graph.y[:4] = torch.nan
    data = ready([graph], global_batch_size=9, num_neighbors=[2])
    train, val, test = (rows.rows for rows in (data.train_rows, data.val_rows, data.test_rows))
    assert sorted(torch.cat([train, val, test]).tolist()) == list(range(4, 60))
    odd = train[train % 2 == 1].double()
    assert data.target_mean == pytest.approx([odd.mean().item(), 1])
    assert data.target_std == pytest.approx([odd.std(correction=0).item(), 1])


@pytest.mark.parametrize("level", ["graph", "node"])
def test_targets_with_gaps_of_several_graphs(level):
    rows = 1 if level == "graph" else 3
    number = iter(range(20))

    def y(graph):
        i = next(number)
        return torch.tensor([[float(i), torch.nan] if i % 2 else [torch.nan, 7.0]] * rows)

    data = ready(given(y=y), level=level)
    y = torch.cat([graph.y for graph in data.train_rows.graphs])
    assert data.target_mean == pytest.approx([y[:, 0].nanmean().item(), 7])
    batch = next(iter(data.train_dataloader()))
    if level == "node":
        assert batch.target_index.tolist() == list(range(batch.num_nodes))


def test_a_target_that_no_training_row_has_is_refused():
    graphs = given(y=lambda graph: torch.tensor([[1.0, torch.nan]]))
    with pytest.raises(ValueError, match=r"target 1, counted from 0, of the dataset .* has no value in what trains"):
        ready(graphs)


@pytest.mark.parametrize(
    ("masks", "options", "said"),
    [
        ((), {"fold": 3}, "fold=3 would have no effect with the dataset .*, which has no masks"),
        (("train_mask", "test_mask"), {"fold": 1}, "fold=1 would have no effect with .*, whose masks are train_mask"),
        (
            ("train_mask", "test_mask"),
            {"test_share": 0.2},
            "test_share would have no effect with .*, whose masks",
        ),
        (("train_mask", "val_mask", "test_mask"), {"val_share": 0.1}, "val_share would have no effect with"),
        (("train_mask", "val_mask", "test_mask"), {"fold": -1}, "would have no effect"),
    ],
)
def test_options_without_effect_on_masks_are_refused(masks, options, said):
    with pytest.raises(ValueError, match=said):
        ready([network(*masks)], **options)


def test_fold_is_refused_with_graphs_of_three_datasets():
    parts = {name: Given(given(4)) for name in ("dataset", "val_dataset", "test_dataset")}
    data = GraphDataModule(**grouped({**parts, "fold": 1}))
    with pytest.raises(ValueError, match="fold=1 would have no effect"):
        data.setup()


def test_one_of_the_masks_may_have_folds():
    graph = network("train_mask", "val_mask", "test_mask")
    graph.train_mask = torch.stack([graph.train_mask, ~graph.test_mask & ~graph.val_mask & (torch.arange(60) < 9)], 1)
    assert ready([graph], fold=1).train_rows.rows.tolist() == list(range(9))


def test_edge_type_of_a_dataset_is_the_type_of_an_edge():
    graphs = given(edge_type=lambda graph: torch.tensor([0, 2, 1, 1]))
    data = ready(graphs)
    assert (data.num_relations, data.edge_dim) == (3, None)
    batch = next(iter(data.train_dataloader()))
    assert batch.edge_attr.tolist() == batch.edge_type.tolist() == [0, 2, 1, 1] * 14
    assert "edge_attr" not in graphs[0]
    both = ready(given(edge_type=lambda graph: torch.zeros(4).long(), edge_attr=lambda graph: torch.randn(4, 2)))
    assert (both.num_relations, both.edge_dim) == (None, 2)


def test_errors_name_a_list_of_graphs_by_their_number():
    with pytest.raises(ValueError, match="y of the dataset of 2 graphs holds one class only"):
        GraphDataModule(
            dataset=[Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2, y=torch.tensor([1])) for _ in range(2)]
        ).setup()
