"""Examination of a user's own fit in a temporary folder."""

import tempfile
import time
import warnings
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lightning_accel._private.lightning import logger_connector
from lightning_accel._private.torch import BatchNormBase, DropoutBase, profile_with_stacks, tree_leaves
from lightning_accel.diagnosis.graph_breaks import CompiledCalls, GraphBreaks
from lightning_accel.diagnosis.host_syncs import HostSync, host_syncs
from lightning_accel.measure import (
    FlopCount,
    MemoryCount,
    MemoryUse,
    Step,
    StepParts,
    batch_size_of,
    isolate,
    part_times,
)
from lightning_accel.measure.flops import precision_of_products
from lightning_accel.measure.machine import usable_cores

_PROFILED = 2  # batches under torch.profiler
_SANITY_BATCHES = 2
_LEAST = 3  # batches to time


@dataclass
class Examined:
    """Hold what was seen of a fit.

    Attributes:
        device: of the module.
        world_size: number of processes.
        precision: the Trainer's.
        batch_size: samples of a batch in this process; None if it cannot be told.
        steps: complete batches without instruments other than the clock, without validation.
        logged: whether each of ``steps`` was one whose metrics the Trainer sends to loggers.
        flops: operations of a batch in this process; None if not counted.
        memory: bytes of this process; None if not counted.
        loading_ms: time of a batch of the training data alone; None if there were too few batches.
        syncs: places where the host waits for a number, in the batches under torch.profiler.
        training_in_validation: names of dropouts and batch norms that were in train mode there.
        unused: names of parameters that have no gradient after the backward pass.
        float64: names of parameters and of places in the batch that are float64.
        module: the module, as the last batch left it.
        loader_facts: settings of the training DataLoaders.
        log_every_n_steps: the Trainer's.
        threads: threads within an operation.
        batch_bytes: of the tensors of a batch.
        fewer_threads_saved_ms: how much shorter a step is with one thread for each core of this process's share, None
            if it has no more than that.
        graph_breaks: of compiled submodules.
    """

    device: torch.device
    world_size: int
    precision: str
    batch_size: int | None
    module: nn.Module
    log_every_n_steps: int
    threads: int
    batch_bytes: int = 0
    fewer_threads_saved_ms: float | None = None
    graph_breaks: list[GraphBreaks] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    logged: list[bool] = field(default_factory=list)
    flops: int | None = None
    memory: MemoryUse | None = None
    loading_ms: float | None = None
    syncs: list[HostSync] = field(default_factory=list)
    training_in_validation: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    float64: list[str] = field(default_factory=list)
    loader_facts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def multiplies_in(self) -> str:
        """Return the key of measured rates for matrix products of the run."""
        return precision_of_products(self.precision, self.device, has_float64=bool(self.float64))

    def to_dict(self) -> dict[str, Any]:
        """Return all but the module and the single steps as values that JSON can hold."""
        left_out = ("module", "steps", "logged", "device", "memory", "syncs", "graph_breaks")
        told = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in left_out}
        parts = part_times(self.steps)
        return told | {
            "device": str(self.device),
            "step_ms": sum(parts.values()),
            "parts_ms": parts,
            "steps": len(self.steps),
            "memory": None if self.memory is None else self.memory.to_dict(),
            "syncs": [sync._asdict() for sync in self.syncs],
            "graph_breaks": [each._asdict() for each in self.graph_breaks],
        }


class TooShortError(Exception):
    """Signal a run that ended before enough batches were trained to measure them."""


class _Examination(L.Callback):
    """Watch a fit: instruments for some batches first, then the clock alone, then stop it."""

    def __init__(self, seconds: float, max_steps: int, accumulate: int) -> None:
        self.seconds, self.max_steps = seconds, max_steps
        self.steps = StepParts(keep=max_steps)
        self.timed: list[Step] = []
        self.compiled: CompiledCalls | None = None
        self.profile_from = accumulate + 2  # after batches that warm up, count operations and measure memory
        self.timed_from = self.profile_from + _PROFILED
        self.seen = 0
        self.began = 0.0
        self.profiler: profile | None = None
        self.found: Examined | None = None
        self.loaders: Any = None
        self.training_in_validation: dict[str, None] = {}
        self.unused: list[str] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # so that it can be stopped; the limits above them stay, since schedules of the module depend on them
        trainer.fit_loop.min_epochs = None
        trainer.fit_loop.epoch_loop.min_steps = None
        self.loaders = trainer.train_dataloader
        self.began = time.monotonic()
        self.found = Examined(
            device=pl_module.device,
            world_size=trainer.world_size,
            precision=str(trainer.precision),
            batch_size=None,
            module=pl_module,
            log_every_n_steps=trainer.log_every_n_steps,  # type: ignore[attr-defined]  # set by a connector
            threads=torch.get_num_threads(),
            loader_facts=[_facts_of(loader) for loader in tree_leaves(self.loaders)],
        )

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert self.found is not None
        if self.seen == 0:
            self.found.batch_size = batch_size_of(batch)
            leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
            names = [name for name, each in pl_module.named_parameters() if each.dtype == torch.float64]
            names += ["the batch"] if any(leaf.dtype == torch.float64 for leaf in leaves) else []
            self.found.float64 = names
            self.found.batch_bytes = sum(leaf.nbytes for leaf in leaves)
            self.compiled = CompiledCalls(pl_module)
            self.compiled.start()
        if self.seen == self.profile_from:
            self.profiler = _profiler(pl_module.device)
            self.profiler.start()

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pairs = pl_module.named_parameters()
        names = [name for name, each in pairs if each.requires_grad and each.grad is None]
        # in each backward pass: an optimizer of several may have none of the others' parameters
        self.unused = names if self.unused is None else [name for name in self.unused if name in names]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self.found is not None
        self.seen += 1
        if self.seen == 1 and self.compiled is not None:
            self.compiled.stop()
        if self.profiler is not None and self.seen == self.timed_from:
            self.profiler.stop()
            self.found.syncs = host_syncs(self.profiler, _PROFILED)
            self.profiler = None
            self.began = time.monotonic()  # what reading the profile took is not the run's
        timed = self.seen - self.timed_from
        if timed == 1:  # the batches before it have instruments, and are complete now
            self.steps.steps.clear()
        if timed > 0 and not self.timed:
            self.found.logged.append(logger_connector(trainer).should_update_logs)
        is_late = time.monotonic() - self.began > self.seconds and min(timed, len(self.steps.steps)) >= _LEAST
        if timed >= self.max_steps or is_late:
            self._end_phase(trainer)

    def _end_phase(self, trainer: L.Trainer) -> None:
        """Stop the fit, or if there are too many threads, go on with fewer for as many batches again."""
        assert self.found is not None
        cores = max(int(usable_cores()) // trainer.world_size, 1)
        if self.timed or self.found.device.type != "cpu" or self.found.threads <= cores:
            trainer.should_stop = True
            return
        self.timed = list(self.steps.steps)
        self.steps.steps.clear()
        self.max_steps += len(self.timed)
        self.began = time.monotonic()
        torch.set_num_threads(cores)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert self.found is not None
        torch.set_num_threads(self.found.threads)
        self._stop_profiler()

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        kinds = (BatchNormBase, DropoutBase, nn.RNNBase)
        names = [name for name, each in pl_module.named_modules() if isinstance(each, kinds) and each.training]
        self.training_in_validation |= dict.fromkeys(names)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self.found is not None:
            torch.set_num_threads(self.found.threads)
        self._stop_profiler()

    def _stop_profiler(self) -> None:
        """End a profile that the end of the run has cut off: the process can have only one."""
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler = None


def examine(
    trainer: L.Trainer,
    module: L.LightningModule,
    data: Any = None,
    *,
    seconds: float = 10.0,
    max_steps: int = 200,
) -> Examined | None:
    """Fit for some seconds and return what was seen; None in processes other than the first.

    Checkpoints are not written, files of loggers and callbacks go to a temporary folder, loggers other than those of
    files get nothing, and validation is of two batches.

    Args:
        trainer: the user's, which is changed and of no further use.
        module: the module; its weights change.
        data: a datamodule or DataLoader, None if the module has its own.
        seconds: how long to train at most, after the warm-up.
        max_steps: number of batches to time at most.

    Raises:
        TooShortError: if the fit ends before three batches were timed.
    """
    counter = FlopCount(batch=trainer.accumulate_grad_batches)
    memory = MemoryCount(batch=trainer.accumulate_grad_batches + 1)
    watch = _Examination(seconds, max_steps, trainer.accumulate_grad_batches)
    watch.steps.exact = trainer.world_size > 1 or trainer.strategy.root_device.type == "cuda"
    with tempfile.TemporaryDirectory(prefix="lightning_accel-doctor-") as folder:
        isolate(trainer, Path(folder), max_val_batches=_SANITY_BATCHES)
        trainer.num_sanity_val_steps = _SANITY_BATCHES
        trainer.profiler = watch.steps  # type: ignore[attr-defined]
        trainer.callbacks += [counter, memory, watch]  # type: ignore[attr-defined]  # set by a connector
        loaders = {"datamodule": data} if isinstance(data, L.LightningDataModule) else {"train_dataloaders": data}
        with warnings.catch_warnings():
            # the count of operations hooks all modules for one batch
            warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
            trainer.fit(module, **loaders)
    found = watch.found
    steps = watch.timed or list(watch.steps.steps)
    timed = [step for step in steps if not step.parts_ns()["validation"]]
    if found is None or watch.seen < watch.timed_from + _LEAST or not timed:
        raise TooShortError(
            f"the run ended after {watch.seen} batches, and the doctor needs at least {watch.timed_from + _LEAST}: "
            "give it more data, or larger max_epochs, max_steps or limit_train_batches"
        )
    if trainer.global_rank > 0:
        return None
    pairs = list(zip(steps, found.logged, strict=False))
    found.steps = timed
    found.logged = [logged for step, logged in pairs if not step.parts_ns()["validation"]]
    if watch.timed:
        fewer = [step for step in watch.steps.steps if not step.parts_ns()["validation"]][1:]
        found.fewer_threads_saved_ms = _median_ms(timed) - _median_ms(fewer) if fewer else None
    found.graph_breaks = [] if watch.compiled is None else watch.compiled.explain()
    found.flops, found.memory = counter.flops, memory.use
    found.unused = watch.unused or []
    found.training_in_validation = list(watch.training_in_validation)
    found.loading_ms = _time_loading(watch.loaders, seconds / 3, max_steps)
    return found


def _median_ms(steps: list[Step]) -> float:
    return median(step.wall_ns for step in steps) / 1e6


def _profiler(device: torch.device) -> profile:
    gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    return profile_with_stacks([ProfilerActivity.CPU, *gpu])


def _facts_of(loader: Any) -> dict[str, Any]:
    names = ("batch_size", "num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
    return {"class": type(loader).__name__, **{name: getattr(loader, name, None) for name in names}}


def _time_loading(loaders: Any, seconds: float, max_batches: int) -> float | None:
    """Return the time of a batch of all training loaders in ms, nothing else running, from the second batch on."""
    total = 0.0
    for loader in tree_leaves(loaders):
        batches = iter(loader)
        times: list[float] = []
        if next(batches, None) is None:
            return None
        start = begin = time.perf_counter()
        while len(times) < max_batches and begin - start < seconds and next(batches, None) is not None:
            end = time.perf_counter()
            times.append(end - begin)
            begin = end
        if not times:
            return None
        total += 1000 * sum(times) / len(times)
    return total
