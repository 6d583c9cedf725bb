"""Runs that a function of the user makes."""

from collections.abc import Callable
from typing import Any

import lightning as L
from torch import nn


def make_run(make: Callable[..., Any], options: dict[str, Any]) -> tuple[L.Trainer, L.LightningModule, Any]:
    """Return the (trainer, module, data) that a function makes with these options for the Trainer.

    Raises:
        TypeError: if the function returns something else.
    """
    made = make(**options)
    is_tuple = isinstance(made, tuple)
    # torch.compile returns a module that is no LightningModule
    if not (is_tuple and len(made) == 3 and isinstance(made[0], L.Trainer) and isinstance(made[1], nn.Module)):
        name = getattr(make, "__qualname__", repr(make))
        found = f"({', '.join(type(each).__name__ for each in made)})" if is_tuple else type(made).__name__
        raise TypeError(f"{name} must return (trainer, module, data), in this order; got {found}")
    return made
