"""Masks of a dataset are honoured or refused."""

import pytest
import torch
from torch_geometric.data import Data

from lightning_accel.data.graphs import GraphDataModule
from tests.data.test_graphs import Given, given


def network(*masks: str) -> Data:
    """60 nodes in a ring, the first 40 of which train where there is a mask of them, the last 10 test."""
    ends = torch.arange(60)
    graph = Data(x=torch.randn(60, 2), edge_index=torch.stack([ends, (ends + 1) % 60]), y=ends % 2)
    places = {"train_mask": ends < 40, "val_mask": (ends >= 40) & (ends < 50), "test_mask": ends >= 50}
    graph.update({name: places[name] for name in masks})
    return graph


def ready(graphs, **options):
    data = GraphDataModule(dataset=Given(graphs), **options)
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
    with pytest.raises(ValueError, match="Give val_dataset and test_dataset without masks"):
        ready([network(*masks)], val_dataset=Given([network()]), test_dataset=Given([network()]))
