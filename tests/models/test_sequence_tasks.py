"""What recurrent cells learn of a task; benchmarks/bench_sequence_tasks.py has more."""

import lightning as L
import pytest
import torch

from lightning_accel import SequenceModel
from lightning_accel.data import LengthBatchSampler, length_batch_loader
from lightning_accel.models import RecurrentLayers


class Scheduled(SequenceModel):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = self.trainer.max_steps
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def parity_loader(num_sequences: int, shortest: int, longest: int):
    """Batches of bits, labelled after each step by the parity of their ones so far."""
    bits = [torch.randint(2, (int(n),)) for n in torch.randint(shortest, longest + 1, (num_sequences,))]
    return length_batch_loader([(x, x.cumsum(0) % 2) for x in bits], LengthBatchSampler([*map(len, bits)], 64))


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.parametrize("cell", ["gru", *(pytest.param(cell, marks=pytest.mark.weekly) for cell in ("rnn", "lstm"))])
def test_parity_of_up_to_40_bits_holds_for_up_to_256(cell):
    L.seed_everything(0)
    quiet = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
    quiet |= {"enable_checkpointing": False, "enable_model_summary": False}
    model = Scheduled(
        vocab_size=2, num_classes=2, target_kind="labelling", layers=RecurrentLayers(cell=cell, hidden_dim=64)
    )
    L.Trainer(max_steps=220, gradient_clip_val=1.0, **quiet).fit(model, parity_loader(7000, 3, 40))
    figures = L.Trainer(**quiet).test(model, parity_loader(2000, 40, 256), verbose=False)[0]
    assert figures["test/accuracy"] > 0.99
