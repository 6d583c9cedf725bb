"""Recalibration of the running statistics of batch norms."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # torch has no other name for all kinds of it


@torch.no_grad()
def recalibrate_batchnorm_(
    module: nn.Module, batches: Iterable[Any], call: Callable[[nn.Module, Any], object] | None = None
) -> list[str]:
    """Set running means and variances of the batch norms in ``module`` to those of ``batches``.

    They are the plain averages over the batches, whatever the layers' momentum. Other layers run in their current mode;
    modes and momenta are restored.

    Args:
        module: module on the device of the batches.
        batches: batches, each a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
        call: function that runs the module on a batch of another type.

    Returns:
        The names of the layers.

    Raises:
        ValueError: if there is no batch; the statistics are then unchanged.
    """
    layers: dict[str, Any] = {
        name: part for name, part in module.named_modules() if isinstance(part, _BatchNorm) and part.track_running_stats
    }
    iterator = iter(batches)
    first = next(iterator, None)
    if first is None:
        raise ValueError("running statistics are those of batches; got none")
    before = {name: (layer.training, layer.momentum) for name, layer in layers.items()}
    try:
        for layer in layers.values():
            layer.reset_running_stats()
            layer.train()
            layer.momentum = None  # the plain mean
        batch: Any = first
        while batch is not None:
            run_batch(module, batch) if call is None else call(module, batch)
            batch = next(iterator, None)
    finally:
        for name, layer in layers.items():
            layer.train(before[name][0])
            layer.momentum = before[name][1]
    return list(layers)


def run_batch(module: nn.Module, batch: Any) -> None:
    """Call ``module`` on a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments."""
    if isinstance(batch, Mapping):
        module(**batch)
    elif isinstance(batch, (tuple, list)):
        module(*batch)
    else:
        module(batch)
