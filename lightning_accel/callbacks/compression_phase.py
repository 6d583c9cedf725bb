"""How callbacks that change a model in phases tell those that judge it."""

from typing import Any, Protocol, runtime_checkable

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint


@runtime_checkable
class InPhases(Protocol):
    """A callback under which figures of different phases of training cannot be compared.

    A model that is half as sparse as asked for is better than the one that is wanted, and no candidate for the best.
    """

    @property
    def phase(self) -> str:
        """What the model goes through now, such as ``"dense"``, ``"ramp to 0.9"``, ``"at 0.9"``."""

    @property
    def is_final_phase(self) -> bool:
        """Whether the model is of the kind that was asked for."""


def current_phase(trainer: L.Trainer) -> str:
    """Phases of all callbacks that have them, joined; empty where none has."""
    return ", ".join(callback.phase for callback in _in_phases(trainer))


def in_final_phase(trainer: L.Trainer) -> bool:
    """Whether no callback is still changing what kind of model it is."""
    return all(callback.is_final_phase for callback in _in_phases(trainer))


def announce_change(trainer: L.Trainer, pl_module: L.LightningModule) -> None:
    """Call ``before_model_changes(trainer, pl_module)`` of all callbacks that have it.

    Called in all processes by a callback with phases, just before it first makes the model one of another kind.
    """
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    for callback in callbacks:
        if callable(hook := getattr(callback, "before_model_changes", None)):
            hook(trainer, pl_module)


def hold_back_checkpoints(trainer: L.Trainer) -> None:
    """Let a ``ModelCheckpoint`` that keeps the best keep none before the final phase; ``save_last`` goes on.

    Called in ``setup``, by each callback that has phases.
    """
    for keeper in trainer.checkpoint_callbacks:
        if isinstance(keeper, ModelCheckpoint) and not isinstance(keeper.check_monitor_top_k, _InFinalPhase):
            keeper.check_monitor_top_k = _InFinalPhase(keeper)  # type: ignore[method-assign]


class _InFinalPhase:
    def __init__(self, keeper: ModelCheckpoint) -> None:
        self.keeper = keeper
        self.check = keeper.check_monitor_top_k

    def __call__(self, trainer: L.Trainer, current: Any = None) -> bool:
        if in_final_phase(trainer):
            return self.check(trainer, current)
        if self.keeper.save_last:  # which Lightning writes at steps alone at which it takes a candidate for saved
            self.keeper._last_global_step_saved = trainer.global_step
        return False


def _in_phases(trainer: L.Trainer) -> list[InPhases]:
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return [callback for callback in callbacks if isinstance(callback, InPhases)]
