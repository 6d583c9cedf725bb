from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch_geometric.data import Batch, Data, HeteroData

from lightning_accel.strategies.batch_splitting import contains_graphs, merge_outputs, split_batch

X, Y = torch.arange(10.0).view(5, 2), torch.arange(5)
CPU = torch.device("cpu")


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Record:
    x: Tensor
    scale: float


def test_parts_keep_types_and_order():
    batch = [Pair(X, Y), {"names": list("abcde"), "k": 3}, OrderedDict(z=(X,)), Record(X, 2.0), torch.tensor(7)]
    parts = split_batch(batch, 2)
    assert [part.num_samples for part in parts] == [3, 2]
    for part, rows in zip(parts, (slice(0, 3), slice(3, 5)), strict=True):
        pair, named, ordered, record, scalar = part.batch
        assert type(pair) is Pair
        assert type(ordered) is OrderedDict
        assert type(record) is Record
        assert record.scale == 2
        assert named == {"names": list("abcde")[rows], "k": 3}
        assert scalar == 7
        for tensor in (pair.x, ordered["z"][0], record.x):
            torch.testing.assert_close(tensor, X[rows])
        torch.testing.assert_close(pair.y, Y[rows])


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    kind: str = "k"


class Kind(Enum):
    A = 1


def test_containers_that_cannot_be_made_from_their_items_alone():
    counts = defaultdict(list, {"x": X, 7: (Y, Frozen(X))})
    constant = MappingProxyType({"y": Y, "kind": Kind.A, "where": Path("a"), "dtype": torch.float64})
    batch = [counts, constant, np.arange(5), [object() for _ in range(5)]]
    parts = split_batch(batch, 2)
    assert [part.num_samples for part in parts] == [3, 2]
    for part, rows in zip(parts, (slice(0, 3), slice(3, 5)), strict=True):
        counted, fixed, numbers, things = part.batch
        assert (type(counted), counted.default_factory, list(counted)) == (defaultdict, list, ["x", 7])
        torch.testing.assert_close((counted["x"], counted[7][0], counted[7][1].x), (X[rows], Y[rows], X[rows]))
        assert {**fixed, "y": 0} == {"y": 0, "kind": Kind.A, "where": Path("a"), "dtype": torch.float64}
        assert fixed["y"].equal(Y[rows])
        assert numbers.tolist() == Y[rows].tolist()
        assert things == batch[3][rows]
    assert X.shape == counts["x"].shape  # what was given is as it was


def test_batches_and_outputs_of_transformers():
    library = pytest.importorskip("transformers")
    encoding = library.BatchEncoding({"input_ids": X}, n_sequences=1)
    output = library.modeling_outputs.CausalLMOutput(loss=torch.tensor(1.0), logits=X)
    first, second = split_batch((encoding, output), 2)
    encoded, given = second.batch
    assert (type(encoded), encoded.n_sequences, type(given), given.loss) == (type(encoding), 1, type(output), 1)
    torch.testing.assert_close((encoded.input_ids, given.logits, given[1]), (X[3:],) * 3)
    merged = merge_outputs([first.batch[1], given], [3, 2], CPU)
    torch.testing.assert_close((merged.logits, merged[1]), (X, X))


@pytest.mark.parametrize(("rows", "expected"), [(1, [1]), (2, [1, 1]), (4, [2, 1, 1]), (0, [0])])
def test_fewer_rows_than_devices(rows, expected):
    assert [part.num_samples for part in split_batch(X[:rows], 3)] == expected


def test_graphs_are_split_whole():
    edges = torch.tensor([[0, 1], [1, 0]])
    graphs = [Data(x=torch.randn(n, 3), edge_index=edges, y=torch.tensor([n])) for n in (2, 3, 4)]
    whole = Batch.from_data_list(graphs, follow_batch=["x"])
    parts = split_batch((whole, torch.arange(3)), 2)
    assert [part.num_samples for part in parts] == [2, 1]
    first, second = parts[0].batch[0], parts[1].batch[0]
    torch.testing.assert_close(first.batch, torch.tensor([0, 0, 1, 1, 1]))
    torch.testing.assert_close(first.x_batch, first.batch)
    torch.testing.assert_close(second.x, graphs[2].x)
    torch.testing.assert_close(second.edge_index, edges)


def test_graphs_are_found_wherever_they_are():
    graph = Data(x=torch.randn(2, 3))
    assert split_batch([graph] * 3, 2)[1].batch == [graph]
    mixed = HeteroData(a={"x": torch.randn(2, 3)})
    for one in (graph, mixed, Batch.from_data_list([graph, graph]), Batch.from_data_list([mixed, mixed])):
        assert contains_graphs({"k": (1, Record(one, 2.0))})
    assert not contains_graphs({"k": (1, Record(X, 2.0))})


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ((X, object()), TypeError, "cannot split a object of a batch; .*train with ddp"),
        ((X, Data(x=X)), TypeError, r"cannot split a torch_geometric\.data\.data\.Data of a batch"),
        (pack_sequence([X]), TypeError, r"cannot split a torch\.nn\.utils\.rnn\.PackedSequence.*lengths"),
        ((X, X[:3]), ValueError, r"unequal first dimensions, \[3, 5\]"),
        ({"k": 3}, ValueError, "found no tensor whose rows could be split.*dict"),
    ],
)
def test_what_cannot_be_split(batch, error, message):
    with pytest.raises(error, match=message):
        split_batch(batch, 2)


def test_merged_outputs_are_those_of_the_whole_batch():
    outputs = [{"loss": X[:3].mean(), "all": Y[:3], "names": ["a"], "n": 1}, {"loss": X[3:].mean(), "all": Y[3:], "names": ["b"], "n": 6}]  # fmt: skip # noqa: E501
    merged = merge_outputs(outputs, [3, 2], CPU)
    torch.testing.assert_close(merged["loss"], X.mean())
    torch.testing.assert_close(merged["all"], Y)
    assert merged["names"] == ["a", "b"]
    assert merged["n"] == 3
    merged = merge_outputs([(X[:1].double().mean(), None), (X[1:].double().mean(), None)], [1, 4], CPU)
    torch.testing.assert_close(merged, (X.double().mean(), None), rtol=1e-12, atol=0)
    weighted = [{"loss": torch.tensor(1.0), "weight": 30}, {"loss": torch.tensor(2.0), "weight": torch.tensor(10.0)}]
    merged = merge_outputs(weighted, [1, 1], CPU)
    assert merged == {"loss": 1.25, "weight": 40}
