"""Folders for the files of a run."""

import contextlib
import tempfile
from pathlib import Path

import lightning as L
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_accel.cli.errors import UsageError


class ConfigSaver(SaveConfigCallback):
    """Save the config as ``config_fit.yaml``, ``config_test.yaml`` ... in the run folder, overwriting nothing.

    Loggers with separate folders get one copy each. A run without a logger has no folder, and saves no config.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.already_saved or not trainer.loggers:
            return
        self.already_saved = True
        log_dir = trainer.log_dir  # asked on every process, since it is broadcast
        if not trainer.is_global_zero:
            return
        assert trainer.state.fn is not None
        text = self.parser.dump(self.config, skip_none=False)
        name = "export" if getattr(trainer, "is_exporting", False) else trainer.state.fn.value
        others = [logger for logger in trainer.loggers[1:] if isinstance(logger, CSVLogger | TensorBoardLogger)]
        of_others = [Path(logger.log_dir) for logger in others if "://" not in logger.root_dir]
        for folder in dict.fromkeys([Path(log_dir or trainer.default_root_dir), *of_others]):
            _save_under_free_name(folder, f"config_{name}", text)


def _save_under_free_name(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.yaml"
    number = 1
    while path.exists() and path.read_text() != text:
        number += 1
        path = folder / f"{name}_{number}.yaml"
    path.write_text(text)


def reserve_run_folder(trainer: L.Trainer) -> list[Path]:
    """Give loggers with the same ``save_dir`` and ``name`` one numbered folder, which no other run has.

    A logger picks the next free number when it is first asked. Here the folder is created at once: of runs that start
    together, the one that creates a folder gets its number, and the others try the next.

    Returns:
        the folders that were created, outermost first.

    Raises:
        UsageError: if a folder cannot be created.
    """
    loggers = [logger for logger in trainer.loggers if isinstance(logger, CSVLogger | TensorBoardLogger)]
    made: list[Path] = []
    for root in dict.fromkeys(logger.root_dir for logger in loggers):
        sharing = [logger for logger in loggers if logger.root_dir == root]
        numbered = [logger for logger in sharing if logger._version is None]  # reading the property would set it
        for logger in sharing:
            _ = logger.version
        if trainer.is_global_zero and "://" not in root:  # the other processes get its folder
            made += _make_folder(Path(root))
            made += [_make_next_folder(numbered)] if numbered else []
    return made


def _make_next_folder(loggers: list[CSVLogger | TensorBoardLogger]) -> Path:
    while True:
        folder = Path(loggers[0].root_dir, f"version_{loggers[0].version}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
        number = int(folder.name.removeprefix("version_")) + 1
        for logger in loggers:
            logger._version = number  # there is no public setter


def run_folder_of(logger: CSVLogger | TensorBoardLogger) -> Path:
    """Return the folder of a logger's run, which holds the checkpoints; ``log_dir`` may be a folder within it."""
    return Path(logger.root_dir, logger.version if isinstance(logger.version, str) else f"version_{logger.version}")


def remove_empty(folders: list[Path]) -> None:
    """Remove those of the ``folders``, given outermost first, that are empty."""
    for path in reversed(folders):
        with contextlib.suppress(OSError):  # not empty
            path.rmdir()


def require_writable(trainer: L.Trainer) -> None:
    """Reject folders for logs or checkpoints that cannot be created or written.

    Raises:
        UsageError: naming the folder.
    """
    if not trainer.is_global_zero:
        return
    folders = {getattr(logger, "root_dir", None) or logger.save_dir for logger in trainer.loggers}
    for keeper in trainer.checkpoint_callbacks:
        folders.add(getattr(keeper, "dirpath", None) or (None if trainer.loggers else trainer.default_root_dir))
    for folder in folders:
        if folder is None or "://" in str(folder):
            continue
        made = _make_folder(Path(folder))
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise _unwritable(folder, error) from error
        finally:
            remove_empty(made)


def _make_folder(folder: Path) -> list[Path]:
    """Create a folder; return the folders that were missing, outermost first."""
    missing = [path for path in (*reversed(folder.parents), folder) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return missing


def _unwritable(folder: Path | str, error: OSError) -> UsageError:
    return UsageError(
        f"cannot write to the log folder {folder}: {error.strerror or error}. Give another: "
        "--trainer.default_root_dir, the logger's save_dir or the checkpoint's dirpath"
    )
