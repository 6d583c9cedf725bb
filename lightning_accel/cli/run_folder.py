"""Where a run leaves its files."""

import contextlib
import tempfile
from pathlib import Path

import lightning as L
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_accel.cli.errors import UsageError


class ConfigSaver(SaveConfigCallback):
    """Save the config as ``config_fit.yaml``, ``config_test.yaml`` ... in the run folder; nothing is overwritten.

    A run without a logger has no folder, and leaves no config.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.already_saved or not trainer.loggers:
            return
        self.already_saved = True
        log_dir = trainer.log_dir  # on every process: it is broadcast
        if not trainer.is_global_zero:
            return
        assert trainer.state.fn is not None
        folder = Path(trainer.default_root_dir if log_dir is None else log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        text = self.parser.dump(self.config, skip_none=False)
        name = "export" if getattr(trainer, "is_exporting", False) else trainer.state.fn.value
        path = folder / f"config_{name}.yaml"
        number = 1
        while path.exists() and path.read_text() != text:
            number += 1
            path = folder / f"config_{name}_{number}.yaml"
        path.write_text(text)


def share_run_folder(trainer: L.Trainer) -> None:
    """Give loggers of equal ``save_dir`` and ``name`` one numbered folder.

    A logger picks the next free number when it is first asked. Unless all are asked before one makes its folder, the
    second finds the number of the first taken, and one run is spread over two folders.
    """
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger | TensorBoardLogger):  # to others a version is a run on a server
            _ = logger.version


def require_writable(trainer: L.Trainer) -> None:
    """Refuse folders for logs or checkpoints that cannot be made or written.

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
            with contextlib.suppress(OSError):  # another run may have begun to use them
                for path in reversed(made):
                    path.rmdir()


def _make_folder(folder: Path) -> list[Path]:
    """Folders that had to be made, outermost first."""
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
