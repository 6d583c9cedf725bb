"""DDP with unused or frozen parameters and with compressed gradients. Shapes: gradients (N, M), rank R."""

import zlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_accel.strategies.batch_samplers import require_distributable_batches
from lightning_accel.strategies.rendezvous import joining_process_group

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_KEY = "accel_ddp_powersgd"  # key in checkpoints
# DDP rejects a hook whose bucket is annotated as anything but GradBucket, which torch does not export to type checkers.
_Hook = Callable[..., torch.futures.Future[Tensor]]


def _cast_hook(dtype: torch.dtype) -> _Hook:
    """Return a DDP communication hook that sends gradients in ``dtype``; torch's own hook requires CUDA."""

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        buffer = bucket.buffer()
        small = buffer.to(dtype).div_(dist.get_world_size())  # divide before summing, since the sum may overflow fp16
        future: torch.futures.Future[list[Tensor]] = dist.all_reduce(small, async_op=True).get_future()
        return future.then(lambda done: buffer.copy_(done.value()[0]))

    return hook


class PowerSGD:
    """Compress gradients to two low-rank factors by a DDP communication hook, :meth:`average`.

    Each step does one subspace iteration from the result of the step before, and adds the approximation error to the
    next gradient (Vogels et al. 2019, https://arxiv.org/abs/1905.13727, algorithms 1 and 2). Vectors, and matrices
    whose factors would not be half as large, are sent uncompressed. Arithmetic is float32 at least.

    torch's PowerSGD hook chains collectives in callbacks, whose order on gloo may differ between processes. This one
    waits, and stores its state by parameter, so that it survives a new order of buckets and a resumed run.

    Args:
        module: module whose parameters DDP synchronizes.
        rank: R.
        start_step: number of first steps whose gradients are sent uncompressed; early gradients are the hardest to
            approximate.
    """

    def __init__(self, module: nn.Module, rank: int, start_step: int) -> None:
        self.rank = rank
        self.start_step = start_step
        self.step = 0
        self.errors: dict[str, Tensor] = {}  # (N, M), those of this process
        self.bases: dict[str, Tensor] = {}  # (M, R), equal on all processes
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}

    def average(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """Replace the gradients of ``bucket`` by their mean over processes."""
        if self.step < self.start_step:
            _average(bucket.buffer())
        else:
            self._approximate(bucket)
        self.step += bucket.is_last()
        return _completed_future(bucket.buffer())

    def _approximate(self, bucket: Any) -> None:
        names = [self._names[id(parameter)] for parameter in bucket.parameters()]
        gradients = dict(zip(names, bucket.gradients(), strict=True))
        matrices = {name: self._add_error(name, one) for name, one in gradients.items() if self._is_compressible(one)}
        whole = [gradient for name, gradient in gradients.items() if name not in matrices]
        # one message for the first factors and the uncompressed gradients
        lefts = [matrix @ self._basis(name, matrix) for name, matrix in matrices.items()]
        _average_together([*lefts, *whole])
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        rights = [matrix.T @ left for matrix, left in zip(matrices.values(), lefts, strict=True)]
        _average_together(rights)
        for (name, matrix), left, right in zip(matrices.items(), lefts, rights, strict=True):
            self.bases[name] = right
            approximation = left @ right.T
            self.errors[name] = matrix - approximation
            gradients[name].copy_(approximation.view_as(gradients[name]))

    def _is_compressible(self, gradient: Tensor) -> bool:
        rows, columns = (len(gradient), gradient[0].numel()) if gradient.ndim > 1 and len(gradient) else (1, 1)
        return 2 * self.rank * (rows + columns) < rows * columns

    def _add_error(self, name: str, gradient: Tensor) -> Tensor:
        matrix = gradient.flatten(1).to(torch.promote_types(gradient.dtype, torch.float32))
        error = self.errors.get(name)
        return matrix if error is None else matrix + error.to(matrix)

    def _basis(self, name: str, matrix: Tensor) -> Tensor:
        if name not in self.bases:  # random, but equal on all processes
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            self.bases[name] = torch.randn(matrix.shape[1], self.rank, generator=generator)
        return torch.linalg.qr(self.bases[name].to(matrix)).Q

    def state_dict(self, alone: bool = False) -> dict[str, Any]:
        """Return the state that a resumed run needs.

        The method is linear: only the mean of the errors of all processes affects the result, so that one copy is
        enough for any number of processes.

        Args:
            alone: whether other processes may not call this, so that only the errors of this one are saved.
        """
        errors = {name: error.clone() for name, error in sorted(self.errors.items())}
        for error in errors.values() if not alone else ():
            _average(error)
        return {"step": self.step, "errors": errors, "bases": dict(self.bases)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.errors, self.bases = state["step"], dict(state["errors"]), dict(state["bases"])


def _average_together(tensors: list[Tensor]) -> None:
    """Average several tensors over processes in one message."""
    if not tensors:
        return
    together = torch.cat([tensor.flatten() for tensor in tensors])
    _average(together)
    for tensor, averaged in zip(tensors, together.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(averaged.view_as(tensor))


def _average(tensor: Tensor) -> None:
    dist.all_reduce(tensor.div_(dist.get_world_size()))


def _completed_future(tensor: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[tensor.device] if tensor.is_cuda else None)
    future.set_result(tensor)
    return future


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

    ``compression`` reduces what is sent, on CPU, too: ``bf16`` and ``fp16`` halve float32 gradients (fp16 loses values
    beyond 65504 and below 6e-8; prefer bf16), ``powersgd`` sends a low-rank approximation, see
    :class:`~lightning_accel.strategies.ddp.PowerSGD`, whose state is kept in checkpoints.

    Not supported: reentrant activation checkpointing, and sparse gradients of parameters that are unused.

    Args:
        accelerator: set by the Trainer.
        parallel_devices: set by the Trainer.
        cluster_environment: set by the Trainer.
        checkpoint_io: set by the Trainer.
        precision_plugin: set by the Trainer.
        compression: how gradients are compressed before they are sent.
        powersgd_rank: rank of the approximation; higher is more accurate and sends more.
        powersgd_start_step: number of first optimizer steps whose gradients are sent uncompressed, about a tenth of
            all.
        bucket_cap_mb: MiB of gradients that are sent together.
        gradient_as_bucket_view: let gradients be views of the communication buckets, which saves a copy of them.
        process_group_backend: by default nccl on CUDA, gloo on CPU.
        timeout: time limit of each collective.
        start_method: how Lightning starts the processes.

    Raises:
        ValueError: if a number is out of range; before training, if ``powersgd`` is used with a gradient scaler.
        RuntimeError: if ``requires_grad`` changes between the micro-batches of an optimizer step.
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        *,
        compression: Literal["none", "bf16", "fp16", "powersgd"] = "none",
        powersgd_rank: int = 4,
        powersgd_start_step: int = 1000,
        bucket_cap_mb: int = 25,
        gradient_as_bucket_view: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
        )
        if compression not in ("none", *_HALVES, "powersgd"):
            raise ValueError(f"compression must be none, bf16, fp16 or powersgd; got {compression!r}")
        if powersgd_rank < 1 or powersgd_start_step < 0:
            raise ValueError(
                "powersgd_rank must be at least 1, and powersgd_start_step not negative; got "
                f"powersgd_rank={powersgd_rank}, powersgd_start_step={powersgd_start_step}"
            )
        self.compression = compression
        self.powersgd_rank = powersgd_rank
        self.powersgd_start_step = powersgd_start_step
        self._powersgd: PowerSGD | None = None
        self._loaded: dict[str, Any] | None = None  # state of PowerSGD from a checkpoint
        self._usage: _ParameterUsage | None = None
        self._accumulating = False

    def setup_environment(self) -> None:
        with joining_process_group(self.cluster_environment, self._timeout):
            super().setup_environment()

    def setup(self, trainer: L.Trainer) -> None:
        if self.compression == "powersgd" and getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                "compression=powersgd adds what it left out of one gradient to the next, which a gradient scaler may "
                "have scaled otherwise, or overflowed; use precision=bf16-mixed, or compression=bf16"
            )
        require_distributable_batches(trainer)
        self._powersgd = None  # drop the state of an earlier fit
        super().setup(trainer)

    def configure_ddp(self) -> None:
        if self._usage is not None:  # called again, after the set of trained parameters changed
            self._unwrap()
        super().configure_ddp()
        assert self.lightning_module is not None
        assert isinstance(self.model, DistributedDataParallel)
        self._usage = _ParameterUsage(self.lightning_module)
        if self.compression in _HALVES:
            self.model.register_comm_hook(None, _cast_hook(_HALVES[self.compression]))
        elif self.compression == "powersgd":
            if self._powersgd is None:
                self._powersgd = PowerSGD(self.lightning_module, self.powersgd_rank, self.powersgd_start_step)
                if self._loaded is not None:
                    self._powersgd.load_state_dict(self._loaded)
            self.model.register_comm_hook(None, self._powersgd.average)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        self._loaded = checkpoint.get(_KEY)
        return checkpoint

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if self._powersgd is not None and "optimizer_states" in checkpoint:
            checkpoint[_KEY] = self._powersgd.state_dict(alone=self._has_failed)
        super().save_checkpoint(checkpoint, filepath, storage_options)

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
        self._loaded = None
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
