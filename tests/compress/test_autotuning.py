import time

import pytest
import torch
from torch import nn
from torch.backends import mkldnn

from lightning_accel._private.torch import onednn_multiplies_float32
from lightning_accel.compress import autotuning
from lightning_accel.compress.autotuning import autotuned, compile_frozen

X = (torch.arange(6.0).view(2, 3),)


def graph_of(module: nn.Module, x: torch.Tensor = X[0]) -> torch.fx.GraphModule:
    return torch.export.export(module, (x,), strict=False).module()


class Rounded(nn.Module):
    def forward(self, x):
        return x.to(torch.int8).float()


@pytest.mark.parametrize("outruns", [False, True])
def test_float32_products_are_onednns_where_it_outruns_mkl(outruns, monkeypatch, native, capfd):
    if not onednn_multiplies_float32():
        pytest.skip("needs AVX-512")
    monkeypatch.setattr(autotuning, "onednn_outruns_mkl", lambda: outruns)
    layer, x = nn.Linear(40, 30), torch.randn(20, 40)
    with torch.no_grad():
        run = compile_frozen(graph_of(layer, x), [x])
        run(x)
        capfd.readouterr()
        with mkldnn.verbose(mkldnn.VERBOSE_ON):
            found = run(x)
    assert ("inner_product" in capfd.readouterr().out) == outruns
    torch.testing.assert_close(found.double(), layer.double()(x.double()), rtol=1e-5, atol=1e-6)
    assert torch.get_float32_matmul_precision() == "highest"


def sleeping(ms: float, value: float = 0.0):
    def run(x):
        time.sleep(ms / 1e3)
        return (x + value,)

    return run


def fail():
    raise KeyError("buf142")


@pytest.mark.sampled(default=2)
@pytest.mark.parametrize(
    ("tune", "wins"),
    [
        (lambda: sleeping(1), True),
        (lambda: sleeping(3), False),
        (lambda: sleeping(1, value=torch.tensor([9.0, -9.0, 0.0])), False),
        (fail, False),
    ],
    ids=["faster", "not faster", "wrong", "fails"],
)
def test_the_faster_compilation_with_right_outputs(tune, wins):
    plain, made = sleeping(3), []
    run = autotuned(graph_of(Rounded()), X, plain, lambda: made.append(tune()) or made[0])
    assert run is (made[0] if wins else plain)


@pytest.mark.slow
def test_only_what_templates_may_speed_up_is_compiled_twice(monkeypatch):
    plain = sleeping(1)
    assert autotuned(graph_of(nn.Identity()), X, plain, fail) is plain
    asked = []
    autotuned(graph_of(Rounded()), X, lambda x: (x,), lambda: asked.append("overhead"))
    halves = graph_of(nn.Linear(3, 2).bfloat16(), X[0].bfloat16())
    for has_amx in (False, True):
        monkeypatch.setattr(autotuning, "has_amx", lambda: has_amx)  # noqa: B023
        autotuned(halves, X, plain, lambda: asked.append("bfloat16") or plain)
    assert asked == ["bfloat16"]
