"""The callback that watches over a run."""

import logging
import warnings
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_accel.callbacks.repeated_step import BufferCopies
from lightning_accel.callbacks.run_parts import attach_run_parts, detach_run_parts
from lightning_accel.callbacks.trainer_callbacks import callbacks_of, has_whole_modules
from lightning_accel.callbacks.watchdog.memory_growth import MemoryGrowth
from lightning_accel.callbacks.watchdog.nonfinite import (
    Agree,
    NonFiniteError,
    StepBegin,
    any_nonfinite,
    draws_of,
    find_origin,
)
from lightning_accel.callbacks.watchdog.stalls import StallWatch
from lightning_accel.callbacks.watchdog.step_times import StepTimes
from lightning_accel.data.shards.loader import ShardLoader
from lightning_accel.measure.run_parts import RunParts
from lightning_accel.ops.bounds import require_above, require_integers
from lightning_accel.ops.renames import renamed_arguments

_log = logging.getLogger(__name__)
_PERIOD = 5.0  # seconds between two looks at memory, at least


class Finding(NamedTuple):
    """Hold what a :class:`Watchdog` has found.

    Attributes:
        kind: ``hang``, ``slow rank``, ``data``, ``memory`` or ``not finite``.
        step: number of the training batch in the fit, from 0.
        text: what was found, and where.
    """

    kind: str
    step: int
    text: str


class Watchdog(L.Callback):
    """Warn of what goes wrong with a run while it trains, say where, and end the run or skip steps as asked.

    It serves any module, with any strategy, and the command line adds it. It finds

    - a run without progress: what it waits for, such as a loader and its worker, and which processes do not answer;
    - a process that takes a tenth of a step longer than most for its batches, or for its forward pass where processes
      do not meet in it, which all others wait for: which one, and on which machine;
    - a loader that a fifth of the time is spent waiting for;
    - memory that grows in each of six looks in a row: by how much, when it will be full, and which lists and tensors
      there are more of;
    - losses that are not finite, or with ``on_nonfinite="skip"`` or ``"end"`` gradients, too, before they change the
      weights: whether the batch was not finite (which samples), weights, or the forward or backward pass of a layer
      (which one). For the layer the step runs again, which leaves no trace. ``warn`` says the layer where one process
      trains on a CPU, and on a GPU the number of the batch alone.

    Each is said by a warning of this module's logger, once, or again when there is twice as much of it, and stands in
    ``findings``, of which :class:`~lightning_accel.callbacks.RunReport` shows a line. By default nothing in it waits
    for a GPU or for other processes: those publish their times in the store of their group.

    Args:
        timeout: seconds without any batch, validation, checkpoint or other hook before the first warning.
        on_hang: ``warn`` again after twice as long, and so on, or ``end`` the process with status 1 after the first
            warning, with the stacks of its threads on stderr, so that a launcher starts it again. What a collective
            operation or a loader waits at most is the ``timeout`` of the strategy and of the DataLoader.
        on_nonfinite: ``warn`` of losses alone; ``skip`` the updates of a step whose losses or gradients are not finite,
            in all processes, and give buffers such as the statistics of batch norms what they held before; or ``end``
            with a :class:`NonFiniteError` before the update. The last two look at all gradients in each step, which
            takes a pass over them, a wait for the GPU and, with several processes, an exchange of one number. Steps
            under loss scaling, which looks for infinite gradients itself, are left to it. A skipped step counts in
            ``global_step``, learning rates go on, and hooks before the update that come later find gradients of None.
        max_skipped: steps in a row that are skipped before the run ends as with ``end``.

    Attributes:
        findings: what was found in the last fit, as :class:`Finding` tuples.

    Raises:
        ValueError: if ``timeout`` is not above 0, ``max_skipped`` is below 1, or one of the choices is unknown.
        TypeError: before training, with ``skip`` or ``end`` under DeepSpeed, which keeps gradients to itself, and with
            LBFGS, which changes weights between several passes of a step.
        NonFiniteError: in training, as asked for.

    Example:
        >>> import lightning as L
        >>> from lightning_accel.callbacks import Watchdog
        >>> trainer = L.Trainer(max_epochs=5, callbacks=[Watchdog(timeout=600, on_nonfinite="skip")])
    """

    is_for_whole_fits = True  # and left out of those that doctor and tune measure

    @renamed_arguments(after_s="timeout")
    def __init__(
        self,
        timeout: float = 120.0,
        on_hang: Literal["warn", "end"] = "warn",
        on_nonfinite: Literal["warn", "skip", "end"] = "warn",
        max_skipped: int = 10,
    ) -> None:
        require_above(0, timeout=timeout)
        if on_hang not in ("warn", "end"):
            raise ValueError(f"on_hang must be 'warn' or 'end'; got {on_hang!r}")
        if on_nonfinite not in ("warn", "skip", "end"):
            raise ValueError(f"on_nonfinite must be 'warn', 'skip' or 'end'; got {on_nonfinite!r}")
        require_integers(1, max_skipped=max_skipped)
        self.timeout, self.on_hang = timeout, on_hang
        self.on_nonfinite, self.max_skipped = on_nonfinite, max_skipped
        self.findings: list[Finding] = []
        self._stalls = StallWatch(timeout, on_hang == "end", self._found_stall, self._exchange)
        self._step = 0
        self._parts: RunParts | None = None
        self._times: StepTimes | None = None
        self._memory: MemoryGrowth | None = None
        self._losses: _Losses | None = None
        self._bad_loss: Tensor | None = None
        self._buffers: BufferCopies | None = None
        self._begins: list[StepBegin] = []  # of the batches of one update
        self._is_over = True  # the update
        self._num_nonfinite = 0
        self._in_a_row: Counter[int] = Counter()  # by the identity of optimizers

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit" and self.on_nonfinite != "warn" and isinstance(trainer.strategy, DeepSpeedStrategy):
            raise TypeError(
                f"Watchdog(on_nonfinite={self.on_nonfinite!r}) cannot see gradients under DeepSpeed, which keeps them "
                "to itself; take on_nonfinite='warn'"
            )
        self._stalls.start(trainer.global_rank, trainer.world_size)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._end(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._end(trainer)

    def _end(self, trainer: L.Trainer) -> None:
        self._stalls.stop()
        if self._parts is not None:
            detach_run_parts(trainer)
        self._parts = self._times = self._memory = self._buffers = None
        self._begins.clear()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stalls.note("fetching the first training batch")
        if self.on_nonfinite != "warn" and any(isinstance(one, LBFGS) for one in trainer.optimizers):
            raise TypeError(
                f"Watchdog(on_nonfinite={self.on_nonfinite!r}) cannot keep the weights of a step of LBFGS, which "
                "changes them between several passes; take on_nonfinite='warn'"
            )
        self.findings, self._step, self._num_nonfinite = [], 0, 0
        self._in_a_row.clear()
        self._losses, self._bad_loss, self._buffers = _Losses(), None, BufferCopies(pl_module)
        self._begins, self._is_over = [], True
        self._parts = attach_run_parts(trainer)
        has_buffers = next(pl_module.buffers(), None) is not None  # which DDP broadcasts
        meets = not has_whole_modules(trainer) or has_buffers
        loader = trainer.train_dataloader
        workers = None if isinstance(loader, ShardLoader) else getattr(loader, "num_workers", None)  # it has threads
        self._times = StepTimes(trainer.global_rank, trainer.world_size, meets, workers)
        others = [one for one in callbacks_of(trainer, L.Callback) if one is not self]
        owners = {type(one).__name__: one for one in (*others, getattr(trainer, "datamodule", None), pl_module)}
        owners.pop("NoneType", None)
        self._memory = MemoryGrowth(trainer.strategy.root_device, owners, min(_PERIOD, self.timeout / 4))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._stalls.note(f"in the forward pass of training batch {batch_idx} of epoch {trainer.current_epoch}")
        is_kept = self.on_nonfinite != "warn"
        if self._is_over or not is_kept:
            self._begins.clear()
            self._is_over = False
            if is_kept and self._buffers is not None:
                self._buffers.take()
        draws = draws_of(trainer.strategy.root_device) if is_kept else None
        self._begins.append(StepBegin(self._step, batch, batch_idx, draws))

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        self._stalls.note(f"in the backward pass after step {trainer.global_step}")
        if self._losses is None:
            return
        flag = ~loss.detach().isfinite().all()
        if self.on_nonfinite != "warn" and not _has_scaler(trainer):  # gradients may be finite where the loss is not
            self._bad_loss = flag if self._bad_loss is None else self._bad_loss | flag
            return
        number = self._losses.first_nonfinite(flag, self._step)
        if number is None:
            return
        can_repeat = trainer.world_size == 1 and has_whole_modules(trainer)
        of_all: Agree | None = (lambda flag: flag) if can_repeat else None
        if number == self._step:
            found = self._origin(trainer, pl_module, of_all)
        else:  # its batch is gone
            self._num_nonfinite += 1
            found = (number, "on_nonfinite='end' says where that begins") if self._num_nonfinite == 1 else None
        self._say(number, f"the loss is not finite at training batch {number}", found)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        self._stalls.note(f"in the optimizer step after step {trainer.global_step}")
        self._is_over = True
        if self.on_nonfinite == "warn" or _has_scaler(trainer):
            return
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        flags = [self._bad_loss, any_nonfinite(one.grad for one in parameters if one.grad is not None)]
        self._bad_loss = None
        if not self._agree(trainer, [one for one in flags if one is not None]):
            self._in_a_row[id(optimizer)] = 0
            return
        self._in_a_row[id(optimizer)] += 1
        ends = self.on_nonfinite == "end" or self._in_a_row[id(optimizer)] > self.max_skipped
        found = self._origin(trainer, pl_module, lambda flag: self._agree(trainer, [flag]), is_asked=ends)
        if self._buffers is not None:
            if pl_module.automatic_optimization or len(trainer.optimizers) == 1:
                self._buffers.give_back()
            else:  # other optimizers of the same batch may have made good steps
                self._buffers.give_back(lambda buffer: bool(any_nonfinite([buffer])))
        if ends:
            number, text = found or (self._step, "")
            where = f": {text}" if text else ", in another process" if trainer.world_size > 1 else ""
            before = f", nor are the {self.max_skipped} before" if self.on_nonfinite == "skip" else ""
            raise NonFiniteError(
                f"training batch {number} is not finite{before}{where}. The weights are those before the step"
            )
        for one in parameters:
            one.grad = None  # which optimizers leave alone
        self._say(self._step, f"the update of training batch {self._step} is skipped", found)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._stalls.note(f"after training batch {batch_idx} of epoch {trainer.current_epoch}, before the next")
        self._step += 1
        if self.on_nonfinite == "warn":
            self._begins.clear()
        if self._times is not None and self._parts is not None:
            self._times.note(self._step, self._parts.seconds())
        if self._memory is not None and (grown := self._memory.look(self._step)):
            self._found("memory", self._step - 1, grown)

    def _agree(self, trainer: L.Trainer, flags: Sequence[Tensor | bool]) -> bool:
        """Return whether any of the flags is set in any process."""
        device = trainer.strategy.root_device
        agreed = torch.zeros((), device=device)
        for flag in flags:
            agreed = torch.maximum(agreed, torch.as_tensor(flag, dtype=torch.float32, device=device))
        if trainer.world_size > 1 and dist.is_initialized():
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return bool(agreed)

    def _origin(
        self, trainer: L.Trainer, module: L.LightningModule, of_all: Agree | None, is_asked: bool = False
    ) -> tuple[int, str] | None:
        """Return the number of the batch in which it begins, and where in it.

        They are looked for if that is asked, the first time, and after two, four, eight ... such steps.
        """
        self._num_nonfinite += 1
        if self._num_nonfinite & (self._num_nonfinite - 1) and not is_asked:
            return None
        for begin in self._begins:  # several where gradients are accumulated
            text = find_origin(trainer, module, begin, of_all)
            if text if of_all is None else of_all(bool(text)):
                return begin.number, text
        return None

    def _say(self, number: int, what: str, found: tuple[int, str] | None) -> None:
        if found is not None and found[1]:
            batch = f"in batch {found[0]}, " if found[0] != number else ""
            self._found("not finite", number, f"{what}: {batch}{found[1]}")
        elif self._num_nonfinite <= 1:
            self._found("not finite", number, what)

    def _found(self, kind: str, number: int, text: str) -> None:
        self.findings.append(Finding(kind, number, text))
        _log.warning(text)

    def _found_stall(self, text: str) -> None:
        self.findings.append(Finding("hang", self._step, text))

    def _exchange(self) -> None:
        """Compare the processes; a thread calls it."""
        if (times := self._times) is None:
            return
        try:
            found = times.exchange()
        except RuntimeError:  # of the store, where the first process has ended
            return
        for kind, text in found.items():
            self._found("slow rank" if kind.startswith("rank") else kind, self._step, text)

    def __getstate__(self) -> dict[str, Any]:
        gone = ("_parts", "_times", "_memory", "_losses", "_buffers", "_bad_loss")  # of a fit, or of a device
        return self.__dict__ | dict.fromkeys(gone) | {"_begins": []}


class _Losses:
    """Look at losses without waiting for a GPU, from which the answers come with later ones."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Tensor, torch.cuda.Event, int]] = deque()

    def first_nonfinite(self, flag: Tensor, number: int) -> int | None:
        """Return the number of a batch whose loss is not finite, None without one.

        Args:
            flag: whether the loss of this batch is not finite.
            number: of this batch.
        """
        if not flag.is_cuda:
            return number if flag else None
        on_host = torch.empty((), dtype=torch.bool, pin_memory=True)
        on_host.copy_(flag, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending.append((on_host, event, number))
        while self._pending and self._pending[0][1].query():
            was_bad, _, before = self._pending.popleft()
            if was_bad:
                return before
        return None


def _has_scaler(trainer: L.Trainer) -> bool:
    return getattr(trainer.precision_plugin, "scaler", None) is not None


def StallMonitor(timeout: float = 120.0) -> Watchdog:
    """Return a :class:`Watchdog`, with a warning: the earlier name, which saved configs hold."""
    warnings.warn("lightning_accel.callbacks.StallMonitor is now Watchdog", FutureWarning, stacklevel=2)
    return Watchdog(timeout)


def _hook(activity: str) -> Callable[..., None]:
    """Return a hook that notes the activity; the number of a batch is the third argument after the module at an end."""

    def note(self: Watchdog, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        number = args[2 if activity.startswith("after") else 1] if "{number}" in activity else None
        self._stalls.note(activity.format(number=number, epoch=trainer.current_epoch, step=trainer.global_step))

    return note


for _name, _activity in {
    "on_train_epoch_end": "at the end of epoch {epoch}",
    "on_validation_start": "fetching the first validation batch",
    "on_validation_batch_start": "in validation batch {number}",
    "on_validation_batch_end": "after validation batch {number}, before the next",
    "on_test_batch_start": "in test batch {number}",
    "on_test_batch_end": "after test batch {number}, before the next",
    "on_predict_batch_start": "in predict batch {number}",
    "on_predict_batch_end": "after predict batch {number}, before the next",
    "on_save_checkpoint": "saving a checkpoint",
    "on_train_end": "at the end of the fit",
}.items():
    setattr(Watchdog, _name, _hook(_activity))
