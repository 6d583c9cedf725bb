"""Graph breaks that sleep on a clock of their own, beside the same graphs joined, which do not."""

import pytest
import torch
from torch import nn

from lightning_accel.diagnosis import joined_graphs
from lightning_accel.diagnosis.graph_breaks import CompiledCalls
from lightning_accel.diagnosis.joined_graphs import breaks_ms
from tests import planted
from tests.planted import use_clock

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo hides it, unless an error


@torch.compiler.disable
def pause():
    planted.sleep("break", 0.003)


@torch.compiler.disable
def doubled(x):
    return 2 * x


class Pausing(nn.Module):
    def __init__(self, pauses):
        super().__init__()
        self.inner, self.pauses = nn.Linear(3, 3), pauses

    def forward(self, x):
        x = self.inner(x)
        if self.pauses > 0:
            pause()
        x = x * self.inner.weight.sum()  # a weight that two graphs take
        if self.pauses > 1:
            pause()
        return {"sum": x.sum(), "number": 1}


class Doubling(Pausing):
    def forward(self, x):
        return doubled(self.inner(x)).sum()


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.setattr(joined_graphs, "_BACKEND", "eager")
    use_clock(monkeypatch, joined_graphs)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.sampled(default=2)
@pytest.mark.parametrize("pauses", [0, 1, 2])
def test_breaks_cost_what_they_are_planted_to(pauses):
    module = torch.compile(Pausing(pauses), backend="eager")
    module(torch.randn(2, 3))
    assert breaks_ms(module, [torch.randn(2, 3)], {}, 0.01) == pytest.approx(3 * pauses, rel=0.01)


def test_operations_between_graphs_cannot_be_joined():
    module = torch.compile(Doubling(0), backend="eager")
    calls, output = joined_graphs._graph_calls(module, [torch.randn(2, 3)], {})
    assert joined_graphs._joined(calls, [output]) is None
    assert breaks_ms(module, [torch.randn(2, 3)], {}, 0.01) is None


def test_what_other_processes_take_stretches_the_difference(monkeypatch):
    """Two of three calls wait six times as long as they work."""
    clock, calls = use_clock(monkeypatch, joined_graphs), []

    def call(ms):
        calls.append(ms)
        clock.sleep(ms / 1000 * (7 if len(calls) % 3 else 1))
        worked.append(ms / 1000)
        return []

    worked = []
    monkeypatch.setattr(clock, "thread_time", lambda: sum(worked), raising=False)
    difference = joined_graphs._difference_ms(lambda: call(5), lambda: call(3), [], 1.0)
    assert difference == pytest.approx(2 * 5, rel=0.1)


def test_graphs_joined_have_the_output_and_gradient_of_the_call():
    module, x = torch.compile(Pausing(2), backend="eager"), torch.randn(2, 3, requires_grad=True)
    calls, output = joined_graphs._graph_calls(module, [x], {})
    whole, inputs = joined_graphs._joined(calls, [output["sum"]])
    assert len(calls) == 3
    torch.testing.assert_close(whole(inputs), [output["sum"]])
    expected = torch.autograd.grad(output["sum"], [x, *module.parameters()])
    torch.testing.assert_close(torch.autograd.grad(whole(inputs), [x, *module.parameters()]), expected)


def test_modules_that_compile_themselves_are_timed_for_each_of_their_calls():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Pausing(1)
            self.inner.compile(backend="eager")

        def forward(self, x):
            return self.inner(x)["sum"] + self.inner(x)["sum"]

    module = Twice()
    calls = CompiledCalls(module)
    calls.start()
    module(torch.randn(2, 3))
    calls.stop()
    assert calls.breaks_ms(0.01) == pytest.approx(6, rel=0.01)
