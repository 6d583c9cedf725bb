"""Checkpoints given on the command line."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info

from lightning_accel.cli.errors import UsageError, nearest
from lightning_accel.strategies.checkpoint_reading import read_checkpoint, require_loadable
from lightning_accel.strategies.named_code import code_named_in
from lightning_accel.strategies.sharded_metadata import METADATA, REST, rejected_object

_MOST_NAMED = 5  # tensors or settings listed in a message


class Checkpoint:
    """Hold a Lightning checkpoint from disk, to check that it fits before a run starts."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path = path
        self.content = content

    @classmethod
    def read(cls, path: str, weights_only: bool | None = None) -> "Checkpoint | None":
        """Read ``path``; return None for what the Trainer resolves itself: keywords, remote files, sharded folders.

        Raises:
            UsageError: if the file is missing, damaged, or not a Lightning checkpoint.
        """
        file = Path(path)
        if path in ("auto", "best", "last", "hpc", "registry") or "://" in path or path.startswith("registry:"):
            return None
        if file.is_dir():
            if not any((file / name).exists() for name in (REST, METADATA)):
                raise UsageError(f"{path} is a folder that holds no sharded checkpoint; name a .ckpt file")
            with _as_usage_errors(path):
                require_loadable(file, weights_only)
                read_checkpoint(file / REST, weights_only, mmap=True)
            return None
        if not file.is_file():
            beside = [str(p) for p in file.parent.glob("*.ckpt")]
            raise UsageError(f"no checkpoint {path}{nearest(path, beside)}")
        with _as_usage_errors(path):
            content = read_checkpoint(file, weights_only, mmap=True)
        if not isinstance(content, dict) or "state_dict" not in content:
            raise UsageError(
                f"{path} is not a checkpoint of a Trainer: it holds no state_dict. A file of weights alone loads with "
                "model.load_state_dict(torch.load(path))"
            )
        return cls(file, content)

    def model_config(self) -> dict[str, Any] | None:
        """Return the model's class and arguments as a config, if the command line wrote the checkpoint.

        Raises:
            UsageError: if they name code that is not imported yet, since reading a checkpoint must not import anything.
        """
        settings = {k: v for k, v in self.content.get("hyper_parameters", {}).items() if k != "_instantiator"}
        if "_class_path" not in settings:
            return None
        if named := code_named_in(settings):
            raise UsageError(
                f"{self.path} names {', '.join(_shortened(named))}, which is not imported, or no class of a module; "
                "reading a checkpoint imports and calls nothing else. If you trust its author, give its model: "
                f"--config with the config_fit.yaml of its run, or --model {settings['_class_path']} and its options"
            )
        return {"class_path": settings.pop("_class_path"), "init_args": settings}

    def schedule_length(self) -> int | None:
        """Return the ``total_steps`` of the first scheduler, if it has a fixed length."""
        states = self.content.get("lr_schedulers") or [{}]  # missing from checkpoints of weights alone
        return states[0].get("total_steps")

    def require_fits(self, model: L.LightningModule) -> None:
        """Check names and shapes against those of ``model``, as far as they are known before its setup.

        Settings that differ but still fit are reported, since the config's override the checkpoint's.

        Raises:
            UsageError: if names or shapes differ; the message lists tensors and settings.
        """
        if _overrides(model, "on_load_checkpoint"):  # the hook may resolve any difference
            return
        saved, own = self.content["state_dict"], model.state_dict()
        problems = [
            f"{name} is {_shape(saved[name])} in the checkpoint, {_shape(own[name])} in the model"
            for name in own.keys() & saved.keys()
            if _shape(saved[name]) != _shape(own[name])
        ]
        if model.strict_loading:
            problems += [f"the checkpoint has no {name}" for name in own.keys() - saved.keys()]
        if model.strict_loading and not (_overrides(model, "configure_model") or _overrides(model, "setup")):
            # neither hook can add layers
            problems += [f"the model has no {name}" for name in saved.keys() - own.keys()]
        if problems:
            raise UsageError(
                f"{self.path} holds {self._kind(model)}another model than {type(model).__name__} as configured:\n"
                + "\n".join(f"  {line}" for line in [*self._settings(model), *_shortened(sorted(problems))])
                + "\nUse the config that the run saved (config_fit.yaml in its folder), or another checkpoint"
            )
        if settings := self._settings(model):
            rank_zero_info("settings other than the checkpoint's: " + "; ".join(settings))

    def _kind(self, model: L.LightningModule) -> str:
        name = _class_name(self.content)
        return "" if name in (None, type(model).__name__) else f"a {name}, "

    def _settings(self, model: L.LightningModule) -> list[str]:
        saved, now = self.content.get("hyper_parameters", {}), model.hparams
        lines = [
            f"{name.lstrip('_')}: {saved[name]!r} in the checkpoint, {now[name]!r} in the model"
            for name in saved.keys() & now.keys()
            if saved[name] != now[name] and None not in (saved[name], now[name])  # None: set by the datamodule
        ]
        return _shortened(sorted(lines))


def find_checkpoint(
    trainer: L.Trainer, model: L.LightningModule, which: str, weights_only: bool | None = None
) -> tuple[str, str]:
    """Find the ``best`` or the ``last`` checkpoint of the newest run of ``model`` under the folders of the loggers.

    The best is the one that a ModelCheckpoint with a ``monitor`` recorded in the newest file, or the only one.
    Checkpoints of another class than the model's are skipped.

    Returns:
        the path, and its kind: ``best``, or ``last`` if the run monitored nothing.

    Raises:
        UsageError: if there is none, or the files do not say which is the best.
    """
    roots = {str(getattr(logger, "root_dir", None) or logger.save_dir) for logger in trainer.loggers}
    roots = roots or {str(Path(trainer.default_root_dir, "checkpoints"))}
    keepers = [keeper for keeper in trainer.checkpoint_callbacks if isinstance(keeper, ModelCheckpoint)]
    roots |= {str(keeper.dirpath) for keeper in keepers if keeper.dirpath}
    files = sorted({file for root in roots for file in Path(root).glob("**/*.ckpt")}, key=lambda f: f.stat().st_mtime)
    others: dict[str, None] = {}
    for newest in reversed(files):
        content = _read_content(newest, weights_only)
        if (name := _class_name(content)) in (None, type(model).__name__):
            break
        others[str(name)] = None
    else:
        held = f"; those there are of {', '.join(others)}" if others else ""
        raise UsageError(
            f"--ckpt_path {which}: no checkpoint of {type(model).__name__} under {' or '.join(sorted(roots))}{held}. "
            "Run fit with this config first, or name a file"
        )
    if which == "last":
        return str(newest), "last"
    states = content.get("callbacks", {})
    keeping = [state for key, state in states.items() if key.startswith("ModelCheckpoint") and state["best_model_path"]]
    for state in sorted(keeping, key=lambda state: state["monitor"] is None):
        best = Path(state["best_model_path"])
        for file in (best, newest.with_name(best.name)):  # the second in case the folder was moved
            if file.exists():
                return str(file), "best" if state["monitor"] else "last"
    if (beside := [file for file in files if file.parent == newest.parent]) == [newest]:
        return str(newest), "last"
    raise UsageError(
        f"--ckpt_path best: the {len(beside)} files in {newest.parent} do not say which is the best (they hold weights "
        "alone, or another folder's); name one"
    )


def _read_content(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Read a file, or the part of a sharded folder beside weights and optimizer states."""
    found = Checkpoint.read(str(path), weights_only)
    return read_checkpoint(path / REST, weights_only, mmap=True) if found is None else found.content


def _class_name(content: dict[str, Any]) -> str | None:
    class_path = content.get("hyper_parameters", {}).get("_class_path")
    return None if class_path is None else str(class_path).rpartition(".")[2]


@contextmanager
def _as_usage_errors(path: str) -> Iterator[None]:
    """Turn errors of reading a checkpoint into a UsageError."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{path} holds objects other than tensors and plain values ({rejected_object(error)}). If you trust its "
            "author, add --weights_only false, which lets the file run code"
        ) from error
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error


def _shape(value: Any) -> str:
    return "x".join(map(str, value.shape)) or "a scalar" if isinstance(value, torch.Tensor) else type(value).__name__


def _shortened(lines: list[str]) -> list[str]:
    hidden = len(lines) - _MOST_NAMED
    return lines if hidden <= 0 else [*lines[:_MOST_NAMED], f"... and {hidden} more"]


def _overrides(model: L.LightningModule, hook: str) -> bool:
    return getattr(type(model), hook) is not getattr(L.LightningModule, hook)
