from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel.callbacks.compression_phase import current_phase, defer_best_checkpoints, in_final_phase


class Falling(L.LightningModule):
    """Whose figure is best at first."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/score", float(-self.current_epoch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Ramp(L.Callback):
    def __init__(self, end):
        self.end = end
        self.epoch = 0

    @property
    def phase(self):
        return "at 0.9" if self.is_final_phase else "ramp to 0.9"

    @property
    def is_final_phase(self):
        return self.epoch >= self.end

    def setup(self, trainer, pl_module, stage):
        defer_best_checkpoints(trainer)

    def on_train_epoch_start(self, trainer, pl_module):
        self.epoch = trainer.current_epoch
        if self.epoch == 2:  # there is one to go on from
            assert [path.name for path in Path(trainer.checkpoint_callback.dirpath).iterdir()] == ["last.ckpt"]


def test_best_checkpoint_is_of_the_final_phase(tmp_path):
    keeper = ModelCheckpoint(tmp_path, "{epoch}", monitor="val/score", mode="max", save_last=True, save_top_k=1)
    callbacks = [Ramp(2), Ramp(3), keeper]  # both wrap the check, once
    trainer = L.Trainer(max_epochs=5, accelerator="cpu", logger=False, callbacks=callbacks,
                        enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    rows = DataLoader(TensorDataset(torch.ones(4, 2)), 2)
    assert (current_phase(trainer), in_final_phase(trainer)) == ("ramp to 0.9, ramp to 0.9", False)
    trainer.fit(Falling(), rows, rows)
    assert (current_phase(trainer), in_final_phase(trainer)) == ("at 0.9, at 0.9", True)
    assert keeper.best_model_path == str(tmp_path / "epoch=3.ckpt")


def test_without_phases_every_model_is_a_candidate():
    trainer = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    assert (current_phase(trainer), in_final_phase(trainer)) == ("", True)
