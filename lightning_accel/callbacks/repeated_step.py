"""Training steps that run again on a batch, for what they show, and leave no trace."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torchmetrics import Metric


def repeat_training_step(module: L.LightningModule, batch: Any, step: Callable[..., Any] | None = None) -> Any:
    """Return the outputs of a training step.

    Args:
        module: whose step it is.
        batch: of training.
        step: what to call, such as a strategy's step, which sharded modules need; by default the function of the
            module's class, without what callbacks have put around it.
    """
    own: Callable[..., Any] = type(module).training_step
    step = partial(own, module) if step is None else step
    return step(batch, 0) if is_param_in_hook_signature(own, "batch_idx", min_args=2) else step(batch)


@contextmanager
def without_traces(module: L.LightningModule) -> Iterator[None]:
    """Let the module log nothing, and give its metrics back what they held."""
    names = [name for name in ("log", "log_dict") if name not in vars(module)]
    metrics = [(one, dict(vars(one))) for one in module.modules() if isinstance(one, Metric)]
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
