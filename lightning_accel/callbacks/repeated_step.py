"""Training steps that run again on a batch, for what they show, and leave no trace."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_accel._private.torch import change_count

_CONTAINERS = (list, dict, set, deque)
_OF_TORCH = frozenset(vars(nn.Module()))


def repeat_training_step(
    module: L.LightningModule, batch: Any, batch_idx: int = 0, step: Callable[..., Any] | None = None
) -> Any:
    """Return the outputs of a training step.

    Args:
        module: whose step it is.
        batch: of training.
        batch_idx: its number, for steps that take it.
        step: what to call, such as a strategy's step, which sharded modules need; by default the function of the
            module's class, without what callbacks have put around it.
    """
    own: Callable[..., Any] = type(module).training_step
    step = partial(own, module) if step is None else step
    return step(batch, batch_idx) if is_param_in_hook_signature(own, "batch_idx", min_args=2) else step(batch)


@contextmanager
def without_traces(module: L.LightningModule) -> Iterator[None]:
    """Let the module log nothing, and give its metrics, and the attributes of its parts, back what they held.

    Attributes are those that hold numbers, text, tensors, lists, dictionaries and sets; tensors are not copied.
    """
    names = [name for name in ("log", "log_dict") if name not in vars(module)]
    parts = list(module.modules())
    metrics = [(one, dict(vars(one))) for one in parts if isinstance(one, Metric)]
    plain = [(one, _attributes(one)) for one in parts if not isinstance(one, Metric)]
    try:
        vars(module).update({name: lambda *args, **kwargs: None for name in names})
        for metric, _ in metrics:
            for name, value in metric.metric_state.items():  # which updates add to in place
                setattr(metric, name, value.clone() if isinstance(value, Tensor) else copy(value))
        yield
    finally:
        for name in names:
            vars(module).pop(name, None)
        for metric, held in metrics:
            vars(metric).clear()
            vars(metric).update(held)
        for part, attributes in plain:
            for name, (value, content) in attributes.items():
                vars(part)[name] = value
                if content is not None:
                    value.clear()
                    (value.extend if isinstance(value, list | deque) else value.update)(content)


def _attributes(part: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return attributes with, of containers, what they contain."""
    return {
        name: (value, copy(value) if isinstance(value, _CONTAINERS) else None)
        for name, value in vars(part).items()
        if name not in _OF_TORCH and isinstance(value, int | float | str | Tensor | None | list | dict | set | deque)
    }


class BufferCopies:
    """Keep copies of the buffers of a module, to give them back.

    Args:
        module: whose buffers they are.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._held: dict[str, tuple[Tensor, int, Tensor]] = {}  # buffers, how often they had changed, copies

    def take(self) -> None:
        """Copy the buffers, of those that are no floats the ones that have changed since the last time."""
        held = {}
        for name, one in self.module.named_buffers():
            held[name] = self._held[name] if self._is_same(name, one) else (one, _changes(one), one.detach().clone())
        self._held = held

    @torch.no_grad()
    def give_back(self, is_lost: Callable[[Tensor], bool] | None = None) -> None:
        """Let buffers hold what they held; others may have come since.

        Args:
            is_lost: what holds for a buffer of each layer whose buffers are given back; by default those of all are.
        """
        now = dict(self.module.named_buffers())
        owners = {name.rpartition(".")[0] for name, one in now.items() if is_lost is None or is_lost(one)}
        for name, (_, _, copied) in self._held.items():
            one = now.get(name)
            if one is None or self._is_same(name, one) or name.rpartition(".")[0] not in owners:
                continue
            if one.shape == copied.shape and one.is_contiguous():
                one.data.copy_(copied)  # which a graph that holds the buffer does not take for a change
            else:  # it has another size, or its numbers share memory
                one.data = copied.clone()

    def _is_same(self, name: str, buffer: Tensor) -> bool:
        """Return whether a buffer surely holds what is held of it; batch norms change floats without counting it."""
        before, count, _ = self._held.get(name, (None, -1, None))
        return before is buffer and not buffer.is_floating_point() and 0 <= count == _changes(buffer)


def _changes(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else change_count(tensor)
