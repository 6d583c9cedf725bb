"""Report at the end of a fit: where its time went, what it reached, and what to do next."""

import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_accel._private.torch import num_compiled_graphs, tree_leaves
from lightning_accel.callbacks.early_stopping import RestoringEarlyStopping
from lightning_accel.callbacks.fit_end import failures_as_warnings
from lightning_accel.callbacks.monitors.run_summary import BestCheckpoint, RunSummary, overfitted
from lightning_accel.callbacks.run_parts import attach_run_parts, detach_run_parts
from lightning_accel.callbacks.trainer_callbacks import callbacks_of
from lightning_accel.callbacks.watchdog.callback import Watchdog
from lightning_accel.measure.flops import FlopCount, precision_of_products
from lightning_accel.measure.memory import gradient_bytes, optimizer_bytes, storages
from lightning_accel.measure.peak_memory import peak_bytes
from lightning_accel.measure.rates import matmul_rate
from lightning_accel.measure.run_parts import RunParts
from lightning_accel.measure.step_parts import batch_size_of
from lightning_accel.measure.table import print_tables
from lightning_accel.strategies.checkpoints.atomic import write_atomically

Commands = Callable[[L.Trainer, L.LightningModule, str | None], list[str]]

_COUNT_AFTER = 30.0  # seconds, so that the batch whose operations are counted, and the rate, take less than 1 %
_MOST_POINTS = 1000  # of a curve; beyond that, every second one goes
_RATE_SECONDS = 0.02
_NOT_SHARED = ("backward", "validation", "checkpoints", "rest")  # parts in which a rank may wait for others
_FAILED = "the report of the run failed"


class RunReport(L.Callback):
    """End a fit with a short table, pictures and ``run_report.json`` in the run folder.

    They tell the time by part, samples a second, the share of the machine's measured peak, memory, the best metric and
    its checkpoint, and what to type next; ``run_report_curves.png`` shows metrics of validation, whose names begin with
    ``val``, if there was more than one. The command line adds it. The first process alone reports. A fit that is
    interrupted or fails is reported up to there; ``fast_dev_run`` and ``barebones`` are not. A run without a logger has
    no folder, and gets the table alone, as one without matplotlib gets no picture. A further fit in the same folder
    writes ``run_report_2.json``, and so on.

    Times are those of :class:`lightning_accel.measure.RunParts`, read from the actions that Lightning reports to its
    profiler; one of your own keeps getting them. Under DDP, the time that the slowest process takes longer than this
    one outside of the backward pass is reported as waiting, not as backward. Operations are counted in one batch after
    30 seconds, of one device or under DDP, and if nothing is compiled, since counting would compile again.

    Attributes:
        summary: what was reported of the last fit; None before its end and in processes other than the first.
        has_graphs: whether the first training batch of the last fit held data objects of PyTorch Geometric.
        commands: a function of the Trainer, the module and the best checkpoint that returns the lines to type next; by
            default those of Python.

    Example:
        >>> import lightning as L
        >>> from lightning_accel.callbacks import RunReport
        >>> report = RunReport()
        >>> trainer = L.Trainer(max_epochs=5, callbacks=[report])
        >>> report.summary is None  # before the end of a fit
        True
    """

    is_for_whole_fits = True  # and left out of those that doctor and tune measure

    def __init__(self) -> None:
        self.summary: RunSummary | None = None
        self.has_graphs = False
        self.commands: Commands = python_lines
        self._parts: RunParts | None = None
        self._folder: Path | None = None
        self._counter: FlopCount | None = None
        self._begin = 0.0
        self._first_epoch = self._first_step = self._batches = self._samples = 0
        self._gradients, self._waited = 0, 0.0
        self._memory: dict[str, int] = {}
        self._curves: dict[str, list[tuple[int, float]]] = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.summary, self._parts, self._counter, self._memory, self._curves = None, None, None, {}, {}
        if not _is_reported(trainer):
            return
        folder = trainer.log_dir if trainer.loggers else None  # asked on every process, since it is broadcast
        self._folder = None if folder is None or "://" in folder else Path(folder)
        self._batches, self._samples, self._gradients, self._waited = 0, 0, 0, 0.0
        self._first_epoch = self._first_step = 0
        self._begin = time.monotonic()
        with failures_as_warnings(_FAILED):
            self._parts = attach_run_parts(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._first_epoch, self._first_step = trainer.current_epoch, trainer.global_step  # those of a resumed run

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        is_due = self._counter is None and self._parts is not None and time.monotonic() - self._begin > _COUNT_AFTER
        if is_due and _reason_not_to_count(trainer) is None:
            self._counter = FlopCount(batch=0)
        if self._counter is not None:
            self._counter.on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._counter is not None:
            self._counter.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._parts is not None:
            self._batches += 1
            self._samples += batch_size_of(batch) or 0
            if self._batches == 1:
                self.has_graphs = any(map(_is_graph, tree_leaves(batch)))
                self._gradients = gradient_bytes(pl_module)  # validation frees them

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._parts is None or trainer.sanity_checking:
            return
        for name, value in trainer.logged_metrics.items():
            if name.startswith("val"):
                curve = self._curves.setdefault(name, [])
                curve.append((trainer.global_step, float(value)))
                if len(curve) > _MOST_POINTS:
                    del curve[1::2]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not _is_reported(trainer):
            return
        if isinstance(trainer.strategy, DDPStrategy) and trainer.world_size > 1:
            # all processes call it, those too in which something has failed
            times = {} if self._parts is None else self._parts.seconds()
            busy = sum(spent for part, spent in times.items() if part not in _NOT_SHARED)
            gathered = trainer.strategy.all_gather(torch.tensor(busy, device=trainer.strategy.root_device))
            self._waited = float(gathered.max()) - busy
        with failures_as_warnings(_FAILED):  # here the optimizers are still on their device
            self._memory = self._memory_of(trainer, pl_module)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._report(trainer, pl_module, None)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self._counter is not None:
            self._counter.on_exception(trainer, pl_module, exception)
        if self._parts is not None and not self._memory:
            with failures_as_warnings(_FAILED):
                self._memory = self._memory_of(trainer, pl_module)
        self._report(trainer, pl_module, exception)

    def _report(self, trainer: L.Trainer, pl_module: L.LightningModule, error: BaseException | None) -> None:
        if self._parts is None:
            return
        with failures_as_warnings(_FAILED):
            times = self._parts.seconds()
            self._parts = None
            detach_run_parts(trainer)
            if not trainer.is_global_zero or (error is not None and not self._batches):
                return
            self.summary = self._summarize(trainer, pl_module, times, error)
            print()
            print_tables([self.summary.table()])
            print(*[f"  {line}" for line in self.summary.commands], sep="\n", flush=True)
            if self._folder is not None:
                _write(self.summary, self._folder)

    def _summarize(
        self, trainer: L.Trainer, pl_module: L.LightningModule, times: dict[str, float], error: BaseException | None
    ) -> RunSummary:
        waited = min(max(self._waited, 0.0), times["backward"])
        times |= {"waiting": waited, "backward": times["backward"] - waited}
        training = sum(times.values()) - times["validation"] - times["checkpoints"]
        share, reason = self._share_of_peak(trainer, training)
        was_stopped = isinstance(error, KeyboardInterrupt | SIGTERMException)
        watchdogs = callbacks_of(trainer, Watchdog)
        health = watchdogs[0].findings if watchdogs else None
        if not any(keeper.monitor for keeper in callbacks_of(trainer, ModelCheckpoint)) and not any(
            each.restore_best for each in callbacks_of(trainer, RestoringEarlyStopping)
        ):
            rises = overfitted(self._curves)
            health = [*(health or []), *rises] if rises else health
        best = best_checkpoints(trainer)
        path = next((each.path for each in best), None)
        return RunSummary(
            status="finished" if error is None else "interrupted" if was_stopped else "failed",
            error=None if error is None or was_stopped else f"{type(error).__name__}: {error}",
            seconds=sum(times.values()),
            parts=times,
            epochs=trainer.current_epoch - self._first_epoch,
            batches=self._batches,
            steps=trainer.global_step - self._first_step,
            samples_per_s=self._samples * _num_replicas(trainer) / training if self._samples else None,
            processes=trainer.world_size,
            device=str(trainer.strategy.root_device),
            precision=str(trainer.precision),
            share_of_peak=share,
            no_share_because=reason,
            memory=self._memory,
            best=best,
            metrics={name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1},
            curves=self._curves,
            health=health,
            commands=self.commands(trainer, pl_module, path),
        )

    def _memory_of(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, int]:
        return {
            "parameters": sum(storages(module.parameters()).values()),
            "gradients": self._gradients,
            "optimizer": optimizer_bytes(trainer.optimizers),
            "peak": peak_bytes(trainer.strategy.root_device),
        }

    def _share_of_peak(self, trainer: L.Trainer, seconds: float) -> tuple[float | None, str | None]:
        if reason := _reason_not_to_count(trainer):
            return None, reason
        if self._counter is None:
            return None, f"not measured in the first {_COUNT_AFTER:.0f} s"
        if not self._counter.flops:
            return None, "no operations that torch counts"
        device = trainer.strategy.root_device
        try:
            key = precision_of_products(str(trainer.precision), device)
            peak = matmul_rate(key, device, _RATE_SECONDS, repeats=3)
        except RuntimeError as error:
            return None, f"the peak could not be measured: {str(error).splitlines()[0]}"
        return self._counter.flops * self._batches / seconds / peak, None


def _is_graph(value: Any) -> bool:
    library = sys.modules.get("torch_geometric")  # importing it takes seconds
    return library is not None and isinstance(value, library.data.data.BaseData)


def _is_reported(trainer: L.Trainer) -> bool:
    return not (trainer.fast_dev_run or trainer.barebones)  # type: ignore[attr-defined]  # set by a connector


def _reason_not_to_count(trainer: L.Trainer) -> str | None:
    if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
        return f"not measured under {type(trainer.strategy).__name__}"
    return "not measured in compiled runs" if num_compiled_graphs() else None


def _num_replicas(trainer: L.Trainer) -> int:
    """Return how many processes get batches of their own; those of a pipeline share theirs."""
    return (getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}).get("num_replicas", 1)


def best_checkpoints(trainer: L.Trainer) -> list[BestCheckpoint]:
    """Return the best checkpoint of each ModelCheckpoint that has written one; the last where none is the best."""
    found = []
    for keeper in callbacks_of(trainer, ModelCheckpoint):
        score = keeper.best_model_score
        if path := keeper.best_model_path or keeper.last_model_path:
            found.append(BestCheckpoint(keeper.monitor, None if score is None else float(score), path))
    return found


def python_lines(trainer: L.Trainer, module: L.LightningModule, checkpoint: str | None) -> list[str]:
    """Return what to do with a Trainer that is still there."""
    if checkpoint is None or trainer.interrupted:
        return []
    steps = [name for name in ("test", "predict") if is_overridden(f"{name}_step", module)]
    return [f"trainer.{name}(ckpt_path={checkpoint!r})" for name in steps]


def _write(summary: RunSummary, folder: Path) -> None:
    """Write files of a number that no report in the folder has yet."""
    folder.mkdir(parents=True, exist_ok=True)
    name, number = "run_report", 1
    while (folder / f"{name}.json").exists():
        number += 1
        name = f"run_report_{number}"
    with write_atomically(folder / f"{name}.json") as part:
        part.write_text(summary.to_json())
    if find_spec("matplotlib") is not None:
        summary.draw(folder / f"{name}.png")
        summary.draw_curves(folder / f"{name}_curves.png")
