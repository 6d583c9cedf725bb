"""Losses of gates in the training of any module with mixtures of experts."""

from functools import wraps
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn

from lightning_accel.callbacks.monitors.expert_load import update_gates
from lightning_accel.callbacks.trainer_callbacks import callbacks_of, require_own_steps
from lightning_accel.nn import ExpertLoad, GateReport, MixtureOfExperts
from lightning_accel.ops.bounds import require_at_least


class ExpertLosses(L.Callback):
    """Add the losses of gates to that of ``training_step``, for any module with mixtures of experts.

    The mixtures may be anywhere, as those that :func:`lightning_accel.nn.replace_mlps_` puts into a network of others.
    The step's loss becomes ``loss + balance_weight * balance + z_weight * z``, with the means of both losses over
    mixtures. Balance losses and biases of gates refer to whole optimizer steps, over micro-batches and processes.
    Logged are ``train/balance_loss``, and the summary of :func:`lightning_accel.nn.summarise_load` under ``train/``; a
    collapsed gate causes a warning. Modules of this package add these losses themselves.

    Args:
        balance_weight: weight of the balance loss (Fedus et al. 2021, https://arxiv.org/abs/2101.03961, eq. 4).
        z_weight: weight of the z-loss (Zoph et al. 2022, https://arxiv.org/abs/2202.08906, eq. 5).

    Raises:
        ValueError: if a weight is negative.
        TypeError: before training, if there is no mixture, the module adds the losses itself or optimizes by hand, or
            a pipeline runs its layers; in the first step, if it returns something without a loss.

    Example:
        >>> import lightning as L
        >>> from lightning_accel.callbacks import ExpertLosses
        >>> trainer = L.Trainer(max_epochs=5, callbacks=[ExpertLosses(balance_weight=0.02)])
    """

    def __init__(self, balance_weight: float = 0.01, z_weight: float = 0.001) -> None:
        require_at_least(0, balance_weight=balance_weight, z_weight=z_weight)
        self.balance_weight = balance_weight
        self.z_weight = z_weight
        self._load = ExpertLoad([])
        self._reports: list[GateReport] | None = None  # of the training step that runs
        self._hooks: list[Any] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        require_own_steps(trainer, pl_module, "ExpertLosses", "add the losses of the gates to yours")
        name = type(pl_module).__name__
        if not any(isinstance(one, MixtureOfExperts) for one in pl_module.modules()):
            raise TypeError(
                f"ExpertLosses found no MixtureOfExperts in {name}; put some in by lightning_accel.nn.replace_mlps_, "
                "or take the callback out"
            )
        if len(callbacks_of(trainer, ExpertLosses)) > 1:
            raise TypeError("the Trainer has several ExpertLosses, and takes one; take the others out")
        if isinstance(getattr(pl_module, "expert_load", None), ExpertLoad):
            raise TypeError(f"{name} adds the losses of its gates itself; take ExpertLosses out")
        self._restore(pl_module)
        self._load = ExpertLoad([])
        vars(pl_module)["expert_load"] = self._load  # so that ExpertLoadMonitor leaves the gates to this callback
        self._watch(pl_module)
        self._wrap(pl_module)

    def _watch(self, pl_module: L.LightningModule) -> None:
        mixtures = [one for one in pl_module.modules() if isinstance(one, MixtureOfExperts)]
        self._load.track([one.gate for one in mixtures])
        self._load.start()
        for hook in self._hooks:
            hook.remove()
        self._hooks = [one.register_forward_hook(self._make_hook(number)) for number, one in enumerate(mixtures)]

    def after_removal(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """See :func:`~lightning_accel.callbacks.compression_phase.announce_removal`."""
        self._watch(pl_module)

    def _make_hook(self, number: int) -> Any:
        def hook(mixture: nn.Module, args: object, output: Any) -> None:
            # activation checkpointing runs the forward pass again in the backward pass, when no step runs
            if self._reports is not None:
                self._reports.append(output.report)
                self._load.add_one(number, output.report)

        return hook

    def _wrap(self, pl_module: L.LightningModule) -> None:
        run = pl_module.training_step

        @wraps(run)
        def training_step(*args: Any, **kwargs: Any) -> STEP_OUTPUT:
            reports: list[GateReport] = []
            self._reports = reports
            try:
                output: Any = run(*args, **kwargs)
            finally:
                self._reports = None
            if output is None or not reports:
                return output
            balance = torch.stack([report.balance_loss for report in reports]).mean()
            extra = self.balance_weight * balance + self.z_weight * torch.stack([one.z_loss for one in reports]).mean()
            pl_module.log("train/balance_loss", balance.detach())
            return _with_loss(output, extra, type(pl_module).__name__)

        pl_module.training_step = training_step  # type: ignore[method-assign]

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        update_gates(self._load, trainer, pl_module)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._restore(pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._restore(pl_module)

    def _restore(self, pl_module: L.LightningModule) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._hooks:
            vars(pl_module).pop("training_step", None)
            vars(pl_module).pop("expert_load", None)
        self._hooks = []


def _with_loss(output: Any, extra: Tensor, name: str) -> Any:
    """Return the output of a training step with a larger loss."""
    if isinstance(output, Tensor):
        return output + extra
    if isinstance(output, dict) and isinstance(output.get("loss"), Tensor):
        return {**output, "loss": output["loss"] + extra}
    raise TypeError(f"training_step of {name} returns no loss, to which ExpertLosses could add those of gates")
