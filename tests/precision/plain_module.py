"""A module that knows nothing of this package, and the Trainer that its tests share."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class PlainClassifier(L.LightningModule):
    """Two layers and a schedule that shrinks the learning rate at each step."""

    def __init__(self, make_optimizer: Any = torch.optim.AdamW, **options: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 3))
        self.make_optimizer, self.options = make_optimizer, {"lr": 0.01} | options
        self.dtypes: set[torch.dtype] = set()
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, target = batch
        logits = self.net(x)
        self.dtypes.add(logits.dtype)
        loss = F.cross_entropy(logits, target)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = self.make_optimizer(self.parameters(), **self.options)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @property
    def learning_rate(self) -> float:
        return self.trainer.optimizers[0].param_groups[0]["lr"]


def batches(rank: int = 0, world_size: int = 1) -> DataLoader:
    """Ten batches of four rows, or this rank's part of each."""
    x = torch.randn(10, 4, 6, generator=torch.Generator().manual_seed(1))
    x = x.chunk(world_size, dim=1)[rank].flatten(end_dim=1)
    return DataLoader(TensorDataset(x, x[:, :3].argmax(dim=1)), 4 // world_size)


def make_trainer(*plugins: Any, **options: Any) -> L.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "use_distributed_sampler": False,
        "max_epochs": 1,
        "logger": False,
        "log_every_n_steps": 1,
    }
    return L.Trainer(plugins=list(plugins), **(quiet | defaults | options))


def fit(*plugins: Any, model: Any = PlainClassifier, ckpt_path: Any = None, **options: Any) -> Any:
    """Train a model, or one of a class from the same weights each time, on the same batches."""
    torch.manual_seed(0)
    model = model() if callable(model) and not isinstance(model, L.LightningModule) else model
    trainer = make_trainer(*plugins, **options)
    trainer.fit(model, batches(), ckpt_path=ckpt_path)
    return model
