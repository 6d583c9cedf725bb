"""What the models' hooks share."""

from typing import Any

import lightning as L
import numpy as np


def is_logging_step(module: L.LightningModule) -> bool:
    """Whether figures of this training step are wanted.

    ``self.log`` takes a few hundred microseconds, so it is called at the steps alone that the loggers record, at the
    end of the epoch, and at every step where a callback or scheduler watches a figure of training.
    """
    if module._trainer is None:
        return False
    trainer: Any = module.trainer  # connectors set the attributes that are read here
    every = trainer.log_every_n_steps
    if every == 0 or (module.global_step + 1) % every == 0 or trainer.is_last_batch:
        return every > 0
    watchers = [*trainer.callbacks, *trainer.lr_scheduler_configs]
    return any(str(getattr(watcher, "monitor", None)).startswith("train/") for watcher in watchers)


def keep_plain_hyperparameters(module: L.LightningModule) -> None:
    """Keep what a checkpoint can hold safely: NumPy's values become Python's, and a gate stays if a config named it.

    The values are those of a subclass's constructor, too.
    """
    for name, value in module.hparams.items():
        if isinstance(value, np.generic | np.ndarray):
            module.hparams[name] = value.tolist()
    if not isinstance(module.hparams.get("gate", {}), dict):
        del module.hparams["gate"]
