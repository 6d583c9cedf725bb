"""Optimizer steps in float32 on parameters that are kept in bfloat16."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_accel.precision.stochastic_rounding import RoundingNoise

_MASTER = "master_weight"


class Float32Step:
    """Makes each step of ``optimizer`` run on float32 copies of its bfloat16 parameters, with float32 state.

    bfloat16 keeps 8 significant bits, so a parameter stays where it is under updates below 1/256 to 1/512 of it. Here
    nothing is rounded before the step is done. Then the copies are either kept (*masters*), in the optimizer's state
    under ``master_weight``, so that whatever saves, shards or loads that state does so with them; or they are rounded
    stochastically to the parameters, and freed.

    Outside of a step the optimizer holds the module's own parameters: ``zero_grad``, clipping, schedules, new parameter
    groups and state dicts work as ever. A parameter that something else changed between steps (a mask, another
    checkpoint) has its master follow.

    Args:
        optimizer: any that finds its parameters in ``param_groups`` and takes gradients from them at its step.
        noise: rounds the parameters after the step; None to keep masters.
    """

    def __init__(self, optimizer: Optimizer, noise: RoundingNoise | None) -> None:
        self.optimizer = optimizer
        self.noise = noise
        self._parameter_of: dict[Tensor, Tensor] = {}  # by the copy in its place, during a step
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]

    def remove(self) -> None:
        """Let the optimizer work on the parameters themselves again."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _before_step(self, *_: Any) -> None:
        for group in self.optimizer.param_groups:
            group["params"] = [self._replace(parameter) for parameter in group["params"]]

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
        self._put_back(keep_copies=self.noise is None)

    @torch.no_grad()
    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self._before_step()  # loaded state is cast to the type of the parameters in place

    @torch.no_grad()
    def _after_load(self, *_: Any) -> None:
        self._put_back(keep_copies=False)

    def _replace(self, parameter: Tensor) -> Tensor:
        if parameter.dtype != torch.bfloat16:
            return parameter
        old_state = self.optimizer.state.pop(parameter, {})
        copy = self._follow(old_state.get(_MASTER), parameter).requires_grad_(parameter.requires_grad)
        if parameter.grad is not None:
            copy.grad = parameter.grad.float()
        # another dictionary, since state dicts that were taken before share the old one
        state = {key: _in_float32(value) for key, value in old_state.items() if key != _MASTER}
        if state:  # optimizers start their state where they find none, and some in their constructor, in bfloat16
            self.optimizer.state[copy] = state
        self._parameter_of[copy] = parameter
        return copy

    def _follow(self, master: Tensor | None, parameter: Tensor) -> Tensor:
        if master is None:
            return parameter.detach().float()
        # the master where it still rounds to the parameter, else somebody else changed the parameter
        return torch.where(master.to(parameter.dtype) == parameter, master, parameter)

    def _put_back(self, keep_copies: bool) -> None:
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


def _in_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value
