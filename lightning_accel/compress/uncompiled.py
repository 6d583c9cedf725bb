"""Access to modules without the wrappers of ``torch.compile``."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from torch import nn


@contextmanager
def uncompiled(module: nn.Module) -> Iterator[nn.Module]:
    """Yield ``module`` with the wrappers of ``torch.compile`` removed inside it, and restore them afterwards.

    Parameters replaced meanwhile are also replaced in the compiled modules, which torch then compiles again.

    >>> import torch
    >>> model = nn.Sequential(torch.compile(nn.Linear(3, 2)))
    >>> with uncompiled(model) as plain:
    ...     [name for name, _ in plain.named_parameters()]
    ['0.weight', '0.bias']
    >>> [name for name, _ in model.named_parameters()]
    ['0._orig_mod.weight', '0._orig_mod.bias']
    """
    places = [(one, name, child) for one in module.modules() for name, child in one._modules.items()]
    compiled = [place for place in places if hasattr(place[2], "_orig_mod")]
    for one, name, child in compiled:
        one._modules[name] = cast(nn.Module, child._orig_mod)  # type: ignore[union-attr]  # asked above
    try:
        yield getattr(module, "_orig_mod", module)
    finally:
        for one, name, child in compiled:
            one._modules[name] = child


def uncompile_(module: nn.Module) -> nn.Module:
    """Remove what ``torch.compile`` and ``Module.compile`` compiled from ``module`` and its submodules, for good.

    >>> import torch
    >>> model = nn.Sequential(torch.compile(nn.Linear(3, 2)))
    >>> list(uncompile_(model).state_dict())
    ['0.weight', '0.bias']
    """
    module = getattr(module, "_orig_mod", module)
    for one in list(module.modules()):
        one._compiled_call_impl = None
        for name, child in one.named_children():
            if hasattr(child, "_orig_mod"):
                setattr(one, name, child._orig_mod)
    return module
