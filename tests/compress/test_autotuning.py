import time

import pytest
import torch
from torch import nn

from lightning_accel.compress import autotuning
from lightning_accel.compress.autotuning import autotuned

X = (torch.arange(6.0).view(2, 3),)


def graph_of(module: nn.Module, x: torch.Tensor = X[0]) -> torch.fx.GraphModule:
    return torch.export.export(module, (x,), strict=False).module()


class Rounded(nn.Module):
    def forward(self, x):
        return x.to(torch.int8).float()


def sleeping(ms: float, value: float = 0.0):
    def run(x):
        time.sleep(ms / 1e3)
        return (x + value,)

    return run


def fail():
    raise KeyError("buf142")


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
