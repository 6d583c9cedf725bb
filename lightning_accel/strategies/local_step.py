"""Optimizer steps on the local shards of distributed parameters as plain tensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from lightning_accel.ops.optimizer_hooks import has_step_hooks

# Each element of a parameter is updated by its own gradient alone. Subclasses may do otherwise.
_ELEMENTWISE = ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop


def step_on_shards(optimizer: Optimizer) -> None:
    """Let an element-wise torch optimizer step on each process's shards as plain tensors; leave others unchanged.

    The result is the same. A DTensor adds about 0.1 ms per operation and parameter, and Adam has a dozen operations.
    """
    if type(optimizer) not in _ELEMENTWISE:
        return
    plain_step = optimizer.step

    @wraps(plain_step)
    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if has_step_hooks(self):  # hooks expect the parameters themselves
            return plain_step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad(), _local_shards(self):
            plain_step()
        return loss

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]  # schedulers need a method


@contextmanager
def _local_shards(optimizer: Optimizer) -> Iterator[None]:
    """Temporarily replace distributed parameters by their local shards, with gradients and states."""
    whole_of: dict[nn.Parameter, tuple[DTensor, dict[str, Any]]] = {}
    groups = [group["params"] for group in optimizer.param_groups]

    def part(parameter: nn.Parameter) -> nn.Parameter:
        if not isinstance(parameter, DTensor) or parameter.grad is None:
            return parameter
        mine = nn.Parameter(parameter.to_local())
        grad: Any = parameter.grad
        mine.grad = grad.redistribute(placements=parameter.placements).to_local()  # autograd may choose others
        state = optimizer.state.pop(parameter, {})
        optimizer.state[mine] = {name: _local(value) for name, value in state.items()}
        whole_of[mine] = parameter, state
        return mine

    try:
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [part(parameter) for parameter in parameters]
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = parameters
        for mine, (parameter, before) in whole_of.items():
            state = optimizer.state.pop(mine)
            optimizer.state[parameter] = {
                name: before[name] if _local(before.get(name)) is value else _split(value, parameter)
                for name, value in state.items()
            }


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _split(value: Any, like: DTensor) -> Any:
    if not isinstance(value, Tensor) or value.shape != like.to_local().shape:
        return value  # a step count
    layout: dict[str, Any] = {"shape": like.shape, "stride": like.stride(), "run_check": False}
    return DTensor.from_local(value, like.device_mesh, like.placements, **layout)
