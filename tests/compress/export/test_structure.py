from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from lightning_accel.compress.export.structure import (
    Structure,
    Unflat,
    describe,
    named_tensors,
    plain_values,
    rebuild,
    restore,
)


@dataclass
class Outputs(OrderedDict):
    """Is a dict of the fields that are set and a dataclass of all, as the outputs of transformers are."""

    loss: Any = None
    logits: Any = None
    states: Any = None

    def __post_init__(self):
        for field in fields(self):
            if getattr(self, field.name) is not None:
                super().__setitem__(field.name, getattr(self, field.name))

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Encoding(UserDict):
    def __getattr__(self, name):
        if name in self.__dict__.get("data", {}):
            return self.data[name]
        raise AttributeError(name)


@dataclass(frozen=True)
class Frozen:
    x: Any
    size: int = 3


class Pair(NamedTuple):
    a: Any
    b: Any = None


def tensors(count):
    return [torch.full((number + 1,), float(number)) for number in range(count)]


ONE, TWO, THREE = tensors(3)
PACKED = pack_padded_sequence(torch.arange(6.0).view(2, 3), torch.tensor([3, 1]), batch_first=True)
CONTAINERS = {
    "fields that are set": (Outputs(logits=ONE, states=(TWO, THREE)), ["logits", "states.0", "states.1"]),
    "mapping with attributes": (Encoding({"ids": ONE, "mask": TWO}), ["ids", "mask"]),
    "ordered": (OrderedDict(b=ONE, a=[TWO, None, 4]), ["b", "a.0"]),
    "mapping that does not change": (MappingProxyType({"x": ONE}), ["x"]),
    "dataclass": (Frozen(Pair(ONE, "text"), 5), ["x.a"]),
    "integer keys": ({1: ONE, 0: (TWO,)}, ["1", "0.0"]),
    "packed": (PACKED, ["data", "batch_sizes"]),
    "sizes": ((ONE, torch.Size([2, 3])), ["0"]),
}


@pytest.mark.parametrize("which", CONTAINERS)
def test_containers_keep_their_classes_and_what_is_no_tensor(which):
    value, names = CONTAINERS[which]
    found = named_tensors(value)
    assert list(found) == names
    made = restore(value, iter([one + 1 for one in found.values()]))
    assert type(made) is type(value)
    assert plain_values(made) == plain_values(value)
    for name, one in named_tensors(made).items():
        torch.testing.assert_close(one, found[name] + 1)
    for name, one in named_tensors(rebuild(describe(value), found)).items():
        assert one is found[name]


def test_outputs_of_a_file_are_found_by_key_attribute_and_place():
    value = Outputs(loss=ONE, logits=TWO)
    made = restore(value, iter([TWO, ONE]))
    assert made.loss is TWO
    assert made["logits"] is made.logits is ONE
    loaded = rebuild(describe(value, kept={"logits"}), {"logits": TWO})
    assert loaded["logits"] is loaded.logits is loaded[0] is loaded[:1][0] is TWO
    assert loaded.loss is loaded.states is None
    assert list(loaded) == ["logits"]
    with pytest.raises(AttributeError, match="no output 'hidden'; there are: logits"):
        loaded.hidden  # noqa: B018
    plain = rebuild(describe({"loss": ONE, "logits": TWO}, kept={"logits"}), {"logits": TWO})
    assert type(plain) is dict
    assert list(plain) == ["loss", "logits"]


def test_what_is_no_container_is_told_or_left():
    cache = namedtuple("Holder", "logits cache")(ONE, object())
    with pytest.raises(TypeError, match="cache is a object; a file takes and gives tensors"):
        named_tensors(cache)
    others: list[str] = []
    assert list(named_tensors(cache, others=others)) == ["logits"]
    assert others == ["cache"]
    assert restore(cache, iter([TWO])) == (TWO, cache.cache)
    assert rebuild(describe(cache), {"logits": ONE}) == (ONE, None)


def test_a_form_refuses_other_plain_values_than_it_was_made_with():
    module = nn.Identity()
    form = Unflat(module, Structure(((torch.empty(0), 3), {"mode": "sum"}), torch.empty(0)))
    assert form(torch.ones(2), 3, mode="sum").tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"as constants: arguments\.1 is 3 and 4$"):
        form(torch.ones(2), 4, mode="sum")
