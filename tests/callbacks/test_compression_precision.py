"""What is measured and deployed of a module that a precision has cast."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel.callbacks import CompressionReport, Distillation, Export, Pruning, Quantization
from lightning_accel.compress import load_compressed
from lightning_accel.precision import Bfloat16Precision

ROWS = TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3)


class Plain(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), batch_size=len(batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.sampled(slow=2)
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"precision": "bf16-true"}, torch.bfloat16),
        pytest.param({"precision": "64-true"}, torch.float64, marks=[pytest.mark.slow, pytest.mark.weekly]),
        pytest.param({"plugins": [Bfloat16Precision()]}, torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=["bf16-true", "64-true", "Bfloat16Precision"],
)
@pytest.mark.parametrize(
    "callbacks",
    [
        pytest.param(
            lambda: [Pruning(0.5, structure="channel", end=0.5), Distillation("dense")], marks=pytest.mark.slow
        ),
        pytest.param(
            lambda: [Pruning(0.5, end=0.5), Quantization("qat", "onnxruntime", seconds=0.01)], marks=pytest.mark.slow
        ),
        pytest.param(lambda: [CompressionReport(compiled=False, seconds=0.01)], marks=pytest.mark.slow),
    ],
    ids=["channels", "int8", "report"],
)
def test_files_and_reports_are_of_float32(callbacks, options, dtype, tmp_path, uncompiled):
    module, export = Plain(), Export(compare=False)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=4, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, callbacks=[*callbacks(), export], **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(ROWS, 16), DataLoader(ROWS, 32))
    assert module.net[0].weight.dtype == dtype
    x = ROWS.tensors[0]
    found = load_compressed(export.exported.path)(x)
    assert found.dtype == torch.float32
    difference = (found - module.net.float()(x)).abs().max() / found.abs().max()
    assert difference < (0.25 if any(isinstance(one, Quantization) for one in trainer.callbacks) else 1e-3)
