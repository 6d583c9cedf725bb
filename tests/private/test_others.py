"""Private names of argparse, torchmetrics, PyTorch Geometric and transformers do what their functions say."""

import warnings
from argparse import ArgumentParser

import pytest
import torch
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks
from torchmetrics import MeanMetric

from lightning_accel._private import others as private
from lightning_accel.nn import RO3Conv


def test_states_that_were_set_count_as_updated():
    metric = MeanMetric()
    metric.mean_value, metric.weight = torch.tensor(6.0), torch.tensor(2.0)
    private.set_update_count(metric, 2)
    assert metric.update_count == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert metric.compute() == 3
    metric.mean_value = torch.tensor(8.0)
    private.set_update_count(metric, 2)
    assert metric.compute() == 4  # not the value computed before


def test_values_of_the_last_step():
    metric = MeanMetric()
    assert metric(2.0) == 2
    private.set_forward_value(metric, 7)
    assert metric._forward_cache == 7


def test_masks_of_explainers():
    layer = RO3Conv(3, 4, 2)
    assert private.explained_edges(layer) is None
    mask = torch.nn.Parameter(torch.tensor([0.0, 1.0]))
    edge_index = torch.tensor([[0, 1], [1, 0]])
    set_masks(layer, mask, edge_index, apply_sigmoid=True)
    torch.testing.assert_close(private.explained_edges(layer), mask.sigmoid())
    set_masks(layer, mask, edge_index, apply_sigmoid=False)
    assert private.explained_edges(layer) is mask
    clear_masks(layer)
    assert private.explained_edges(layer) is None


def test_experts_of_transformers():
    transformers = pytest.importorskip("transformers", minversion="5")
    config = transformers.OlmoeConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                                      intermediate_size=8, num_experts=2, num_experts_per_tok=1)  # fmt: skip
    model = transformers.OlmoeModel(config)
    model.set_experts_implementation("grouped_mm")
    assert private.has_grouped_experts(model)
    model.set_experts_implementation("batched_mm")
    assert not private.has_grouped_experts(model)
    assert not private.has_grouped_experts(torch.nn.Linear(2, 2))


def test_options_are_arranged():
    parser = ArgumentParser(prog="run", add_help=False)
    for name in ("--rest", "--second", "--first"):
        parser.add_argument(name)
    private.set_help(parser, "first", "comes first")
    private.arrange_options(parser, {"empty": ["none"], "most used": ["first", "second"]}, "others")
    text = parser.format_help()
    assert "comes first" in text
    assert "empty" not in text
    shown = text.partition("\n\n")[2]
    places = [shown.index(part) for part in ("most used:", "--first", "--second", "others:", "--rest")]
    assert places == sorted(places)
    assert parser.parse_args(["--first", "1"]).first == "1"
