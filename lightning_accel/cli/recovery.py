"""Resumption of runs that a launcher restarts."""

import os
import warnings
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_accel.cli.errors import UsageError
from lightning_accel.cli.run_folder import RunLocks, lock_run_folder, run_folder_of
from lightning_accel.strategies import AtomicCheckpointIO
from lightning_accel.strategies.checkpoint_io import newest_checkpoint


def write_checkpoints_atomically(trainer: L.Trainer) -> None:
    """Write checkpoints atomically, so that a kill never leaves a partial file, unless the config chooses otherwise."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()


def resume_run(trainer: L.Trainer, locks: RunLocks) -> str | None:
    """Reuse the newest run folder and return its newest complete checkpoint; None if there is none yet.

    Every process searches on its own, before the process group exists; whether all found the same is checked later.

    Raises:
        UsageError: if another run uses the folder, or a folder of checkpoints.
    """
    _warn_of_shared_store()
    for folder in _checkpoint_folders(trainer) if trainer.is_global_zero else []:
        if "://" not in str(folder):
            folder.mkdir(parents=True, exist_ok=True)
            locks.require(folder / ".lock", folder)
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger | TensorBoardLogger):
            _reuse_newest_folder(logger)
            if trainer.is_global_zero and "://" not in logger.root_dir:
                lock_run_folder(logger, locks)
            if isinstance(logger, CSVLogger) and trainer.is_global_zero:
                _rename_old_metrics(Path(logger.log_dir))
    warnings.filterwarnings("ignore", message=r"(Experiment logs|Checkpoint) directory .* not empty")
    path = newest_checkpoint(_checkpoint_places(trainer))
    rank_zero_info("--ckpt_path auto: " + (f"going on from {path}" if path else "no checkpoint yet, a new run begins"))
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    callbacks.append(_RequireSameCheckpoint(path))
    return None if path is None else str(path)


def _warn_of_shared_store() -> None:
    """Warn that restarts may hang: https://github.com/pytorch/pytorch/issues/135712, 3 of 6 did on torch 2.13."""
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True":
        rank_zero_warn(
            "processes that torchrun starts again find the addresses of those that died in its store, and may wait for "
            "them until the time-out: start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --max-restarts ..."
        )


def _reuse_newest_folder(logger: CSVLogger | TensorBoardLogger) -> None:
    """Give ``logger`` the numbered folder of the newest fit, skipping those of ``test`` or ``predict``."""
    if logger._version is not None or not isinstance(logger.version, int) or logger.version == 0:
        return  # the config sets it, or there is none; the property has set it to the next free number
    if "://" in logger.root_dir:
        logger._version = logger.version - 1  # there is no public setter
        return
    numbers = [path.name.removeprefix("version_") for path in Path(logger.root_dir).glob("version_*") if path.is_dir()]
    newest_first = sorted((int(number) for number in numbers if number.isdecimal()), reverse=True)
    for is_taken in (_is_of_fit, _has_no_config):
        for number in newest_first:
            if is_taken(Path(logger.root_dir, f"version_{number}")):
                logger._version = number
                return


def _is_of_fit(folder: Path) -> bool:
    return any(next(folder.glob(pattern), None) for pattern in ("**/config_fit*.yaml", "**/*.ckpt"))


def _has_no_config(folder: Path) -> bool:
    """Return whether ``folder`` has no config, as from a plain Trainer, or from another process just now."""
    return next(folder.glob("**/config_*.yaml"), None) is None


def _rename_old_metrics(folder: Path) -> None:
    """Rename the metrics file of earlier runs, since the logger would delete it."""
    path = folder / "metrics.csv"
    if path.exists():
        number = 1 + len(list(folder.glob("metrics_*.csv")))
        path.rename(folder / f"metrics_{number}.csv")


def _checkpoint_places(trainer: L.Trainer) -> list[Path]:
    """Return the places of this run's checkpoints: ModelCheckpoint, SaveOnSignal, and Lightning's under Slurm."""
    root = Path(trainer.default_root_dir)
    folder = root
    if trainer.loggers:
        first = trainer.loggers[0]
        if isinstance(first, CSVLogger | TensorBoardLogger):
            folder = run_folder_of(first)
        else:
            folder = Path(first.save_dir or root, str(first.name), str(first.version))
    places = [folder / "checkpoints"]
    return [*places, *_checkpoint_folders(trainer), *root.glob("hpc_ckpt_*.ckpt"), *root.glob("signal-step=*.ckpt")]


def _checkpoint_folders(trainer: L.Trainer) -> list[Path]:
    keepers = [keeper for keeper in trainer.checkpoint_callbacks if isinstance(keeper, ModelCheckpoint)]
    return [Path(keeper.dirpath) for keeper in keepers if keeper.dirpath]


class _RequireSameCheckpoint(L.Callback):
    """Reject a resumption if processes found different checkpoints, and forget the path once it is loaded."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        first = trainer.strategy.broadcast(self.path)
        if not trainer.strategy.reduce_boolean_decision(first == self.path, all=True):
            raise UsageError(
                f"--ckpt_path auto: the newest checkpoint is {first} for process 0, {self.path} for process "
                f"{trainer.global_rank}. All machines must see one folder; give --trainer.default_root_dir on a disk "
                "that they share"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.ckpt_path = None  # else ModelCheckpoint would never delete that file, after every restart
