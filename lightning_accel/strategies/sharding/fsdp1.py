"""FSDP1, also on CPUs, for modules and checkpoints that need the older of torch's two implementations."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_accel.strategies.batch_samplers import require_distributable_batches
from lightning_accel.strategies.checkpoints.reading import require_loadable
from lightning_accel.strategies.rendezvous import joining_process_group


class FSDP1Strategy(FSDPStrategy):
    """Run Lightning's FSDPStrategy, with the same arguments, on CPUs as well.

    Prefer :class:`lightning_accel.strategies.FullyShardedStrategy`, FSDP2. This strategy does not distribute experts
    and reduces the gradients of each accumulated batch; on CPUs it has no ``cpu_offload`` and writes only sharded
    checkpoints (``python -m lightning.pytorch.utilities.consolidate_checkpoint FOLDER`` converts them to one file).

    Raises:
        ValueError: before training, if CPU offloading or an unsharded checkpoint is requested on a CPU.
    """

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the short name ``accel_fsdp1`` with the Trainer."""
        if "accel_fsdp1" not in strategy_registry:
            description = "Lightning's FSDP1, on CPUs too, with sharded checkpoints"
            strategy_registry.register("accel_fsdp1", cls, description, state_dict_type="sharded")

    def setup_environment(self) -> None:
        with joining_process_group(self.cluster_environment, self._timeout):
            super().setup_environment()

    def setup(self, trainer: L.Trainer) -> None:
        require_distributable_batches(trainer)
        if self.root_device.type == "cpu":
            if self.cpu_offload is not None and self.cpu_offload.offload_params:
                raise ValueError("on a CPU there is nothing to offload to; leave cpu_offload out of FSDP1Strategy")
            if self._state_dict_type != "sharded":  # gathering a full state dict crashes the process in torch
                raise ValueError(
                    "on a CPU FSDP1Strategy writes sharded checkpoints alone; give it state_dict_type='sharded', or "
                    "take FullyShardedStrategy, which writes whole ones"
                )
        super().setup(trainer)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        require_loadable(self.broadcast(checkpoint_path), weights_only)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        if self.root_device.type != "cpu":
            return super()._setup_model(model)
        self.kwargs.setdefault("device_id", torch.device("cpu"))  # otherwise FSDP1 requires another device
        sharding: dict[str, Any] = {
            "sharding_strategy": self.sharding_strategy,
            "mixed_precision": self.mixed_precision_config,
        }
        return FullyShardedDataParallel(model, **sharding, **self.kwargs)
