"""Learning rate schedules of a fixed length, such as OneCycleLR, and the length of the run."""

import math
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn


def planned_steps(trainer: L.Trainer, interval: str) -> float:
    """Return how often the run steps a scheduler, from its first epoch on; infinite if unknown."""
    if interval == "step":
        return trainer.estimated_stepping_batches
    epochs = _max_epochs(trainer)
    if trainer.max_steps == -1:
        return epochs
    trainer.fit_loop.setup_data()  # counts the batches
    batches = trainer.num_training_batches
    if batches == math.inf:
        return batches
    steps_per_epoch = math.ceil(batches / trainer.accumulate_grad_batches)
    return min(epochs, trainer.max_steps // max(steps_per_epoch, 1))  # an incomplete epoch steps no scheduler


def require_long_schedules(trainer: L.Trainer) -> None:
    """Reject a resumed schedule of fixed length that would end, with an error from torch, in mid-run.

    With manual optimization, where only the module knows when it steps its schedulers, warn if it goes on stepping them
    as often as before.

    Raises:
        ValueError: if a schedule that the Trainer steps is shorter than the run.
    """
    for config in trainer.lr_scheduler_configs:
        total, name = getattr(config.scheduler, "total_steps", None), type(config.scheduler).__name__
        if total is None:
            continue
        goes_on = f"a resumed run goes on with the {name} of its checkpoint, which ends after {total} steps"
        if not trainer.lightning_module.automatic_optimization:
            if total < (steps := _expected_steps(trainer, config.scheduler)) < math.inf:
                rank_zero_warn(
                    f"{goes_on}. The module has stepped it {config.scheduler.last_epoch} times so far, and would step "
                    f"it {steps:.0f} times until the end of the run: torch raises an error then. Shorten the run, or "
                    "train anew, without ckpt_path"
                )
            continue
        steps = planned_steps(trainer, config.interval)
        if (total + 1) * config.frequency <= steps < math.inf:
            limit = "max_steps" if config.interval == "step" else "max_epochs"
            raise ValueError(
                f"{goes_on}, but the run takes {steps // config.frequency:.0f} of its interval, {config.interval!r}; "
                f"end it there with Trainer({limit}={total * config.frequency}), or train anew, without ckpt_path"
            )


def _expected_steps(trainer: L.Trainer, scheduler: Any) -> float:
    """Return the steps of a scheduler at the end of the run, if it is stepped as often as up to its checkpoint."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    trainer.fit_loop.setup_data()  # counts the batches
    lengths = [(_max_epochs(trainer) * trainer.num_training_batches, batches.processed)]
    if trainer.max_steps != -1:
        lengths.append((trainer.max_steps, trainer.global_step))
    return min((scheduler.last_epoch * planned / done for planned, done in lengths if done), default=math.inf)


def _max_epochs(trainer: L.Trainer) -> float:
    return math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs
