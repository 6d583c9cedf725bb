"""Training phases of model compression, which callbacks announce and others query."""

from typing import Any, Protocol, runtime_checkable

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_accel._private.lightning import set_last_saved_step
from lightning_accel.callbacks.trainer_callbacks import callbacks_of


@runtime_checkable
class HasPhases(Protocol):
    """Declare that metrics of different training phases are not comparable under this callback.

    For example, a model at half the requested sparsity scores better than the final one, but must not be selected as
    the best.
    """

    @property
    def phase(self) -> str:
        """Return the current phase of the model, such as ``"dense"``, ``"ramp to 0.9"``, ``"at 0.9"``."""

    @property
    def is_final_phase(self) -> bool:
        """Return whether the model has reached the requested form."""


def current_phase(trainer: L.Trainer) -> str:
    """Return the phases of all callbacks that have them, joined by commas; empty if there are none."""
    return ", ".join(callback.phase for callback in _callbacks_with_phases(trainer))


def in_final_phase(trainer: L.Trainer) -> bool:
    """Return whether all callbacks with phases are in their final one."""
    return all(callback.is_final_phase for callback in _callbacks_with_phases(trainer))


def announce_change(trainer: L.Trainer, pl_module: L.LightningModule) -> None:
    """Call ``before_model_changes(trainer, pl_module)`` of all callbacks that have it.

    A callback with phases calls this in all processes, just before it first changes the model's form.
    """
    for callback in callbacks_of(trainer, L.Callback):
        if callable(hook := getattr(callback, "before_model_changes", None)):
            hook(trainer, pl_module)


def announce_removal(trainer: L.Trainer, pl_module: L.LightningModule) -> None:
    """Call ``after_removal(trainer, pl_module)`` of all callbacks that have it, once layers or experts are gone."""
    for callback in callbacks_of(trainer, L.Callback):
        if callable(hook := getattr(callback, "after_removal", None)):
            hook(trainer, pl_module)


def defer_best_checkpoints(trainer: L.Trainer) -> None:
    """Prevent a ``ModelCheckpoint`` with a monitor from saving before the final phase; ``save_last`` still works.

    Each callback that has phases calls this in ``setup``.
    """
    for keeper in callbacks_of(trainer, ModelCheckpoint):
        if not isinstance(keeper.check_monitor_top_k, _FinalPhaseCheck):
            keeper.check_monitor_top_k = _FinalPhaseCheck(keeper)  # type: ignore[method-assign]


class _FinalPhaseCheck:
    def __init__(self, keeper: ModelCheckpoint) -> None:
        self.keeper = keeper
        self.check = keeper.check_monitor_top_k

    def __call__(self, trainer: L.Trainer, current: Any = None) -> bool:
        if in_final_phase(trainer):
            return self.check(trainer, current)
        if self.keeper.save_last:  # Lightning writes it only at steps that it believes to have saved
            set_last_saved_step(self.keeper, trainer.global_step)
        return False


def _callbacks_with_phases(trainer: L.Trainer) -> list[HasPhases]:
    return [callback for callback in callbacks_of(trainer, L.Callback) if isinstance(callback, HasPhases)]
