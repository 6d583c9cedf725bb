"""Accounting of a fit's wall time by parts of a step, from the actions that Lightning reports to its profiler."""

import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning import LightningModule
from lightning.pytorch.profilers import Profiler
from torch import Tensor

# In the order of a step
PARTS = (
    "data",  # waiting for the next batch
    "transfer",  # host to device
    "forward",
    "backward",
    "optimizer",
    "callbacks",  # and hooks of the module, and checkpoints
    "logging",  # what the Trainer does after a batch: metrics, loggers
    "validation",
    "waiting",  # for other ranks
    "rest",  # of the Trainer's loop
)
PART_NAMES = {
    "data": "waiting for data",
    "transfer": "host to device",
    "callbacks": "callbacks and hooks",
    "waiting": "waiting for other ranks",
    "rest": "the Trainer's loop",
}
_PART_OF = {
    "train_dataloader_next": "data",
    "on_before_batch_transfer": "transfer",
    "batch_to_device": "transfer",
    "transfer_batch_to_device": "transfer",
    "on_after_batch_transfer": "transfer",
    "training_step": "forward",
    "backward": "backward",
    "optimizer_step": "optimizer",
    "optimizer_zero_grad": "optimizer",
    "configure_gradient_clipping": "optimizer",
    "clip_gradients": "optimizer",
    "lr_scheduler_step": "optimizer",
    "save_checkpoint": "callbacks",
}


# Stretches between actions that Lightning does not report, with their parts
_BACKWARD = ("manual backward", "backward")
_LOGGING = ("loggers", "logging")
_VALIDATION = ("validation", "validation")


class Segment(NamedTuple):
    """Hold an uninterrupted stretch of a step: its part, the action that took it, and its borders in ns."""

    part: str
    action: str
    begin: int
    end: int


class Step(NamedTuple):
    """Hold where the time of one training batch went, without a gap, from its fetch to the next."""

    segments: tuple[Segment, ...]

    @property
    def wall_ns(self) -> int:
        return self.segments[-1].end - self.segments[0].begin

    def parts_ns(self) -> dict[str, int]:
        """Return the time of each part in ns; the sum is ``wall_ns``."""
        times = dict.fromkeys(PARTS, 0)
        for segment in self.segments:
            times[segment.part] += segment.end - segment.begin
        return times


class StepParts(Profiler):
    """Account for the time of each training batch by part, as ``Trainer(profiler=StepParts())``.

    A part's time excludes what is nested in it, and the parts of a step sum to its wall time. Lightning reports the
    actions; the backward pass of ``manual_backward`` lies between its hooks ``on_before_backward`` and
    ``on_after_backward``. A module that calls ``loss.backward()`` itself has it counted as forward.

    Args:
        exact: at the borders of parts, wait for the GPU, and for other ranks before forward and backward, so that time
            counts where it is caused. This takes away what overlaps; otherwise a part is the time of this process.
        keep: number of steps to keep, the last.

    Attributes:
        steps: the last complete steps, the oldest first.
    """

    def __init__(self, exact: bool = False, keep: int = 1000) -> None:
        super().__init__()
        self.exact = exact
        self.steps: deque[Step] = deque(maxlen=keep)
        self._open: list[tuple[str, str]] = []  # actions and their parts, the innermost last
        self._segments: list[Segment] | None = None  # of the step in progress
        self._has_trained = False
        self._last = 0

    def start(self, action_name: str) -> None:
        """Begin an action; Lightning calls it."""
        hook = hook_of(action_name)
        part = part_of(action_name)
        self._synchronize(part)
        self._mark()
        if self._open and (self._open[-1] == _LOGGING or (self._open[-1] == _BACKWARD and hook == "on_after_backward")):
            self._open.pop()
        if hook in ("train_dataloader_next", "on_train_epoch_end"):
            self._end_step()
        if hook == "train_dataloader_next":
            self._segments, self._has_trained = [], False
        elif hook == "on_validation_model_eval":
            self._open.append(_VALIDATION)
        elif hook == "training_step":
            self._has_trained = True
        self._open.append((action_name, part))

    def stop(self, action_name: str) -> None:
        """End an action; Lightning calls it."""
        names = [action for action, _ in self._open]
        if action_name not in names:
            return
        part = dict(self._open)[action_name]
        self._synchronize(part)
        self._mark()
        del self._open[len(names) - 1 - names[::-1].index(action_name) :]  # and gaps in it that an error left open
        hook, is_module = hook_of(action_name), action_name.startswith("[LightningModule]")
        if hook == "on_before_backward" and is_module:
            self._wait()
            self._open.append(_BACKWARD)
        elif hook == "on_train_batch_end" and is_module:
            self._open.append(_LOGGING)
        elif hook == "batch_to_device":
            self._wait()
        elif hook == "on_validation_end" and action_name.startswith("[Strategy]") and _VALIDATION in self._open:
            self._open.remove(_VALIDATION)

    def teardown(self, stage: str | None) -> None:
        """Discard a step that is not complete."""
        super().teardown(stage)
        self._open, self._segments = [], None

    def _mark(self) -> None:
        """Attribute the time since the last mark to the innermost action."""
        now = time.perf_counter_ns()
        if self._segments is not None:
            action, part = self._open[-1] if self._open else ("loop", "rest")
            if _VALIDATION in self._open:
                part = "validation"
            self._add(Segment(part, action, self._last, now))
        self._last = now

    def _add(self, segment: Segment) -> None:
        assert self._segments is not None
        before = self._segments[-1] if self._segments else None
        if before is not None and (before.part, before.action) == (segment.part, segment.action):
            segment = segment._replace(begin=self._segments.pop().begin)
        self._segments.append(segment)

    def _end_step(self) -> None:
        if self._segments and self._has_trained:
            self.steps.append(Step(tuple(self._segments)))
        self._segments = None

    def _synchronize(self, part: str) -> None:
        if self.exact and part in ("transfer", "forward", "backward", "optimizer") and torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def _wait(self) -> None:
        """Wait for all ranks, if the time is to be exact and all of them are at this point of a training step."""
        in_training = self._segments is not None and _VALIDATION not in self._open
        if not (self.exact and in_training and dist.is_available() and dist.is_initialized()):
            return
        self._open.append(("other ranks", "waiting"))
        dist.barrier()
        self._mark()
        self._open.pop()


def part_times(steps: Iterable[Step]) -> dict[str, float]:
    """Return the mean time of each part in ms a step; the sum is the mean wall time. Zeros if there are no steps."""
    listed = list(steps)
    times = dict.fromkeys(PARTS, 0.0)
    for step in listed:
        for part, spent in step.parts_ns().items():
            times[part] += spent / 1e6 / len(listed)
    return times


def action_times(steps: Iterable[Step], part: str) -> dict[str, float]:
    """Return the mean time of each action of a part in ms a step, the longest first."""
    listed = list(steps)
    times: dict[str, float] = {}
    for segment in (segment for step in listed for segment in step.segments if segment.part == part):
        times[segment.action] = times.get(segment.action, 0.0) + (segment.end - segment.begin) / 1e6 / len(listed)
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def hook_of(action: str) -> str:
    """Return the hook of an action: ``backward`` for ``[Strategy]DDPStrategy.backward``; keys may have dots, too."""
    return action.rpartition(".")[2]


def part_of(action: str) -> str:
    """Return the part of a step that an action of Lightning's belongs to; ``rest`` if it is not known."""
    if action.startswith("[Callback]"):
        return "callbacks"
    hook = hook_of(action)
    is_hook = action.startswith("[") and hook.startswith(("on_", "setup", "configure_"))
    return _PART_OF.get(hook, "callbacks" if is_hook else "rest")


def batch_size_of(batch: Any) -> int | None:
    """Return the size of the first dimension of a batch's first tensor, or its number of graphs; None without one.

    Lightning's own function warns where several tensors differ, and reads iterators, which it empties.
    """
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else None
    if isinstance(graphs := getattr(batch, "num_graphs", None), int):
        return graphs
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif is_dataclass(batch):
        batch = vars(batch).values()
    elif not isinstance(batch, list | tuple):
        return None
    return next((size for each in batch if (size := batch_size_of(each)) is not None), None)


def bad_loss_of(module: LightningModule, outputs: Any) -> str:
    """Return what is wrong with the loss of a step, from the outputs that callbacks get; "" if nothing is.

    With manual optimization, no loss is expected.
    """
    if not module.automatic_optimization:
        return ""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, Tensor):
        return "training_step returns no loss, so that nothing is trained"
    if torch.isfinite(loss).all():
        return ""
    return f"the loss is {loss.item()}; Trainer(detect_anomaly=True) names the operation where that begins"
