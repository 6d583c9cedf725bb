"""What a trial writes down: the time of each step, losses, and facts about the run."""

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import IO, Any

import lightning as L
import torch
from lightning.pytorch.strategies import FSDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from lightning_accel._private.lightning import ddp_options
from lightning_accel._private.torch import DropoutBase
from lightning_accel.callbacks.ddp_settings import is_ddp
from lightning_accel.callbacks.memory_savings import has_batch_norms
from lightning_accel.callbacks.pruning.semi_structured import why_not_sparsifiable
from lightning_accel.callbacks.speedups import blocks_of, called_children, has_fused_step, loaders_of
from lightning_accel.data.batched_fetch import why_by_sample
from lightning_accel.measure import PeakMemory, bad_loss_of, batch_size_of
from lightning_accel.measure.allocators import allocator_in_use
from lightning_accel.measure.machine import Machine, describe_machine
from lightning_accel.nn.deferred_weights import is_deferrable
from lightning_accel.nn.recurrent.fused import is_fusible
from lightning_accel.precision.float8 import why_not_float8
from lightning_accel.strategies import AccelDDPStrategy, FullyShardedStrategy, find_blocks
from lightning_accel.strategies.batch_splitting import leaves
from lightning_accel.strategies.checkpoints.atomic import write_atomically
from lightning_accel.tuning.identity import imported_code
from lightning_accel.tuning.learning import larger_batches_of, why_not_bucketed_of, why_not_padded_of
from lightning_accel.tuning.variant import SHAPES_VARY, Step


class TrialEnd(Exception):
    """End a fit that has shown what a trial is about."""


class StepRecorder(L.Callback):
    """Write each step of a fit as a line of a file.

    A line holds the fields of :class:`lightning_accel.tuning.variant.Step`. A step begins when the one before it ended.
    Times are those of ``time.monotonic``, which is one clock for all processes; validation is left out.

    Args:
        folder: where ``steps.csv`` and ``facts.json`` are written, by the first process of the run, and an empty
            ``shapes_vary`` at the first batch whose tensors have other shapes than the first one's; by each process,
            at every power of 2 of steps, the peak of its memory until then, ``memory_RANK.csv``.
        num_steps: steps after which :class:`TrialEnd` is raised; None for no end.
        with_losses: also record losses, for which a GPU has to be waited for.
        perturb: move each weight by one rounding at the beginning, to learn what rounding does to the losses.
    """

    def __init__(
        self, folder: Path, num_steps: int | None = None, with_losses: bool = False, perturb: bool = False
    ) -> None:
        self.folder = folder
        self.num_steps = num_steps
        self.with_losses = with_losses
        self.perturb = perturb
        self._file: IO[str] | None = None
        self._begin: float | None = None
        self._memory: PeakMemory | None = None
        self._free: int | None = None  # on a GPU, before the module is there
        self._random_state: list[int] | None = None  # before the first step
        self._shapes: list[Any] | None = None  # of the first batch, until another has others
        self._waited = self._validated = self._validation_begin = 0.0
        self._optimized = self._optimizing_since = self._in_system = 0.0
        self.num_recorded = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._begin, self.num_recorded = None, 0
        device = trainer.strategy.root_device
        self._free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._memory = PeakMemory(trainer.strategy.root_device)
        if self.perturb:
            perturb_(pl_module)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._begin is not None:
            self._waited = time.monotonic() - self._begin - self._validated
        elif self._random_state is None:
            self._random_state = _random_state(trainer.strategy.root_device)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, Optimizer):
                optimizer.register_step_post_hook(self._end_optimizing)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        self._optimizing_since = time.monotonic()

    def _end_optimizing(self, *_: Any) -> None:
        self._optimized += time.monotonic() - self._optimizing_since

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validation_begin = time.monotonic()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validated += time.monotonic() - self._validation_begin

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = self._loss(trainer, outputs) if self.with_losses else float("nan")
        if trainer.is_global_zero:
            if self._file is None:
                self._file = open(self.folder / "steps.csv", "a", buffering=1)  # noqa: SIM115  # closed by teardown
            now, in_system = time.monotonic(), os.times().system
            if self._begin is not None or self.with_losses:
                begin = math.nan if self._begin is None else self._begin
                spent = in_system - self._in_system
                step = Step(begin, now - self._validated, self._waited, loss, self._optimized, spent)
                self._file.write(step.to_line())
            if self.num_recorded == 0 and not (self.folder / "facts.json").exists():
                with write_atomically(self.folder / "facts.json") as part:
                    draws = self._random_state != _random_state(trainer.strategy.root_device)
                    seen = {"draws": draws, "bad_loss": bad_loss_of(pl_module, outputs)}
                    if self._memory is not None:
                        seen |= {"resident_bytes": self._memory.begin, "free_device_bytes": self._free}
                    part.write_text(json.dumps(facts_of(trainer, pl_module, batch) | seen))
                self._shapes = _shapes_of(batch)
            elif self._shapes is not None and _shapes_of(batch) != self._shapes:
                (self.folder / SHAPES_VARY).touch()
                self._shapes = None
            self._begin, self._in_system = now, in_system
            self._waited = self._validated = self._optimized = 0.0
        self.num_recorded += 1
        if self._memory is not None and self.num_recorded & (self.num_recorded - 1) == 0:
            with open(self.folder / f"memory_{trainer.global_rank}.csv", "a") as file:
                file.write(f"{self.num_recorded},{self._memory.read()}\n")
        if self.num_recorded == self.num_steps:
            raise TrialEnd

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    @staticmethod
    def _loss(trainer: L.Trainer, outputs: Any) -> float:
        """Return the loss of the step, or the sum of all logged losses where optimization is manual."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            return loss.item()
        logged = [float(value) for name, value in trainer.callback_metrics.items() if "loss" in name.lower()]
        return sum(logged) if logged else float("nan")


def perturb_(module: nn.Module) -> None:
    """Move each weight by one rounding."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            sign = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            parameter.mul_(1 + sign.to(parameter) * torch.finfo(parameter.dtype).eps)


def model_facts_of(trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
    """Return facts about the model and the machine that hold for any run of it, as plain values."""
    machine = describe_machine()
    return {
        "device": trainer.strategy.root_device.type,
        "world_size": trainer.world_size,
        "precision": str(trainer.precision),
        "threads": torch.get_num_threads(),
        "allocator": allocator_in_use(),
        "cores": max(1, int(machine.cores)),
        "bfloat16_units": _has_bfloat16_units(machine, trainer.strategy.root_device),
        "num_parameters": sum(parameter.numel() for parameter in module.parameters()),
        "num_conv2d": sum(isinstance(layer, nn.Conv2d | nn.ConvTranspose2d) for layer in module.modules()),
        "has_attention": any("attention" in type(layer).__name__.lower() for layer in module.modules()),
        "num_deferrable_attentions": _num_deferrable_attentions(module),
        "num_children": len(called_children(module)),
        "num_blocks": len(blocks_of(module)),
        "code": imported_code(),
    }


def facts_of(trainer: L.Trainer, module: L.LightningModule, batch: Any) -> dict[str, Any]:
    """Return what decides which changes can be tried on a fit, as plain values."""
    sources = _flatten(trainer.train_dataloader)
    loaders = [loader for one in sources for loader in loaders_of(one)]
    planned = trainer.estimated_stepping_batches
    return model_facts_of(trainer, module) | {
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "planned_steps": None if planned == float("inf") else planned * trainer.accumulate_grad_batches,
        "items_per_step": (batch_size_of(batch) or 1) * trainer.world_size,
        "has_dropout": has_dropout(module),
        "num_fusible_rnns": sum(is_fusible(layer) for layer in module.modules()),
        "num_fusible_convolutions": _num_fusible_convolutions(module),
        "num_repeated": len(find_blocks(module)),
        "has_batch_norms": has_batch_norms(module),
        "batch_norms_in_blocks": has_batch_norms(*find_blocks(module)),
        "automatic_optimization": module.automatic_optimization,
        "strategy": _kind_of(trainer.strategy),
        "ddp": _ddp_of(trainer.strategy),
        "fusible_optimizers": [type(one).__name__ for one in trainer.optimizers if has_fused_step(one)],
        "larger_batches": larger_batches_of(trainer, sources),
        "not_bucketed": why_not_bucketed_of(sources),
        "not_padded": why_not_padded_of(batch),
        "not_float8": why_not_float8(trainer.strategy.root_device),
        "not_sparsifiable": why_not_sparsifiable(module, trainer.strategy.root_device),
        "fused": any(one.defaults.get("fused") for one in trainer.optimizers),
        "loaders": [
            {
                "num_workers": loader.num_workers,
                "persistent_workers": loader.persistent_workers,
                "prefetch_factor": loader.prefetch_factor or 0,
                "pin_memory": loader.pin_memory,
                "is_iterable": isinstance(loader.dataset, IterableDataset),
                "by_sample": why_by_sample(loader),
            }
            for loader in loaders
        ],
    }


def has_dropout(module: nn.Module) -> bool:
    """Return whether layers drop anything, by ``p`` of dropouts and attributes such as ``dropout`` of other layers."""
    return any(
        isinstance(value, float) and value > 0 and ("drop" in name or (name == "p" and isinstance(layer, DropoutBase)))
        for layer in module.modules()
        for name, value in vars(layer).items()
    )


def _flatten(loaders: Any) -> list[Any]:
    if isinstance(loaders, dict):
        return [one for value in loaders.values() for one in _flatten(value)]
    if isinstance(loaders, list | tuple):
        return [one for value in loaders for one in _flatten(value)]
    return [loaders]


def _has_bfloat16_units(machine: Machine, device: torch.device) -> bool:
    """Return whether the device has units for bfloat16 matrix products, which are faster than float32 ones there."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool({"AVX512-BF16", "AMX-BF16"} & set(machine.instruction_sets))


def _num_deferrable_attentions(module: nn.Module) -> int:
    """Count layers that defer weights, without those of torch's transformers and of GPS, which ask for none."""
    transformers: tuple[type[nn.Module], ...] = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    if "torch_geometric" in sys.modules:
        from torch_geometric.nn import GPSConv

        transformers += (GPSConv,)
    inner = {one for layer in module.modules() if isinstance(layer, transformers) for one in layer.modules()}
    return sum(is_deferrable(layer) for layer in module.modules() if layer not in inner)


def _num_fusible_convolutions(module: nn.Module) -> int:
    if "torch_geometric" not in sys.modules:
        return 0
    from lightning_accel.nn.message_passing import has_fusible_messages

    return sum(has_fusible_messages(layer) for layer in module.modules())


def _kind_of(strategy: Strategy) -> str:
    """Return ``single``, ``ddp``, ``sharded`` of FSDP, or ``other``, which splits parameters or batches itself."""
    if isinstance(strategy, SingleDeviceStrategy):
        return "single"
    if isinstance(strategy, FullyShardedStrategy | FSDPStrategy):
        return "sharded"
    return "ddp" if is_ddp(strategy) else "other"


def _shapes_of(batch: Any) -> list[Any]:
    """Return the shapes of tensors in a batch, and the sizes of graphs."""
    return [
        tuple(leaf.shape)
        if isinstance(leaf, Tensor)
        else [getattr(leaf, f"num_{of}", None) for of in ("nodes", "edges")]
        for leaf in leaves(batch)
    ]


def _random_state(device: torch.device) -> list[int]:
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return state.tolist()


def _ddp_of(strategy: Strategy) -> dict[str, Any]:
    """Return what DDP was given, as far as it is plain values, and whether it is Lightning's own; empty without DDP."""
    if not is_ddp(strategy):
        return {}
    given = {name: value for name, value in ddp_options(strategy).items() if isinstance(value, bool | int | float)}
    return {"is_plain": not isinstance(strategy, AccelDDPStrategy)} | given
