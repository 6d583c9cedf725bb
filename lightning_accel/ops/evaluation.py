"""Temporary evaluation mode of modules."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put ``module`` into evaluation mode temporarily, then restore the mode of each submodule, also after an error.

    ``module.train(was_training)`` is not enough: it puts submodules that were in evaluation mode, such as frozen ones,
    into training mode.
    """
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
