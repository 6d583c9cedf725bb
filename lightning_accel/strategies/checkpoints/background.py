"""Checkpoints written in a thread, while training goes on."""

import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from lightning_accel._private.lightning import timeout_of
from lightning_accel.strategies.checkpoints.io import AtomicCheckpointIO

_MOST_COPIES = 2  # ModelCheckpoint writes the one that it keeps, and last.ckpt, at the same step


class BackgroundCheckpointIO(AtomicCheckpointIO):
    """Write checkpoints in a thread, from a copy in the memory of the host, while training goes on.

    A step waits for the copy alone, whose memory is used again by the next one (pinned with CUDA). Whole checkpoints of
    any strategy that uses a CheckpointIO are written so, and the sharded folders of ``accel_fsdp2`` and
    ``accel_model_parallel``, whose processes then meet in a gloo group of their own. Writing is atomic, and paths with
    a protocol (``s3://``) go by a ``local_folder``, as :class:`AtomicCheckpointIO` describes.

    - The order is kept: a checkpoint that ModelCheckpoint removes for a new one stays until the new one is complete.
    - At most two copies are held. A step that saves a third one waits until the first one is written.
    - If writing fails, a warning names the checkpoint at once, no older one is removed, and the next save or the end of
      the run raises the error.
    - The end of a run, also by an exception or a signal that SaveOnSignal catches, waits for what is not written yet.
      The checkpoint before Slurm's requeue is written at once.
    - A ModelCheckpoint's ``filename`` has to tell its checkpoints apart (``{step}``): whether a name is taken is looked
      up before the file is there.

    What cannot be copied, such as sparse tensors and tensors of torchao, is written at once, with a warning.

    Args:
        local_folder: a folder on a disk of each machine, for copies of checkpoints whose paths have a protocol.
        keep_local: number of copies that stay of each folder of the store.

    Raises:
        ValueError: if ``keep_local`` is below 1.
    """

    def __init__(self, local_folder: str | Path | None = None, keep_local: int = 2) -> None:
        super().__init__(local_folder, keep_local)
        self._thread: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []
        self._stagers: list[DefaultStager] = []
        self._idle: queue.SimpleQueue[DefaultStager] | None = None  # made with the thread, since it cannot be pickled
        self._group: dist.ProcessGroup | None = None
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Wait until everything is written and removed.

        Raises:
            OSError: if a checkpoint could not be written; errors of a store's file system may have other types.
        """
        pending, self._pending = self._pending, []
        for each in pending:
            each.result()
        self._raise_error()

    def local_path(self, path: str | Path) -> Path:
        self.wait()
        return super().local_path(path)

    def load_checkpoint(self, path: str | Path, *arguments: Any, **options: Any) -> dict[str, Any]:
        self.wait()
        return super().load_checkpoint(path, *arguments, **options)

    def remove_checkpoint(self, path: str | Path) -> None:
        self._submit(partial(self._remove, super().remove_checkpoint, path))

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
            self._group = None

    def _save(self, content: dict[str, Any], path: str | Path, write: Callable[[dict[str, Any]], None]) -> None:
        self._raise_error()
        if PurePosixPath(str(path)).name.startswith("hpc_ckpt"):  # Lightning asks Slurm to end the job right after it
            self.wait()
            write(content)
            return
        stager = self._free_stager()
        try:
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
        self._submit(partial(self._write, write, copy, stager, path))

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

    def _submit(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._pending = [each for each in self._pending if not each.done()]
        self._pending.append(self._thread.submit(job))

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
        if self._error is None:  # else the one that was to replace it may not be there
            try:
                remove(path)
            except BaseException as error:
                self._note_error(error, f"the checkpoint {path} could not be removed")

    def _note_error(self, error: BaseException, what: str) -> None:
        self._error = self._error or error
        rank_zero_warn(f"{what} ({type(error).__name__}: {error}). Older ones stay; the next save raises this error")

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
