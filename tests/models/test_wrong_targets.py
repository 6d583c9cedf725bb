"""Targets of other types, shapes and ranges than classes have: refused before training, or converted."""

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader as GraphLoader

from lightning_accel import RelationalGNN
from lightning_accel.data import SequenceBatch
from lightning_accel.models import (
    Classifier,
    ConvolutionLayers,
    DeepBeliefNetwork,
    FineTuning,
    MoEClassifier,
    SequenceModel,
    Stage,
)

EDGES = torch.tensor([[0, 1], [1, 0]])


def rows(target):
    return DataLoader(TensorDataset(torch.rand(4, 3), target), batch_size=4)


def graphs(target):
    return GraphLoader([Data(torch.rand(3, 3), EDGES, y=y[None]) for y in target], batch_size=4)


def sequences(target):
    return DataLoader([SequenceBatch(torch.rand(4, 5, 3), torch.full((4,), 5), target)], batch_size=None)


def classifier():
    return Classifier(3, 3), rows


def mixture():
    return MoEClassifier(3, 3, dim=4), rows


def graph_network():
    layers = ConvolutionLayers("GINConv", dim=4, num_layers=1)
    return RelationalGNN(3, 3, level="graph", target_kind="classification", layers=layers), graphs


def sequence_model():
    return SequenceModel(num_features=3, num_classes=3, target_kind="classification"), sequences


def belief_network():
    fine_tuning = FineTuning("classifier", epochs=1)
    return DeepBeliefNetwork(3, [2], [Stage(epochs=1)], fine_tuning=fine_tuning, num_classes=3), rows


MODELS = [classifier, mixture, graph_network, sequence_model, belief_network]


def fit(made, target):
    model, load = made()
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(max_epochs=2, accelerator="cpu", enable_model_summary=False, **options)
    trainer.fit(model, load(target), load(target))
    return trainer.callback_metrics["val/loss"]


@pytest.mark.parametrize("made", MODELS)
@pytest.mark.parametrize(
    ("target", "found"),
    [
        (torch.tensor([0, 1, 2, 3]), r"got \(4,\) torch.int64, 0 to 3$"),
        (torch.tensor([0, 1, 2, -1]), r"got \(4,\) torch.int64, -1 to 2$"),
        (torch.tensor([0.0, 1.0, 1.0, 0.0]), r"torch.float32, 0.0 to 1.0. If they are whole numbers.* \.long\(\)$"),
        (torch.eye(3)[[0, 1, 2, 0]].long(), r"got \(4, 3\) torch.int64.* pass target.argmax\(dim=-1\)$"),
    ],
    ids=["above", "below", "floating", "one-hot"],
)
def test_wrong_classes_are_named_before_training(made, target, found):
    with pytest.raises(ValueError, match=rf"classes .*must be \(4,\) integers in \[0, 3\).*{found}"):
        fit(made, target)


@pytest.mark.parametrize("made", MODELS)
def test_classes_of_other_whole_types_are_those_of_int64(made):
    target = torch.tensor([0, 1, 2, 0])
    losses = []
    for dtype in (torch.int64, torch.int32):
        torch.manual_seed(0)
        losses.append(fit(made, target.to(dtype)))
    assert losses[0] == losses[1]


def test_probabilities_are_targets_of_rows():
    fit(classifier, torch.tensor([[0.5, 0.5, 0.0]]).expand(4, 3))


def test_one_hot_classes_of_sequences_are_not_taken_for_quantities():
    with pytest.raises(ValueError, match=r"pass target.argmax\(dim=-1\)"):
        fit(sequence_model, torch.eye(3)[[0, 1, 2, 0]])
