"""Saving of a checkpoint when the process receives a signal to stop."""

import signal
import threading
from types import FrameType
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_accel._private.lightning import last_saved_step, requeue_path
from lightning_accel.callbacks.fit_end import failures_as_warnings
from lightning_accel.callbacks.trainer_callbacks import callbacks_of, move_last
from lightning_accel.ops.bounds import require_integers
from lightning_accel.ops.names import list_of_names
from lightning_accel.strategies.checkpoints.stores import join_location


class SaveOnSignal(L.Callback):
    """Save a checkpoint on SIGTERM, after the current optimizer step, and end all processes with status 143.

    It suffices that one process gets the signal: they agree every ``every_n_steps`` optimizer steps, which costs one
    reduction of one number. The file ``signal-step=N.ckpt`` is written beside those of the ModelCheckpoint, and ``fit
    --ckpt_path auto`` resumes from it. It is removed when the resumed run has written a later checkpoint. This callback
    runs after all others, so that the checkpoint includes what they do at the end of a batch.

    It replaces Lightning's handler, which sends a broadcast from within the signal, between whichever collectives run,
    and saves nothing. Under Slurm, Lightning's handler of the requeue signal stays, and is called after a step, on all
    processes, instead of in the middle of one; the file that it saves is removed like this callback's.

    Args:
        every_n_steps: optimizer steps between agreements; a single process needs none. The time before SIGKILL (30 s
            under torchrun, Slurm's KillWait) must suffice for that many steps and for writing a checkpoint.
        stop_signals: names of further signals to treat like SIGTERM, such as ``SIGUSR1``.

    Attributes:
        files: those of this run that no later checkpoint has replaced, and the steps at which they were written.

    Raises:
        TypeError: if an option has another type.
        ValueError: if ``every_n_steps`` is below 1 or a signal has another name.

    Example:
        >>> import lightning as L
        >>> from lightning_accel import SaveOnSignal
        >>> trainer = L.Trainer(max_epochs=5, callbacks=[SaveOnSignal(stop_signals=("SIGUSR1",))])
    """

    def __init__(self, every_n_steps: int = 10, stop_signals: tuple[str, ...] = ()) -> None:
        require_integers(1, every_n_steps=every_n_steps)
        known = {each.name for each in signal.Signals} - {"SIGKILL", "SIGSTOP"}
        stop_signals = tuple(list_of_names(stop_signals, "stop_signals"))
        if unknown := [name for name in stop_signals if name not in known]:
            raise ValueError(
                f"stop_signals are names of signals that a process can handle, such as SIGUSR1; got {unknown[0]!r}"
            )
        self.every_n_steps = every_n_steps
        self._stop_signals = {signal.SIGTERM, *(signal.Signals[name] for name in stop_signals)}
        self._received = 0
        self._requeue: Any = None
        self._requeue_signal = 0
        self.files: dict[str, int] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.files = {}
        move_last(trainer, self)

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._install_handlers(trainer)  # Lightning's ends a run that is told to stop here with status 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if threading.current_thread() is not threading.main_thread():
            rank_zero_warn(
                "SaveOnSignal does nothing in this run: it trains in a thread, as workers of Ray Train do, and Python "
                "tells the main thread alone of signals. Let ModelCheckpoint save as often as you can afford to repeat"
            )
        self._install_handlers(trainer)

    def _install_handlers(self, trainer: L.Trainer) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == self._handle_signal:
            return  # the sanity check did
        self._received = 0
        environment = getattr(trainer.strategy, "cluster_environment", None)
        requeues = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
        self._requeue_signal = int(environment.requeue_signal or 0) if requeues else 0  # type: ignore[union-attr]
        self._requeue = signal.getsignal(self._requeue_signal) if self._requeue_signal else None
        for number in {*self._stop_signals, *({self._requeue_signal} - {0})}:
            signal.signal(number, self._handle_signal)  # the Trainer restores the previous handlers

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        steps, rest = divmod(batch_idx + 1, trainer.accumulate_grad_batches)
        last = batch_idx + 1 == trainer.num_training_batches
        if rest and not last:
            return  # checkpoints do not hold gradients that are being accumulated
        self._remove_outdated(trainer)
        received = self._received
        if trainer.world_size > 1:
            if steps % self.every_n_steps and not last:
                return
            received = _max_over_processes(received, trainer.strategy.root_device)
        if received:
            self._received = 0
            self._save_and_stop(received, trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        with failures_as_warnings("SaveOnSignal left a file that a later checkpoint replaces"):
            self._remove_outdated(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"files": self.files} if self.files else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.files = dict(state_dict["files"])

    def _remove_outdated(self, trainer: L.Trainer) -> None:
        """Remove files that are older than a full checkpoint written by a ModelCheckpoint since."""
        keepers = callbacks_of(trainer, ModelCheckpoint)
        steps = [last_saved_step(each) for each in keepers if not each.save_weights_only]
        for file in [file for file, step in self.files.items() if step < max(steps, default=0)]:
            trainer.strategy.remove_checkpoint(file)
            del self.files[file]

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        self._received = number

    def _save_and_stop(self, number: int, trainer: L.Trainer) -> None:
        if number == self._requeue_signal and callable(self._requeue):
            self.files[requeue_path(trainer)] = trainer.global_step
            self._requeue(number, None)  # saves that file, and asks Slurm to stop and restart this job
            return
        keeper = trainer.checkpoint_callback
        folder = getattr(keeper, "dirpath", None) or trainer.default_root_dir
        path = join_location(folder, f"signal-step={trainer.global_step}.ckpt")
        outdated, self.files = self.files, {str(path): trainer.global_step}
        trainer.save_checkpoint(path, weights_only=False)
        for file in outdated.keys() - self.files.keys():
            trainer.strategy.remove_checkpoint(file)
        rank_zero_info(f"{signal.Signals(number).name}: saved {path}, and stop")
        raise SystemExit(128 + number)


def _max_over_processes(number: int, device: torch.device) -> int:
    value = torch.tensor([number], device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return int(value.item())
