import random
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from lightning_accel.data.batched_fetch import random_state
from lightning_accel.diagnosis import loader_lines
from lightning_accel.diagnosis.loader_lines import trace_loading
from tests.planted import use_clock


class Slow(Dataset):
    def __init__(self, clock=None):
        self.clock = clock

    def __len__(self):
        return 8

    def __getitem__(self, index):
        self.clock.now_ns += 2_000_000
        return self.load(index)

    def load(self, index):
        for _ in range(2):
            self.clock.now_ns += 4_000_000  # in a function of the dataset, whose caller is not slow
        return torch.zeros(3)


class GoesOn(Slow):
    def __getitem__(self, index):
        return self.load(index), setattr(self.clock, "now_ns", self.clock.now_ns + 12_000_000)


class Drawing(Slow):
    def __init__(self, draw):
        self.draw = draw

    def __getitem__(self, index):
        return torch.full((2,), float(self.draw()))


class FailsHere(Slow):
    def __init__(self, index):
        self.first = index

    def __getitem__(self, index):
        if index >= self.first:
            raise RuntimeError("not in a worker")
        return 0


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "timeout": 5, "persistent_workers": True}])
def test_the_slow_lines_are_named_with_their_shares(workers, monkeypatch):
    clock = use_clock(monkeypatch, loader_lines)
    loader = DataLoader(Subset(Slow(clock), range(8)), 2, shuffle=True, **workers)
    before, tracer = random_state(), sys.gettrace()
    (slow, fast), draws = trace_loading({"one": loader}, 5.0, 3)
    first = Slow.load.__code__.co_firstlineno
    assert Path(slow.place).resolve() == Path(f"{__file__}:{first + 2}")
    assert slow.text == "self.clock.now_ns += 4_000_000  # in a function..."
    assert (slow.share, fast.share) == pytest.approx((0.8, 0.2), abs=0.01)
    assert fast.text == "self.clock.now_ns += 2_000_000"
    assert not draws
    assert (random_state(), sys.gettrace()) == (before, tracer)
    assert loader.num_workers == workers.get("num_workers", 0)


def test_what_follows_a_function_of_the_users_counts_as_the_line_that_called_it(monkeypatch):
    dataset = GoesOn(use_clock(monkeypatch, loader_lines))
    (slow, fast), _ = trace_loading(DataLoader(dataset, 2, collate_fn=list), 5.0, 3)
    assert slow.text.startswith("return self.load(index), setattr")
    assert (slow.share, fast.share) == pytest.approx((0.6, 0.4), abs=0.01)


@pytest.mark.parametrize("draw", [random.random, partial(torch.rand, ())], ids=["python", "torch"])
def test_random_samples_are_known(draw):
    before = random_state()
    assert trace_loading(DataLoader(Drawing(draw), 2), 5.0, 3).draws
    assert random_state() == before


def test_data_without_lines_of_the_users_have_none():
    tensors = DataLoader(TensorDataset(torch.zeros(8, 3)), 2)
    for loaders in (tensors, [[torch.zeros(3)]], DataLoader(FailsHere(0), 2)):
        assert trace_loading(loaders, 5.0, 3) == ([], False)
        assert sys.gettrace() is None


def test_a_tracer_of_another_program_is_restored():
    def other(frame, event, arg):
        return None

    before = sys.gettrace()
    sys.settrace(other)
    try:
        trace_loading(DataLoader(FailsHere(2), 2), 5.0, 3)
        found = sys.gettrace()
    finally:
        sys.settrace(before)
    assert found is other
