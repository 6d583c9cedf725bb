"""What recurrent cells learn of the tasks of SequenceDataModule; benchmarks/bench_sequence_tasks.py has all of it."""

import lightning as L
import pytest
import torch

from lightning_accel import SequenceDataModule, SequenceModel


class Scheduled(SequenceModel):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = self.trainer.max_steps
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def learn(steps: int, model: dict, **data) -> dict[str, float]:
    """Test figures after ``steps``."""
    quiet = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
    quiet |= {"enable_checkpointing": False, "enable_model_summary": False}
    trainer = L.Trainer(max_steps=steps, limit_val_batches=0, gradient_clip_val=1.0, **quiet)
    module, datamodule = Scheduled(**model), SequenceDataModule(**data)
    trainer.fit(module, datamodule)
    return L.Trainer(**quiet).test(module, datamodule, verbose=False)[0]


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
def test_parity_of_up_to_40_bits_holds_for_up_to_256(cell):
    figures = learn(220, {"cell": cell, "hidden_dim": 64}, task="parity_steps")
    assert figures["test/accuracy"] > 0.99
