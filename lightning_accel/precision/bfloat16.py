"""Training with bfloat16 parameters that keeps small updates."""

from collections.abc import Callable
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.plugins import HalfPrecision
from torch import nn
from torch.optim import LBFGS, Optimizer

from lightning_accel.precision.float32_step import Float32Step
from lightning_accel.precision.stochastic_rounding import RoundingNoise


class Bfloat16Precision(HalfPrecision):
    """Train with bf16 parameters, as Lightning's ``bf16-true``, without losing small updates.

    Pass it as ``Trainer(plugins=[Bfloat16Precision()])``. A bf16 weight has 8 significant bits, so plain ``bf16-true``
    loses every update below 1/512 of the weight. Here each optimizer step runs in float32, with float32 state, and
    then:

    - ``master``: float32 master weights are kept in the state of the optimizer, and saved and loaded with it. Adam
      needs 14 bytes per parameter and 2 for the gradient, compared with 12 and 4 in float32, and 4 more during a step.
    - ``stochastic``: the new weights are rounded to bf16 stochastically, without bias (Zamirai et al. 2020,
      https://arxiv.org/abs/2010.06192). Adam needs 10 bytes per parameter and 2 for the gradient, and 8 more during a
      step. Replicas of a weight are rounded equally on all ranks; the seed and the number of steps are saved.

    It supports any optimizer with torch's interface except LBFGS, several optimizers, new parameter groups, and
    strategies that shard by DTensor. The module's state dict has its usual keys, in bf16. Gradients are bf16, as are
    their sums over accumulated batches and over ranks, and their norm for clipping.

    Args:
        mode: ``master`` or ``stochastic``.
        seed: seed of ``stochastic`` rounding, the same on all ranks.

    Raises:
        ValueError: if ``mode`` is unknown; before training, if an optimizer cannot work on copies of parameters.
    """

    def __init__(self, mode: Literal["master", "stochastic"] = "master", *, seed: int = 0) -> None:
        if mode not in ("master", "stochastic"):
            raise ValueError(f"mode must be master or stochastic; got {mode!r}")
        super().__init__("bf16-true")
        self.mode = mode
        self.seed = seed
        self._steps: list[Float32Step] = []

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        for optimizer in optimizers:
            _require_step_on_copies(optimizer)
        self._remove_steps()
        self._steps = [
            # different seeds, or two optimizers would use the same random numbers
            Float32Step(optimizer, RoundingNoise(self.seed + number) if self.mode == "stochastic" else None)
            for number, optimizer in enumerate(optimizers)
        ]
        return super().connect(model, optimizers, lr_schedulers)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        result = closure()  # before the step, during which the optimizer holds copies
        self._after_closure(model, optimizer)
        optimizer.step(**kwargs)
        return result

    def teardown(self) -> None:
        self._remove_steps()
        super().teardown()

    def state_dict(self) -> dict[str, Any]:
        noises = [step.noise for step in self._steps if step.noise is not None]
        return {"seeds": [n.seed for n in noises], "steps": [n.steps for n in noises]} if noises else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        noises = [step.noise for step in self._steps if step.noise is not None]
        for noise, seed, steps in zip(noises, state_dict["seeds"], state_dict["steps"], strict=False):
            noise.seed, noise.steps = seed, steps

    def _remove_steps(self) -> None:
        for step in self._steps:  # keep the list: a checkpoint may be saved after the fit
            step.remove()


def _require_step_on_copies(optimizer: Optimizer) -> None:
    # LBFGS evaluates the loss in its step; ZeroRedundancyOptimizer (has consolidate_state_dict) wraps another optimizer
    steps_itself = isinstance(optimizer, Optimizer) and not hasattr(optimizer, "consolidate_state_dict")
    if isinstance(optimizer, LBFGS) or not steps_itself:
        raise ValueError(
            f"Bfloat16Precision steps on float32 copies of the parameters, which {type(optimizer).__name__} does not "
            "allow; use another optimizer, or AmpPrecision"
        )
