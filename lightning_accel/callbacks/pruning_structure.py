"""What a kind of sparsity has to offer :class:`~lightning_accel.callbacks.Pruning`, which says when and how much."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import lightning as L
from torch import Tensor, nn
from torch.optim import Optimizer

Criterion = str | Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class StructureOptions:
    """What a structure is made with: ``MaskStructure(options)``, ``ChannelStructure(options)``.

    Args:
        structure: as the user gave it: ``"unstructured"``, ``"channel"``, ``"2:4"``, another ``"N:M"``.
        criterion: name of it, or a function of a parameter's name and value that returns scores of its shape, of
            which the lowest are pruned.
        scope: ``"layer"``, ``"global"`` or ``"erk"``.
        exclude: names or globs of parameters or modules (``"network.6"``, ``"*.head.*"``), or classes, or their names.
        regrowth: ``None``, ``"rigl"`` or ``"set"``.
        seed: of random criteria and regrowth; equal on all processes.
        target: share that is zero, or removed, at the end.
    """

    structure: str
    criterion: Criterion
    scope: str
    exclude: Sequence[str | type[nn.Module]]
    regrowth: str | None
    seed: int
    target: float


class Structure(Protocol):
    """A kind of sparsity: masks that keep zeros, or channels that are marked and then removed.

    Called by :class:`~lightning_accel.callbacks.Pruning` alone, in this order: ``rebuild`` in ``setup`` of a resumed
    run, ``load_state_dict`` (where a checkpoint is resumed), ``attach`` in ``on_fit_start``, with parameters laid out
    by the strategy and optimizers made, then in each step ``before_optimizer_step`` once for each optimizer that
    steps (gradients are there, and unscaled), ``after_step`` once ``trainer.global_step`` has moved, and ``prune_to``
    after it where the schedule says so; ``finish`` once, right after the ``prune_to`` that reached the target; at the
    end ``detach``. All processes call each method alike, so that each may use collectives.
    """

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, str]:
        """Find what is to be pruned, apply a loaded state, and refuse what cannot work.

        Returns:
            The name of each parameter of at least two dimensions that is left out, with the reason.

        Raises:
            ValueError: if nothing can be pruned, or the target cannot be met; the message says what to do.
            TypeError: if the module or strategy is of a kind that this structure cannot serve.
        """

    def prune_to(self, trainer: L.Trainer, pl_module: L.LightningModule, sparsity: float) -> None:
        """Have a share of ``sparsity`` pruned, of all that is to be pruned: absolute, never of what is left.

        Shares never shrink from one call to the next within a run.
        """

    def before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Collect what the criterion needs of the gradients, then keep them from what is pruned."""

    def after_step(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep weights and moments of what is pruned at zero."""

    def finish(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The target is reached: for channels, the place to remove them; masks have nothing to do."""

    def detach(self, pl_module: L.LightningModule) -> None:
        """Take hooks off the module; also after a failure."""

    def sparsity(self) -> float:
        """Share that is pruned now, of all that is to be pruned, over all processes."""

    def sparsities(self) -> dict[str, float]:
        """The same for each parameter that is pruned (of a channel structure: each layer), by name."""

    def report_rows(self) -> list[dict[str, Any]]:
        """A row for each layer: ``name``, ``shape``, ``parameters``, ``nonzero``, ``sparsity``, ``note``."""

    def state_dict(self) -> dict[str, Any]:
        """Of tensors, numbers, strings, lists and dicts: it is loaded with ``weights_only=True``. On all processes."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep ``state`` for ``attach``: called before parameters are laid out, or after."""

    def rebuild(self, pl_module: L.LightningModule, state: dict[str, Any]) -> None:
        """Bring shapes of a new module to those of the checkpoint that ``state`` comes from.

        In ``setup``, before the strategy lays out parameters and optimizers are made, and before ``load_state_dict``.
        """
