"""Gradient accumulation weighted by the number of elements that each loss averages over."""

import math
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_accel.callbacks.trainer_callbacks import require_own_steps


class WeightedAccumulation(L.Callback):
    """Weigh each micro-batch and process by the number of elements its loss averages over, such as non-padding tokens.

    ``training_step`` returns ``{"loss": mean_loss, "weight": tokens}``. The gradient of an optimizer step is then
    sum(weight * gradient) / sum(weight) over its micro-batches and processes, as for a single batch of them all; the
    Trainer alone weighs all micro-batches and processes equally. If the weight is 0, the loss must still be finite:
    divide by ``tokens.clamp(min=1)``.

    It works with every strategy that averages gradients over processes, and with a gradient scaler. In each optimizer
    step it costs a reduction of one number over processes, and a pass over the gradients; clipping, and callbacks after
    this one, see the final gradient. It never waits for the device.

    Raises:
        TypeError: before training, with manual optimization or under ``accel_pipeline``; at the first step, if
            ``training_step`` returns no weight.
        ValueError: if a weight is not a single number, or one on the CPU is negative or not finite.

    Example:
        >>> import lightning as L
        >>> from lightning_accel.callbacks import WeightedAccumulation
        >>> trainer = L.Trainer(accumulate_grad_batches=4, callbacks=[WeightedAccumulation()])
    """

    def __init__(self) -> None:
        self.unit: float | None = None  # a power of 2 near the first weights
        self._strategy: Any = None
        self._weight: Tensor | None = None
        self._total: Tensor | None = None  # of this optimizer step in this process, in multiples of unit

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Wrap the strategy's ``training_step`` to read the weight, which callback hooks see only after backward."""
        require_own_steps(trainer, pl_module, "WeightedAccumulation", "weigh the losses there")
        self._weight = self._total = None
        self._strategy = trainer.strategy
        run = self._strategy.training_step

        def training_step(*args: Any, **kwargs: Any) -> STEP_OUTPUT:
            output: STEP_OUTPUT = run(*args, **kwargs)
            self._weight = None if output is None else _weight_of(output, pl_module)
            return output

        self._strategy.training_step = training_step

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        assert self._weight is not None
        if self.unit is None:
            self.unit = _power_of_2(trainer.strategy.reduce(self._weight.clone(), reduce_op="mean").item())
        # A power of 2 leaves all digits of a gradient unchanged, and keeps fp16 and compressed gradients in range.
        weight = self._weight / self.unit
        self._total = weight if self._total is None else self._total + weight
        if loss.requires_grad:  # else backward raises the error
            loss.register_hook(lambda gradient: (gradient * weight).to(gradient.dtype))

    @torch.no_grad()
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._total is None:
            return
        total = trainer.strategy.reduce(self._total, reduce_op="sum")
        self._total = None
        # the Trainer has divided by the number of micro-batches, and the strategy by that of processes
        shares = trainer.accumulate_grad_batches * trainer.world_size
        factor = torch.where(total > 0, shares / total, 0.0)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient = parameter.grad
                    # DTensor's own multiplication has more overhead than the product
                    (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(factor)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._restore_training_step()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._restore_training_step()

    def _restore_training_step(self) -> None:
        if self._strategy is not None:
            vars(self._strategy).pop("training_step", None)
            self._strategy = None

    def state_dict(self) -> dict[str, Any]:
        return {"unit": self.unit}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.unit = state_dict["unit"]


def _weight_of(output: STEP_OUTPUT, module: L.LightningModule) -> Tensor:
    if not isinstance(output, Mapping) or output.get("weight") is None:
        raise TypeError(
            'WeightedAccumulation needs training_step to return {"loss": mean_loss, "weight": what it is a mean over}; '
            f"that of {type(module).__name__} returned "
            f"{sorted(output) if isinstance(output, Mapping) else type(output).__name__}"
        )
    weight = torch.as_tensor(output["weight"]).detach()
    if weight.numel() != 1:
        raise ValueError(f"the weight of a micro-batch must be a single number; got shape {tuple(weight.shape)}")
    if weight.device.type == "cpu" and not 0 <= weight.item() < math.inf:
        raise ValueError(f"the weight of a micro-batch must be finite and at least 0; got {weight.item()}")
    dtype = torch.float32 if module.device.type == "mps" else torch.float64
    return weight.reshape(()).to(module.device, dtype)


def _power_of_2(weight: float) -> float:
    return 2.0 ** round(math.log2(weight)) if 0 < weight < math.inf else 1.0
