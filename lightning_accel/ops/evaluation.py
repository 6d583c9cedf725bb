"""Modules that are in evaluation mode for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put ``module`` into evaluation mode; each of its parts is as it was afterwards, whatever is raised within.

    ``module.train(was_training)`` would not do: it trains parts that were in evaluation mode, such as a frozen one.
    """
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
