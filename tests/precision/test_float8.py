import sys
import types

import pytest
import torch
from torch import nn

from lightning_accel.nn import MixtureOfExperts
from lightning_accel.precision import Float8Precision, float8
from tests.precision.plain_module import PlainClassifier, fit


class FakeFloat8Linear(nn.Linear):
    pass


@pytest.fixture
def torchao(monkeypatch):
    """What of torchao is used, on machines without it: the layers it was given, by name."""
    converted = []

    def convert(module, *, module_filter_fn, config):
        for name, layer in list(module.named_modules()):
            if isinstance(layer, nn.Linear) and module_filter_fn(layer, name):
                layer.__class__ = FakeFloat8Linear
                converted.append(name)

    package = types.ModuleType("torchao.float8")
    package.convert_to_float8_training, package.Float8LinearConfig = convert, dict
    layers = types.ModuleType("torchao.float8.float8_linear")
    layers.Float8Linear = FakeFloat8Linear
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", package)
    monkeypatch.setitem(sys.modules, "torchao.float8.float8_linear", layers)
    monkeypatch.setattr(float8, "find_spec", lambda name: True)
    return converted


def test_asks_for_torchao(monkeypatch):
    monkeypatch.setattr(float8, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install torchao, or use AmpPrecision"):
        Float8Precision()


def test_asks_for_hardware_before_training(torchao, monkeypatch):
    with pytest.raises(ValueError, match=r"compute capability 8.9 or more; got a cpu device. Use AmpPrecision\(\)"):
        fit(Float8Precision())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card")
    assert float8.why_not_float8(torch.device("cuda", 0)).endswith("got Card, which has 8.6")


class Wide(PlainClassifier):
    def __init__(self):
        super().__init__()
        self.mixture = MixtureOfExperts(16, 32, 4)
        self.blocks = nn.ModuleList([nn.Linear(32, 16), nn.Linear(32, 17), nn.Linear(30, 16)])
        self.head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32))


def test_converts_wide_layers_alone(torchao):
    model = Wide()
    names = set(model.state_dict())
    Float8Precision()._convert(model)
    assert torchao == ["blocks.0"]
    Float8Precision()._convert(model)  # the next fit
    assert torchao == ["blocks.0"]
    assert set(model.state_dict()) == names


def test_refuses_to_have_no_effect(torchao):
    with pytest.raises(ValueError, match=r"no nn.Linear whose sides are multiples of 16.*exclude=\('blocks', 'head'\)"):
        Float8Precision(exclude=["blocks", "head"])._convert(Wide())
    with pytest.raises(ValueError, match="exclude has 'heads', which is no parameter, submodule or class in Wide"):
        Float8Precision(exclude=["heads"])._convert(Wide())


@pytest.mark.parametrize(
    ("exclude", "converted"),
    [([], ["blocks.0", "head.1"]), ("head", ["blocks.0"]), ("blocks.*", ["head.1"]), (nn.ModuleList, ["head.1"])],
)
def test_leaves_out_what_exclude_matches(torchao, exclude, converted):
    Float8Precision(exclude)._convert(Wide())
    assert torchao == converted


class WidePlain(PlainClassifier):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 3))


@pytest.mark.gpu
def test_trains_as_float32_does():
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")
    expected = fit(model=WidePlain, accelerator="cuda")
    actual = fit(Float8Precision(), model=WidePlain, accelerator="cuda")
    assert type(actual.net[2]).__name__ == "Float8Linear"
    assert actual.state_dict().keys() == expected.state_dict().keys()
    torch.testing.assert_close(actual.losses, expected.losses, rtol=0, atol=0.15)
