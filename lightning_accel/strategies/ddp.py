"""DDP with unused or frozen parameters and with compressed gradients."""

from datetime import timedelta
from typing import Any, Literal

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_accel.strategies.batch_samplers import require_distributable_batches
from lightning_accel.strategies.rendezvous import joining_process_group

_HOOKS = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}


class AccelDDPStrategy(DDPStrategy):
    """Run DDP where parameters may be unused in some steps, on some processes, or frozen in some phases.

    Gradients are those of one process with all batches: a parameter unused on some processes counts as 0 there, and one
    unused on all processes has no gradient, so that no optimizer updates it. Every parameter is connected to the loss
    by a graph edge that carries no gradient, and one message of a byte per parameter is sent in each step. The overhead
    is about that of ``find_unused_parameters=True`` on a CPU; on CUDA, a process waits for the device only if it has
    unused parameters.

    ``requires_grad`` may change from one optimizer step to the next, alike on all processes, as when layers are trained
    one after another; gradients of frozen parameters are then not sent. (Plain DDP fails on a parameter frozen during
    training, and silently does not synchronize one that was frozen at first.)

    ``compression`` halves what float32 gradients send, on CPU, too; ``fp16`` loses values beyond 65504 and below 6e-8.

    Not supported: reentrant activation checkpointing, and sparse gradients of parameters that are unused.

    Args:
        compression: dtype in which gradients are sent; prefer ``bf16``.
        timeout: time limit of each collective.
        start_method: how Lightning starts the processes.

    Raises:
        ValueError: if ``compression`` is unknown.
        RuntimeError: if ``requires_grad`` changes between the micro-batches of an optimizer step.
    """

    def __init__(
        self,
        *,
        compression: Literal["none", "bf16", "fp16"] = "none",
        timeout: timedelta = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        super().__init__(timeout=timeout, start_method=start_method)
        if compression not in ("none", *_HOOKS):
            raise ValueError(f"compression must be none, bf16 or fp16; got {compression!r}")
        self.compression = compression
        self._usage: _ParameterUsage | None = None
        self._accumulating = False

    def setup_environment(self) -> None:
        with joining_process_group(self.cluster_environment, self._timeout):
            super().setup_environment()

    def setup(self, trainer: L.Trainer) -> None:
        require_distributable_batches(trainer)
        super().setup(trainer)

    def configure_ddp(self) -> None:
        if self._usage is not None:  # called again, after the set of trained parameters changed
            self._unwrap()
        super().configure_ddp()
        assert self.lightning_module is not None
        assert isinstance(self.model, DistributedDataParallel)
        self._usage = _ParameterUsage(self.lightning_module)
        if self.compression in _HOOKS:
            hook = _HOOKS[self.compression]
            # by another name, since torch rejects its own on gloo, which can send bf16, too
            self.model.register_comm_hook(None, lambda state, bucket: hook(state, bucket))

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not self._has_failed:  # after a failure this process may be alone, as when it saves a checkpoint
            super().barrier(*args, **kwargs)

    @property
    def _has_failed(self) -> bool:
        module = self.lightning_module
        return module is not None and module.trainer.state.status == TrainerStatus.INTERRUPTED

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self._usage is not None and self._usage.is_outdated():
            self._rewrap()
        return super().training_step(*args, **kwargs)

    def _rewrap(self) -> None:
        if self._accumulating:
            raise RuntimeError(
                "requires_grad of some parameters changed between the micro-batches of an optimizer step, so that "
                "gradients would stay behind unsent; change it where a step begins, such as in on_train_epoch_start"
            )
        self.configure_ddp()

    def _unwrap(self) -> None:
        if self._usage is not None:
            self._usage.close()
            self._usage = None
        self.model = self.lightning_module

    def backward(
        self, closure_loss: Tensor, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if self._usage is not None and self._syncs_gradients():
            closure_loss = self._usage.join(closure_loss)
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        self._accumulating = not self._syncs_gradients()
        if self._usage is not None and self._syncs_gradients():
            self._usage.clear_unused_gradients()

    def _syncs_gradients(self) -> bool:
        return isinstance(self.model, DistributedDataParallel) and self.model.require_backward_grad_sync

    def teardown(self) -> None:
        if self._usage is not None:
            self._usage.close()
            self._usage = None
        self._accumulating = False
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        if "accel_ddp" not in strategy_registry:
            strategy_registry.register("accel_ddp", cls, description="DDP for parameters that go unused or are frozen")


class _ParameterUsage:
    """Track which of the parameters that DDP synchronizes get a gradient."""

    def __init__(self, module: nn.Module) -> None:
        self.all = list(module.parameters())
        self.trained = [parameter.requires_grad for parameter in self.all]
        self.parameters = [parameter for parameter in self.all if parameter.requires_grad]
        self.used: set[int] = set()  # positions in parameters
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(self._make_hook(position))
            for position, parameter in enumerate(self.parameters)
        ]

    def _make_hook(self, position: int) -> Any:
        def hook(parameter: Tensor) -> None:
            # also called where no gradient arrived; one may exist from an earlier micro-batch, or be set to zero
            if parameter.grad is not None:
                self.used.add(position)

        return hook

    def is_outdated(self) -> bool:
        return [parameter.requires_grad for parameter in self.all] != self.trained

    def join(self, loss: Tensor) -> Tensor:
        """Return the same loss, whose backward pass reaches every parameter, so that DDP waits for none."""
        if not loss.requires_grad:  # backward raises a clear error
            return loss
        self.used.clear()
        frozen = [parameter for parameter in self.parameters if not parameter.requires_grad]
        try:  # autograd skips what requires no gradient, and toggle_optimizer temporarily freezes some
            for parameter in frozen:
                parameter.requires_grad_(True)
            return _ConnectParameters.apply(loss, *self.parameters)
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)

    def clear_unused_gradients(self) -> None:
        """Remove the zero gradients that DDP leaves in parameters which no process used."""
        if not self.parameters:
            return
        used = torch.zeros(len(self.parameters), dtype=torch.uint8)
        used[list(self.used)] = 1
        used = used.to(self.parameters[0].device, non_blocking=True)
        dist.all_reduce(used, dist.ReduceOp.MAX)
        if len(self.used) < len(self.parameters):  # if all were used here, there is no need to wait for the device
            for parameter, by_any in zip(self.parameters, used.tolist(), strict=True):
                if not by_any:
                    parameter.grad = None

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()


class _ConnectParameters(torch.autograd.Function):
    """Return the first input, with graph edges to the others that carry no gradient but run their hooks."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        ctx.num_parameters = len(parameters)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, *[None] * ctx.num_parameters
