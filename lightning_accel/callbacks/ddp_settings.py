"""How DDP synchronizes gradients, whatever form the run's strategy is given in."""

from typing import Any, Literal, TypeGuard

import lightning as L
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.nn.parallel import DistributedDataParallel

from lightning_accel._private.lightning import ddp_options
from lightning_accel.ops.bounds import if_set, require_flags, require_integers
from lightning_accel.ops.names import require_one_of
from lightning_accel.strategies import AccelDDPStrategy, FullyShardedStrategy, PipelineStrategy
from lightning_accel.strategies.ddp import compress_gradients


class DDPSettings(L.Callback):
    """Change how DDP synchronizes gradients, whether the strategy of the run is a name or an object.

    ``lightning-accel tune`` finds the settings of a run on several processes, and writes them to a config. Gradients
    stay equal, with the exception of ``compression``. Each is None, and left as the run has it, by default.

    Args:
        bucket_cap_mb: size of the buckets in which gradients are sent, in MiB.
        gradient_as_bucket_view: keep gradients in the buckets, without copies.
        static_graph: whether all steps use the same parameters in the same order; torch ends a run where they do not.
        find_unused_parameters: whether to look for unused parameters in each step; without, torch ends a run that has
            any.
        compression: dtype in which gradients are sent.

    Raises:
        TypeError: before training, if the strategy is not DDP, or is ``accel_ddp``, whose parameters may go unused, for
            options other than sizes and views of buckets.

    Example:
        >>> import lightning as L
        >>> from lightning_accel.callbacks import DDPSettings
        >>> settings = DDPSettings(gradient_as_bucket_view=True)
        >>> trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", callbacks=[settings])
    """

    def __init__(
        self,
        bucket_cap_mb: int | None = None,
        gradient_as_bucket_view: bool | None = None,
        static_graph: bool | None = None,
        find_unused_parameters: bool | None = None,
        compression: Literal["bf16"] | None = None,
    ) -> None:
        require_integers(1, **if_set(bucket_cap_mb=bucket_cap_mb))
        require_flags(
            **if_set(
                gradient_as_bucket_view=gradient_as_bucket_view,
                static_graph=static_graph,
                find_unused_parameters=find_unused_parameters,
            )
        )
        self.buckets = {"bucket_cap_mb": bucket_cap_mb, "gradient_as_bucket_view": gradient_as_bucket_view}
        self.graph = {"static_graph": static_graph, "find_unused_parameters": find_unused_parameters}
        if compression is not None:
            require_one_of("compression", compression, ["bf16"])
        self.compression = compression
        self._before: dict[str, Any] | None = None  # what the strategy had

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        given = {name: value for name, value in (self.buckets | self.graph).items() if value is not None}
        strategy = trainer.strategy
        if not is_ddp(strategy):
            raise TypeError(f"DDPSettings needs DDP; got {type(strategy).__name__}: take the callback out")
        if isinstance(strategy, AccelDDPStrategy) and (self.compression or given.keys() & self.graph.keys()):
            raise TypeError(
                "accel_ddp looks for unused parameters and compresses gradients itself: give compression to the "
                "strategy, and bucket_cap_mb and gradient_as_bucket_view alone to DDPSettings"
            )
        options = ddp_options(strategy)
        self._before = dict(options)
        options.update(given)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.compression is not None:
            assert isinstance(trainer.strategy.model, DistributedDataParallel)
            compress_gradients(trainer.strategy.model, self.compression)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if is_ddp(trainer.strategy) and self._before is not None:
            options = ddp_options(trainer.strategy)
            options.clear()
            options.update(self._before)
            self._before = None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "")  # which Lightning leaves out


def is_ddp(strategy: object) -> TypeGuard[DDPStrategy]:
    """Return whether a strategy is DDP with whole parameters on each process."""
    return isinstance(strategy, DDPStrategy) and not isinstance(strategy, FullyShardedStrategy | PipelineStrategy)


def require_whole_parameters(trainer: L.Trainer, name: str, instead: str) -> None:
    """Reject, with a TypeError, a strategy other than a single device or DDP on behalf of the option ``name``."""
    if not isinstance(trainer.strategy, SingleDeviceStrategy) and not is_ddp(trainer.strategy):
        raise TypeError(
            f"{name} needs a single device or DDP, whose parameters and gradients are whole; got "
            f"{type(trainer.strategy).__name__}: {instead}"
        )
