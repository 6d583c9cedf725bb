"""Checkpoints written atomically, and the search for the newest undamaged one."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_warn

from lightning_accel._private.lightning import timeout_of
from lightning_accel.strategies.batch_samplers import distribute_sampler
from lightning_accel.strategies.checkpoints.atomic import find_written, remove_atomically, write_atomically
from lightning_accel.strategies.checkpoints.reading import find_damage, require_loadable, verified_file
from lightning_accel.strategies.rendezvous import joining_process_group


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write local checkpoints beside their final place, flush them to the disk, and rename them.

    Lightning's default writes to the system's temporary folder and moves the file. If that folder is on another disk
    than the checkpoints, as on most clusters, the move is a copy, and a process that is killed leaves an incomplete
    file in place of the last checkpoint. The default also does not flush the file, and keeps two copies of it in
    memory.

    Before reading a file, the checksums of its parts are compared (500 MB in 0.2 s), which ``torch.load`` does not do.

    Paths with a protocol (``s3://``) are left to Lightning; such stores show no object before it is complete.
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
        if _is_remote(path):
            return super().load_checkpoint(path, map_location, weights_only)
        found = _written_or_given(path)
        with verified_file(found):
            return super().load_checkpoint(found, map_location, weights_only)

    def remove_checkpoint(self, path: str | Path) -> None:
        if _is_remote(path):
            super().remove_checkpoint(path)
        else:
            remove_atomically(path)


class AtomicModelParallelStrategy(ModelParallelStrategy):
    """Run Lightning's ``ModelParallelStrategy``, replacing its sharded checkpoint folders atomically."""

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        require_loadable(self.broadcast(checkpoint_path), weights_only)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def setup_environment(self) -> None:
        with joining_process_group(self.cluster_environment, timeout_of(self)):
            super().setup_environment()

    def process_dataloader(self, dataloader: object) -> object:
        return distribute_sampler(super().process_dataloader(dataloader), **self.distributed_sampler_kwargs)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        path = self.broadcast(filepath)
        with write_atomically(path, owner=self.is_global_zero, barrier=self.barrier) as partial:
            super().save_checkpoint(checkpoint, partial, storage_options)


def newest_checkpoint(places: Iterable[str | Path]) -> Path | None:
    """Return the undamaged checkpoint that was written last among ``places`` and the folders among them, if any.

    Newer checkpoints that are damaged, such as incomplete files that other writers leave, are skipped with a warning.
    """
    found = [path for place in places for path in _candidates(Path(place)) if path.exists()]
    for path in sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        damage = find_damage(path)
        if not damage:
            return path
        rank_zero_warn(f"the checkpoint {path} is passed over, since it is damaged: {damage}")
    return None


def _candidates(folder: Path) -> list[Path]:
    if folder.suffix == ".ckpt":
        return [folder]
    replaced = [path.with_name(path.name[1 : -len(".replaced")]) for path in folder.glob("**/.*.ckpt.replaced")]
    return [*folder.glob("**/*.ckpt"), *(find_written(path) for path in replaced if not path.exists())]


def _written_or_given(path: str | Path) -> str | Path:
    try:
        return find_written(path)
    except FileNotFoundError:
        return path  # Lightning reports that it does not exist


def _is_remote(path: str | Path) -> bool:
    return "://" in str(path)
