"""Shares of a step that a trial writes down."""

import os
import time

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_accel.tuning.comparison import Shares
from lightning_accel.tuning.parity import record_losses
from lightning_accel.tuning.project import Changes, Project
from lightning_accel.tuning.recorder import StepRecorder
from lightning_accel.tuning.variant import Variant

_SECONDS = {"data": 0.02, "optimizer": 0.01, "system": 0.01}


class SlowSGD(torch.optim.SGD):
    """Take some time for a step, after its closure has run."""

    def step(self, closure=None):
        loss = super().step(closure)
        time.sleep(_SECONDS["optimizer"])
        return loss


class SlowEverywhere(L.LightningModule):
    """Have the system work in the forward pass, and an optimizer that is slow."""

    def __init__(self, automatic):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.automatic_optimization = automatic
        self.losses = []

    def training_step(self, batch):
        until = os.times().system + _SECONDS["system"]
        while os.times().system < until:
            os.urandom(2**20)
        loss = self.layer(batch).square().mean()
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            time.sleep(0.01)  # which is not the optimizer's
        return loss

    def configure_optimizers(self):
        return SlowSGD(self.parameters(), lr=0.1)


class SlowRows(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        time.sleep(_SECONDS["data"])
        return torch.ones(2)


def fit(module, recorder):
    recorder.folder.mkdir()
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, callbacks=[recorder], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(SlowRows()))


@pytest.mark.slow
def test_shares_of_a_step_are_where_its_time_goes(tmp_path):
    for automatic in (True, False):
        folder = tmp_path / str(automatic)
        fit(SlowEverywhere(automatic), StepRecorder(folder))
        steps = Variant(Project("nobody:runs", {}), Changes(), folder, None).new_steps()
        assert len(steps) == 5
        shares = Shares.of(steps)
        seconds = sum(step.end - step.begin for step in steps)
        for part, each in _SECONDS.items():
            assert 0.99 * each * 5 / seconds <= getattr(shares, part)  # times are multiples of 0.01 s, rounded
        assert shares.data + shares.optimizer < 1


@pytest.mark.slow
def test_losses_are_those_that_steps_return(tmp_path, monkeypatch):
    module = SlowEverywhere(automatic=True)
    monkeypatch.setattr(Variant, "start", lambda *_: fit(module, StepRecorder(tmp_path / "seed_3", with_losses=True)))
    monkeypatch.setattr(Variant, "wait", lambda *_: None)
    project = Project("nobody:runs", {})
    assert record_losses(project, Changes(), tmp_path, [3], 6, deadline=0.0) == [module.losses]
    assert len({*module.losses}) == 6
