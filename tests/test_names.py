"""A text where several names may stand is one name, wherever the package takes names."""

from collections import OrderedDict
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from lightning_accel.callbacks import Export, LowRankAdapters, Pruning, Quantization
from lightning_accel.compress import export, find_channel_groups, find_prunable, load_compressed, measure_forms, prune_
from lightning_accel.compress.quantization.fake_quant import rank_layers
from lightning_accel.compress.quantization.layers import find_layers
from lightning_accel.compress.quantization.quantized import quantize
from lightning_accel.models import DeepBeliefNetwork, MoEClassifier, SequenceModel
from lightning_accel.models.relational import RelationalGNN
from lightning_accel.nn.relational.layers import RO3Pooling
from lightning_accel.ops.names import find_excluded, list_of_names
from lightning_accel.precision import Float8Precision
from lightning_accel.strategies import FullyShardedStrategy, find_blocks

CALL = ((torch.ones(3, 4),), {})


def net():
    return nn.Sequential(OrderedDict(first=nn.Linear(4, 6), between=nn.ReLU(), last=nn.Linear(6, 2)))


def refused_exclusion(exclude):
    with pytest.raises(ValueError, match="exclude has") as refused:
        quantize(net(), [CALL], exclude=exclude)
    return str(refused.value)


TAKERS = {
    "MoEClassifier": ("ab", lambda names: MoEClassifier(class_names=names).class_names),
    "DeepBeliefNetwork": ("ab", lambda names: DeepBeliefNetwork(class_names=names).class_names),
    "RelationalGNN": ("ab", lambda names: RelationalGNN(class_names=names).class_names),
    "SequenceModel": ("ab", lambda names: SequenceModel(class_names=names).class_names),
    "Export class_names": ("ab", lambda names: Export(class_names=names).class_names),
    "Pruning": ("head", lambda names: Pruning(0.5, exclude=names).exclude),
    "Quantization": ("head", lambda names: Quantization(exclude=names).exclude),
    "LowRankAdapters": ("head", lambda names: LowRankAdapters(include=names, exclude=names, train=names).options),
    "quantize": ("head", refused_exclusion),
    "find_layers": ("Linear", lambda names: find_layers(nn.ModuleList([net(), nn.Conv1d(1, 1, 1)]), names).left_float),
    "rank_layers": ("first", lambda names: list(rank_layers(net(), [CALL], names))),
    "find_prunable": ("Conv1d", lambda names: find_prunable(nn.Sequential(net(), nn.Conv1d(1, 1, 1)), names)[1]),
    "prune_": ("first", lambda names: list(prune_(net(), 0.5, exclude=names))),
    "find_excluded": ("first", lambda names: find_excluded(net(), names)),
    "find_channel_groups": ("Linear", lambda names: find_channel_groups(net(), *CALL, exclude=names).layers),
    "find_blocks": ("Linear", lambda names: [one.in_features for one in find_blocks(net(), names)]),
    "FullyShardedStrategy": ("Linear", lambda names: FullyShardedStrategy(blocks=names).blocks),
    "RO3Pooling": ("wedge", lambda names: RO3Pooling(types=names).types),
}


@pytest.mark.parametrize("taker", TAKERS)
def test_a_text_is_one_name(taker):
    name, take = TAKERS[taker]
    assert take(name) == take([name])


@pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
def test_float8_leaves_out_one_name():
    assert Float8Precision("head").exclude == ("head",)


def test_a_class_alone_is_one_class_too():
    assert list_of_names(nn.Linear) == [nn.Linear]
    assert {"first", "first.weight", "last.bias"} < set(find_excluded(net(), nn.Linear))
    assert find_prunable(net(), nn.Linear)[0] == []
    assert Quantization(exclude=nn.Linear).exclude == [nn.Linear]


def test_a_contender_is_one_form(monkeypatch):
    asked = []
    monkeypatch.setattr("lightning_accel.compress.report.forms.ties", lambda _, names: asked.append(names) or [])
    forms = {"a": net(), "b": net(), "ab": net()}
    measure_forms(net(), CALL, forms, batches=[3], seconds=1e-3, contenders="ab")
    assert asked[0] == ["ab"]


def test_an_exported_file_holds_one_class_name(tmp_path):
    export(nn.Linear(4, 1), [CALL], tmp_path / "m.pt2", class_names="only")
    assert load_compressed(tmp_path / "m.pt2").class_names == ["only"]
