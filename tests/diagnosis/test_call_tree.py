"""Loops, modules and places in the tree of a profiled step."""

import json
import os
import sysconfig
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity

from lightning_accel._private.torch import profile_with_stacks
from lightning_accel.diagnosis import call_tree
from lightning_accel.diagnosis.call_tree import CallTree, Span, Tracing, place_of, walk


class Base(nn.Module):
    def training_step(self, x):
        return x * 1.0


class Net(Base):
    def __init__(self):
        super().__init__()
        self.used, self.branch = nn.Linear(4, 3), nn.Linear(4, 3)

    def training_step(self, x):
        self.branch(super().training_step(x))
        out = self.used(x)
        loss = torch.zeros(())
        for row in range(len(out)):
            loss = loss + torch.relu(out[row]).sum()
            loss = loss * 1.0
        return self.operators(out) + self.large(x.expand(len(x), 4)) + loss

    def operators(self, out):
        total = 0.0
        for row in range(9):
            total = total + out[row, 0] * out[row, 1]
        return total

    def large(self, x):
        square = torch.ones(300, 300)
        for _ in range(8):
            square = torch.mm(square, square).clamp(max=1)
        return square.sum() * x.sum() * 0.0

    def read(self, loss):
        return loss.item()


def line_of(function, text):
    lines = Path(__file__).read_text().splitlines()
    first = function.__code__.co_firstlineno
    return next(number for number, line in enumerate(lines, 1) if number > first and text in line)


@pytest.fixture(scope="module")
def tree():
    net, x = Net(), torch.randn(9, 4)
    net.training_step(x).backward()  # what is done once for each process
    with profile_with_stacks([ProfilerActivity.CPU]) as profiled:
        for _ in range(3):
            loss = net.training_step(x)
            loss.backward()
            net.read(loss)
    tree = CallTree(profiled)
    tree.net = net
    return tree


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch):
    """Small operations may take five times as long."""
    monkeypatch.setattr(call_tree, "_SMALL_NS", 5 * call_tree._SMALL_NS)


def test_loops_of_small_operations_are_found_with_their_line(tree):
    first, second = tree.loops()
    assert (
        first.place == f"tests/diagnosis/test_call_tree.py:{line_of(Net.training_step, 'torch.relu')} in training_step"
    )
    assert first.times == 9
    assert first.operations == 5 * 9 - 3  # from the first relu to the last sum
    assert second.place == "tests/diagnosis/test_call_tree.py in operators"  # operators have no lines
    assert second.forward.ns < tree.step.duration_time_ns


def test_the_backward_pass_of_a_loop_is_that_of_its_operations(tree):
    nodes = {node.extra_fields.sequence_number: node.name.rpartition(" ")[2] for node in tree.nodes}
    assert list(nodes.values()).count("ReluBackward0") == 9
    first, second = tree.loops()
    whole = tree.nodes[-1].end_time_ns - tree.nodes[0].start_time_ns
    assert 0 < first.backward.ns < whole
    assert first.backward.ns + second.backward.ns < whole
    events = sum(1 for node in tree.nodes if "Relu" in node.name for _ in walk(node))
    assert first.backward.events > events


def test_modules_have_the_span_of_their_calls(tree):
    branch, both = tree.modules([tree.net.branch]), tree.modules([tree.net.branch, tree.net.used])
    assert 0 < branch.ns < both.ns < tree.step.duration_time_ns
    assert tree.modules([nn.Linear(4, 3)]) == Span()


def test_events_have_the_place_of_the_users_call(tree):
    (item, *_) = [each for root in tree.roots for each in walk(root) if each.name == "aten::item"]
    line = line_of(Net.read, "item")
    assert place_of(item) == (f"tests/diagnosis/test_call_tree.py:{line} in read", True)


def test_the_shortest_step_is_read(tree):
    first = Net.training_step.__code__.co_firstlineno
    steps = [each for root in tree.roots for each in walk(root) if each.name.endswith(f"({first}): training_step")]
    assert len(steps) == 3
    assert tree.step.duration_time_ns == min(each.duration_time_ns for each in steps)
    assert steps[2 - tree.from_last] is tree.step
    numbers = {node.extra_fields.sequence_number for node in tree.nodes} - {-1}
    assert len(tree.nodes) == len(numbers) + 2  # gradients of weight and bias


def test_what_the_profiler_adds_is_taken_off(tree):
    events = sum(1 for _ in walk(tree.step))
    nodes = sum(1 for node in tree.nodes for _ in walk(node))
    tracing = tree.tracing({"forward": 4.1, "backward": 3.0}, {"forward": 4.0, "backward": 3.5})
    assert tracing == (pytest.approx(1e5 / events), 0.0)  # nothing, where it seems to have made it faster
    tracing = tree.tracing({"forward": 4.1, "backward": 13.0}, {"forward": 4.0, "backward": 3.5})
    assert tracing.backward_ns == tracing.forward_ns  # the rest is chance
    assert tree.tracing({"forward": 1e6, "backward": 0.0}, {"forward": 0.0, "backward": 0.0}).forward_ns == 1000.0
    assert nodes > 0
    assert Tracing(100.0, 50.0).ms(Span(3_000_000, 10_000), Span(2_000_000, 20_000)) == pytest.approx(2.0 + 1.0)
    assert Tracing(100.0, 50.0).ms(Span(1000, 10_000)) == 0.0


@pytest.mark.parametrize(
    ("file", "short"),
    [
        ("/usr/lib/python3/dist-packages/PIL/Image.py", "PIL/Image.py"),
        ("/env/lib/python3.12/site-packages/PIL/Image.py", "PIL/Image.py"),
        (os.path.realpath(json.decoder.__file__), os.path.realpath(json.decoder.__file__)),
    ],
)
def test_files_of_packages_and_of_python_are_not_the_users(file, short):
    assert not call_tree.is_users_file(file)
    assert call_tree.short_path(file) == short
    assert not call_tree.is_users_file(os.path.join(os.path.realpath(sysconfig.get_path("scripts")), "lightning-accel"))
    generated = os.path.join(os.path.realpath(tempfile.gettempdir()), "torch_geometric.nn.sequential_x.py")
    assert not call_tree.is_users_file(generated)
    assert call_tree.is_users_file("/home/me/run/train.py")
