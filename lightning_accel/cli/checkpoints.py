"""Checkpoints that a command line names."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_accel.cli.errors import UsageError, nearest

_MOST_NAMED = 5  # tensors or settings that a message names


class Checkpoint:
    """A Lightning checkpoint on disk, read to check that it fits before a run starts."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path = path
        self.content = content

    @classmethod
    def read(cls, path: str, weights_only: bool | None = None) -> "Checkpoint | None":
        """Read ``path``; None for what the Trainer resolves itself: keywords, remote files, sharded folders.

        Raises:
            UsageError: if it is not there, not whole, or not a Lightning checkpoint.
        """
        file = Path(path)
        if (
            path in ("best", "last", "hpc", "registry")
            or "://" in path
            or path.startswith("registry:")
            or file.is_dir()
        ):
            return None
        if not file.is_file():
            beside = [str(p) for p in file.parent.glob("*.ckpt")]
            raise UsageError(f"no checkpoint {path}{nearest(path, beside)}")
        whole = zipfile.is_zipfile(file)
        try:
            content = torch.load(file, map_location="cpu", weights_only=weights_only is not False, mmap=whole or None)
        except pickle.UnpicklingError as error:
            if not whole:
                raise _broken(file) from error
            reason = str(error).split("WeightsUnpickler error:")[-1].strip().splitlines()[0]
            raise UsageError(
                f"{path} holds objects other than tensors and plain values ({reason}). If you trust its author, add "
                "--weights_only false, which lets the file run code"
            ) from error
        except (RuntimeError, EOFError, OSError, ValueError) as error:
            raise _broken(file) from error
        if not isinstance(content, dict) or "state_dict" not in content:
            raise UsageError(
                f"{path} is not a checkpoint of a Trainer: it holds no state_dict. A file of weights alone loads with "
                "model.load_state_dict(torch.load(path))"
            )
        return cls(file, content)

    def model_config(self) -> dict[str, Any] | None:
        """The model's class and arguments as a config, if the checkpoint was made by a command line."""
        settings = {k: v for k, v in self.content.get("hyper_parameters", {}).items() if k != "_instantiator"}
        if "_class_path" not in settings:
            return None
        return {"class_path": settings.pop("_class_path"), "init_args": settings}

    def require_fits(self, model: L.LightningModule) -> None:
        """Compare names and shapes with those of ``model``, as far as they are settled before it is set up.

        Raises:
            UsageError: naming what differs, tensors and settings.
        """
        if _overrides(model, "on_load_checkpoint"):  # it may mend any difference
            return
        saved, own = self.content["state_dict"], model.state_dict()
        problems = [
            f"{name} is {_shape(saved[name])} in the checkpoint, {_shape(own[name])} in the model"
            for name in own.keys() & saved.keys()
            if _shape(saved[name]) != _shape(own[name])
        ]
        if model.strict_loading:
            problems += [f"the checkpoint has no {name}" for name in own.keys() - saved.keys()]
        if model.strict_loading and not _overrides(model, "configure_model"):  # which may add layers
            problems += [f"the model has no {name}" for name in saved.keys() - own.keys()]
        if problems:
            raise UsageError(
                f"{self.path} holds another model than {type(model).__name__} as configured:\n"
                + "\n".join(f"  {line}" for line in [*self._settings(model), *_shortened(sorted(problems))])
                + "\nUse the config that the run saved (config_fit.yaml in its folder), or another checkpoint"
            )

    def _settings(self, model: L.LightningModule) -> list[str]:
        saved, now = self.content.get("hyper_parameters", {}), model.hparams
        lines = [
            f"{name.lstrip('_')}: {saved[name]!r} in the checkpoint, {now[name]!r} in the model"
            for name in saved.keys() & now.keys()
            if saved[name] != now[name]
        ]
        return _shortened(sorted(lines))


def find_best_checkpoint(trainer: L.Trainer) -> str:
    """Path of the best checkpoint of the newest run under the folders that the Trainer's loggers write to.

    Raises:
        UsageError: if there is none.
    """
    roots = {str(getattr(logger, "root_dir", None) or logger.save_dir) for logger in trainer.loggers}
    roots = roots or {trainer.default_root_dir}
    keepers = [keeper for keeper in trainer.checkpoint_callbacks if isinstance(keeper, ModelCheckpoint)]
    dirpaths = {str(keeper.dirpath) for keeper in keepers if keeper.dirpath}
    files = [file for root in roots for file in Path(root).glob("*/checkpoints/*.ckpt")]
    files += [file for folder in dirpaths for file in Path(folder).glob("*.ckpt")]
    if not files:
        raise UsageError(
            f"--ckpt_path best: no checkpoint under {' or '.join(sorted(roots | dirpaths))}; run fit with this config "
            "first, or name a file"
        )
    newest = max(files, key=lambda file: file.stat().st_mtime)
    checkpoint = Checkpoint.read(str(newest))
    assert checkpoint is not None
    for key, state in checkpoint.content.get("callbacks", {}).items():
        best = newest.with_name(Path(state.get("best_model_path") or ".").name)
        if key.startswith(ModelCheckpoint.__name__) and best.is_file():
            return str(best)
    return str(newest)


def _broken(file: Path) -> UsageError:
    return UsageError(
        f"{file} is not a whole checkpoint ({file.stat().st_size:,} bytes): it was cut short when it was written or "
        "copied, or is another kind of file. Use another checkpoint of the run, or copy it again"
    )


def _shape(value: Any) -> str:
    return "x".join(map(str, value.shape)) or "a scalar" if isinstance(value, torch.Tensor) else type(value).__name__


def _shortened(lines: list[str]) -> list[str]:
    hidden = len(lines) - _MOST_NAMED
    return lines if hidden <= 0 else [*lines[:_MOST_NAMED], f"... and {hidden} more"]


def _overrides(model: L.LightningModule, hook: str) -> bool:
    return getattr(type(model), hook) is not getattr(L.LightningModule, hook)
