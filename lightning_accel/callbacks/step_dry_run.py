"""Dry run of one training step on a copy of a module, before training starts."""

import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT

from lightning_accel.callbacks.deployment import (
    WholeCopy,
    copy_for_dry_run,
    evaluate,
    first_batches,
    run_in_first_process,
)

Use = Callable[[L.LightningModule, Callable[[], STEP_OUTPUT], tuple[Any, ...]], None]


class _UntriedError(Exception):
    """Mark a failure of the step itself outside of the training loop, where it may lack its Trainer."""


def dry_run_step(trainer: L.Trainer, pl_module: L.LightningModule, copied: WholeCopy, use: Use, purpose: str) -> None:
    """Run ``training_step`` on the first batch before training; all processes must call it.

    The step runs on a copy, with separate loaders, the run's precision and restored random numbers, so that training
    is unchanged. Nothing is checked if the module cannot be copied, its instance overrides ``training_step``, the
    loader cannot be read twice, or the step itself fails, since it may need the Trainer that trains.

    Args:
        trainer: a Trainer in ``on_fit_start``.
        pl_module: the module to be trained.
        copied: a copy of ``pl_module``, see :func:`~lightning_accel.callbacks.deployment.dry_run`.
        use: called in the first process with the copy, a function that runs the step, and the step's arguments.
        purpose: a verb for the error message in the other processes.

    Raises:
        Exception: what ``use`` raises; in the other processes a RuntimeError that quotes it.
    """
    if "training_step" in vars(pl_module):  # it may be bound to the module to be trained
        return

    def make() -> L.LightningModule | None:
        try:
            return copy_for_dry_run(trainer, pl_module, copied)
        except TypeError:  # it cannot be copied, which training does not require
            return None

    def run(module: L.LightningModule) -> None:
        loader = first_batches(trainer, of_training=True)
        if loader is None:
            return
        dtypes = {value.dtype for value in pl_module.parameters() if value.is_floating_point()}
        module.to(trainer.strategy.root_device, dtypes.pop() if len(dtypes) == 1 else None)
        original, failures = module.training_step, []

        def step_once(batch: Any, *args: Any) -> None:
            arguments = trainer.precision_plugin.convert_input(batch), *args

            def step() -> STEP_OUTPUT:
                try:
                    return original(*arguments)
                except Exception as error:
                    raise _UntriedError from error

            module.train()
            with torch.enable_grad(), trainer.precision_plugin.train_step_context():
                try:
                    use(module, step, arguments)
                except Exception as error:
                    failures.append(error)

        vars(module)["validation_step"] = step_once
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # training repeats the relevant ones
            try:
                evaluate(module, loader, limit_batches=1, datamodule=trainer.datamodule)  # type: ignore[attr-defined]
            except Exception:  # from hooks around the step
                return
        if failures and not isinstance(failures[0], _UntriedError):
            raise failures[0]

    run_in_first_process(trainer, make, run, purpose)
