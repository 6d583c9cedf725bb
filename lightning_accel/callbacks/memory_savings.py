"""Training steps in less memory: micro-batches, and activations that are recomputed or kept on the host."""

from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_accel._private.torch import BatchNormBase, tree_map_only
from lightning_accel.callbacks.ddp_settings import require_whole_parameters
from lightning_accel.callbacks.trainer_callbacks import require_own_steps
from lightning_accel.ops.blocks import find_blocks
from lightning_accel.ops.bounds import require_flags, require_integers
from lightning_accel.strategies.batch_splitting import RecordedLog, merge_outputs, split_batch
from lightning_accel.strategies.sharding.blocks import recompute_activations

_LEAST_BYTES = 2**20  # smaller activations cost more to move than they save


class MemorySavings(L.Callback):
    """Train any module in less memory, with the losses and gradients of the run as it is, up to rounding.

    ``lightning-accel tune --goal memory`` finds the settings and writes them to a config.

    Micro-batches are parts of one batch of the loader: ``training_step`` runs on each, and the gradient of each is
    computed before the next one runs, so that the activations of one are held at a time. Batches, schedulers, hooks
    and logged values are those of whole batches, other than with ``accumulate_grad_batches``. Losses have to be means
    over samples, or ``training_step`` returns ``{"loss": mean, "weight": what it is a mean over}``. Each part draws
    its own random numbers.

    Args:
        micro_batches: parts of each batch.
        activation_checkpointing: keep only the input of each repeated block of the module (see
            :func:`lightning_accel.strategies.find_blocks`), and recompute the rest in the backward pass.
        activation_offload: keep activations of 1 MiB and more of a GPU in page-locked memory of the host until the
            backward pass needs them. Parameters stay where they are: ``accel_fsdp2_offload`` is the strategy that keeps
            these, their gradients and the states of optimizers on the host.

    Raises:
        TypeError: before training, with micro-batches or ``activation_offload`` under a strategy other than DDP or a
            single device; with micro-batches under manual optimization, or a precision that scales losses; at the first
            step, if a batch cannot be split.
        ValueError: before training, if batch norms would see other batches, there are no repeated blocks, or there is
            no GPU for ``activation_offload``.

    Source: activation checkpointing: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost,
    https://arxiv.org/abs/1604.06174.

    Example:
        >>> import lightning as L
        >>> from lightning_accel.callbacks import MemorySavings
        >>> trainer = L.Trainer(max_epochs=5, callbacks=[MemorySavings(micro_batches=4, activation_checkpointing=True)])
    """

    def __init__(
        self, micro_batches: int = 1, activation_checkpointing: bool = False, activation_offload: bool = False
    ) -> None:
        require_integers(1, micro_batches=micro_batches)
        require_flags(activation_checkpointing=activation_checkpointing, activation_offload=activation_offload)
        self.micro_batches = micro_batches
        self.activation_checkpointing = activation_checkpointing
        self.activation_offload = activation_offload
        self._changed: list[tuple[nn.Module, str]] = []  # modules, and the method that they got

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.activation_offload:
            device = trainer.strategy.root_device
            if device.type == "cpu":
                raise ValueError(
                    "activation_offload moves activations from a GPU to the memory of the host, where those of a cpu "
                    "device are already; take it out"
                )
            require_whole_parameters(trainer, "activation_offload", "use the strategy accel_fsdp2_offload")
            self._offload_steps(pl_module, device)
        if self.micro_batches > 1:
            _require_splittable(trainer, pl_module)
            self._split_steps(trainer, pl_module)
        if self.activation_checkpointing:
            blocks = find_blocks(pl_module)
            if not blocks:
                raise ValueError(f"activation_checkpointing found no repeated blocks in {type(pl_module).__name__}")
            if has_batch_norms(*blocks):
                raise ValueError(
                    "activation_checkpointing would run the batch norms in the blocks twice, and their running "
                    "statistics would be others; take it out, or put other norms in"
                )
            recompute_activations(blocks)
            self._changed += [(block, "forward") for block in blocks]

    def _offload_steps(self, pl_module: L.LightningModule, device: torch.device) -> None:
        run = pl_module.training_step

        @wraps(run)
        def training_step(*args: Any, **kwargs: Any) -> STEP_OUTPUT:
            with activations_on_host(pl_module, device):
                return run(*args, **kwargs)

        pl_module.training_step = training_step  # type: ignore[method-assign]
        self._changed.append((pl_module, "training_step"))

    def _split_steps(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        run = pl_module.training_step

        @wraps(run)
        def training_step(batch: Any, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
            if trainer.accumulate_grad_batches == 1:  # the Trainer would clear them between forward and backward
                pl_module.zero_grad()
            log = RecordedLog()
            parts = split_batch(batch, self.micro_batches, "train without micro_batches")
            sizes = [part.num_samples for part in parts]
            outputs: list[Any] = []
            sums = _GradientSums([each for each in pl_module.parameters() if each.requires_grad])
            for part in parts:
                pl_module.__dict__["log"] = log.recorder()
                try:
                    output: Any = run(part.batch, *args, **kwargs)
                finally:
                    del pl_module.__dict__["log"]
                if output is None:
                    return None
                sums.add(output, part.num_samples)
                outputs.append(tree_map_only(Tensor, Tensor.detach, output))
                del output
            for call in log.merged(pl_module.device, sizes):
                pl_module.log(**call)
            merged = merge_outputs(outputs, sizes, pl_module.device)
            if isinstance(merged, Tensor):
                return sums.attach(merged)
            merged["loss"] = sums.attach(merged["loss"])
            return merged

        pl_module.training_step = training_step  # type: ignore[method-assign]
        self._changed.append((pl_module, "training_step"))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._restore()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._restore()

    def _restore(self) -> None:
        for module, name in self._changed:
            module.__dict__.pop(name, None)
        self._changed = []


class _GradientSums:
    """Sum the gradients of losses of micro-batches, and hand them to the backward pass of their mean."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.sums: list[Tensor | None] = [None] * len(parameters)
        self.weight: Any = 0

    def add(self, output: Any, num_samples: int) -> None:
        weight = num_samples
        loss = output
        if not isinstance(output, Tensor):
            loss, weight = output["loss"], output.get("weight", num_samples)
        with torch.autocast(loss.device.type, enabled=False):  # backward runs outside of it, as that of a whole batch
            gradients = torch.autograd.grad(loss * weight, self.parameters, allow_unused=True)
        for place, gradient in enumerate(gradients):
            before = self.sums[place]
            if before is None:
                self.sums[place] = gradient
            elif gradient is not None:
                before += gradient
        self.weight += weight

    def attach(self, loss: Tensor) -> Tensor:
        """Return the mean loss, (), whose backward pass gives each parameter its sum over the sum of weights."""
        used = [place for place, total in enumerate(self.sums) if total is not None]
        parameters = [self.parameters[place] for place in used]
        totals = [self.sums[place] for place in used]
        self.sums = []
        result: Tensor = _MeanLoss.apply(loss, self.weight, totals, *parameters)
        return result


class _MeanLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, weight: Any, totals: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.weight, ctx.totals = weight, totals
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        totals, ctx.totals = ctx.totals, None  # a gradient that nobody else holds becomes .grad without a copy
        scale = gradient / ctx.weight
        for total in totals:
            total.mul_(scale)
        return None, None, None, *totals


def activations_on_host(
    module: nn.Module, device: torch.device, least_bytes: int = _LEAST_BYTES
) -> AbstractContextManager[None]:
    """Keep what a forward pass saves for its backward pass in the memory of the host.

    Args:
        module: its parameters and buffers, which layers save as well, stay on the device.
        device: where the forward and the backward pass run.
        least_bytes: of what is moved.
    """
    own = {one.untyped_storage().data_ptr() for one in (*module.parameters(), *module.buffers())}

    def pack(saved: Tensor) -> Tensor:
        if saved.device != device or saved.nbytes < least_bytes or saved.untyped_storage().data_ptr() in own:
            return saved
        # all copies run on the stream of the operations, in their order
        on_host = torch.empty(saved.shape, dtype=saved.dtype, pin_memory=device.type == "cuda")
        return on_host.copy_(saved, non_blocking=True)

    def unpack(packed: Tensor) -> Tensor:
        return packed.to(device, non_blocking=True)

    return saved_tensors_hooks(pack, unpack)


def has_batch_norms(*modules: nn.Module) -> bool:
    """Return whether batch norms in train mode are among the modules, whose outputs depend on the whole batch."""
    return any(isinstance(layer, BatchNormBase) and layer.training for one in modules for layer in one.modules())


def _require_splittable(trainer: L.Trainer, module: L.LightningModule) -> None:
    require_own_steps(trainer, module, "MemorySavings(micro_batches)", "split batches there")
    require_whole_parameters(trainer, "micro_batches", "use accumulate_grad_batches with smaller batches")
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise TypeError(
            "micro_batches computes gradients before the loss is scaled, which loses digits in float16: use bf16-mixed"
        )
    if has_batch_norms(module):
        raise ValueError("micro_batches would give the batch norms smaller batches: take it out")
