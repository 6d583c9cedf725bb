"""Access to modules without the wrappers of ``torch.compile``."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from lightning_accel._private.torch import children_of, compiled_original, set_compiled_call


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
    places = [(one, name, child) for one in module.modules() for name, child in children_of(one).items()]
    compiled = [(*place, inner) for place in places if (inner := compiled_original(place[2])) is not None]
    for one, name, _, inner in compiled:
        children_of(one)[name] = inner
    try:
        yield compiled_original(module) or module
    finally:
        for one, name, child, _ in compiled:
            children_of(one)[name] = child


def uncompile_(module: nn.Module) -> nn.Module:
    """Remove what ``torch.compile`` and ``Module.compile`` compiled from ``module`` and its submodules, for good.

    >>> import torch
    >>> model = nn.Sequential(torch.compile(nn.Linear(3, 2)))
    >>> list(uncompile_(model).state_dict())
    ['0.weight', '0.bias']
    """
    module = compiled_original(module) or module
    for one in list(module.modules()):
        set_compiled_call(one, None)
        for name, child in one.named_children():
            if (inner := compiled_original(child)) is not None:
                setattr(one, name, inner)
    return module
