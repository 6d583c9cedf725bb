"""Train a module of a user's own with one of our operations, in a process of its own; print what came of it.

python native_job.py: JSON of whether native kernels were used, of all warnings, and of the weights.
"""

import json
import warnings

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel.ops import gated_scan


class Smoother(L.LightningModule):
    """Predicts the next value of a sequence from a mean that gates decay."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.out = nn.Linear(3, 10), nn.Linear(5, 1)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        (x,) = batch
        return (self.out(gated_scan("mingru", self.gates(x))) - x.sum(-1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train() -> list[float]:
    L.seed_everything(0, verbose=False)
    module = Smoother()
    rows = DataLoader(TensorDataset(torch.randn(9, 7, 3)), 4)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    L.Trainer(max_epochs=2, accelerator="cpu", devices=1, **quiet).fit(module, rows)
    return nn.utils.parameters_to_vector(module.parameters()).tolist()


if __name__ == "__main__":
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weights = train()
        native = hasattr(torch.ops.lightning_accel_native, "gated_scan")  # loaded by the training, nobody else
    said = [str(warning.message) for warning in caught if "native" in str(warning.message)]
    print(json.dumps({"native": native, "said": said, "weights": weights}))
