"""Checkpoints written in a thread, while training goes on."""

import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from lightning_accel._private.lightning import count_queued_files, finish_other_saves, timeout_of
from lightning_accel._private.torch import tree_map_only
from lightning_accel.strategies.checkpoints.atomic import NotWrittenError
from lightning_accel.strategies.checkpoints.io import AtomicCheckpointIO
from lightning_accel.strategies.checkpoints.stores import is_remote

_MOST_COPIES = 2  # ModelCheckpoint writes the one that it keeps, and last.ckpt, at the same step


class BackgroundCheckpointIO(AtomicCheckpointIO):
    """Write checkpoints in a thread, from a copy in the memory of the host, while training goes on.

    A step waits for the copy alone, whose memory is used again by the next one (pinned with CUDA). Whole checkpoints of
    any strategy that uses a CheckpointIO are written so, and the sharded folders of ``accel_fsdp2`` and
    ``accel_model_parallel``, whose processes then meet in a gloo group of their own. Writing is atomic, and paths with
    a protocol (``s3://``) go by a ``local_folder``, as :class:`AtomicCheckpointIO` describes.

    - The order is kept: a checkpoint that ModelCheckpoint removes for a new one stays until the new one is complete.
    - At most two copies are held. A step that saves a third one waits until the first one is written.
    - If writing fails, a warning names the checkpoint at once, nothing is removed until the run has ended, and the next
      save or the end of the run raises the error.
    - The end of a run, also by an exception or a signal that SaveOnSignal catches, waits for what is not written yet.
      The checkpoint before Slurm's requeue is written at once.
    - ModelCheckpoint takes the names of what is not written yet for taken.

    What cannot be copied, such as sparse tensors and tensors of torchao, is written at once, with a warning. Only
    ModelCheckpoint is served in the background: where others call ``trainer.save_checkpoint``, such as Ray's
    RayTrainReportCallback, the file is there when it returns, on all processes. Loggers that upload checkpoints see
    those that are complete.

    Args:
        local_folder: a folder on a disk of each machine, for copies of checkpoints whose paths have a protocol.
        keep_local: number of copies that stay of each folder of the store, of those written and of those read.

    Raises:
        ValueError: if ``local_folder`` is empty or a URL, or ``keep_local`` is below 1.

    Example:
        >>> import lightning as L
        >>> from lightning_accel.strategies import BackgroundCheckpointIO
        >>> trainer = L.Trainer(plugins=[BackgroundCheckpointIO(local_folder="/tmp/checkpoints")])
    """

    def __init__(self, local_folder: str | Path | None = None, keep_local: int = 2) -> None:
        super().__init__(local_folder, keep_local)
        _tell_lightning()
        self._thread: ThreadPoolExecutor | None = None
        self._pending: list[tuple[Future[None], str, bool]] = []  # path, and whether it is written or removed
        self._stagers: list[DefaultStager] = []
        self._idle: queue.SimpleQueue[DefaultStager] | None = None  # made with the thread, since it cannot be pickled
        self._group: dist.ProcessGroup | None = None
        self._error: BaseException | None = None
        self._has_failed = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        _tell_lightning()  # in a process that was spawned

    def will_exist(self, path: str | Path) -> bool | None:
        """Return whether a file will be there when all is done; None if nothing is to be done to it."""
        last = [is_written for future, queued, is_written in self._pending if queued == str(path) and not future.done()]
        return last[-1] if last else None

    def wait(self) -> None:
        """Wait until everything is written and removed.

        Raises:
            OSError: if a checkpoint could not be written; errors of a store's file system may have other types.
        """
        pending, self._pending = self._pending, []
        for future, _, _ in pending:
            future.result()
        self._raise_error()

    def finish(self, strategy: Strategy | None) -> None:
        """Wait on all processes until everything is written and removed; None as ``strategy``: on this one alone.

        Raises:
            OSError: as :meth:`wait` does, also where another process could not write.
        """
        error = None
        try:
            self.wait()
        except Exception as found:
            error = found
        has_failed = strategy is not None and strategy.reduce_boolean_decision(error is not None, all=False)
        if error is not None:
            raise error
        if has_failed:
            raise NotWrittenError("a checkpoint could not be written by another process, which says why")

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        self._raise_error()
        super().save_checkpoint(checkpoint, path, storage_options)

    def save_sharded(
        self,
        state: dict[str, Any],
        rest: dict[str, Any],
        path: str | Path,
        strategy: DDPStrategy | ModelParallelStrategy,
    ) -> None:
        if strategy.reduce_boolean_decision(self._error is not None, all=False):  # or the later ones go on
            self.finish(strategy)
        super().save_sharded(state, rest, path, strategy)

    def local_path(self, path: str | Path) -> Path:
        self.wait()
        return super().local_path(path)

    def load_checkpoint(self, path: str | Path, *arguments: Any, **options: Any) -> dict[str, Any]:
        self.wait()
        return super().load_checkpoint(path, *arguments, **options)

    def remove_checkpoint(self, path: str | Path) -> None:
        self._submit(partial(self._remove, super().remove_checkpoint, path), path, False)

    def teardown(self) -> None:
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            for stager in self._stagers:
                stager.close()
            self._thread, self._idle, self._stagers = None, None, []
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
            self._group, self._has_failed = None, False

    def _save(self, content: dict[str, Any], path: str | Path, write: Callable[[dict[str, Any]], None]) -> None:
        if PurePosixPath(str(path)).name.startswith("hpc_ckpt"):  # Lightning asks Slurm to end the job right after it
            self.wait()
            write(content)
            return
        stager = self._free_stager()
        try:
            tree_map_only(Tensor, _require_copyable, content)
            copy: Any = stager.stage(content)
        except Exception as error:
            rank_zero_warn(
                f"{path} is written while training waits, since it holds something that cannot be copied: "
                f"{type(error).__name__}: {str(error).splitlines()[0]}"
            )
            stager.close()
            self._stagers.remove(stager)
            self.wait()
            write(content)
            return
        if not is_remote(path):
            Path(path).parent.mkdir(parents=True, exist_ok=True)  # for ModelCheckpoint's link to it
        self._submit(partial(self._write, write, copy, stager, path), path, True)

    def _group_of(self, strategy: Strategy) -> dist.ProcessGroup | None:
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=timeout_of(strategy))
        return self._group

    def _free_stager(self) -> DefaultStager:
        if self._idle is None:
            self._idle = queue.SimpleQueue()
        if self._idle.empty() and len(self._stagers) < _MOST_COPIES:
            has_cuda = torch.cuda.is_available()
            options = StagingOptions(
                use_pinned_memory=has_cuda,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=has_cuda,
            )
            self._stagers.append(DefaultStager(options))
            return self._stagers[-1]
        return self._idle.get()

    def _submit(self, job: Callable[[], None], path: str | Path, is_written: bool) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._pending = [each for each in self._pending if not each[0].done()]
        self._pending.append((self._thread.submit(job), str(path), is_written))

    def _write(
        self, write: Callable[[dict[str, Any]], None], copy: dict[str, Any], stager: DefaultStager, path: str | Path
    ) -> None:
        try:
            write(copy)
        except BaseException as error:
            self._note_error(error, f"the checkpoint {path} could not be written")
        finally:
            assert self._idle is not None
            self._idle.put(stager)

    def _remove(self, remove: Callable[[str | Path], None], path: str | Path) -> None:
        if not self._has_failed:  # else the one that was to replace it may not be there
            try:
                remove(path)
            except BaseException as error:
                self._note_error(error, f"the checkpoint {path} could not be removed")

    def _note_error(self, error: BaseException, what: str) -> None:
        self._has_failed = True
        self._error = self._error or error
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        rank_zero_warn(f"{what} ({reason}). Older ones stay; the next save, the end of the run, or wait() raises this")

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def _tell_lightning() -> None:
    count_queued_files()
    finish_other_saves()


def _require_copyable(tensor: Tensor) -> None:
    if tensor.is_quantized:  # the stager makes broken ones of them (torch 2.13)
        raise TypeError("a quantized tensor")
