"""Arguments that are one name or several, or several sizes, and the meaning of ``exclude``."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from operator import index
from typing import TypeAlias, TypeVar

from torch import nn

Name = TypeVar("Name")
Exclusion: TypeAlias = str | type[nn.Module]

HEADS_AND_GATES = "head", "lm_head", "gate", "router"  # last names of layers that lose most by fewer digits


def list_of_names(names: Iterable[Name], option: str = "this option") -> list[Name]:
    """Return a list of names or classes; a single string or class becomes a list of one.

    Raises:
        TypeError: if ``option``, as the message calls them, is neither.

    >>> list_of_names("head"), list_of_names(("head", "gate"))
    (['head'], ['head', 'gate'])
    """
    if isinstance(names, str | type):
        return [names]  # type: ignore[list-item]  # a string is an iterable of strings, too
    if not isinstance(names, Iterable):
        raise TypeError(f"{option} must be a name, or a list of names; got {names!r}")
    return list(names)


def list_some(names: Sequence[str], most: int = 5) -> str:
    """Join names, and count those that are more than ``most``.

    >>> list_some(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def list_of_sizes(name: str, sizes: Sequence[int]) -> list[int]:
    """Return the sizes of the argument ``name`` as Python's integers.

    Raises:
        ValueError: if they are one number.
    """
    if not isinstance(sizes, Iterable):
        raise ValueError(f"{name} must be a sequence with the size of each layer, such as [{sizes!r}]; got {sizes!r}")
    return [index(size) for size in sizes]


def require_one_of(name: str, value: object, allowed: Iterable[str]) -> None:
    """Reject, with a ValueError, a ``value`` of the argument ``name`` that is not among those ``allowed``."""
    known = list(allowed)
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}")


def find_excluded(module: nn.Module, exclude: Iterable[Exclusion], argument: str = "exclude") -> dict[str, str]:
    """Find the modules, parameters and buffers that ``exclude`` matches, with all that these modules contain.

    Args:
        module: module with the parameters.
        exclude: names or globs of parameters or submodules (``"network.6"``, ``"*.head"``), classes of modules, or
            names of classes.
        argument: name of the argument in the error, where another one than ``exclude`` takes such entries.

    Returns:
        The first entry that matches, by name without the prefixes of ``torch.compile``.

    Raises:
        ValueError: if an entry matches nothing in ``module``.

    >>> sorted(find_excluded(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), ["Linear"]))
    ['0', '0.bias', '0.weight']
    """
    modules = {clean_name(name): part for name, part in module.named_modules(remove_duplicate=False)}
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    names = [*modules, *(clean_name(name) for name, _ in tensors)]
    found: dict[str, str] = {}
    for entry in list_of_names(exclude):
        if not isinstance(entry, str | type):
            raise TypeError(f"{argument} takes names, patterns and classes of modules; got {entry!r}")
        shown = entry if isinstance(entry, str) else entry.__name__
        roots = {name for name, part in modules.items() if _is_class_of(entry, part)}
        roots |= {name for name in names if isinstance(entry, str) and fnmatchcase(name, entry)}
        if not roots:
            raise ValueError(
                f"{argument} has {shown!r}, which is no parameter, submodule or class in {type(module).__name__}, nor "
                f"a pattern of one; there are {', '.join(names[1:9])}"
            )
        for name in names:
            parts = name.split(".")
            if "" in roots or any(".".join(parts[:count]) in roots for count in range(1, len(parts) + 1)):
                found.setdefault(name, shown)
    return found


def find_linear_layers(
    module: nn.Module, multiple: int, exclude: Iterable[Exclusion] | None = None
) -> dict[str, nn.Linear]:
    """Find the ``nn.Linear`` layers, without subclasses, with two sizes that are multiples of a number.

    Args:
        module: module with the layers.
        multiple: number, in features.
        exclude: see :func:`find_excluded`; by default layers named head, lm_head, gate or router.

    >>> find_linear_layers(nn.ModuleDict({"up": nn.Linear(8, 16), "head": nn.Linear(16, 8)}), 8)
    {'up': Linear(in_features=8, out_features=16, bias=True)}
    """
    if exclude is None:
        exclude = [name for name, _ in module.named_modules() if name.rpartition(".")[2] in HEADS_AND_GATES]
    excluded = find_excluded(module, exclude)
    return {
        name: layer
        for name, layer in module.named_modules()
        if type(layer) is nn.Linear
        and layer.in_features % multiple == 0
        and layer.out_features % multiple == 0
        and name not in excluded
    }


def clean_name(name: str) -> str:
    """Remove the prefixes of ``torch.compile`` from a name."""
    return name.replace("_orig_mod.", "").removesuffix("._orig_mod").removesuffix("_orig_mod")


def _is_class_of(entry: Exclusion, part: nn.Module) -> bool:
    if isinstance(entry, type):
        return isinstance(part, entry)
    return entry in {kind.__name__ for kind in type(part).__mro__}
