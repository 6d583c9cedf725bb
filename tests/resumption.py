"""Runs that are stopped and resumed, and what of them has to equal a run that was not."""

import csv
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_accel.strategies import AtomicCheckpointIO
from lightning_accel.strategies.checkpoints.io import newest_checkpoint

Rows = dict[tuple[int, str], str]


class Killed(BaseException):
    """Stands for SIGKILL within one process."""


class StopAt(Callback):
    """Kill the run when ``hook`` is called for the ``time``-th time (from 1), or send its process a signal."""

    def __init__(self, hook: str, time: int, sends: signal.Signals | None = None) -> None:
        self.hook, self.left, self.sends = hook, time, sends
        setattr(self, hook, self._count)

    def _count(self, trainer: L.Trainer, *_: Any) -> None:
        self.left -= not trainer.sanity_checking
        if self.left == 0 and self.sends:
            os.kill(os.getpid(), self.sends)
        elif self.left == 0:
            raise Killed(self.hook)


class StopAfterWriting(AtomicCheckpointIO):
    """Kill the run as soon as the ``number``-th checkpoint (from 1) is on the disk; 0 never does, and counts them."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number, self.written = number, 0

    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        super().save_checkpoint(*arguments, **options)
        self.written += 1
        if self.written == self.number:
            raise Killed(f"after checkpoint {self.number}")


@dataclass
class Ended:
    """What a run left behind: a checkpoint of its end, and all that it logged."""

    checkpoint: dict[str, Any]
    rows: Rows
    files: list[str]


def run_until_stopped(fit: Callable[[], object]) -> None:
    """Run ``fit``, which has to be stopped."""
    with pytest.raises((Killed, SystemExit)) as stop:
        fit()
    if isinstance(stop.value, SystemExit):
        assert stop.value.code == 128 + signal.SIGTERM


def ended(trainer: L.Trainer, folder: Path) -> Ended:
    """Collect what is compared of a run that is over, with all of its files in ``folder``."""
    end = folder / "end.ckpt"
    trainer.save_checkpoint(end)
    checkpoint = torch.load(end, weights_only=True)
    trainer.strategy.barrier()
    trainer.strategy.remove_checkpoint(end)
    trainer.strategy.barrier()
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.ckpt"))
    return Ended(_without(str(folder), checkpoint), logged_rows(folder), files)


def logged_rows(folder: Path) -> Rows:
    """Read the metrics of a run: all tables in ``folder``, by step and name, as text.

    What a stopped run logged after its last checkpoint is logged again when it goes on.

    Raises:
        AssertionError: if a figure was logged twice, with different values.
    """
    rows: Rows = {}
    for path in sorted(folder.rglob("metrics*.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                step = int(row.pop("step"))
                for name, value in row.items():
                    if value and rows.setdefault((step, name), value) != value:
                        raise AssertionError(f"step {step}: {name} is {rows[step, name]} and, logged again, {value}")
    return rows


def assert_same_rows(found: Rows, expected: Rows) -> None:
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    common = sorted(found.keys() & expected.keys())
    wrong = [(key, found[key], expected[key]) for key in common if found[key] != expected[key]]
    assert not missing + extra, f"missing rows {missing}; extra rows {extra}"
    assert not wrong, f"found, expected: {wrong}"


def assert_same_end(resumed: Ended, whole: Ended, ignored: tuple[str, ...] = ()) -> None:
    """Compare weights, optimizers, schedulers, loops, callbacks, all figures logged, and which checkpoints are left.

    Args:
        resumed: run that was stopped.
        whole: run that was not.
        ignored: parts of names in the checkpoint, such as clocks.
    """
    assert_same_rows(resumed.rows, whole.rows)
    different = [
        f"{name}: {str(found)[:80]} for {str(expected)[:80]}"
        for name, found, expected in differences(resumed.checkpoint, whole.checkpoint)
        if not any(part in name for part in ignored)
    ]
    assert not different, "\n".join(different[:20])
    assert resumed.files == whole.files


def differences(found: Any, expected: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield where two checkpoints differ, by a bit or more."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in {**expected, **found}:
            yield from differences(found.get(key, "nothing"), expected.get(key, "nothing"), f"{name}/{key}")
    elif isinstance(found, list | tuple) and isinstance(expected, list | tuple) and len(found) == len(expected):
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            yield from differences(one, other, f"{name}/{number}")
    elif isinstance(found, Tensor) and isinstance(expected, Tensor):
        if found.dtype != expected.dtype or not torch.equal(found, expected):
            yield name, found, expected
    elif found != expected:
        yield name, found, expected


def newest(folder: Path) -> Path | None:
    """Find the newest checkpoint in ``folder``, the same for all processes."""
    found = [newest_checkpoint([folder])]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    return found[0]


def _without(folder: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {_without(folder, key): _without(folder, each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without(folder, each) for each in value]
    return value.replace(folder, "") if isinstance(value, str) else value
