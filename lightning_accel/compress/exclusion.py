"""Selection of parameters by names, patterns and classes."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from lightning_accel.ops.names import list_of_names


def excluded_parameters(module: nn.Module, exclude: Sequence[str | type[nn.Module]]) -> set[str]:
    """Return the names of the parameters and buffers that ``exclude`` matches.

    Args:
        module: module with the parameters.
        exclude: names or globs of parameters or submodules (``"network.6"``, ``"*.head"``), classes of modules, or
            names of classes; a submodule stands for all its parameters and buffers.

    Raises:
        ValueError: if an entry matches nothing in ``module``.

    >>> sorted(excluded_parameters(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), ["Linear"]))
    ['0.bias', '0.weight']
    """
    modules = dict(module.named_modules())
    tensors = [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]
    found: set[str] = set()
    for entry in list_of_names(exclude):
        inside = [name for name, part in modules.items() if _matches(entry, name, part)]
        named = [name for name in tensors if isinstance(entry, str) and fnmatchcase(name, entry)]
        if not inside and not named:
            shown = entry if isinstance(entry, str) else entry.__name__
            raise ValueError(
                f"exclude has {shown!r}, which is no parameter, submodule or class in {type(module).__name__}, nor a "
                f"pattern of one; there are {', '.join([*modules][1:9])}"
            )
        found.update(named)
        found.update(name for name in tensors if any(not one or name.startswith(f"{one}.") for one in inside))
    return found


def _matches(entry: str | type[nn.Module], name: str, part: nn.Module) -> bool:
    if isinstance(entry, type):
        return isinstance(part, entry)
    return fnmatchcase(name, entry) or entry in {kind.__name__ for kind in type(part).__mro__}
