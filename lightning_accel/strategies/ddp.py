"""DDP with unused or frozen parameters and with compressed gradients."""

from datetime import timedelta
from typing import Any, Literal

import lightning as L
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_accel.strategies.batch_samplers import require_distributable_batches
from lightning_accel.strategies.launched import LaunchedStrategy

_HOOKS = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}


class AccelDDPStrategy(LaunchedStrategy):
    """Run DDP where parameters may be unused in some steps, on some processes, or frozen in some phases.

    Gradients are those of one process with all batches: a parameter unused on some processes counts as 0 there, and one
    unused on all processes has no gradient, so that no optimizer updates it. This is torch's
    ``find_unused_parameters=True``, which warns once if all parameters are used.

    ``requires_grad`` may change from one optimizer step to the next, alike on all processes, as when layers are trained
    one after another; gradients of frozen parameters are then not sent. (Plain DDP fails on a parameter frozen during
    training, and silently does not synchronize one that was frozen at first.)

    ``compression`` halves what float32 gradients send, on CPU, too; ``fp16`` loses values beyond 65504 and below 6e-8.

    Args:
        compression: dtype in which gradients are sent; prefer ``bf16``.
        timeout: time limit of each collective, a ``datetime.timedelta``.
        start_method: how Lightning starts the processes.

    Raises:
        ValueError: if ``compression`` is unknown.
        RuntimeError: if ``requires_grad`` changes between the micro-batches of an optimizer step.

    Source: Li et al. 2020, PyTorch Distributed: Experiences on Accelerating Data Parallel Training,
    https://arxiv.org/abs/2006.15704.

    Example:
        >>> import lightning as L
        >>> from lightning_accel import AccelDDPStrategy
        >>> trainer = L.Trainer(accelerator="cpu", devices=2, strategy=AccelDDPStrategy(compression="bf16"))
    """

    def __init__(
        self,
        *,
        compression: Literal["none", "bf16", "fp16"] = "none",
        timeout: timedelta = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        super().__init__(timeout=timeout, start_method=start_method, find_unused_parameters=True)
        if compression not in ("none", *_HOOKS):
            raise ValueError(f"compression must be none, bf16 or fp16; got {compression!r}")
        self.compression = compression
        self._trained: list[bool] = []
        self._accumulating = False

    def setup(self, trainer: L.Trainer) -> None:
        require_distributable_batches(trainer)
        super().setup(trainer)

    def configure_ddp(self) -> None:
        assert self.lightning_module is not None
        self.model = self.lightning_module  # called again after the set of trained parameters changed
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        self._trained = self._find_trained()
        if self.compression in _HOOKS:
            compress_gradients(self.model, self.compression)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not self._has_failed:  # after a failure this process may be alone, as when it saves a checkpoint
            super().barrier(*args, **kwargs)

    @property
    def _has_failed(self) -> bool:
        module = self.lightning_module
        return module is not None and module.trainer.state.status == TrainerStatus.INTERRUPTED

    def _find_trained(self) -> list[bool]:
        assert self.lightning_module is not None
        return [parameter.requires_grad for parameter in self.lightning_module.parameters()]

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if isinstance(self.model, DistributedDataParallel) and self._find_trained() != self._trained:
            if self._accumulating:
                raise RuntimeError(
                    "requires_grad of some parameters changed between the micro-batches of an optimizer step, so that "
                    "gradients would stay behind unsent; change it where a step begins, such as in "
                    "on_train_epoch_start"
                )
            self.configure_ddp()
        return super().training_step(*args, **kwargs)

    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        wrapped = isinstance(self.model, DistributedDataParallel)
        self._accumulating = wrapped and not self.model.require_backward_grad_sync  # type: ignore[union-attr]

    def teardown(self) -> None:
        self._accumulating = False
        super().teardown()


def compress_gradients(model: DistributedDataParallel, dtype: str) -> None:
    """Send gradients as ``bf16`` or ``fp16``."""
    hook = _HOOKS[dtype]
    # by another name, since torch rejects its own on gloo, which can send bf16, too
    model.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
