"""One optimizer step of a real run, by its own Trainer, strategy and optimizer, on a cluster that is not there."""

import copy
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelSummary, ProgressBar
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.flop_counter import flop_registry

from lightning_accel._private.lightning import layer_sync_of, leave_layer_sync_out, repeat_batches
from lightning_accel._private.torch import arguments_of, group_of, is_functional_collective, packet_of, tree_leaves
from lightning_accel.callbacks import (
    CompressionReport,
    Distillation,
    Export,
    OneShotPruning,
    Pruning,
    Quantization,
)
from lightning_accel.measure.isolation import isolate
from lightning_accel.measure.step_parts import batch_size_of
from lightning_accel.planning.cuda_rules import as_on_cuda
from lightning_accel.planning.hardware import Cluster
from lightning_accel.planning.live_memory import HOST, LiveMemory
from lightning_accel.planning.simulated_group import simulated_world
from lightning_accel.planning.simulated_peers import Peers, Unanswered
from lightning_accel.planning.simulated_tensors import SimulatedTensors
from lightning_accel.planning.step_trace import Collective, StepTrace, Work
from lightning_accel.strategies import DataParallelStrategy, PipelineStrategy

Fit = Callable[[L.Trainer, L.LightningModule, Any], None]
Run = Callable[[dict[str, Any], Fit], None]

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
_FUNCTIONAL = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce_": "all_reduce",
}
_FEW_STEPS = 8  # more than are simulated
_COMPRESSING = (CompressionReport, Distillation, Export, OneShotPruning, Pruning, Quantization)
_ELSEWHERE = ("SLURM_", "TORCHELASTIC_", "LSB_", "OMPI_", "PMI_", "JSM_")  # launchers that this process is not part of


class SimulationError(Exception):
    """Signal a step that cannot be simulated, and why."""


@dataclass
class Simulation:
    """Hold what one step of the first process takes.

    Attributes:
        peak: the most bytes that its tensors take at once.
        memory: these bytes by what they are for: parameters, gathered parameters, gradients, optimizer states,
            activations, batch, buffers, communication and temporary.
        phase_of_peak: forward, backward or optimizer.
        trace: operations and collectives of the step.
        stages: such traces of each stage of a pipeline, of which the one that needs most memory is described here.
        samples: samples of the step in this process; None where the batch does not tell.
        replicas: number of batches of the step: of processes, or of groups of them that share one.
        small_batch: samples of its first batch and the size that its loader has, where these are fewer.
        num_parameters: numbers that the parameters of the whole module hold.
        tf32: whether float32 products may use tensor cores.
        left_out: callbacks that make the model smaller, at some other step or after training, and their teachers;
            synchronization of batch norms.
    """

    peak: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    phase_of_peak: str = ""
    trace: StepTrace = field(default_factory=StepTrace)
    stages: list[StepTrace] = field(default_factory=list)
    samples: int | None = 0
    replicas: int = 1
    small_batch: tuple[int, int] | None = None
    num_parameters: int = 0
    tf32: bool = False
    left_out: list[str] = field(default_factory=list)


def simulate_step(run: Run, cluster: Cluster, options: Mapping[str, Any], folder: Path) -> Simulation:
    """Run two optimizer steps of a fit as the first process of a cluster, and measure the second.

    Both belong to one epoch, for which batches are repeated if they are too few, and short ones left out. Nothing is
    saved by ``torch.save`` or the Trainer, since weights have no values.

    A pipeline's third step is measured, with which its schedule begins; its stages are simulated one after another,
    twice, since in the first step each waits for what the last one says. Its layers are split by their parameters.

    Args:
        run: called with arguments for the Trainer and a function, to which it must pass the Trainer that it makes with
            them, the module, and data (or None).
        cluster: devices, a process for each.
        options: arguments of the Trainer, such as ``strategy``.
        folder: where loggers and callbacks write.

    Raises:
        SimulationError: if the run ends before two steps, or uses what cannot be simulated; other errors are the run's
            own.
    """
    peers = Peers()
    stages = [_simulate(run, cluster, options, folder, peers)]
    if peers.count > 1:
        for rank in range(1, peers.count):
            _simulate(run, cluster, options, folder, peers, rank)
        stages = [_simulate(run, cluster, options, folder, peers, rank) for rank in range(peers.count)]
    if not all(one.is_done for one in stages):
        raise SimulationError(
            "training ended before its second optimizer step, so that there is none to measure; give it batches"
        )
    found = max((one.found for one in stages), key=lambda one: one.peak)
    if peers.count > 1:
        found.stages = [one.found.trace for one in stages]
    return found


def _simulate(
    run: Run, cluster: Cluster, options: Mapping[str, Any], folder: Path, peers: Peers, rank: int = 0
) -> "_Watch":
    watch = _Watch(cluster)
    memory, mode = watch.memory, watch.mode
    peers.begin(rank, lambda tensor: not memory.is_simulated(tensor.untyped_storage()))

    def fit(trainer: L.Trainer, module: L.LightningModule, data: Any) -> None:
        if isinstance(trainer.strategy, DataParallelStrategy):
            raise SimulationError(
                "DataParallelStrategy is not planned, which has one process for all devices; plan ddp"
            )
        if trainer.world_size != cluster.size:
            raise SimulationError(
                f"the Trainer has {trainer.world_size} processes where {cluster.size} are planned: pass the arguments "
                "that the function is called with on to the Trainer, which has no devices, num_nodes, strategy and "
                "accelerator of its own then"
            )
        if isinstance(trainer.strategy, PipelineStrategy):
            peers.count = trainer.world_size // trainer.strategy.data_parallel_size
            watch.steps_before = 2  # in lockstep
            module.example_input_array = None  # or layers would be split by how long their simulation takes
        watch.found.num_parameters = sum(each.numel() for each in module.parameters())
        isolate(trainer, folder, max_val_batches=1)
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        watch.found.left_out = [type(one).__name__ for one in callbacks if isinstance(one, _COMPRESSING)]
        if isinstance(trainer.strategy, ParallelStrategy) and layer_sync_of(trainer.strategy) is not None:
            leave_layer_sync_out(trainer.strategy)  # its layers compute on GPUs alone, or read counts
            watch.found.left_out.append("SyncBatchNorm")
        unwanted = (*_COMPRESSING, ModelSummary, ProgressBar)
        trainer.callbacks = [*(one for one in callbacks if not isinstance(one, unwanted)), watch]  # type: ignore[attr-defined]
        trainer.num_sanity_val_steps = 0
        watch.follow_setup(trainer.strategy, module)
        loaders = {"datamodule": data} if isinstance(data, L.LightningDataModule) else {"train_dataloaders": data}
        trainer.fit(module, **loaders)

    arguments = {
        "accelerator": "cpu",
        "devices": cluster.per_machine,
        "num_nodes": cluster.machines,
        "enable_model_summary": False,
        **copy.deepcopy(dict(options)),  # a strategy is for one Trainer, and each stage has its own
    }
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))  # also after errors
        stack.enter_context(isolate_rng(include_cuda=False))
        torch.manual_seed(0)  # the choice of experts is drawn
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_environment(cluster, rank))
        if cluster.size > 1:
            stack.enter_context(simulated_world(cluster.size, watch.record_collective, peers))
        stack.enter_context(memory.seeing_resizes())
        device = cluster.device
        stack.enter_context(as_on_cuda(memory, device.capability) if device.is_gpu else nullcontext())
        stack.enter_context(_nothing_saved())
        stack.enter_context(_flags())
        stack.enter_context(_batch_norms_of_one_process(watch.found))
        stack.enter_context(mode.read_by_host())
        stack.enter_context(mode)
        with suppress(_Measured, Unanswered):
            run(arguments, fit)
    return watch


def _is_causal(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operation is attention to earlier tokens alone, which kernels do not compute for others."""
    names = [argument.name for argument in arguments_of(func)]
    given = dict(zip(names, args, strict=False)) | kwargs
    return bool(given.get("is_causal", given.get("causal", False)))


class _Measured(BaseException):
    """End a fit whose second step is measured; no handler of exceptions takes it for a failure."""


class _Watch(L.Callback):
    """Tell the phases of a step apart, and what tensors are for."""

    def __init__(self, cluster: Cluster) -> None:
        self.memory = LiveMemory(counts_host=not cluster.device.is_gpu)
        self.memory.kind = HOST
        self.mode = SimulatedTensors(self.memory, self._record_work)
        self.found = Simulation()
        self.steps_before = 1
        self.is_done = False
        self._updates = 0
        self._is_measuring = False
        self._largest = 0, 0  # tensors and samples of a batch

    # ---- what is recorded

    def record_collective(self, name: str, size: int, ranks: tuple[int, ...], tensors: list[Tensor]) -> None:
        if not self._is_measuring:
            return
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.layout == torch.strided:
                self.memory.add(tensor.untyped_storage(), kind="communication")
        if size or name == "barrier":
            self.found.trace.events.append(Collective(self.memory.phase, name, size, ranks))

    def _record_work(self, func: Any, called: tuple[Any, Any, list[Tensor]], result: Any) -> None:
        args, kwargs, tensors = called
        if "split_with_sizes_copy" in func.name():
            for tensor in kwargs.get("out", ()):
                self.memory.add(tensor.untyped_storage(), kind="gathered parameters")
        if not self._is_measuring or func.namespace in ("profiler", "c10d"):
            return
        made = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        if is_functional_collective(func):
            if any(self.memory.is_simulated(one.untyped_storage()) for one in tensors):  # or it went to the group
                name, _, _ = packet_of(func).__name__.removesuffix("_coalesced").partition("_single")
                name = _FUNCTIONAL.get(name, name)
                whole = made if name == "all_gather" else tensors
                group = group_of(kwargs.get("group_name", args[-1]))
                ranks = tuple(dist.get_process_group_ranks(group))
                self.record_collective(name, _bytes(whole), ranks, [*tensors, *made])
            return
        flops = 0
        if formula := flop_registry.get(packet_of(func)):
            flops = formula(*args, **kwargs, out_val=result) // (2 if _is_causal(func, args, kwargs) else 1)
        floats = [one for one in tensors if one.is_floating_point()]
        dtype = _DTYPES.get(floats[0].dtype, "fp32") if floats else "fp32"
        size = _bytes([*tensors, *made])
        self.found.trace.events.append(Work(self.memory.phase, flops, dtype, size, "attention" in func.name()))

    def _enter(self, phase: str, kind: str) -> None:
        self.memory.phase, self.memory.kind = phase, kind

    def _label(self, tensors: Iterable[Any], kind: str) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                if local.layout == torch.strided and not local.is_meta:
                    self.memory.add(local.untyped_storage(), kind=kind)

    def _label_module(self, module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        self._label(module.buffers(), "buffers")
        self._label(module.parameters(), "parameters")
        for optimizer in optimizers:
            self._label(tree_leaves(list(optimizer.state.values())), "optimizer states")

    def follow_setup(self, strategy: Any, module: L.LightningModule) -> None:
        """Label the module where a strategy has moved it to the device, before optimizers and hooks copy its parts."""
        setup_optimizers = strategy.setup_optimizers

        def labelled(trainer: L.Trainer) -> None:
            self.mode.take(module)
            self._label_module(module, [])
            self.memory.phase = "between"
            setup_optimizers(trainer)

        strategy.setup_optimizers = labelled

    def _is_full(self, batch: Any) -> bool:
        size = sum(isinstance(one, Tensor) for one in tree_leaves(batch)), batch_size_of(batch) or 0
        self._largest = (max(size[0], self._largest[0]), max(size[1], self._largest[1]))
        return size == self._largest

    # ---- hooks

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.mode.take(pl_module)
        self._label_module(pl_module, [])
        if isinstance(trainer.strategy, ParallelStrategy):
            self.found.replicas = trainer.strategy.distributed_sampler_kwargs["num_replicas"]
        loops = trainer.fit_loop, trainer.fit_loop.epoch_loop
        repeat_batches(loops[0], self._is_full, _FEW_STEPS * trainer.accumulate_grad_batches)
        if 0 <= trainer.max_steps < _FEW_STEPS:
            loops[1].max_steps = _FEW_STEPS
        trainer.val_check_batch = math.inf
        # whose numbers of steps are those of the fit
        loops[1].update_lr_schedulers = lambda *_, **__: None  # type: ignore[method-assign]

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.should_stop = True  # batches cannot be repeated

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        leaves = [one for one in tree_leaves(batch) if isinstance(one, Tensor)]
        self._label(leaves, "batch")
        if trainer.global_step >= self.steps_before and not self._is_measuring:
            self._is_measuring, self._updates = True, trainer.global_step
            self._label_module(pl_module, trainer.optimizers)
            self.memory.phase = "forward"
            self.memory.reset_peak()
        if self._is_measuring and self.found.samples is not None:
            size = batch_size_of(batch)
            wanted = getattr(trainer.train_dataloader, "batch_size", None)
            if size and isinstance(wanted, int) and size < wanted:
                self.found.small_batch = size, wanted
            self.found.samples = None if size is None else self.found.samples + size
        self._enter("forward", "activations")

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        self._enter("backward", "temporary")

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        self._label((each.grad for each in pl_module.parameters()), "gradients")
        self._enter("optimizer", "temporary")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._is_measuring and trainer.global_step > self._updates:
            self._label_module(pl_module, trainer.optimizers)
            found, memory = self.found, self.memory
            found.peak, found.phase_of_peak = memory.peak, memory.phase_of_peak
            at_peak = memory.at_peak
            at_peak["other"] += at_peak.pop(HOST, 0)
            found.memory = {kind: size for kind, size in at_peak.most_common() if size > 0}
            found.tf32 = torch.get_float32_matmul_precision() != "highest"
            self.is_done = True
            raise _Measured
        self._enter("between", HOST)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(one.numel() * one.element_size() for one in tensors if one.layout == torch.strided)


@contextmanager
def _nothing_saved() -> Iterator[None]:
    save = torch.save

    def save_in_memory(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(f, str | os.PathLike):
            save(obj, f, *args, **kwargs)

    with patch.object(torch, "save", save_in_memory), patch.object(L.Trainer, "save_checkpoint", lambda *_, **__: None):
        yield


@contextmanager
def _flags() -> Iterator[None]:
    """Restore what a Trainer sets for the whole process, and let it look for no NaN, which numbers may be here."""
    is_deterministic, only_warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    benchmark = torch.backends.cudnn.benchmark
    try:
        with patch.object(torch.autograd, "set_detect_anomaly", lambda *_, **__: nullcontext()):
            yield
    finally:
        torch.use_deterministic_algorithms(is_deterministic, warn_only=only_warns)
        torch.backends.cudnn.benchmark = benchmark


@contextmanager
def _batch_norms_of_one_process(found: Simulation) -> Iterator[None]:
    """Let torch's synchronized batch norms, which compute on GPUs alone, be those of one process."""

    def forward(norm: nn.SyncBatchNorm, input: Tensor) -> Tensor:
        if "SyncBatchNorm" not in found.left_out:
            found.left_out.append("SyncBatchNorm")
        return super(nn.SyncBatchNorm, norm).forward(input)

    with patch.object(nn.SyncBatchNorm, "forward", forward):
        yield


@contextmanager
def _environment(cluster: Cluster, rank: int) -> Iterator[None]:
    """Tell Lightning that this is a process of a cluster, which torchrun has started."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(_ELSEWHERE):
            del os.environ[name]
    if cluster.size > 1:
        machine, local_rank = divmod(rank, cluster.per_machine)
        ranks = {"RANK": rank, "LOCAL_RANK": local_rank, "GROUP_RANK": machine, "WORLD_SIZE": cluster.size}
        os.environ.update({name: str(value) for name, value in ranks.items()})
        os.environ["LOCAL_WORLD_SIZE"] = str(cluster.per_machine)
        os.environ.update(TORCHELASTIC_RUN_ID="plan", MASTER_ADDR="localhost", MASTER_PORT="0")
    rank_of_lightning = getattr(rank_zero_only, "rank", None)
    try:
        yield
    finally:
        rank_zero_only.rank = rank_of_lightning  # type: ignore[attr-defined]
        os.environ.clear()
        os.environ.update(before)
