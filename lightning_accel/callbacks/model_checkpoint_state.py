"""State of ModelCheckpoint callbacks at the moment when one of them writes a checkpoint."""

import os
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint


class ModelCheckpointState:
    """Save what Lightning's ModelCheckpoint omits from its state, and let each callback finish when resumed."""

    def __init__(self) -> None:
        self._files: dict[str, set[str]] = {}  # of each callback, when its state was last saved

    def state_dict(self, trainer: L.Trainer) -> dict[str, Any]:
        states = {}
        named = {os.path.realpath(trainer.ckpt_path)} if trainer.ckpt_path else set()  # the user's file is kept
        for keeper in _model_checkpoints(trainer):
            files = _files_of(keeper)
            states[keeper.state_key] = {
                "dirpath": keeper.dirpath,
                "current_score": keeper.current_score,
                "last_step": keeper._last_global_step_saved,
                "last_file": keeper._last_checkpoint_saved,
                "waits_for_validation": keeper._defer_save_until_validation,
                # Lightning removes them once the new file is written
                "superseded": sorted(self._files.get(keeper.state_key, set()) - files - named),
            }
            self._files[keeper.state_key] = files
        return states

    def load_state_dict(self, states: dict[str, Any], trainer: L.Trainer) -> None:
        for keeper in _model_checkpoints(trainer):
            state = states.get(keeper.state_key)
            if state is None:
                continue
            keeper.current_score = state["current_score"]
            keeper._last_global_step_saved = state["last_step"]
            keeper._defer_save_until_validation = state["waits_for_validation"]
            if state["dirpath"] == keeper.dirpath:
                keeper._last_checkpoint_saved = state["last_file"]
                for file in state["superseded"]:
                    if Path(keeper.dirpath or "") in Path(file).parents:
                        trainer.strategy.remove_checkpoint(file)
            self._files[keeper.state_key] = _files_of(keeper)

    def finish(self, trainer: L.Trainer, hook: str, *arguments: Any, ckpt_path: str) -> None:
        """Run ``hook`` of the ModelCheckpoint callbacks that had not run it yet.

        The one that wrote the checkpoint ``ckpt_path`` gets the state that it has after writing, and then performs its
        last action: writing ``last.ckpt``.
        """
        module = trainer.lightning_module
        for keeper in _model_checkpoints(trainer):
            if os.path.realpath(ckpt_path) not in map(os.path.realpath, _files_of(keeper)):
                getattr(keeper, hook)(trainer, module, *arguments)
                continue
            keeper._last_global_step_saved, keeper._last_checkpoint_saved = trainer.global_step, ckpt_path
            if os.path.realpath(ckpt_path) != os.path.realpath(keeper.last_model_path):
                keeper._save_last_checkpoint(trainer, keeper._monitor_candidates(trainer))


def _model_checkpoints(trainer: L.Trainer) -> list[ModelCheckpoint]:
    return [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]


def _files_of(keeper: ModelCheckpoint) -> set[str]:
    return {*keeper.best_k_models, keeper.best_model_path, keeper.last_model_path} - {""}
