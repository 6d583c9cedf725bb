"""Optimizer steps in float32 for bfloat16 parameters."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_accel.precision.stochastic_rounding import RoundingNoise

_MASTER = "master_weight"


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
