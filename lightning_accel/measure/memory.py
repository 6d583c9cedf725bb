"""Memory of training: bytes of parameters, gradients, optimizer states and activations."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from lightning_accel._private.torch import tree_leaves


@dataclass(frozen=True)
class MemoryUse:
    """Hold the bytes of this process by what they are for; shared storages count once."""

    parameters: int
    buffers: int
    gradients: int
    optimizer_states: int
    activations: int

    def to_dict(self) -> dict[str, int]:
        """Return all fields as values that JSON can hold."""
        return asdict(self)


class MemoryCount(L.Callback):
    """Measure the memory of one training batch by what it is for.

    Activations are what autograd keeps for the backward pass, without parameters, buffers and the batch itself; where
    a batch has several backward passes, their sum. Gradients and optimizer states are those after the batch.

    Args:
        batch: number of the batch to measure, from 0, within this fit; one that updates the weights, so that there are
            optimizer states.

    Attributes:
        use: the bytes; None before that batch ends.
    """

    def __init__(self, batch: int = 1) -> None:
        self.batch = batch
        self.use: MemoryUse | None = None
        self._seen = 0
        self._hooks: Any = None
        self._known: frozenset[int] = frozenset()
        self._kept: dict[int, int] = {}
        self._gradients = 0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._seen == self.batch:
            inputs = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
            self._known = frozenset(storages([*pl_module.parameters(), *pl_module.buffers(), *inputs]))
            self._hooks = saved_tensors_hooks(self._pack, lambda value: value)
            self._hooks.__enter__()
        self._seen += 1

    def _pack(self, value: Tensor) -> Tensor:
        self._kept.update({key: size for key, size in storages([value]).items() if key not in self._known})
        return value

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if self._hooks is not None:  # here they are all there; zero_grad frees them
            self._gradients = max(self._gradients, gradient_bytes(pl_module))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._hooks is None:
            return
        self._close()
        self.use = MemoryUse(
            parameters=sum(storages(pl_module.parameters()).values()),
            buffers=sum(storages(pl_module.buffers()).values()),
            gradients=max(self._gradients, gradient_bytes(pl_module)),
            optimizer_states=optimizer_bytes(trainer.optimizers),
            activations=sum(self._kept.values()),
        )

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
            self._hooks = None


def gradient_bytes(module: nn.Module) -> int:
    """Return the bytes of the gradients that the parameters hold."""
    return sum(storages(each.grad for each in module.parameters() if each.grad is not None).values())


def optimizer_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Return the bytes of the tensors in the states of optimizers."""
    states = (leaf for each in optimizers for leaf in tree_leaves(list(each.state.values())))
    return sum(storages(leaf for leaf in states if isinstance(leaf, Tensor)).values())


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of the storages of tensors, each once, by address; of sharded ones the part of this process."""
    found = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.device.type == "meta" or local.layout != torch.strided:
            continue
        storage = local.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return found
