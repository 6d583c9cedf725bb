"""Helpers of the models' hooks. Shapes: L mixtures, E experts."""

from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_accel.nn import GateReport
from lightning_accel.ops.names import list_of_names


def is_logging_step(module: L.LightningModule) -> bool:
    """Return whether metrics of this training step are logged.

    ``self.log`` takes a few hundred microseconds, so it is called only at the steps that the loggers record, at the end
    of the epoch, and at every step if a callback or scheduler monitors a training metric.
    """
    if module._trainer is None:
        return False
    trainer: Any = module.trainer  # connectors set the attributes read here
    every = trainer.log_every_n_steps
    if every == 0 or (module.global_step + 1) % every == 0 or trainer.is_last_batch:
        return every > 0
    watchers = [*trainer.callbacks, *trainer.lr_scheduler_configs]
    return any(str(getattr(watcher, "monitor", None)).startswith("train/") for watcher in watchers)


def num_replicas(module: L.LightningModule) -> int:
    """Count the processes that train on different batches; the stages of a pipeline, which share them, count once."""
    if module._trainer is None:
        return 1
    trainer: Any = module.trainer
    return int((trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1))


def take_from_datamodule(module: L.LightningModule, **plain: Callable[[Any], object]) -> None:
    """Set attributes of ``module`` that were not given from the datamodule; reject values that contradict it.

    Args:
        module: a module in a Trainer.
        plain: by attribute, a function that converts the datamodule's value to a plain one: NumPy types would make the
            checkpoint unsafe to load.

    Raises:
        ValueError: if both have a value, and they differ.
    """
    datamodule = module.trainer.datamodule  # type: ignore[attr-defined]  # set by a connector
    for name, make_plain in plain.items():
        offered, given = getattr(datamodule, name, None), getattr(module, name)
        offered = None if offered is None else make_plain(offered)
        if given is None:
            setattr(module, name, offered)
            module.hparams[name] = offered
        elif offered is not None and offered != given:
            raise ValueError(
                f"{type(module).__name__} has {name}={given}, but {type(datamodule).__name__} has {name}={offered}. "
                f"Leave {name} out to take the datamodule's"
            )


def list_of_str(names: Sequence[object]) -> list[str]:
    """Convert names, such as NumPy's, to a list of plain strings; a single string is one name."""
    return [str(name) for name in list_of_names(names)]


def keep_plain_hyperparameters(module: L.LightningModule) -> None:
    """Keep only hyperparameters that are safe to load: NumPy values become Python's, gates stay if a config named them.

    This includes the hyperparameters of a subclass's constructor.
    """
    for name, value in module.hparams.items():
        if isinstance(value, np.generic | np.ndarray):
            module.hparams[name] = value.tolist()
    if not isinstance(module.hparams.get("gate", {}), dict):
        del module.hparams["gate"]


class EpochLoad(Metric):
    """Compute the share of the slots requested of each expert, (L, E), over all batches and processes of an epoch."""

    counts: Tensor

    def __init__(self, num_mixtures: int, num_experts: int) -> None:
        super().__init__()
        self.add_state("counts", torch.zeros(num_mixtures, num_experts, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, reports: Sequence[GateReport]) -> None:
        self.counts += torch.stack([report.expert_counts for report in reports])

    def compute(self) -> Tensor:
        return self.counts / self.counts.sum(dim=1, keepdim=True).clamp(min=1)
