"""Interface between :class:`~lightning_accel.callbacks.Pruning`, which schedules, and the kinds of sparsity."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import lightning as L
from torch import Tensor, nn
from torch.optim import Optimizer

Criterion = Literal["magnitude"] | Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class StructureOptions:
    """Hold the options of ``MaskStructure(options)`` and ``ChannelStructure(options)``.

    Args:
        structure: ``"unstructured"``, ``"channel"``, ``"2:4"`` or another ``"N:M"``.
        criterion: ``"magnitude"``, or a function of a parameter's name and value that returns scores of its shape, of
            which the lowest are pruned.
        scope: ``"layer"``, ``"global"`` or ``"erk"``.
        exclude: names or globs of parameters or modules (``"network.6"``, ``"*.head.*"``), or classes, or their names.
        target: final share that is zero, or removed.
    """

    structure: str
    criterion: Criterion
    scope: str
    exclude: Sequence[str | type[nn.Module]]
    target: float


class Structure(Protocol):
    """Define a kind of sparsity: masks that keep zeros, or channels that are zeroed and then removed.

    Only :class:`~lightning_accel.callbacks.Pruning` calls it, in this order: ``rebuild`` in ``setup`` of a resumed run;
    ``load_state_dict`` when resuming from a checkpoint; ``attach`` in ``on_fit_start``, after the strategy has sharded
    the parameters and the optimizers exist; then in each step ``before_optimizer_step`` once for each optimizer that
    steps (with unscaled gradients), ``after_step`` once ``trainer.global_step`` has advanced, and then ``prune_to``
    where the schedule says so; ``finish`` once, right after the ``prune_to`` that reached the target. All processes
    make the same calls, so that each method may use collectives.
    """

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, str]:
        """Find what to prune, apply a loaded state, and reject what is not supported.

        Returns:
            the name of each omitted parameter of at least two dimensions, with the reason.

        Raises:
            ValueError: if nothing can be pruned, or the target cannot be met; the message says what to do.
            TypeError: if this structure does not support the module or the strategy.
        """

    def prune_to(self, trainer: L.Trainer, pl_module: L.LightningModule, sparsity: float) -> None:
        """Prune up to a share of ``sparsity`` of everything prunable, including what is pruned already.

        Shares never decrease from one call to the next within a run.
        """

    def before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Collect what regrowth needs from the gradients, then zero the gradients of pruned weights."""

    def after_step(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Set weights and moments of pruned entries to zero."""

    def finish(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remove channels once the target is reached; masks do nothing."""

    def sparsity(self) -> float:
        """Return the share of everything prunable that is pruned now, over all processes."""

    def report_rows(self) -> list[dict[str, Any]]:
        """Return a row for each layer: ``name``, ``shape``, ``parameters``, ``nonzero``, ``sparsity``, ``note``."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state on all processes, of types that load with ``weights_only=True``."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Store ``state`` for ``attach``; called before or after parameters are sharded."""

    def rebuild(self, pl_module: nn.Module, state: dict[str, Any]) -> None:
        """Change the shapes of a new module to those of the checkpoint that ``state`` comes from.

        Called in ``setup``, before parameters are sharded and optimizers created, and before ``load_state_dict``.
        """
