"""Checkpoints written atomically, and the search for the newest undamaged one."""

import re
import socket
from collections.abc import Callable, Iterable
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_accel._private.lightning import saves_sharded, timeout_of
from lightning_accel.ops.bounds import local_path, require_integers
from lightning_accel.ops.names import list_of_names
from lightning_accel.strategies.batch_samplers import distribute_sampler
from lightning_accel.strategies.checkpoints.agreement import Agreement
from lightning_accel.strategies.checkpoints.atomic import (
    NotWrittenError,
    find_written,
    remove_atomically,
    write_atomically,
    write_in_parts,
)
from lightning_accel.strategies.checkpoints.reading import find_damage, require_loadable, verified_file
from lightning_accel.strategies.checkpoints.stores import LocalCopies, complete_checkpoints, is_remote
from lightning_accel.strategies.mixed_updates import update_mixed_groups_one_by_one
from lightning_accel.strategies.rendezvous import joining_process_group
from lightning_accel.strategies.sharding.metadata import REST


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write local checkpoints beside their final place, flush them to the disk, and rename them.

    Lightning's default writes to the system's temporary folder and moves the file. If that folder is on another disk
    than the checkpoints, as on most clusters, the move is a copy, and a process that is killed leaves an incomplete
    file in place of the last checkpoint. The default also does not flush the file, and keeps two copies of it in
    memory.

    Before reading a file, the checksums of its parts are compared (500 MB in 0.2 s), which ``torch.load`` does not do.

    Paths with a protocol (``s3://``), which fsspec opens, are left to Lightning without a ``local_folder``. With one, a
    checkpoint is written there, atomically, and then uploaded, from the disk in place of the memory, and sharded
    folders go to stores as well: the part that makes them complete goes last.

    Args:
        local_folder: a folder on a disk of each machine, for copies of checkpoints whose paths have a protocol. A run
            that goes on reads the copy unless the store has another version.
        keep_local: number of copies that stay of each folder of the store, of those written and of those read.

    Raises:
        TypeError: if an option has another type.
        ValueError: if ``local_folder`` is empty or a URL, or ``keep_local`` is below 1.

    Example:
        >>> import lightning as L
        >>> from lightning_accel.strategies import AtomicCheckpointIO
        >>> trainer = L.Trainer(plugins=[AtomicCheckpointIO()])
    """

    def __init__(self, local_folder: str | Path | None = None, keep_local: int = 2) -> None:
        super().__init__()
        require_integers(1, keep_local=keep_local)
        self.copies = None if local_folder is None else LocalCopies(local_folder, keep_local)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if storage_options is not None or (is_remote(path) and self.copies is None):
            write = partial(super().save_checkpoint, path=path, storage_options=storage_options)
        else:
            write = partial(self._write_file, path)
        self._save(checkpoint, path, write)

    def save_sharded(
        self,
        state: dict[str, Any],
        rest: dict[str, Any],
        path: str | Path,
        strategy: DDPStrategy | ModelParallelStrategy,
    ) -> None:
        """Write a folder with a shard of ``state`` from each process, and ``rest`` of the first one.

        Every process must call it.

        Raises:
            ValueError: if ``path`` is remote and there is no ``local_folder``.
        """
        require_local_folder(self, [path])
        write = partial(self._write_folder, path, strategy, Agreement(self._group_of(strategy)))
        self._save({"state": state, "rest": rest}, path, write)

    def local_path(self, path: str | Path) -> Path:
        """Return the local file or folder that holds a checkpoint, downloading it if it has to be.

        Raises:
            FileNotFoundError: if there is no such checkpoint.
            ValueError: if ``path`` is remote and there is no ``local_folder``.
        """
        require_local_folder(self, [path])
        return self.copies.fetch(str(path)) if self.copies is not None and is_remote(path) else find_written(path)

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        if is_remote(path) and self.copies is None:
            return super().load_checkpoint(path, map_location, weights_only)
        try:
            found: str | Path = self.local_path(path)
        except FileNotFoundError:
            if is_remote(path):
                raise
            found = path  # Lightning reports that it does not exist
        with verified_file(found):
            return super().load_checkpoint(found, map_location, weights_only)

    def remove_checkpoint(self, path: str | Path) -> None:
        if not is_remote(path):
            remove_atomically(path)
        elif self.copies is None:
            super().remove_checkpoint(path)
        else:
            self.copies.remove(str(path))

    def _save(self, content: dict[str, Any], path: str | Path, write: Callable[[dict[str, Any]], None]) -> None:
        write(content)

    def _group_of(self, strategy: Strategy) -> dist.ProcessGroup | None:
        """Return the process group of the writers; None for the default one."""
        return None

    def _write_file(self, path: str | Path, checkpoint: dict[str, Any]) -> None:
        copies = self.copies if is_remote(path) else None
        with write_atomically(path if copies is None else copies.begin(str(path))) as file:
            torch.save(checkpoint, file)
        if copies is not None:
            copies.upload_file(str(path))

    def _write_folder(
        self,
        path: str | Path,
        strategy: DDPStrategy | ModelParallelStrategy,
        agreement: Agreement,
        content: dict[str, Any],
    ) -> None:
        copies = self.copies if is_remote(path) else None
        with agreement.part():
            place = path if copies is None else copies.begin(str(path))
        owner = strategy.is_global_zero if copies is None else strategy.local_rank == 0
        with write_in_parts(place, owner, agreement.part) as folder:
            try:
                save(content["state"], checkpoint_id=folder, process_group=agreement.group)
            except CheckpointException as error:  # with the tracebacks of all processes
                rank, (reason, _) = next(iter(error.failures.items()))
                raise NotWrittenError(
                    f"{path}: process {rank} could not write its shard: {type(reason).__name__}: {reason}"
                ) from error
            if strategy.is_global_zero:
                torch.save(content["rest"], folder / REST)
        if copies is not None:
            copies.upload_folder(str(path), strategy.global_rank, strategy.local_rank, agreement)


class AtomicModelParallelStrategy(ModelParallelStrategy):
    """Run Lightning's ``ModelParallelStrategy``, replacing its checkpoints, whole or sharded, atomically.

    Optimizers update modules that split only some of their weights one parameter after another, without which torch
    refuses them on GPUs.

    Args:
        data_parallel_size: number of replicas of the model, which train on different batches; ``auto`` is the number of
            machines.
        tensor_parallel_size: number of processes over which ``configure_model`` splits the layers of one replica;
            ``auto`` is the number of devices of a machine.
        save_distributed_checkpoint: write a folder with a shard from each process; False writes one file.
        process_group_backend: backend of the collectives, such as ``nccl`` or ``gloo``; by default that of the device.
        timeout: time limit of each collective, a ``datetime.timedelta``.

    Example:
        >>> import lightning as L
        >>> from lightning_accel.strategies import AtomicModelParallelStrategy
        >>> trainer = L.Trainer(devices=2, strategy=AtomicModelParallelStrategy(tensor_parallel_size=2))
    """

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        path = checkpoint_io_of(self).local_path(self.broadcast(str(checkpoint_path)))
        require_loadable(path, weights_only)
        return super().load_checkpoint(path, weights_only)

    def setup_environment(self) -> None:
        with joining_process_group(self.cluster_environment, timeout_of(self)):
            super().setup_environment()

    def setup(self, trainer: L.Trainer) -> None:
        if saves_sharded(self):
            require_local_folder(checkpoint_io_of(self), checkpoint_folders(trainer))
        super().setup(trainer)

    def setup_optimizers(self, trainer: L.Trainer) -> None:
        super().setup_optimizers(trainer)
        update_mixed_groups_one_by_one(self.optimizers)

    def process_dataloader(self, dataloader: object) -> object:
        return distribute_sampler(super().process_dataloader(dataloader), **self.distributed_sampler_kwargs)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        reject_storage_options(storage_options)
        writer = checkpoint_io_of(self)
        if saves_sharded(self):
            path = agreed_path(filepath)
            states = {f"optimizer_{i}": state for i, state in enumerate(checkpoint.pop("optimizer_states", []))}
            writer.save_sharded({"state_dict": checkpoint.pop("state_dict"), **states}, checkpoint, path, self)
        elif self.is_global_zero:
            writer.save_checkpoint(checkpoint, filepath)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self.is_global_zero:
            checkpoint_io_of(self).remove_checkpoint(filepath)

    def teardown(self) -> None:
        super().teardown()
        self.checkpoint_io.teardown()  # which Lightning's does not call


def checkpoint_io_of(strategy: Strategy) -> AtomicCheckpointIO:
    """Return the plug-in that writes a strategy's checkpoints, or one of ours where it has another one."""
    found = strategy.checkpoint_io
    return found if isinstance(found, AtomicCheckpointIO) else AtomicCheckpointIO()


def agreed_path(path: str | Path) -> str:
    """Return the path that the first process was given of a checkpoint to which all write.

    Raises:
        ValueError: if processes of several machines were given other folders, as by Ray's callback, where each reports
            one of its own: the first one's would lack what the other machines write.
    """
    given: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(given, (str(path), str(Path(path).parent), socket.gethostname()))
    folders, machines = ({each[part] for each in given} for part in (1, 2))
    if len(folders) > 1 and len(machines) > 1:
        raise ValueError(
            f"processes of {len(machines)} machines were to write one sharded checkpoint to {len(folders)} folders, "
            f"such as {min(folders)}. Save it by ModelCheckpoint(dirpath=...), in a folder that all machines see or a "
            "store; Ray's RayTrainReportCallback keeps whole checkpoints alone"
        )
    return str(given[0][0])


def checkpoint_folders(trainer: L.Trainer) -> list[str]:
    """Return the folders of the ModelCheckpoint callbacks that have one."""
    keepers = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
    return [str(keeper.dirpath) for keeper in keepers if keeper.dirpath]


def require_local_folder(io: AtomicCheckpointIO, paths: Iterable[str | Path]) -> None:
    """Reject remote places of sharded checkpoints, which are copies of local ones.

    Raises:
        ValueError: if one of the ``paths`` is remote and there is no ``local_folder``.
    """
    if io.copies is None and (remote := [path for path in paths if is_remote(path)]):
        raise ValueError(
            f"a sharded checkpoint goes to {remote[0]} from a disk of each machine, so a folder there was needed: "
            'Trainer(plugins=[AtomicCheckpointIO(local_folder="/scratch/checkpoints")]), or BackgroundCheckpointIO'
        )


def reject_storage_options(options: Any) -> None:
    """Raise an error if there are options for a CheckpointIO, which does not write sharded checkpoints.

    Raises:
        TypeError: if there are any.
    """
    if options is not None:
        raise TypeError("storage_options go to a CheckpointIO, which sharded checkpoints do not use; leave them out")


def newest_checkpoint(
    places: str | Path | Iterable[str | Path], copies: LocalCopies | None = None
) -> str | Path | None:
    """Return the undamaged checkpoint that was written last below a folder, None if there is none.

    It may be a file or a sharded folder, of a ``ModelCheckpoint`` or of :class:`~lightning_accel.SaveOnSignal`, in any
    of the folders ``version_N`` of a logger. Newer ones that are damaged, such as incomplete files that other writers
    leave, are skipped with a warning.

    With it, one script starts a run and resumes it: ``Trainer.fit`` begins anew with ``ckpt_path=None``. All runs below
    the folder count as one, so give each run a folder of its own.

    Args:
        places: a folder, or several: files, folders, and URLs of folders in stores. A folder that does not exist yet
            holds none.
        copies: local copies of what stores hold, ``AtomicCheckpointIO(local_folder=...).copies``; those whose upload
            was cut off are taken into account.

    Raises:
        TypeError: if ``places`` is no path, and no list of them.
        ValueError: if a folder has no name, as an empty variable gives, or is a file that is no checkpoint.

    Example:
        >>> import lightning as L
        >>> from lightning_accel.strategies import newest_checkpoint
        >>> trainer = L.Trainer(default_root_dir="runs/digits", max_epochs=5)
        >>> newest = newest_checkpoint("runs/digits")  # for trainer.fit(model, data, ckpt_path=newest)
        >>> newest is None
        True
    """
    found: list[tuple[float, str | Path]] = []
    for place in list_of_names([places] if isinstance(places, str | bytes | PathLike) else places, "places"):
        folder = local_path(place, "each of places")
        if is_remote(place):
            found += complete_checkpoints(str(place))
            local = [] if copies is None else [*copies.not_uploaded(str(place))]
        else:
            if folder.is_file() and folder.suffix != ".ckpt":
                raise ValueError(f"newest_checkpoint needs a folder, or a .ckpt file; {folder} is another file")
            local = [path for path in _candidates(folder) if path.exists()]
        found += [(path.stat().st_mtime_ns / 1e9, path) for path in local]
    for _, path in sorted(found, key=_moment, reverse=True):
        damage = "" if isinstance(path, str) else find_damage(path)
        if not damage:
            return path
        rank_zero_warn(f"the checkpoint {path} is passed over, since it is damaged: {damage}")
    return None


def _moment(found: tuple[float, str | Path]) -> tuple[float, list[int]]:
    """Return the time, and the numbers in the name, which tell those of one second apart: S3 has no finer time."""
    time, path = found
    return time, [int(number) for number in re.findall(r"\d+", Path(path).name)]


def _candidates(folder: Path) -> list[Path]:
    if folder.suffix == ".ckpt":
        return [folder]
    replaced = [path.with_name(path.name[1 : -len(".replaced")]) for path in folder.glob("**/.*.ckpt.replaced")]
    return [*folder.glob("**/*.ckpt"), *(find_written(path) for path in replaced if not path.exists())]
