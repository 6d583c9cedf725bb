"""Checkpoints given on the command line, and resumption of runs that a launcher restarts."""

import os
import pickle
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_accel._private.lightning import given_version, saves_sharded, set_version
from lightning_accel.callbacks import Pruning
from lightning_accel.cli.errors import UsageError, nearest
from lightning_accel.cli.run_folder import RunLocks, lock_run_folder, run_folder_of
from lightning_accel.compress.channels.plan import find_plans
from lightning_accel.strategies import AtomicCheckpointIO, AtomicModelParallelStrategy, BackgroundCheckpointIO
from lightning_accel.strategies.checkpoints.io import checkpoint_folders, checkpoint_io_of, newest_checkpoint
from lightning_accel.strategies.checkpoints.named_code import code_named_in
from lightning_accel.strategies.checkpoints.reading import read_checkpoint, require_loadable
from lightning_accel.strategies.checkpoints.stores import complete_checkpoints, is_remote, join_location
from lightning_accel.strategies.sharding.metadata import METADATA, REST, rejected_object

_REMOVAL = re.compile(r"(\w+)\{'structure': '(\w+)'")  # the state_key of a Pruning
_PARTS = {"width": "channels"}
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
        if path in ("auto", "best", "last", "hpc", "registry") or is_remote(path) or path.startswith("registry:"):
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

    def require_fits(self, model: L.LightningModule, pruning: Sequence[Pruning] = ()) -> None:
        """Check names and shapes against those of ``model``, as far as they are known before its setup.

        Settings that differ but still fit are reported, since the config's override the checkpoint's.

        Args:
            model: rebuilt by the callbacks ``pruning`` where parts of the checkpoint's were removed.
            pruning: those of the Trainer.

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
                + "\n"
                + self._advice(pruning)
            )
        if settings := self._settings(model):
            rank_zero_info("settings other than the checkpoint's: " + "; ".join(settings))

    def _advice(self, pruning: Sequence[Pruning]) -> str:
        """Say what to do with a checkpoint that does not fit, such as that of a model parts of which were removed."""
        advice = "Use the config that the run saved (config_fit.yaml in its folder), or another checkpoint"
        states = self.content.get("callbacks", {})
        keys = [key for key in states if find_plans(states[key]) and key not in {one.state_key for one in pruning}]
        removals = [found.groups() for key in keys if (found := _REMOVAL.match(key))]
        if not removals:
            return advice
        parts = " and ".join(_PARTS.get(structure, f"{structure}s") for _, structure in removals)
        options = " ".join(
            f"--trainer.callbacks+={callback} --trainer.callbacks.structure={structure}"
            for callback, structure in removals
        )
        return (
            f"{parts.capitalize()} of the checkpoint's model were removed in its run. Add the callback that did it, "
            f"{options}, or load it in Python, lightning_accel.compress.load_pruned(model, path). {advice}"
        )

    def _kind(self, model: L.LightningModule) -> str:
        name = _class_name(self.content)
        return "" if name in (None, type(model).__name__) else f"a {name}, "

    def _settings(self, model: L.LightningModule) -> list[str]:
        saved, now = _flat(self.content.get("hyper_parameters", {})), _flat(model.hparams)
        lines = [
            f"{name.lstrip('_')}: {saved[name]!r} in the checkpoint, {now[name]!r} in the model"
            for name in saved.keys() & now.keys()
            if saved[name] != now[name] and None not in (saved[name], now[name])  # None: set by the datamodule
        ]
        return _shortened(sorted(lines))


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return options within options by names with dots.

    >>> _flat({"dim": 8, "experts": {"k": 2}})
    {'dim': 8, 'experts.k': 2}
    """
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        inner = _flat(value) if isinstance(value, Mapping) else {"": value}
        flat |= {f"{name}.{option}".rstrip("."): part for option, part in inner.items()}
    return flat


def folder_of_configs(configs: Iterable[str], trainer: L.Trainer) -> Path | None:
    """Return the folder of the run that saved one of ``configs``: that of the last one that lies in such a folder.

    A folder without checkpoints is that of a run if a logger numbers it, and ModelCheckpoint writes to no other place.
    """
    numbering = [logger for logger in trainer.loggers if isinstance(logger, CSVLogger | TensorBoardLogger)]
    roots = [] if checkpoint_folders(trainer) else [Path(logger.root_dir).resolve() for logger in numbering]
    for folder in reversed([Path(config).resolve().parent for config in configs]):
        is_numbered = folder.parent in roots and folder.name.startswith("version_")
        if is_numbered or any((folder / "checkpoints").glob("**/*.ckpt")):
            return folder
    return None


def find_checkpoint(
    trainer: L.Trainer,
    model: L.LightningModule,
    which: str,
    weights_only: bool | None = None,
    run_folder: Path | None = None,
) -> tuple[str, str]:
    """Find the ``best`` or the ``last`` checkpoint of a run of ``model``.

    The best is the one that a ModelCheckpoint with a ``monitor`` recorded in the newest file, or the only one.
    Checkpoints of another class than the model's are skipped.

    Args:
        trainer: whose loggers have the folders of runs.
        model: of the class that was trained.
        which: ``best`` or ``last``.
        weights_only: whether to read tensors and plain values alone.
        run_folder: of the run; by default the newest one under the folders of the loggers.

    Returns:
        the path, and its kind: ``best``, or ``last`` if the run monitored nothing.

    Raises:
        UsageError: if there is none, or the files do not say which is the best.
    """
    roots = {str(getattr(logger, "root_dir", None) or logger.save_dir) for logger in trainer.loggers}
    roots = roots or {str(Path(trainer.default_root_dir, "checkpoints"))}
    roots |= {*checkpoint_folders(trainer)}
    if run_folder is not None:
        roots = {str(run_folder / "checkpoints")}
    others: dict[str, None] = {}
    files = [file for _, file in sorted(set(_checkpoints_below(roots)))]
    for newest in reversed(files):
        content = _read_content(trainer, newest, weights_only)
        if (name := _class_name(content)) in (None, type(model).__name__):
            break
        others[str(name)] = None
    else:
        held = f"; those there are of {', '.join(others)}" if others else ""
        mend = "Run fit with this config first, or name a file"
        if run_folder is not None:
            mend = "The config lies in the folder of this run: give that of another run, or name a file"
        raise UsageError(
            f"--ckpt_path {which}: no checkpoint of {type(model).__name__} under {' or '.join(sorted(roots))}{held}. "
            f"{mend}"
        )
    if which == "last":
        return newest, "last"
    beside = [file for file in files if _folder_of(file) == _folder_of(newest)]
    states = content.get("callbacks", {})
    keeping = [state for key, state in states.items() if key.startswith("ModelCheckpoint") and state["best_model_path"]]
    for state in sorted(keeping, key=lambda state: state["monitor"] is None):
        best = state["best_model_path"]
        for file in (best, str(join_location(_folder_of(newest), Path(best).name))):  # if the folder was moved
            if file in beside or (not is_remote(file) and Path(file).exists()):
                return file, "best" if state["monitor"] else "last"
    if beside == [newest]:
        return newest, "last"
    raise UsageError(
        f"--ckpt_path best: the {len(beside)} files in {_folder_of(newest)} do not say which is the best (they hold "
        "weights alone, or another folder's); name one"
    )


def _checkpoints_below(roots: set[str]) -> Iterator[tuple[float, str]]:
    """Yield the checkpoints below folders and URLs, with the times at which they were written."""
    for root in roots:
        if is_remote(root):
            yield from complete_checkpoints(root)
        else:
            files = (file for file in Path(root).glob("**/*.ckpt") if file.exists())  # no link to a removed one
            yield from ((file.stat().st_mtime, str(file)) for file in files)


def _folder_of(file: str) -> str:
    return file.rpartition("/")[0] if is_remote(file) else str(Path(file).parent)


def _read_content(trainer: L.Trainer, file: str, weights_only: bool | None) -> dict[str, Any]:
    """Read a file, or the part of a sharded folder beside weights and optimizer states."""
    if is_remote(file):
        reader = checkpoint_io_of(trainer.strategy)
        if reader.copies is None:
            return reader.load_checkpoint(file, weights_only=weights_only)
        file = str(reader.local_path(file))
    found = Checkpoint.read(file, weights_only)
    return read_checkpoint(Path(file, REST), weights_only, mmap=True) if found is None else found.content


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


def write_checkpoints_atomically(trainer: L.Trainer) -> None:
    """Write checkpoints atomically, so that a kill never leaves a partial file, unless the config chooses otherwise.

    Raises:
        UsageError: if they are to be written in the background by a strategy that writes them itself.
    """
    strategy = trainer.strategy
    if (
        isinstance(strategy.checkpoint_io, BackgroundCheckpointIO)
        and saves_sharded(strategy)
        and not isinstance(strategy, AtomicModelParallelStrategy)
    ):
        raise UsageError(
            f"{type(strategy).__name__} writes sharded checkpoints itself, while training waits, so "
            "BackgroundCheckpointIO has no effect. Take the strategy accel_fsdp2 with checkpoints=sharded, or "
            "accel_model_parallel, or leave BackgroundCheckpointIO out"
        )
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()


def resume_run(trainer: L.Trainer, locks: RunLocks) -> str | None:
    """Reuse the newest run folder and return its newest complete checkpoint; None if there is none yet.

    Every process searches on its own, before the process group exists; whether all found the same is checked later.

    Raises:
        UsageError: if another run uses the folder, or a folder of checkpoints, or runs lie in a store.
    """
    if is_remote(root := trainer.default_root_dir):
        raise UsageError(
            f"--ckpt_path auto looks for the run's folder on a disk; got --trainer.default_root_dir {root}. Give a "
            f"folder on a disk, and ModelCheckpoint(dirpath='{root}') for checkpoints that are to lie there"
        )
    _warn_of_shared_store()
    for place in checkpoint_folders(trainer) if trainer.is_global_zero else []:
        if not is_remote(place):
            folder = Path(place)
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
    copies = checkpoint_io_of(trainer.strategy).copies if _is_one_machine(trainer) else None  # others cannot see them
    path = newest_checkpoint(_checkpoint_places(trainer), copies)
    rank_zero_info("--ckpt_path auto: " + (f"going on from {path}" if path else "no checkpoint yet, a new run begins"))
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    callbacks.append(_RequireSameCheckpoint(path))
    return None if path is None else str(path)


def _is_one_machine(trainer: L.Trainer) -> bool:
    """Return whether all processes are on this machine; Ray Train's workers may be on several without ``num_nodes``."""
    here = os.environ.get("LOCAL_WORLD_SIZE")
    return trainer.num_nodes == 1 and (here is None or here == os.environ.get("WORLD_SIZE", here))


def _warn_of_shared_store() -> None:
    """Warn that restarts may hang: https://github.com/pytorch/pytorch/issues/135712, 3 of 6 did on torch 2.13."""
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True":
        rank_zero_warn(
            "processes that torchrun starts again find the addresses of those that died in its store, and may wait for "
            "them until the time-out: start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --max-restarts ..."
        )


def _reuse_newest_folder(logger: CSVLogger | TensorBoardLogger) -> None:
    """Give ``logger`` the numbered folder of the newest fit, skipping those of ``test`` or ``predict``."""
    if given_version(logger) is not None or not isinstance(logger.version, int) or logger.version == 0:
        return  # the config sets it, or there is none; the property has set it to the next free number
    if "://" in logger.root_dir:
        set_version(logger, logger.version - 1)
        return
    numbers = [path.name.removeprefix("version_") for path in Path(logger.root_dir).glob("version_*") if path.is_dir()]
    newest_first = sorted((int(number) for number in numbers if number.isdecimal()), reverse=True)
    for is_taken in (_is_of_fit, _has_no_config):
        for number in newest_first:
            if is_taken(Path(logger.root_dir, f"version_{number}")):
                set_version(logger, number)
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


def _checkpoint_places(trainer: L.Trainer) -> list[str | Path]:
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
    return [*places, *checkpoint_folders(trainer), *root.glob("hpc_ckpt_*.ckpt"), *root.glob("signal-step=*.ckpt")]


class _RequireSameCheckpoint(L.Callback):
    """Reject a resumption if processes found different checkpoints, and forget the path once it is loaded."""

    def __init__(self, path: str | Path | None) -> None:
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
