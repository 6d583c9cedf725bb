"""Command lines that come after a fit, with the paths of its run."""

import os
import shlex
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_accel._private.lightning import last_saved_file, last_saved_step
from lightning_accel.callbacks import RunReport, SaveOnSignal
from lightning_accel.callbacks.trainer_callbacks import callbacks_of
from lightning_accel.cli.run_folder import ConfigSaver
from lightning_accel.models import Classifier, MoEClassifier


def next_commands(trainer: L.Trainer, module: L.LightningModule, checkpoint: str | None) -> list[str]:
    """Return the lines to type after a fit; none without the config that a run with a logger saves.

    Args:
        trainer: the Trainer, after the fit.
        module: what was trained, whose methods tell what it can do.
        checkpoint: of the best weights, None if there is none.
    """
    saver = next((each for each in callbacks_of(trainer, ConfigSaver) if each.path is not None), None)
    if saver is None or saver.path is None:
        return []
    config = saver.path
    if trainer.interrupted:
        saved = {last_saved_file(each): last_saved_step(each) for each in callbacks_of(trainer, ModelCheckpoint)}
        saved |= {file: step for each in callbacks_of(trainer, SaveOnSignal) for file, step in each.files.items()}
        newest = max(saved, key=lambda file: saved[file], default="")
        return [_line("fit", config, newest)] if newest else []
    names = [name for name in ("test", "predict") if checkpoint is not None and _can(name, trainer, module)]
    can_export = getattr(module, "can_export", True) and is_overridden("validation_step", module)
    can_export = can_export and not any(report.has_graphs for report in callbacks_of(trainer, RunReport))
    if checkpoint is not None and trainer.enable_validation and can_export:
        names.append("export")
    resumed = saver.config.get("ckpt_path") is not None  # tune trains from the start
    lines = [_line(name, config, checkpoint, *_export_options(trainer, module, name)) for name in names]
    return [*lines, _line("tune", config, "null" if resumed else None)]


def _export_options(trainer: L.Trainer, module: L.LightningModule, name: str) -> list[str]:
    """Return the options of ``export`` by which the file takes data as they are, and gives probabilities of classes."""
    if name != "export" or not callable(getattr(trainer.datamodule, "preprocessing", None)):  # type: ignore[attr-defined]
        return []
    is_classifier = isinstance(module, Classifier | MoEClassifier)
    return ["--preprocess", "true", *(["--probabilities", "true"] if is_classifier else [])]


def _can(name: str, trainer: L.Trainer, module: L.LightningModule) -> bool:
    """Return whether there are data, and for a test a step; every module has one to predict."""
    loader = f"{name}_dataloader"
    has_data = is_overridden(loader, module) or (
        trainer.datamodule is not None and is_overridden(loader, trainer.datamodule)  # type: ignore[attr-defined]
    )
    return has_data and (name == "predict" or is_overridden("test_step", module))


def _line(name: str, config: Path, checkpoint: str | None, *options: str) -> str:
    words = ["lightning-accel", name, "--config", _short(config)]
    return shlex.join([*words, *(["--ckpt_path", _short(Path(checkpoint))] if checkpoint else []), *options])


def _short(path: Path) -> str:
    """Return a path from the current folder on, if it lies there."""
    return os.path.relpath(path) if path.is_absolute() and path.is_relative_to(Path.cwd()) else str(path)
