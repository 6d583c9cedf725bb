"""``lightning_accel.plan``: memory, communication and time of the user's own run on machines that are not there."""

import importlib
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L

from lightning_accel.measure.machine import describe_machine
from lightning_accel.measure.made_run import make_run
from lightning_accel.measure.rates import measure_rates
from lightning_accel.planning.candidates import AS_CONFIGURED, SMALLEST, Candidate, candidates_for
from lightning_accel.planning.hardware import Cluster, Device, find_device
from lightning_accel.planning.simulation import Fit, Run, Simulation, SimulationError, simulate_step
from lightning_accel.planning.step_trace import StepTime, time_together
from lightning_accel.strategies import find_experts

# What a GPU needs beside tensors
RESERVED = 1.1  # what torch's allocator reserves, as a share of what tensors take
CONTEXT = 2**30  # bytes of the CUDA context, libraries and buffers of NCCL
# Where a run begins to fit is searched in machines of at most so many GPUs, and up to 2^6 times as many machines
_MOST_GPUS, _DOUBLINGS = 8, 6

Make = Callable[..., tuple[L.Trainer, L.LightningModule, Any]]


@dataclass(frozen=True)
class Option:
    """Hold what a strategy needs on a cluster.

    Attributes:
        candidate: the strategy.
        cluster: where it was planned.
        simulation: the step of the first process; None if it cannot be planned.
        reason: why not.
    """

    candidate: Candidate
    cluster: Cluster
    simulation: Simulation | None = None
    reason: str = ""

    @property
    def needed(self) -> int:
        """Return the bytes that a device has to have."""
        assert self.simulation is not None
        is_gpu = self.cluster.device.is_gpu
        return round(self.simulation.peak * RESERVED) + CONTEXT if is_gpu else self.simulation.peak

    @property
    def fits(self) -> bool:
        """Return whether the memory of a device is enough."""
        return self.simulation is not None and self.needed <= self.cluster.device.memory

    @property
    def time(self) -> StepTime:
        """Return the estimated time of a step."""
        assert self.simulation is not None
        traces = self.simulation.stages or [self.simulation.trace]
        return time_together(traces, self.cluster, self.simulation.tf32)

    @property
    def batches_per_second(self) -> float:
        """Return the estimated rate of batches."""
        assert self.simulation is not None
        return self.simulation.replicas / self.time.total if self.time.total else 0.0


@dataclass(frozen=True)
class Plan:
    """Hold what each strategy needs on a cluster.

    Attributes:
        cluster: the machines.
        options: those that can be planned, the fastest that fit first, and then the rest.
        fits_from: where none fits, the most economical strategy and the smallest of some larger clusters on which it
            does; None if none is known.
        seconds: time that planning took.
    """

    cluster: Cluster
    options: list[Option] = field(repr=False)
    fits_from: tuple[Candidate, Cluster] | None
    seconds: float

    @property
    def best(self) -> Option | None:
        """Return the fastest that fits."""
        return self.options[0] if self.options and self.options[0].fits else None

    def print(self) -> None:
        """Print what was found as tables."""
        from lightning_accel.measure.table import print_tables
        from lightning_accel.planning.writing import plan_tables

        print_tables(plan_tables(self))

    def __str__(self) -> str:
        from lightning_accel.measure.table import as_texts
        from lightning_accel.planning.writing import plan_tables

        return as_texts(plan_tables(self))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as values that JSON can hold."""
        from lightning_accel.planning.writing import plan_dict

        return plan_dict(self)

    def overlay(self) -> dict[str, Any]:
        """Return the config that makes the run use the fastest strategy that fits, on as many devices.

        Raises:
            ValueError: if none fits.
        """
        if self.best is None:
            raise ValueError(f"nothing fits on {self.cluster}")
        devices = {"devices": self.cluster.per_machine, "num_nodes": self.cluster.machines}
        accelerator = "gpu" if self.cluster.device.is_gpu else "cpu"
        return {"trainer": {"accelerator": accelerator, **devices, **self.best.candidate.config()}}


def plan(
    config: str | Path | Sequence[str] | Make,
    gpus: str | Device | None = None,
    machines: int = 1,
    processes: int | None = None,
) -> Plan:
    """Predict memory, communication and time of a run's training step on other machines, for each strategy that it has.

    Nothing is trained. The run's own Trainer, strategy, module, optimizer and callbacks do two steps as the first
    process of the cluster, with tensors of their true sizes that nobody computes: memory and communication are those of
    the code. What depends on values is computed from real integers (token ids, lengths, edges), and where it depends on
    floats, such as the choice of experts, from random ones. The time of an operation is that of its arithmetic or of
    its memory traffic at a share of the published rates (``lightning_accel.planning.step_trace``), or for processes
    on CPUs at rates measured here; gathers of weights and reductions of gradients run beside the computation.

    Kernels of CUDA may keep other tensors than those of the CPU that stand for them: float32 islands of autocast,
    dropout, fused attention and updates of all weights at once are taken into account, recurrent kernels and workspaces
    of convolutions are not. ``torch.compile`` is left out, which makes steps shorter and memory smaller. Each stage of
    a pipeline is simulated; what is told is the memory of the one that needs most.

    Args:
        config: a config file, arguments of ``lightning-accel fit``, or a function that returns (trainer, module, data)
            and passes keyword arguments on to the Trainer.
        gpus: devices of each machine, such as ``8xH100-80GB``, or one :class:`lightning_accel.planning.Device`.
        machines: number of such machines.
        processes: without GPUs, processes of each machine, which is one like this.

    Raises:
        SimulationError: if the run cannot be planned with any strategy; errors that it ends with before it has a
            Trainer and a module are its own.
        TypeError: if an argument has another type, or the function returns something else.
        ValueError: if the devices are unknown, or numbers are not positive.
    """
    began = time.monotonic()
    if (gpus is None) == (processes is None):
        raise ValueError("give gpus, such as 8xH100-80GB, or the processes of each machine without GPUs")
    is_list = isinstance(config, Sequence) and all(isinstance(one, str) for one in config)
    if not (callable(config) or isinstance(config, Path) or is_list):
        raise TypeError(
            "config must be a file, a list of arguments of fit, or a function that makes (trainer, module, data); got "
            f"{type(config).__name__}. Pass the function itself, plan(make), not what it returns"
        )
    if not isinstance(gpus, str | Device | None):
        raise TypeError(f"gpus must be a number and a kind, as 8xH100-80GB, or a Device; got {gpus!r}")
    for name, number in (("machines", machines), ("processes", 1 if processes is None else processes)):
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"{name} must be an integer; got {number!r}")
        if number < 1:
            raise ValueError(f"{name} must be positive; got {number}")
    if isinstance(gpus, Device):
        per_machine, device = 1, gpus
    elif gpus is not None:
        per_machine, device = find_device(gpus)
    else:
        per_machine = processes or 1
        device = _this_machine(per_machine)
    cluster = Cluster(device, per_machine, machines)
    planner = _Planner(config)
    options = planner.options(cluster)
    if all(option.simulation is None for option in options):
        raise SimulationError("; ".join(dict.fromkeys(option.reason for option in options)))
    fits_from = None if any(option.fits for option in options) else planner.fits_from(cluster, options)
    options.sort(
        key=lambda one: (one.simulation is None, not one.fits, -one.batches_per_second if one.simulation else 0.0)
    )
    return Plan(cluster, options, fits_from, time.monotonic() - began)


class _Planner:
    def __init__(self, config: str | Path | Sequence[str] | Make) -> None:
        self.is_function = callable(config)
        self.num_experts = 0
        self.has_tensor_plan = False
        self.is_made = False
        if callable(config):
            self.run: Run = partial(_fit_made, config)
        else:
            arguments = ["--config", str(config)] if isinstance(config, str | Path) else list(config)
            # by its name, since the command line imports this package
            self.run = importlib.import_module("lightning_accel.cli.plan").run_of(arguments)

    def options(self, cluster: Cluster) -> list[Option]:
        """Return what each strategy needs; the run's own comes first."""
        own = self.option(AS_CONFIGURED, cluster)
        if cluster.size == 1:
            return [own]
        candidates = candidates_for(cluster, self.num_experts, self.has_tensor_plan)
        found = {one: self.option(one, cluster) for one in candidates}
        return [
            own,
            *(option for one, option in found.items() if not _adds_nothing(option, found.get(one.base or one))),
        ]

    def option(self, candidate: Candidate, cluster: Cluster) -> Option:
        """Simulate a step with a strategy."""
        options = candidate.trainer_options() if self.is_function else candidate.config()
        with tempfile.TemporaryDirectory(prefix="plan-") as folder, _quiet():
            try:
                return Option(candidate, cluster, simulate_step(self._observed, cluster, options, Path(folder)))
            except SimulationError as error:
                return Option(candidate, cluster, reason=str(error))
            except Exception as error:
                if not self.is_made:
                    raise  # it is no run yet, with whatever strategy
                return Option(candidate, cluster, reason=_reason(error))

    def _observed(self, options: dict[str, Any], fit: Fit) -> None:
        def observed(trainer: L.Trainer, module: L.LightningModule, data: Any) -> None:
            self.is_made = True
            sizes = [
                next((len(one) for one in layer.parameters(recurse=False) if one.dim() > 1), 0)
                for layer in find_experts(module).values()
            ]
            self.num_experts = min((size for size in sizes if size), default=0)
            self.has_tensor_plan = hasattr(module, "tensor_parallel_plan")
            fit(trainer, module, data)

        self.run(options, observed)

    def fits_from(self, cluster: Cluster, options: list[Option]) -> tuple[Candidate, Cluster] | None:
        """Return the strategy with the least memory, and a larger cluster on which it fits."""
        known = [option for option in options if option.simulation is not None]
        candidate = min(known, key=lambda one: one.needed).candidate
        has_smaller_parts = candidate.strategy == "FullyShardedStrategy" and "shard_size" not in candidate.arguments
        if not has_smaller_parts:
            candidate = SMALLEST
        for larger in _larger(cluster):
            option = self.option(candidate, larger)
            if option.fits:
                return candidate, larger
            if option.simulation is None:
                return None
        return None


def _larger(cluster: Cluster) -> Iterator[Cluster]:
    """Yield clusters of twice, four times, ... as many devices."""
    while cluster.device.is_gpu and 2 * cluster.per_machine <= _MOST_GPUS:  # processes on CPUs share their memory
        cluster = replace(cluster, per_machine=2 * cluster.per_machine)
        yield cluster
    for _ in range(_DOUBLINGS):
        cluster = replace(cluster, machines=2 * cluster.machines)
        yield cluster


def _adds_nothing(option: Option, base: Option | None) -> bool:
    """Return whether the blocks of a module are not known, or recompute their activations already."""
    if base is option or base is None or option.simulation is None or base.simulation is None:
        return False
    ours, theirs = option.simulation, base.simulation
    return (ours.peak, ours.trace.flops) == (theirs.peak, theirs.trace.flops)


def _fit_made(make: Make, options: dict[str, Any], fit: Fit) -> None:
    fit(*make_run(make, options))


def _reason(error: Exception) -> str:
    text = (str(error) or type(error).__name__).strip().splitlines()[0]
    if "can't allocate memory" in text:
        return (
            "a tensor is larger than this machine's memory, which Linux refuses also for memory that nobody uses; plan "
            f"on a larger machine, or allow it: sysctl vm.overcommit_memory=1 ({text})"
        )
    return f"{type(error).__name__}: {text}"


def _this_machine(processes: int) -> Device:
    """Return what each of some processes on this machine has."""
    machine, rates = describe_machine(), measure_rates()
    memory = min(machine.memory_bytes, machine.memory_limit_bytes or machine.memory_bytes)
    products = {
        "fp32": rates.matmul["fp32"],
        "fp64": rates.matmul["fp32"] / 2,  # vectors of half as many
        **{name: rates.matmul[name] for name in ("bf16",) if name in rates.matmul},
    }
    share = min(1.0, machine.cores / processes)
    link = rates.collective.bytes_per_s if rates.collective else 1e9
    return Device(
        "this CPU",
        memory // processes,
        {name: rate * share for name, rate in products.items()},
        rates.memory_bytes_per_s * share,
        link,
        link,
        is_gpu=False,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back warnings and messages of runs, which a plan makes again and again."""
    loggers = [logging.getLogger(name) for name in ("lightning", "lightning.pytorch", "lightning.fabric", "torch")]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)
