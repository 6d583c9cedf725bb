"""Processes and devices as a launcher deals them."""

from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_accel._private.lightning import timeout_of
from lightning_accel.strategies.rendezvous import joining_process_group


class LaunchedStrategy(DDPStrategy):
    """Run DDP on the processes that a launcher has started, however it deals them to machines and devices.

    DDPStrategy takes the same number of processes on each machine for granted. Ray Train places workers where there is
    room, on CPUs more than the Trainer's ``devices``, and launchers may let each process see its own GPU alone.
    """

    @property
    def root_device(self) -> torch.device:
        devices = self.parallel_devices or []
        if self.local_rank < len(devices):
            return devices[self.local_rank]
        if devices and (devices[0].type == "cpu" or torch.cuda.device_count() == 1):
            return devices[0]
        raise ValueError(
            f"process {self.local_rank} of this machine, counted from 0, needs a device of its own; the Trainer has "
            f"{[str(device) for device in devices]}. Give it devices='auto', or as many as processes are started here"
        )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_environment(self) -> None:
        with joining_process_group(self.cluster_environment, timeout_of(self)):
            super().setup_environment()
