"""Data parallelism over several devices in one process."""

import os
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor

from lightning_accel._private.torch import compiled_call, compiled_original
from lightning_accel.strategies.batch_splitting import RecordedLog, merge_outputs, split_batch
from lightning_accel.strategies.replicas import Replica, ReplicaMetric, run_in_threads


class DataParallelStrategy(Strategy):
    """Split each batch over several devices in one process, whose replicas of the module run in threads.

    The short name is ``accel_dp``. Loss, gradients and values logged by ``self.log`` equal those of one device with the
    whole batch: means over devices are weighted by numbers of samples, and torchmetrics see all samples in order
    (except that a metric logged with ``on_step=True`` reports, for a step, the samples of the first device only).
    Checkpoints are those of one device, too. Batches may be nested, see
    :func:`~lightning_accel.strategies.batch_splitting.split_batch`; a batch with fewer samples than devices leaves some
    idle.

    Changes that a step makes to the module persist on the first device only, as in ``torch.nn.DataParallel``: buffers
    (running statistics of BatchNorm and counters cover the samples of the first device) and assigned attributes.
    Objects that steps change in place, such as lists, are shared by all devices, so their threads must not conflict
    there.

    With ``accelerator="cpu"`` the replicas share parameters and run one after another, for tests.

    DDP is faster: here each step copies the module to the devices, one interpreter feeds them all, and the first one
    collects all gradients. Use this strategy where processes cannot be started, or to debug all devices at once.

    Raises:
        ValueError: before training, on several nodes or processes.
        TypeError: before training, if the module uses manual optimization or is compiled; in a step, if its batch
            cannot be split.

    Example:
        >>> import lightning as L
        >>> from lightning_accel import DataParallelStrategy
        >>> trainer = L.Trainer(accelerator="cpu", devices=2, strategy=DataParallelStrategy())
    """

    def __init__(self) -> None:
        super().__init__()
        self.parallel_devices: list[torch.device] | None = None  # set by the Trainer; the first holds the module
        self.num_nodes = 1
        self.global_rank = self.local_rank = 0
        self.world_size = 1

    @property
    def devices(self) -> list[torch.device]:
        assert self.parallel_devices
        return self.parallel_devices

    @property
    def root_device(self) -> torch.device:
        return self.devices[0]

    @property
    def is_global_zero(self) -> bool:
        return True

    def setup_environment(self) -> None:
        processes = int(os.environ.get("WORLD_SIZE", 1))
        if self.num_nodes > 1 or processes > 1:
            raise ValueError(
                f"accel_dp is one process on one node, but there are {self.num_nodes} nodes and {processes} processes; "
                "use strategy=ddp, or start the script without torchrun"
            )
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        assert self.lightning_module is not None
        if trainer.state.fn == TrainerFn.FITTING and not self.lightning_module.automatic_optimization:
            raise TypeError(
                f"accel_dp needs automatic optimization, but {type(self.lightning_module).__name__} optimizes by hand, "
                "which its copies would do each for itself; use strategy=ddp"
            )
        self._reject_compiled()
        super().setup(trainer)

    def _reject_compiled(self) -> None:
        assert self.lightning_module is not None
        for name, module in self.lightning_module.named_modules():
            compiled = compiled_call(module) is not None or compiled_original(module) is not None
            if compiled or isinstance(module, torch.jit.ScriptModule):
                raise TypeError(
                    f"accel_dp cannot copy {name or 'the module'}, which is compiled, in each step; leave out its "
                    "compilation, or use strategy=ddp"
                )

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self.precision_plugin.train_step_context():
            return self._run("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self.precision_plugin.val_step_context():
            return self._run("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self.precision_plugin.test_step_context():
            return self._run("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._run("predict_step", *args, **kwargs)

    def _run(self, step: str, batch: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        parts = split_batch(batch, len(self.devices))
        if len(parts) == 1:
            return getattr(module, step)(batch, *args, **kwargs)
        replicas = [Replica(module, device) for device in self.devices[1 : len(parts)]]
        modules = [module, *(replica.module for replica in replicas)]
        log, num_samples = RecordedLog(), [part.num_samples for part in parts]
        calls = []
        for number, (part, device) in enumerate(zip(parts, self.devices, strict=False)):
            modules[number].__dict__["log"] = log.recorder()
            inputs = move_data_to_device(part.batch, device)
            calls.append(lambda one=modules[number], inputs=inputs: getattr(one, step)(inputs, *args, **kwargs))
        try:
            outputs = run_in_threads(calls, self.devices[: len(parts)])
        finally:
            del module.__dict__["log"]
        for replica in replicas:
            for metric in replica.metrics:
                metric.replay(self.root_device)
        for call in log.merged(self.root_device, num_samples):
            value = call.pop("value")
            module.log(value=value.metric if isinstance(value, ReplicaMetric) else value, **call)
        return merge_outputs(outputs, num_samples, self.root_device)

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Return ``tensor`` unchanged, since there is one process."""
        return tensor

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Return ``tensor`` unchanged, since there is one process."""
        return tensor

    def barrier(self, name: str | None = None) -> None:
        pass

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj
