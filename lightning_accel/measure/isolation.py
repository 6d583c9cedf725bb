"""Fits that are only measured: they leave nothing in the user's folders."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_accel._private.lightning import copy_into, set_default_folder


def isolate(trainer: L.Trainer, folder: Path, max_val_batches: int) -> None:
    """Make the fit of a Trainer write into ``folder`` alone, and validate on a few batches.

    Checkpoints and callbacks whose attribute ``is_for_whole_fits`` is true are left out, and loggers other than those
    of files get nothing.

    Args:
        trainer: one that has not begun.
        folder: where loggers of files and callbacks write.
        max_val_batches: batches of a validation; without any, if the Trainer has none.
    """
    set_default_folder(trainer, str(folder))
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    unwanted = Checkpoint | SaveConfigCallback
    kept = [one for one in callbacks if not (isinstance(one, unwanted) or getattr(one, "is_for_whole_fits", False))]
    trainer.callbacks = kept  # type: ignore[attr-defined]
    loggers: list[Any] = []
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger | TensorBoardLogger):
            loggers.append(copy_into(logger, str(folder)))
        else:  # it may be on a server
            loggers.append(DummyLogger())
    trainer.loggers = loggers
    limit = trainer.limit_val_batches
    if limit and (isinstance(limit, float) or limit > max_val_batches):  # a float is a share of the data
        trainer.limit_val_batches = max_val_batches
    trainer.num_sanity_val_steps = min(max_val_batches, trainer.num_sanity_val_steps)
