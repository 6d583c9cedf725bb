"""Storage of the weights of an earlier step, to rewind to."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_accel.callbacks.weight_part import WeightPart
from lightning_accel.compress.prunable import clean_name


class Rewinding:
    """Hold copies of all trainable parameters on their devices; each process holds its own shards."""

    def __init__(self) -> None:
        self.copies: dict[str, Tensor] = {}
        self._loaded: dict[str, Tensor] = {}

    def store(self, pl_module: L.LightningModule) -> None:
        self.copies = {part.name: part.value.clone() for part in _parts(pl_module)}

    def rewind(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore the parameters, and clear the optimizer states, which belong to later steps."""
        with torch.no_grad():
            for part in _parts(pl_module):
                part.value.copy_(self.copies[part.name])
        for optimizer in trainer.optimizers:
            optimizer.state.clear()

    def state_dict(self, pl_module: L.LightningModule) -> dict[str, Tensor]:
        if not self.copies:
            return {}
        parts = {part.name: part for part in _parts(pl_module)}
        device = torch.device("cpu")
        return {name: parts[name].gather(value, None, device).clone() for name, value in self.copies.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._loaded = state

    def attach(self, pl_module: L.LightningModule) -> None:
        """Shard the loaded copies like the current parameters."""
        if self._loaded:
            self.copies = {part.name: part.shard(self._loaded[part.name]) for part in _parts(pl_module)}
            self._loaded = {}


def _parts(pl_module: L.LightningModule) -> list[WeightPart]:
    named: Any = pl_module.named_parameters()
    return [WeightPart(clean_name(name), value, 0, pl_module) for name, value in named if value.requires_grad]
