"""Memory that grows, and what in it does."""

import weakref
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_accel.callbacks import Watchdog
from lightning_accel.callbacks.watchdog import memory_growth
from lightning_accel.callbacks.watchdog.memory_growth import MemoryGrowth

MIB = 2**20


class Keeps(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.losses, self.few = [], [1, 2]

    def training_step(self, batch):
        loss = self.layer(batch).square().mean()
        self.losses.append(loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.fixture
def resident(monkeypatch):
    """Bytes that looks find one after the other."""
    sizes = []
    monkeypatch.setattr(memory_growth, "resident_bytes", lambda device: sizes.pop(0))
    monkeypatch.setattr(memory_growth, "memory_bytes", lambda: (10_000 * MIB, 4_000 * MIB))
    return sizes


def told(growth, resident, sizes, step=20):
    resident[:] = [size * MIB for size in sizes]
    return [growth.look(step * (number + 1)) for number in range(len(sizes))]


def test_growth_in_six_looks_in_a_row_is_said_with_when_memory_is_full(resident):
    growth = MemoryGrowth(torch.device("cpu"), {}, period=0.0)
    sizes = [900, 950, 990, 1000, 1000, 1000, 1000, 1020, 1040, 1060, 1080, 1100, 1120]
    (*others, last) = told(growth, resident, sizes)
    assert others == [None] * 12
    assert last.startswith(
        "memory of the process grows: by 120.0 MiB in 120 steps, since step 140; 3.9 GiB are full after 2,880 more. "
        "no tensors, and no lists"
    )


def test_growth_that_pauses_or_is_small_is_not_said(resident):
    growth = MemoryGrowth(torch.device("cpu"), {}, period=0.0)
    assert not any(told(growth, resident, [1000] * 7 + [1100, 1200, 1300, 1400, 1500, 1500, 1600, 1700]))
    growth = MemoryGrowth(torch.device("cpu"), {}, period=0.0)
    assert not any(told(growth, resident, [1000] * 7 + [1010, 1020, 1030, 1040, 1050, 1060]))


@pytest.mark.slow
def test_it_is_said_again_after_twice_as_much(resident):
    growth = MemoryGrowth(torch.device("cpu"), {}, period=0.0)
    sizes = [1000] * 7 + [1000 + 20 * number for number in range(1, 25)]
    found = [number for number, text in enumerate(told(growth, resident, sizes)) if text]
    assert found == [12, 24]


def test_looks_are_20_steps_apart(resident):
    growth = MemoryGrowth(torch.device("cpu"), {}, period=0.0)
    told(growth, resident, [1000] * 30, step=5)
    assert len(resident) == 30 - 7


@pytest.mark.slow
def test_lists_and_graphs_that_a_module_keeps_are_named(resident, monkeypatch):
    monkeypatch.setattr("lightning_accel.callbacks.watchdog.callback._PERIOD", 0.0)
    resident[:] = [(1000 + 20 * number) * MIB for number in range(20)]
    watchdog = Watchdog()
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, max_epochs=1, callbacks=[watchdog],
    )  # fmt: skip
    trainer.fit(Keeps(), DataLoader(torch.ones(290, 2)))
    (found,) = watchdog.findings
    assert found.kind == "memory"
    assert "Keeps.losses has grown by 60 to 240 entries since step 180" in found.text
    assert "there are 60 more tensors of shape (), float32 on cpu, with the graphs that computed them" in found.text
    assert "few" not in found.text


def test_lists_within_lists_count(resident):
    owner = SimpleNamespace(history={"a": [], "b": []}, names=["x"])
    growth = MemoryGrowth(torch.device("cpu"), {"Owner": owner}, period=0.0)
    resident[:] = [1000 * MIB] * 7 + [(1000 + 20 * number) * MIB for number in range(1, 7)]
    gone = [weakref.proxy(nn.Linear(1, 1))]  # which counting tensors comes across
    found = []
    for number in range(13):
        owner.history["a"] += [0] * 20
        found.append(growth.look(20 * (number + 1)))
    assert len(gone) == 1
    assert "Owner.history has grown by 60 to 262 entries" in found[-1]
