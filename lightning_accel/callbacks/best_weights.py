"""In-memory storage of the best weights of a run so far."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_accel.callbacks.deployment.copies import gather_to_cpu
from lightning_accel.strategies.sharding.state import shard_like


class BestWeights:
    """Hold copies of a module's parameters and buffers in host memory, including those not in ``state_dict``.

    Each process stores only its own shards; they are gathered for checkpoints alone.
    """

    def __init__(self) -> None:
        self._shards: dict[str, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._shards)

    def clear(self) -> None:
        self._shards = {}

    def store(self, trainer: L.Trainer, module: nn.Module) -> None:
        self._shards = {name: _local(value).to("cpu", copy=True) for name, value in _tensors(trainer, module).items()}

    def matches(self, trainer: L.Trainer, module: nn.Module) -> bool:
        """Return whether the names and shapes of the stored tensors match those of ``module``."""
        shapes = {name: _local(value).shape for name, value in _tensors(trainer, module).items()}
        return shapes == {name: value.shape for name, value in self._shards.items()}

    @torch.no_grad()
    def copy_to(self, trainer: L.Trainer, module: nn.Module) -> None:
        for name, value in _tensors(trainer, module).items():
            _local(value).copy_(self._shards[name])

    def gather(self, trainer: L.Trainer, module: nn.Module) -> dict[str, Tensor]:
        """Return the whole tensors by name on the first process; every process must call it.

        Returns an empty dict if a sharded run was interrupted, since other processes may be gone.
        """
        live = _tensors(trainer, module)
        if not self._shards or not _is_sharded(trainer, module):
            return dict(self._shards)
        if trainer.state.status == TrainerStatus.INTERRUPTED:
            return {}
        if not _needs_strategy_gather(trainer, module):
            gathered = {name: gather_to_cpu(_to_dtensor(part, live[name])) for name, part in self._shards.items()}
        else:
            with _replaced_weights(self, trainer, module):
                gathered = dict(trainer.strategy.lightning_module_state_dict())
        return gathered if trainer.is_global_zero else {}

    def scatter(self, trainer: L.Trainer, module: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Store this process's shards of the tensors that ``gather`` returned."""
        if not _needs_strategy_gather(trainer, module):
            live = _tensors(trainer, module)
            self._shards = {
                name: _local(shard_like(value, live[name])).to("cpu", copy=True) for name, value in state.items()
            }
            return
        self.store(trainer, module)
        with _replaced_weights(self, trainer, module):
            trainer.strategy.load_model_state_dict({"state_dict": state}, strict=False)
            loaded = BestWeights()
            loaded.store(trainer, module)
        self._shards = loaded._shards


@contextmanager
def _replaced_weights(best: BestWeights, trainer: L.Trainer, module: nn.Module) -> Iterator[None]:
    """Replace the weights of ``module`` with the best ones while open."""
    own = BestWeights()
    own.store(trainer, module)
    best.copy_to(trainer, module)
    try:
        yield
    finally:
        own.copy_to(trainer, module)


def _tensors(trainer: L.Trainer, module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers on this process, as sharded between steps."""
    for part in (trainer.strategy.model or module).modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # a validation leaves some parameters unsharded
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: value for name, value in named.items() if not value.is_meta}


def _is_sharded(trainer: L.Trainer, module: nn.Module) -> bool:
    split = any(isinstance(value, DTensor) for value in _tensors(trainer, module).values())
    return split or _needs_strategy_gather(trainer, module)


def _needs_strategy_gather(trainer: L.Trainer, module: nn.Module) -> bool:
    """Return whether only the strategy can gather the state: pipeline stages, or FSDP's flat parameters."""
    return isinstance(trainer.strategy, FSDPStrategy) or any(value.is_meta for value in module.parameters())


def _local(value: Tensor) -> Tensor:
    local: Tensor = value.detach()
    return local.to_local() if isinstance(local, DTensor) else local


def _to_dtensor(part: Tensor, value: Tensor) -> Any:
    if not isinstance(value, DTensor):
        return part
    local = part.to(value.device)
    return DTensor.from_local(local, value.device_mesh, value.placements, shape=value.shape, stride=value.stride())
