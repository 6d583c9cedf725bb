"""Mixed precision in the format of the device, with skipped steps that schedules and checkpoints account for."""

import math
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

from lightning_accel._private.lightning import call_step_hooks
from lightning_accel._private.torch import cpu_capabilities, found_inf_by_device, scale_of, unscale_gradients_
from lightning_accel.ops.bounds import require_above, require_integers
from lightning_accel.ops.names import list_some

MixedDtype: TypeAlias = Literal["auto", "bf16", "fp16"]
MixedPrecisionName: TypeAlias = Literal["bf16-mixed", "16-mixed", "32-true"]

_BF16_CAPABILITY = (8, 0)  # Ampere; older devices emulate bf16, which is slower than float32
_MAX_NAMES = 8
_MAX_CONSECUTIVE_SKIPS = 20  # they halve the initial scale to 1/16, at which a healthy run does not overflow


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

    Attributes:
        skipped_steps: number of steps skipped since the beginning of the run, including before a resume.
        consecutive_skips: number of steps skipped since the last one that was not.

    Raises:
        TypeError: if an option has another type.
        ValueError: if an argument is out of range; before training, if fp16 is combined with LBFGS or with float16
            parameters.
        FloatingPointError: during training, if 20 steps in a row are skipped; the message names the
            gradients that are not finite.

    Source: Micikevicius et al. 2018, Mixed Precision Training, https://arxiv.org/abs/1710.03740.

    Example:
        >>> import lightning as L
        >>> from lightning_accel import AmpPrecision
        >>> trainer = L.Trainer(plugins=[AmpPrecision()])
    """

    def __init__(
        self,
        dtype: MixedDtype = "auto",
        *,
        init_scale: float = 2.0**16,
        growth_interval: int = 2000,
    ) -> None:
        if dtype not in get_args(MixedDtype):
            raise ValueError(f"dtype must be auto, bf16 or fp16; got {dtype!r}")
        require_above(0, init_scale=init_scale)
        require_integers(1, growth_interval=growth_interval)
        super().__init__("bf16-mixed", "cpu")  # placeholders until choose sets both
        self.dtype = dtype
        self.init_scale = init_scale
        self.growth_interval = growth_interval
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
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        result = closure()
        if result is None and model.automatic_optimization:  # training_step returned None
            call_step_hooks(self, model, optimizer)
            return result
        skip = self._unscale(optimizer)
        self._count_skips(skip, model)
        call_step_hooks(self, model, optimizer)
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
        if self.consecutive_skips >= _MAX_CONSECUTIVE_SKIPS:
            assert self.scaler is not None
            raise FloatingPointError(
                f"{self.consecutive_skips} optimizer steps in a row were skipped, and the scale of the loss went down "
                f"to {self.scaler.get_scale():g}. {_describe_non_finite(model, self._loss, self._across_ranks)}"
            )

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


class WorldGradScaler(torch.amp.GradScaler):
    """Scale the loss and skip steps like ``GradScaler``, with the same decision on all processes.

    Under expert or pipeline parallelism an overflow may occur on a single rank; with torch's scaler the other ranks
    would step, and the scales would diverge. Here one flag is reduced over all processes in :meth:`unscale_`. Gradients
    of one optimizer may be sharded over different meshes or not sharded: each rank checks its own shards.

    Args:
        device: device type of the scale, ``cpu`` or ``cuda``.
        init_scale: initial scale.
        growth_interval: number of steps without a skip after which the scale doubles.
    """

    def __init__(self, device: str, init_scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        super().__init__(device, init_scale=init_scale, growth_interval=growth_interval)
        self.across_ranks = False

    def start(self, device: torch.device, across_ranks: bool) -> None:
        """Create the scale on ``device``, also on pipeline ranks, which may never scale a loss."""
        self.across_ranks = across_ranks
        self.scale(torch.ones((), device=device))  # creates it

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        scale, found = scale_of(self), found_inf_by_device(self, optimizer)
        assert scale is not None
        flags = [flag.to(scale.device, non_blocking=True) for flag in found.values()]
        # a rank without gradients takes part, too
        flag = torch.stack(flags).amax() if flags else torch.zeros((), device=scale.device)
        if self.across_ranks:
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        found.clear()
        found[scale.device] = flag

    def found_non_finite(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether :meth:`unscale_` found inf or NaN on any rank; waits for the device."""
        return any(bool(flag) for flag in found_inf_by_device(self, optimizer).values())

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # torch's version passes all gradients to one operator, which rejects DTensors of different meshes or with
        # tensors
        grads: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        grad = _own_gradient(parameter)
                        grads[grad.device, grad.dtype].append(grad)
            flags: dict[torch.device, Tensor] = {}
            for (device, dtype), values in grads.items():
                if dtype == torch.float16 and not allow_fp16:
                    raise ValueError("a GradScaler needs float32 parameters; got gradients in float16")
                flag = flags.setdefault(device, torch.zeros_like(found_inf, device=device))
                unscale_gradients_(values, flag, inv_scale.to(device, non_blocking=True))
        return flags


def _own_gradient(parameter: Tensor) -> Tensor:
    """Return this rank's part of the gradient, to be changed in place."""
    grad = parameter.grad
    assert grad is not None
    if isinstance(grad, DTensor):
        return grad.to_local()
    if grad.is_sparse:
        parameter.grad = grad = grad.coalesce()
        return grad.values()
    return grad


def _describe_non_finite(module: nn.Module, loss: Tensor | None, across_ranks: bool) -> str:
    """Return a message with the parameters of ``module`` whose gradients are not finite on any rank, and the loss.

    All ranks must call this if ``across_ranks``.
    """
    own = [name for name, parameter in module.named_parameters() if not _is_finite(parameter.grad)]
    value = None if loss is None else float(_local_values(loss).float().mean())
    found: list[tuple[list[str], float | None]] = [(own, value)]
    if across_ranks:
        found = [([], None)] * dist.get_world_size()
        dist.all_gather_object(found, (own, value))
    names = list(dict.fromkeys(name for part, _ in found for name in part))
    shown = list_some(names, _MAX_NAMES) or "no named parameter"
    return f"Not finite are the gradients of {shown}. {_describe_loss([v for _, v in found])}"


def _describe_loss(values: list[float | None]) -> str:
    losses = [value for value in values if value is not None]
    if broken := [value for value in losses if not math.isfinite(value)]:
        return f"The loss itself is {broken[0]}: look in the forward pass, or at the data."
    return f"The loss is finite ({', '.join(f'{value:.4g}' for value in losses)}): look in the backward pass."


def _is_finite(grad: Tensor | None) -> bool:
    return grad is None or bool(_local_values(grad).isfinite().all())


def _local_values(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.coalesce().values() if tensor.is_sparse else tensor


class PrecisionChoice(NamedTuple):
    """Hold a precision, as Lightning names it, and the reason for it."""

    precision: MixedPrecisionName
    reason: str


def choose_precision(dtype: MixedDtype, device: torch.device) -> PrecisionChoice:
    """Return the precision for ``dtype``, or for ``auto`` the fastest on ``device`` that trains as well as float32.

    >>> choose_precision("fp16", torch.device("cpu"))
    PrecisionChoice(precision='16-mixed', reason='it was asked for')
    """
    if dtype != "auto":
        precision: MixedPrecisionName = "bf16-mixed" if dtype == "bf16" else "16-mixed"
        return PrecisionChoice(precision, "it was asked for")
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        found = f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}"
        if capability >= _BF16_CAPABILITY:
            return PrecisionChoice("bf16-mixed", f"{found}, and computes in bf16 from 8.0 on")
        return PrecisionChoice("16-mixed", f"{found}, and computes in bf16 from 8.0 on only, but in fp16")
    if device.type == "cpu":
        if instructions := bf16_instructions():
            return PrecisionChoice("bf16-mixed", f"the CPU computes in bf16, by {instructions}")
        return PrecisionChoice("32-true", "the CPU emulates bf16, which is slower than float32")
    return PrecisionChoice("32-true", f"nothing else is known to be faster on {device.type}; name a dtype to try it")


def bf16_instructions() -> str | None:
    """Return the name of this CPU's instructions for bf16 products, or None if it emulates them."""
    capabilities = cpu_capabilities()
    return next((name for name in ("amx_bf16", "avx512_bf16", "sve_bf16", "bf16") if capabilities.get(name)), None)
