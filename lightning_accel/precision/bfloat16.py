"""Training with bfloat16 parameters that keeps small updates."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import HalfPrecision
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

_MASTER = "master_weight"  # name in the state of the optimizer
_LOW_BITS = 16  # number of low bits of a float32 that a bfloat16 lacks


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


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round ``values``, float32 of any shape, at random to one of the two nearest bfloat16 numbers.

    The probability of each is proportional to its proximity, so that the expected value is the input (Gupta et al.
    2015, https://arxiv.org/abs/1502.02551, section 2). inf and NaN stay unchanged.

    >>> generator = torch.Generator().manual_seed(0)
    >>> rounded = round_stochastically(torch.full((1000,), 1 + 2**-9), generator)  # a quarter of a step above 1
    >>> rounded.unique(), rounded.float().mean() - 1 < 2**-8
    (tensor([1.0000, 1.0078], dtype=torch.bfloat16), tensor(True))
    """
    bits = values.contiguous().view(torch.int32)
    # the low bits carry into the high ones with a probability in proportion to their value, whatever the sign
    rounded = _random_low_bits(bits, generator).add_(bits).bitwise_and_(-(1 << _LOW_BITS)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def _random_low_bits(like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw integers in [0, 2**16), int32, in the shape of ``like``."""
    # four numbers from each 64-bit draw, which takes as long as drawing one number
    draws = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
    draws.random_(-(2**63), None, generator=generator)
    low = draws.view(torch.int16)[: like.numel()].view(like.shape)
    return low.to(torch.int32).bitwise_and_((1 << _LOW_BITS) - 1)


class RoundingNoise:
    """Round parameters stochastically with random numbers that depend only on seed, step, parameter and shard.

    Replicas of a tensor on different ranks are therefore rounded equally, and its shards independently, whatever a rank
    has drawn before.

    Args:
        seed: any integer, the same on all ranks.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.steps = 0

    def round_(self, values: Tensor, index: int) -> None:
        """Round the local shard of ``values``, float32, of parameter number ``index`` to bfloat16 values, in place."""
        local = values.to_local() if isinstance(values, DTensor) else values
        key = repr((self.seed, self.steps, index, _shard_coordinates(values)))
        generator = torch.Generator(local.device).manual_seed(zlib.crc32(key.encode()))
        local.copy_(round_stochastically(local, generator))


def _shard_coordinates(values: Tensor) -> list[int]:
    if not isinstance(values, DTensor):
        return []
    coordinates: Sequence[int] = values.device_mesh.get_coordinate() or []
    return [c for c, placement in zip(coordinates, values.placements, strict=True) if not placement.is_replicate()]


class Float32Step:
    """Run each step of ``optimizer`` on float32 copies of its bfloat16 parameters, with float32 state.

    bfloat16 has 8 significant bits, so updates below 1/256 to 1/512 of a parameter do not change it. Here nothing is
    rounded before the end of the step. Then the copies are either kept as master weights, in the optimizer's state
    under ``master_weight``, where they are saved, sharded and loaded with the state; or they are rounded stochastically
    to the parameters, and freed.

    Outside of a step the optimizer holds the module's own parameters, so ``zero_grad``, clipping, schedules, new
    parameter groups and state dicts work as usual. If a parameter is changed between steps (by a mask, or another
    checkpoint), its master weight is set to the new value.

    Args:
        optimizer: optimizer that reads its parameters and their gradients from ``param_groups`` at each step.
        noise: rounds the parameters after the step; None to keep master weights.
    """

    def __init__(self, optimizer: Optimizer, noise: RoundingNoise | None) -> None:
        self.optimizer = optimizer
        self.noise = noise
        self._parameter_of: dict[Tensor, Tensor] = {}  # by the copy that replaces it during a step
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]

    def remove(self) -> None:
        """Remove the hooks, so that the optimizer updates the parameters themselves again."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _before_step(self, *_: Any) -> None:
        for group in self.optimizer.param_groups:
            group["params"] = [self._replace_by_copy(parameter) for parameter in group["params"]]

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        for index, copy in enumerate(self._copies()):
            parameter = self._parameter_of.get(copy)
            if parameter is None or copy.grad is None:
                continue
            if self.noise is not None:
                self.noise.round_(copy.detach(), index)
            parameter.copy_(copy)
        if self.noise is not None:
            self.noise.steps += 1
        self._restore_parameters(keep_copies=self.noise is None)

    @torch.no_grad()
    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self._before_step()  # loading casts the state to the dtype of the current parameters

    @torch.no_grad()
    def _after_load(self, *_: Any) -> None:
        self._restore_parameters(keep_copies=False)

    def _replace_by_copy(self, parameter: Tensor) -> Tensor:
        if parameter.dtype != torch.bfloat16:
            return parameter
        old_state = self.optimizer.state.pop(parameter, {})
        copy = self._current_master(old_state.get(_MASTER), parameter).requires_grad_(parameter.requires_grad)
        if parameter.grad is not None:
            copy.grad = parameter.grad.float()
        # a new dictionary, since state dicts saved before share the old one
        state = {key: _to_float32(value) for key, value in old_state.items() if key != _MASTER}
        if state:  # optimizers initialise missing state; some do so in their constructor, in bfloat16
            self.optimizer.state[copy] = state
        self._parameter_of[copy] = parameter
        return copy

    def _current_master(self, master: Tensor | None, parameter: Tensor) -> Tensor:
        if master is None:
            return parameter.detach().float()
        # the master weight if it still rounds to the parameter, else the parameter, which has been changed
        return torch.where(master.to(parameter.dtype) == parameter, master, parameter)

    def _restore_parameters(self, keep_copies: bool) -> None:
        for group in self.optimizer.param_groups:
            group["params"] = [self._parameter_of.get(copy, copy) for copy in group["params"]]
        for copy, parameter in self._parameter_of.items():
            state = self.optimizer.state.pop(copy, {})
            if keep_copies:
                state[_MASTER] = copy.detach()
            if state:
                self.optimizer.state[parameter] = state
        self._parameter_of.clear()

    def _copies(self) -> Iterator[Tensor]:
        for group in self.optimizer.param_groups:
            yield from group["params"]


def _to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value
