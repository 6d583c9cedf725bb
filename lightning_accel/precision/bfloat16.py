"""Training with bfloat16 parameters that keeps small updates."""

import sys
from collections.abc import Callable
from copy import copy as shallow_copy
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import HalfPrecision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_accel._private.lightning import call_step_hooks

_MASTER = "master_weight"  # name in the state of the optimizer


class Bfloat16Precision(HalfPrecision):
    """Train with bf16 parameters, as Lightning's ``bf16-true``, without losing small updates.

    Pass it as ``Trainer(plugins=[Bfloat16Precision()])``. A bf16 weight has 8 significant bits, so plain ``bf16-true``
    loses every update below 1/512 of the weight. Here each optimizer step runs in float32, with float32 state, on
    float32 master weights that are kept in the state of the optimizer, and saved and loaded with it. Adam needs 14
    bytes per parameter and 2 for the gradient, compared with 12 and 4 in float32, and 4 more during a step.

    It supports any optimizer with torch's interface except LBFGS, several optimizers, new parameter groups, and
    strategies that shard by DTensor. The module's state dict has its usual keys, in bf16. Gradients are bf16, as are
    their sums over accumulated batches and over ranks, and their norm for clipping.

    Raises:
        ValueError: before training, if an optimizer cannot work on copies of parameters.

    Example:
        >>> import lightning as L
        >>> from lightning_accel import Bfloat16Precision
        >>> trainer = L.Trainer(plugins=[Bfloat16Precision()])
    """

    def __init__(self) -> None:
        super().__init__("bf16-true")
        self._steps: list[Float32Step] = []

    def convert_input(self, data: Any) -> Any:
        """Convert the floating tensors of a batch, those of PyG's graphs included, to bfloat16."""
        if graphs := sys.modules.get("torch_geometric.data"):  # whoever has one of its graphs has imported it
            data = apply_to_collection(data, graphs.data.BaseData, self._convert_graph)
        return super().convert_input(data)

    def _convert_graph(self, graph: Any) -> Any:
        return shallow_copy(graph).apply(super().convert_input)  # not in place: it may be the data set's own

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        for optimizer in optimizers:
            _require_step_on_copies(optimizer)
        self._remove_steps()
        self._steps = [Float32Step(optimizer) for optimizer in optimizers]
        return super().connect(model, optimizers, lr_schedulers)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        result = closure()  # before the step, during which the optimizer holds copies
        call_step_hooks(self, model, optimizer)
        optimizer.step(**kwargs)
        return result

    def teardown(self) -> None:
        self._remove_steps()
        super().teardown()

    def _remove_steps(self) -> None:
        for step in self._steps:
            step.remove()


def _require_step_on_copies(optimizer: Optimizer) -> None:
    # LBFGS evaluates the loss in its step; ZeroRedundancyOptimizer (has consolidate_state_dict) wraps another optimizer
    steps_itself = isinstance(optimizer, Optimizer) and not hasattr(optimizer, "consolidate_state_dict")
    if isinstance(optimizer, LBFGS) or not steps_itself:
        raise ValueError(
            f"Bfloat16Precision steps on float32 copies of the parameters, which {type(optimizer).__name__} does not "
            "allow; use another optimizer, or AmpPrecision"
        )


class Float32Step:
    """Run each step of ``optimizer`` on float32 copies of its bfloat16 parameters, with float32 state.

    The copies are kept as master weights, in the optimizer's state under ``master_weight``, where they are saved,
    sharded and loaded with the state.

    Outside of a step the optimizer holds the module's own parameters, so ``zero_grad``, clipping, schedules, new
    parameter groups and state dicts work as usual. If a parameter is changed between steps (by a mask, or another
    checkpoint), its master weight is set to the new value.

    Args:
        optimizer: optimizer that reads its parameters and their gradients from ``param_groups`` at each step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
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
        for copy, parameter in self._parameter_of.items():
            if copy.grad is not None:
                parameter.copy_(copy)
        self._restore_parameters(keep_copies=True)

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


def _to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value
