"""Examination of a user's own fit in a temporary folder."""

import gc
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from lightning_accel._private.lightning import logger_connector
from lightning_accel._private.torch import BatchNormBase, DropoutBase, profile_with_stacks, tree_leaves
from lightning_accel.callbacks.padding import padding_shares
from lightning_accel.diagnosis.call_tree import CallTree
from lightning_accel.diagnosis.graph_breaks import Compilations, CompiledCalls, GraphBreaks, compilations_since
from lightning_accel.diagnosis.host_syncs import HostSync, ReadCalls, host_syncs
from lightning_accel.diagnosis.loader_lines import LoaderLine, trace_loading
from lightning_accel.diagnosis.loader_times import facts_of, loading_ms, set_workers, start_ms, use_fewer_workers
from lightning_accel.diagnosis.thread_turns import BATCHES, ThreadTurns
from lightning_accel.measure import (
    FlopCount,
    MemoryCount,
    MemoryUse,
    Step,
    StepParts,
    bad_loss_of,
    batch_size_of,
    isolate,
    part_times,
)
from lightning_accel.measure.flops import precision_of_products
from lightning_accel.measure.machine import usable_cores
from lightning_accel.ops.matmul import multiplies_by_onednn
from lightning_accel.ops.native import missing_kernel

_PROFILED = 2  # batches under torch.profiler
_SANITY_BATCHES = 2
_LEAST = 3  # batches to time


class SlowLoop(NamedTuple):
    """Hold a loop of small operations: its place, how often it runs and operations in a batch, and their time in ms."""

    place: str
    times: int
    operations: int
    ms: float


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
        onednn_flops: those of matrix products that oneDNN can compute in place of MKL.
        multiplies_by_onednn: whether float32 matrix products on the CPU are computed by oneDNN in place of MKL.
        memory: bytes of this process; None if not counted.
        loading_ms: time of a batch of the training data alone; None if there were too few batches.
        syncs: places where the host waits for a number, in the batches under torch.profiler.
        training_in_validation: names of dropouts and batch norms that were in train mode there.
        unused: names of parameters that have no gradient after the backward pass.
        float64: names of parameters and of places in the batch that are float64.
        bad_loss: what is wrong with the loss of the first batch, "" if nothing is.
        padded_columns: share of the columns of batches that are padding of all samples, in the first batches.
        padding: share of the tokens of batches that are padding.
        module: the module, as the last batch left it.
        loader_facts: settings of the training DataLoaders.
        loader_lines: lines of the user's that take most of the time of loading, the most expensive first.
        loader_draws: whether loading draws random numbers.
        log_every_n_steps: the Trainer's.
        threads: threads within an operation.
        batch_bytes: of the tensors of a batch.
        fewer_threads_saved_ms: how much shorter a step is with one thread for each core of this process's share, less
            than 0 if it is longer; None if the process has no more threads than that.
        fewer_workers_saved_ms: how much shorter a step is with a worker for each core, None if there are no more.
        workers_start_ms: time to start and end workers, for each batch of an epoch; None if none start with each epoch.
        fewer_workers_start_ms: that of a worker for each core.
        graph_breaks: of compiled submodules.
        graph_breaks_ms: time that all of them take of a step.
        compilations: during ``steps``, None if there were none.
        loops: of small operations.
        unused_ms: time of the submodules in the forward pass of which no parameter has a gradient.
        padding_gps: number of blocks of PyTorch Geometric's GPS that pad graphs, where a kernel could do without.
        padding_gps_ms: time of their attention in the forward pass.
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
    fewer_workers_saved_ms: float | None = None
    workers_start_ms: float | None = None
    fewer_workers_start_ms: float | None = None
    graph_breaks: list[GraphBreaks] = field(default_factory=list)
    graph_breaks_ms: float = 0.0
    compilations: Compilations | None = None
    loops: list[SlowLoop] = field(default_factory=list)
    unused_ms: float = 0.0
    padding_gps: int = 0
    padding_gps_ms: float = 0.0
    steps: list[Step] = field(default_factory=list)
    logged: list[bool] = field(default_factory=list)
    flops: int | None = None
    onednn_flops: int | None = None
    multiplies_by_onednn: bool = False
    memory: MemoryUse | None = None
    loading_ms: float | None = None
    syncs: list[HostSync] = field(default_factory=list)
    training_in_validation: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    float64: list[str] = field(default_factory=list)
    bad_loss: str = ""
    padded_columns: float = 0.0
    padding: float = 0.0
    loader_facts: list[dict[str, Any]] = field(default_factory=list)
    loader_lines: list[LoaderLine] = field(default_factory=list)
    loader_draws: bool = False

    @property
    def multiplies_in(self) -> str:
        """Return the key of measured rates for matrix products of the run."""
        return precision_of_products(self.precision, self.device, has_float64=bool(self.float64))

    def to_dict(self) -> dict[str, Any]:
        """Return all but the module and the single steps as values that JSON can hold."""
        left_out = ("module", "steps", "logged", "device", "memory", "syncs", "graph_breaks", "loops", "compilations")
        told = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in left_out}
        parts = part_times(self.steps)
        return told | {
            "device": str(self.device),
            "step_ms": sum(parts.values()),
            "parts_ms": parts,
            "steps": len(self.steps),
            "memory": None if self.memory is None else self.memory.to_dict(),
            "syncs": [sync._asdict() for sync in self.syncs],
            "loops": [loop._asdict() for loop in self.loops],
            "loader_lines": [line._asdict() for line in self.loader_lines],
            "compilations": None if self.compilations is None else self.compilations._asdict(),
            "graph_breaks": [each._asdict() for each in self.graph_breaks],
        }


class TooShortError(Exception):
    """Signal a run that ended before enough batches were trained to measure them."""


class _Examination(L.Callback):
    """Watch a fit: instruments for some batches first, then the clock alone, then stop it."""

    def __init__(self, seconds: float, max_steps: int, accumulate: int) -> None:
        self.seconds, self.max_steps = seconds, max_steps
        self.steps = StepParts(keep=2 * max_steps)
        self.phase = ""
        self.timed_since = 0.0
        self.phases: dict[str, list[Step]] = {}  # the first is the run as it is
        self.turns: ThreadTurns | None = None
        self.compiled: CompiledCalls | None = None
        self.breaks_ms: float | None = None
        self.profile_from = accumulate + 2  # after batches that warm up, count operations and measure memory
        self.profile_until = self.profile_from + _PROFILED
        self.timed_from = self.profile_until + 1  # a batch after a profile and a collection of garbage is slower
        self.seen = 0
        self.began = 0.0
        self.profiler: profile | None = None
        self.reads = ReadCalls()
        self.tree: CallTree | None = None
        self.profiled: Step | None = None  # the last batch of the tree
        self.found: Examined | None = None
        self.loaders: Any = None
        self.padding: list[tuple[float, float]] = []
        self.training_in_validation: dict[str, None] = {}
        self.unused: list[str] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # so that it can be stopped; the limits above them stay, since schedules of the module depend on them
        trainer.fit_loop.min_epochs = None
        trainer.fit_loop.epoch_loop.min_steps = None
        self.loaders = trainer.train_dataloader
        self.began = time.monotonic()
        cores, threads = _cores_of_rank(trainer), torch.get_num_threads()
        if pl_module.device.type == "cpu" and threads > cores:
            self.turns = ThreadTurns(threads, cores)
            self.max_steps *= 2
        self.found = Examined(
            device=pl_module.device,
            world_size=trainer.world_size,
            precision=str(trainer.precision),
            batch_size=None,
            module=pl_module,
            log_every_n_steps=trainer.log_every_n_steps,  # type: ignore[attr-defined]  # set by a connector
            threads=threads,
            multiplies_by_onednn=multiplies_by_onednn(),
            loader_facts=[facts_of(loader) for loader in tree_leaves(self.loaders)],
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
        if self.seen < self.profile_from and (shares := padding_shares(batch)):  # reading a mask waits for a GPU
            self.padding.append(shares)
        if self.seen == self.profile_from:
            self.profiler = _profiler(pl_module.device)
            self.reads.start()
            self.profiler.start()
        if self.profiler is not None and self.seen == self.profile_until:  # as much loading as training is in it
            self._read_profile()

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
        if self.seen == 1:
            self.found.bad_loss = bad_loss_of(pl_module, outputs)
            if self.compiled is not None:
                self.compiled.stop()
        timed = self.seen - self.timed_from
        if timed == 0:
            self._restore()
        if timed == 1:  # the batches before it have instruments, and are complete now
            assert self.tree is not None
            self.profiled = self.steps.steps[-2 - self.tree.from_last]
            self.steps.steps.clear()
            self.timed_since = time.time()
        if timed > 0 and not self.phases:
            self.found.logged.append(logger_connector(trainer).should_update_logs)
            if self.turns is not None:
                self.turns.end_batch()
        in_turns = self.turns is not None and not self.phases
        seconds, least = (2 * self.seconds, 2 * BATCHES) if in_turns else (self.seconds, _LEAST)
        is_late = time.monotonic() - self.began > seconds and min(timed, len(self.steps.steps)) >= least
        if timed >= self.max_steps or is_late:
            self._end_phase(trainer)

    def _read_profile(self) -> None:
        assert self.found is not None
        assert self.profiler is not None
        profiler = self.profiler
        self._stop_profiler()
        self.tree = CallTree(profiler)
        self.found.syncs = host_syncs(self.tree, _PROFILED)
        gc.collect()  # or it would be while a step is timed
        self.began = time.monotonic()  # what reading the profile took is not the run's
        if self.turns is not None:
            torch.set_num_threads(self.turns.fewer)  # for one batch, in which compiled modules compile for them

    def _end_phase(self, trainer: L.Trainer) -> None:
        """Stop the fit, or if there are too many workers, go on with fewer for as many batches again."""
        assert self.found is not None
        cores = _cores_of_rank(trainer)
        loaders = [each for each in tree_leaves(self.loaders) if isinstance(each, DataLoader)]
        # ranks that would begin anew at different batches would wait for each other for ever
        can_restart = trainer.world_size == 1 and sum(each.num_workers for each in loaders) > cores
        if self.phases or not can_restart:
            trainer.should_stop = True
            return
        self._keep_steps()
        self.phase = "workers"
        self.steps.steps.clear()
        self.max_steps += self.seen - self.timed_from
        self.began = time.monotonic()
        use_fewer_workers(trainer, loaders, cores)

    def _keep_steps(self) -> None:
        steps = list(self.steps.steps)
        if self.found is not None and not self.phases:
            self._restore()
            self.found.compilations = compilations_since(self.timed_since)
            pairs = list(zip(steps, self.found.logged, strict=False))
            if self.turns is not None:
                self.found.fewer_threads_saved_ms = self.turns.saved_ms(steps)
                pairs = [pair for pair, unchanged in zip(pairs, self.turns.unchanged(), strict=False) if unchanged]
            steps, self.found.logged = [step for step, _ in pairs], [logged for _, logged in pairs]
        self.phases[self.phase] = steps

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._keep_steps()
        self._restore()
        self._stop_profiler()
        # other ranks would take part in calls of sharded modules, and not as often
        if trainer.world_size == 1 and self.compiled is not None and self.tree is not None:
            with trainer.precision_plugin.train_step_context():
                self.breaks_ms = self.compiled.breaks_ms(self.seconds / 3)

    def _restore(self) -> None:
        if self.found is not None:
            torch.set_num_threads(self.found.threads)

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        kinds = (BatchNormBase, DropoutBase, nn.RNNBase)
        names = [name for name, each in pl_module.named_modules() if isinstance(each, kinds) and each.training]
        self.training_in_validation |= dict.fromkeys(names)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._restore()
        self._stop_profiler()

    def _stop_profiler(self) -> None:
        """End a profile, also one that the end of the run has cut off: the process can have only one."""
        if self.profiler is not None:
            self.profiler.stop()
            self.reads.stop()
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
        rank_zero_info(f"doctor: train with instruments for {watch.timed_from} batches, then for about {seconds:g} s")
        with warnings.catch_warnings():
            # the count of operations hooks all modules for one batch
            warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
            trainer.fit(module, **loaders)
    found = watch.found
    steps = watch.phases[""]
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
    found.fewer_workers_saved_ms = _saved_ms(watch, "workers")
    found.graph_breaks = [] if watch.compiled is None else watch.compiled.explain()
    found.flops, found.onednn_flops, found.memory = counter.flops, counter.onednn_flops, memory.use
    found.unused = watch.unused or []
    if watch.padding:
        found.padded_columns, found.padding = map(fmean, zip(*watch.padding, strict=True))
    found.training_in_validation = list(watch.training_in_validation)
    _read_tree(watch, found)
    _time_starts(watch, found, trainer.num_training_batches)
    found.loading_ms = loading_ms(watch.loaders, seconds / 3, max_steps)
    found.loader_lines, found.loader_draws = trace_loading(watch.loaders, seconds / 3, max_steps)
    return found


def _saved_ms(watch: _Examination, phase: str) -> float | None:
    """Return how much shorter the median step of a phase is, None if there was none."""
    # a step that had begun before the phase, and one that waits for new workers
    fewer = [step for step in watch.phases.get(phase, [])[2:] if not step.parts_ns()["validation"]]
    return _median_ms(watch.phases[""]) - _median_ms(fewer) if fewer else None


def _time_starts(watch: _Examination, found: Examined, batches: float) -> None:
    """Measure what workers that end with each epoch take for their start and end, in ms a batch."""
    loaders = [each for each in tree_leaves(watch.loaders) if isinstance(each, DataLoader)]
    starts = any(each.num_workers and not each.persistent_workers for each in loaders)
    if "workers" in watch.phases:
        found.fewer_workers_start_ms = start_ms(loaders) / batches if starts else None
        for loader, facts in zip(loaders, found.loader_facts, strict=True):
            set_workers(loader, facts["num_workers"])
    found.workers_start_ms = start_ms(loaders) / batches if starts else None


def _read_tree(watch: _Examination, found: Examined) -> None:
    """Note what ran in the last profiled batch, without the time that the profiler took."""
    assert watch.tree is not None
    assert watch.profiled is not None
    parts = {part: median(step.parts_ns()[part] / 1e6 for step in found.steps) for part in ("forward", "backward")}
    tracing = watch.tree.tracing(part_times([watch.profiled]), parts)
    for loop in watch.tree.loops():
        found.loops.append(SlowLoop(loop.place, loop.times, loop.operations, tracing.ms(loop.forward, loop.backward)))
    found.unused_ms = tracing.ms(watch.tree.modules(_without_gradients(found)))
    if "torch_geometric" in sys.modules and found.device.type == "cpu":
        from lightning_accel.nn.graph_attention import padding_gps

        spans = [watch.tree.modules([layer.attn]) for layer in padding_gps(found.module)]
        if any(span.events for span in spans) and not missing_kernel():
            found.padding_gps = sum(span.events > 0 for span in spans)
            found.padding_gps_ms = sum(tracing.ms(span) for span in spans)
    regions, *passes = watch.tree.compiled()
    breaks = sum(each.breaks for each in found.graph_breaks)
    if watch.breaks_ms is not None:
        found.graph_breaks_ms = watch.breaks_ms
    elif regions:
        found.graph_breaks_ms = tracing.ms(*passes) * min(breaks / regions, 1.0)


def _without_gradients(found: Examined) -> list[nn.Module]:
    """Return the outermost submodules of which no parameter has a gradient."""
    used = {id(each) for name, each in found.module.named_parameters() if name not in found.unused}
    outermost: list[nn.Module] = []
    inner: set[nn.Module] = set()
    for each in found.module.modules():
        own = {id(parameter) for parameter in each.parameters()}
        if each not in inner and own and not own & used:
            outermost.append(each)
            inner.update(each.modules())
    return outermost


def _cores_of_rank(trainer: L.Trainer) -> int:
    return max(int(usable_cores()) // trainer.world_size, 1)


def _median_ms(steps: list[Step]) -> float:
    return median(step.wall_ns for step in steps) / 1e6


def _profiler(device: torch.device) -> profile:
    gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    return profile_with_stacks([ProfilerActivity.CPU, *gpu])
