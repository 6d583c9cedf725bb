"""Checkpoints that are whole whenever the process that writes them is killed, and the newest of them."""

import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_accel.strategies.atomic import find_written, remove_atomically, write_atomically
from lightning_accel.strategies.batch_samplers import deal_as_wanted


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write local checkpoints beside their final place, flush them to the disk, and rename them.

    Lightning's own writes to the system's temporary folder and moves the file. Where that folder is on another disk
    than the checkpoints, as on most clusters, the move is a copy, and a process that is killed leaves a part of it
    in the place of the last checkpoint. Nor does it flush the file, or keep less than two copies of it in memory.

    Paths with a protocol (``s3://``) are left to Lightning, whose stores show no object before it is whole.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if _is_remote(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with write_atomically(path) as partial:
            torch.save(checkpoint, partial)

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        found = path if _is_remote(path) else _written_or_same(path)
        return super().load_checkpoint(found, map_location, weights_only)

    def remove_checkpoint(self, path: str | Path) -> None:
        if _is_remote(path):
            super().remove_checkpoint(path)
        else:
            remove_atomically(path)


class AtomicModelParallelStrategy(ModelParallelStrategy):
    """Lightning's ``ModelParallelStrategy``, whose sharded folders are replaced as a whole."""

    def process_dataloader(self, dataloader: object) -> object:
        return deal_as_wanted(super().process_dataloader(dataloader), **self.distributed_sampler_kwargs)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        path = self.broadcast(filepath)
        with write_atomically(path, owner=self.is_global_zero, barrier=self.barrier) as partial:
            super().save_checkpoint(checkpoint, partial, storage_options)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        if "accel_model_parallel" not in strategy_registry:
            strategy_registry.register("accel_model_parallel", cls, description=cls.__doc__)


def newest_checkpoint(places: Iterable[str | Path]) -> Path | None:
    """The whole checkpoint that was written last of those ``places``, or in folders among them; None if there is none.

    Half-written ones, which Lightning's own ways of writing may leave, are passed over.
    """
    found = [path for place in places for path in _candidates(Path(place)) if is_whole(path)]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


def is_whole(path: Path) -> bool:
    """Whether ``path`` is a file or a sharded folder that was written to its end."""
    if path.is_dir():  # the parts are written first, then their table, then the Trainer's state
        return (path / ".metadata").is_file() and is_whole(path / "meta.pt")
    return zipfile.is_zipfile(path)  # the table of contents stands at the end


def _candidates(folder: Path) -> list[Path]:
    if folder.suffix == ".ckpt":
        return [folder]
    replaced = [path.with_name(path.name[1 : -len(".replaced")]) for path in folder.glob("**/.*.ckpt.replaced")]
    return [*folder.glob("**/*.ckpt"), *(find_written(path) for path in replaced if not path.exists())]


def _written_or_same(path: str | Path) -> str | Path:
    try:
        return find_written(path)
    except FileNotFoundError:
        return path  # Lightning says that it is not there


def _is_remote(path: str | Path) -> bool:
    return "://" in str(path)
