"""Modules as they were before ``torch.compile``."""

from torch import nn


def uncompile_(module: nn.Module) -> nn.Module:
    """Put what was compiled inside of ``module`` back in its place; what ``module.compile()`` compiled, too.

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
