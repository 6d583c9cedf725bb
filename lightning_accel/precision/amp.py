"""Mixed precision in the format of the device, with skipped steps that schedules and checkpoints account for."""

import sys
from collections.abc import Callable
from typing import Any, get_args

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_accel.precision.dtype_choice import MixedDtype, MixedPrecisionName, bf16_instructions, choose_precision
from lightning_accel.precision.grad_scaler import WorldGradScaler
from lightning_accel.precision.gradient_check import all_finite, describe_non_finite


class AmpPrecision(MixedPrecision):
    """Train in mixed precision, in the format that the device computes in: ``Trainer(plugins=[AmpPrecision()])``.

    ``auto`` selects bf16 on CUDA devices of compute capability 8.0 or higher and on CPUs with bf16 multiplication (AMX,
    AVX512-bf16, ARM bf16); fp16 with a gradient scaler on older CUDA devices; and float32, without autocast, on CPUs
    that would emulate bf16. The choice is reported once, when the run is set up. On CPU, ``fp16`` uses fp16, where
    ``Trainer(precision="16-mixed")`` silently uses bf16.

    In fp16, all processes skip a step together, under any strategy. With automatic optimization, a learning-rate
    schedule with ``interval: step`` does not advance on a skipped step; if ``frequency`` is above 1 and the step on
    which it would advance is skipped, it advances ``frequency`` steps later. ``trainer.global_step`` counts skipped
    steps, since Lightning derives the position in an epoch from it. Gradients are unscaled before callbacks and
    clipping; fused optimizers can be clipped. Each fp16 step waits once for the device, to know whether to skip; bf16
    steps do not. Two optimizers that step after one backward pass are unscaled by the same scale. ``precision/scale``
    and ``precision/skipped_steps`` are logged in fp16.

    The scale and the counts are saved in checkpoints; scales of Lightning's own ``16-mixed`` can be loaded.

    Args:
        dtype: ``auto``, ``bf16`` or ``fp16``.
        init_scale: initial scale in fp16.
        growth_interval: number of steps without a skip after which the scale doubles.
        max_consecutive_skips: number of consecutive skipped steps after which an error ends the run and names the
            gradients that are not finite. The default halves the initial scale to 1/16, at which a healthy run does not
            overflow.
        check_gradients: check all gradients before each step in bf16 and float32 too, and raise an error with the names
            of those that are not finite. This waits for the device at each step.

    Attributes:
        skipped_steps: number of steps skipped since the beginning of the run, including before a resume.
        consecutive_skips: number of steps skipped since the last one that was not.

    Raises:
        ValueError: if an argument is out of range; before training, if fp16 is combined with LBFGS or with float16
            parameters.
        FloatingPointError: during training, if gradients are not finite, see ``max_consecutive_skips`` and
            ``check_gradients``.
    """

    def __init__(
        self,
        dtype: MixedDtype = "auto",
        *,
        init_scale: float = 2.0**16,
        growth_interval: int = 2000,
        max_consecutive_skips: int = 20,
        check_gradients: bool = False,
    ) -> None:
        if dtype not in get_args(MixedDtype):
            raise ValueError(f"dtype must be auto, bf16 or fp16; got {dtype!r}")
        if init_scale <= 0 or growth_interval < 1 or max_consecutive_skips < 1:
            raise ValueError(
                "init_scale must be positive, growth_interval and max_consecutive_skips at least 1; got "
                f"init_scale={init_scale}, growth_interval={growth_interval}, "
                f"max_consecutive_skips={max_consecutive_skips}"
            )
        super().__init__("bf16-mixed", "cpu")  # placeholders until choose sets both
        self.dtype = dtype
        self.init_scale = init_scale
        self.growth_interval = growth_interval
        self.max_consecutive_skips = max_consecutive_skips
        self.check_gradients = check_gradients
        self.scaler: WorldGradScaler | None = None
        self.skipped_steps = 0
        self.consecutive_skips = 0
        self._precision: MixedPrecisionName | None = None
        self._across_ranks = False
        self._loss: Tensor | None = None
        self._unscaled: set[int] = set()
        self._paused: list[tuple[LRSchedulerConfig, int]] = []

    @property  # type: ignore[override]  # a settable attribute in Lightning
    def precision(self) -> MixedPrecisionName:
        """Return ``bf16-mixed``, ``16-mixed`` or ``32-true``; before setup, that of the accelerator."""
        if self._precision is None:
            device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
            return choose_precision(self.dtype, device).precision
        return self._precision

    @precision.setter
    def precision(self, precision: MixedPrecisionName) -> None:
        self._precision = precision

    def choose(self, device: torch.device) -> str:
        """Choose the precision for ``device`` and return it.

        :meth:`convert_module` calls it; strategies that need the precision earlier call it themselves.
        """
        choice = choose_precision(self.dtype, device)
        if (choice.precision, device.type) != (self._precision, self.device):
            emulated = device.type == "cpu" and choice.precision == "bf16-mixed" and not bf16_instructions()
            advice = "; this CPU emulates bf16, so float32 is faster" if emulated else ""
            rank_zero_info(f"AmpPrecision: {choice.precision}, since {choice.reason}{advice}")
            self.scaler = None
        self.precision, self.device = choice.precision, device.type
        if self.scaler is None and choice.precision == "16-mixed":
            self.scaler = WorldGradScaler(device.type, self.init_scale, self.growth_interval)
        return choice.precision

    def convert_module(self, module: nn.Module) -> nn.Module:
        assert isinstance(module, pl.LightningModule)
        strategy = module.trainer.strategy
        self.choose(strategy.root_device)
        self._across_ranks = module.trainer.world_size > 1 and dist.is_available() and dist.is_initialized()
        if self.scaler is not None:
            self.scaler.start(strategy.root_device, self._across_ranks)
        return module

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        if self.scaler is not None:
            for optimizer in optimizers:
                _require_scalable(optimizer)
        return super().connect(model, optimizers, lr_schedulers)

    def autocast_context_manager(self) -> torch.autocast:
        if self.precision == "32-true":
            return torch.autocast(self.device, enabled=False)
        return super().autocast_context_manager()

    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        self._loss = tensor.detach()
        self._update_scale()
        return super().pre_backward(tensor, module)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        self._resume_schedules()
        if self.scaler is None:
            if self.check_gradients:
                closure = self._with_gradient_check(closure, optimizer, model)
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        result = closure()
        if result is None and model.automatic_optimization:  # training_step returned None
            self._after_closure(model, optimizer)
            return result
        skip = self._unscale(optimizer)
        self._count_skips(skip, model)
        self._after_closure(model, optimizer)
        if not skip:
            optimizer.step(**kwargs)
        self._log(model)
        return result

    def clip_gradients(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        # not MixedPrecision's, which rejects fused optimizers: here gradients are unscaled already
        super(MixedPrecision, self).clip_gradients(optimizer, *args, **kwargs)

    def _unscale(self, optimizer: Optimizer) -> bool:
        """Unscale the gradients; return whether to skip the step."""
        assert self.scaler is not None
        if id(optimizer) in self._unscaled:  # a second step without a backward pass
            self._update_scale()
        self.scaler.unscale_(optimizer)
        # the scale may change only before the next backward pass: other optimizers may have gradients at this scale
        self._unscaled.add(id(optimizer))
        return self.scaler.found_non_finite(optimizer)

    def _update_scale(self) -> None:
        if self.scaler is not None and self._unscaled:
            self.scaler.update()
        self._unscaled.clear()

    def _count_skips(self, skip: bool, model: pl.LightningModule) -> None:
        self.consecutive_skips = self.consecutive_skips + 1 if skip else 0
        if not skip:
            return
        self.skipped_steps += 1
        self._pause_schedules(model.trainer.lr_scheduler_configs)
        if self.consecutive_skips >= self.max_consecutive_skips:
            assert self.scaler is not None
            raise FloatingPointError(
                f"{self.consecutive_skips} optimizer steps in a row were skipped, and the scale of the loss went down "
                f"to {self.scaler.get_scale():g}. {describe_non_finite(model, self._loss, self._across_ranks)}"
            )

    def _with_gradient_check(
        self, closure: Callable[[], Any], optimizer: Optimizer, model: pl.LightningModule
    ) -> Callable[[], Any]:
        def checked() -> Any:
            result = closure()
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            if not all_finite(parameters, self._across_ranks):
                raise FloatingPointError(
                    f"The gradients of step {model.trainer.global_step} are not finite. "
                    f"{describe_non_finite(model, self._loss, self._across_ranks)}"
                )
            return result

        return checked

    def _pause_schedules(self, configs: list[LRSchedulerConfig]) -> None:
        for config in configs:
            if config.interval == "step":
                self._paused.append((config, config.frequency))
                config.frequency = sys.maxsize  # Lightning steps a schedule at multiples of its frequency

    def _resume_schedules(self) -> None:
        for config, frequency in self._paused:
            config.frequency = frequency
        self._paused.clear()

    def _log(self, model: pl.LightningModule) -> None:
        trainer: Any = model.trainer  # Any, as connectors set the attributes used here
        every = trainer.log_every_n_steps
        if trainer.loggers and every and (trainer.global_step + 1) % every == 0:
            assert self.scaler is not None
            model.log("precision/scale", self.scaler.get_scale())
            model.log("precision/skipped_steps", float(self.skipped_steps))

    def teardown(self) -> None:
        self._resume_schedules()
        self._loss = None
        super().teardown()

    def state_dict(self) -> dict[str, Any]:
        self._update_scale()
        counts = {"skipped_steps": self.skipped_steps, "consecutive_skips": self.consecutive_skips}
        return super().state_dict() | counts if self.scaler is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaler is None:  # a checkpoint from a device that uses fp16
            return
        super().load_state_dict(state_dict)
        self.skipped_steps = state_dict.get("skipped_steps", 0)
        self.consecutive_skips = state_dict.get("consecutive_skips", 0)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if type(self).__qualname__ not in checkpoint and MixedPrecision.__qualname__ in checkpoint:
            self.load_state_dict(checkpoint[MixedPrecision.__qualname__])


def _require_scalable(optimizer: Optimizer) -> None:
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "LBFGS evaluates the loss several times a step, which a gradient scaler cannot follow; "
            'use AmpPrecision(dtype="bf16") or another optimizer'
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(parameter.dtype == torch.float16 for parameter in parameters):
        raise ValueError(
            "mixed precision needs float32 parameters; got float16 ones, whose gradients cannot be unscaled. "
            "Leave the module in float32: autocast casts what gains from it"
        )
