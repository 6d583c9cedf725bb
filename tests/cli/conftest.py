import sys
from pathlib import Path

import pytest

OWN_MODULE = '''
"""A module and data that know nothing of lightning_accel."""
import dataclasses

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class OwnModule(L.LightningModule):
    def __init__(self, width: int, bias: bool = True):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1, bias)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = (self.layer(x).squeeze(1) - y).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step_loss(batch))

    def training_step_loss(self, batch):
        x, y = batch
        return (self.layer(x).squeeze(1) - y).square().mean()

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.training_step_loss(batch))

    def predict_step(self, batch, batch_idx):
        return self.layer(batch[0]).squeeze(1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OwnData(L.LightningDataModule):
    def __init__(self, rows: int = 32):
        super().__init__()
        x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(1))
        self.data = TensorDataset(x, x @ torch.tensor([1.0, -2.0, 3.0]))

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=8)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class BuildsInSetup(OwnModule):
    def setup(self, stage):
        self.more = torch.nn.Linear(2, 2)


class Renamed(OwnModule):
    @__import__("lightning_accel.ops.renames", fromlist=["_"]).renamed_arguments(size="width", factors="scales")
    def __init__(self, scales: list[float], width: int = 3):
        super().__init__(width)


@dataclasses.dataclass(frozen=True)
class Layer:
    width: int = 3
    scales: list[float] = dataclasses.field(default_factory=list)


class Grouped(OwnModule):
    @__import__("lightning_accel.ops.renames", fromlist=["_"]).renamed_arguments(
        size="layer.width", factors="layer.scales"
    )
    def __init__(self, bias: bool = True, layer: Layer = Layer()):
        super().__init__(layer.width, bias)


class Broken(OwnModule):
    def __init__(self, width: int):
        super().__init__(width)
        self.layer.no_such_attribute.use()


class BreaksLater(OwnModule):
    def training_step(self, batch, batch_idx):
        raise RuntimeError("planted in mid-run")


class SmoothedMoE(__import__("lightning_accel").MoEClassifier):
    def training_step(self, batch, batch_idx):
        x, target = batch
        logits, report = self(x)
        return torch.nn.functional.cross_entropy(logits, target, label_smoothing=0.1) + 0.1 * report.balance_loss
'''


@pytest.fixture
def own(run_folder) -> Path:
    """The current folder, with ``own_module.py`` in it."""
    path = run_folder / "own_module.py"
    path.write_text(OWN_MODULE)
    yield path
    sys.modules.pop("own_module", None)
    if str(run_folder) in sys.path:
        sys.path.remove(str(run_folder))
