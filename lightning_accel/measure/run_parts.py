"""Accounting of a whole fit's wall time by parts, in sums alone, which costs less than Lightning's own hooks."""

import time
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.pytorch.profilers import Profiler

from lightning_accel.measure.step_parts import PARTS, hook_of, part_of

RUN_PARTS = (*PARTS[:-1], "checkpoints", PARTS[-1])


class RunParts(Profiler):
    """Sum up the wall time of a fit by part, from the actions that Lightning reports to its profiler.

    Parts are those of :class:`lightning_accel.measure.StepParts`, and ``checkpoints``. A part's time excludes what is
    nested in it, but validation and checkpoints include all that happens in them. Actions of others, such as a user's
    own, belong to what they are nested in. On a GPU, which computes meanwhile, a part is what the host spent in it.

    Args:
        idle: names of actions in which nothing happens, such as hooks that a callback does not have.
    """

    def __init__(self, idle: Collection[str] = ()) -> None:
        super().__init__()
        self._spent = dict.fromkeys(RUN_PARTS, 0)  # ns
        self._part = "rest"
        self._last = time.perf_counter_ns()
        # actions, and stretches between actions that Lightning does not report; each with the part to return to
        self._open: list[tuple[_Action | str, str]] = []
        nothing: AbstractContextManager[None] = nullcontext()
        self._actions: dict[str, Any] = dict.fromkeys(idle, nothing)
        self._stretch: str | None = None
        self._is_validating = False

    def seconds(self) -> dict[str, float]:
        """Return the time of each part so far in s; the sum is the time since this object was made."""
        self._mark()
        return {part: spent / 1e9 for part, spent in self._spent.items()}

    def profile(self, action_name: str) -> Any:
        """Return a context that accounts for an action."""
        action = self._actions.get(action_name)
        if action is None:
            action = self._actions[action_name] = _Action(self, action_name)
        return action

    def start(self, action_name: str) -> None:
        """Begin an action; Lightning calls it."""
        self.profile(action_name).__enter__()

    def stop(self, action_name: str) -> None:
        """End an action; Lightning calls it."""
        self.profile(action_name).__exit__(None, None, None)

    def begin(self, action: "_Action") -> None:
        """Change to the part of an action."""
        if self._stretch is not None and (self._stretch == "logging" or action.hook == "on_after_backward"):
            self._return_from(self._stretch)
        if action.hook == "on_validation_model_eval":
            self._begin_stretch("validation")
            self._is_validating = True
        self._open.append((action, self._part))
        part = action.part
        is_kept = self._part == "checkpoints" or (self._is_validating and part != "checkpoints")
        if part is not None and not is_kept:
            self._switch(part)

    def end(self, action: "_Action") -> None:
        """Change to the part around an action; an unknown one is left out."""
        if self._open and self._open[-1][0] is action:
            self._switch(self._open.pop()[1])
        else:
            self._return_from(action)
        if not action.has_stretch:
            return
        if action.hook == "on_validation_end":
            self._return_from("validation")
        elif not self._is_validating:
            self._stretch = "backward" if action.hook == "on_before_backward" else "logging"
            self._begin_stretch(self._stretch)

    def _begin_stretch(self, part: str) -> None:
        self._open.append((part, self._part))
        self._switch(part)

    def _return_from(self, wanted: "_Action | str") -> None:
        """End an action or a stretch, and what an error has left open in it."""
        if not any(opened is wanted for opened, _ in self._open):
            return
        opened: _Action | str | None = None
        while opened is not wanted:
            opened, part = self._open.pop()
            if opened == "validation":
                self._is_validating = False
            elif isinstance(opened, str):
                self._stretch = None
        self._switch(part)

    def _switch(self, part: str) -> None:
        if part != self._part:
            self._mark()
            self._part = part

    def _mark(self) -> None:
        """Attribute the time since the last mark to the current part."""
        now = time.perf_counter_ns()
        self._spent[self._part] += now - self._last
        self._last = now


class _Action:
    """Account for each time that an action is entered; there is one object for each name."""

    __slots__ = ("has_stretch", "hook", "part", "parts")

    def __init__(self, parts: RunParts, name: str) -> None:
        self.parts = parts
        self.hook = hook_of(name)
        part = "checkpoints" if self.hook == "save_checkpoint" else part_of(name)
        self.part = None if part == "rest" else part
        of_module = name.startswith("[LightningModule]") and self.hook in ("on_before_backward", "on_train_batch_end")
        self.has_stretch = of_module or (name.startswith("[Strategy]") and self.hook == "on_validation_end")

    def __enter__(self) -> None:
        self.parts.begin(self)

    def __exit__(self, *_: object) -> None:
        self.parts.end(self)
