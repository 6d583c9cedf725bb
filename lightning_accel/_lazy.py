"""Public names of packages, imported on first use."""

import ast
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path


def names_in(stub: Path) -> dict[str, str]:
    """Return the module of each name that a stub file imports by ``from module import name as name``."""
    imports = [node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def public_dir(public: Iterable[str], module: Mapping[str, object]) -> Callable[[], list[str]]:
    """Return the ``__dir__`` of a package, which shows public names, packages and attributes of the language alone.

    Args:
        public: its ``__all__``.
        module: its ``globals()``.
    """

    def __dir__() -> list[str]:
        package = module["__name__"]
        inner = {name for name, value in module.items() if getattr(value, "__name__", "") == f"{package}.{name}"}
        own = {name for name in module if name.startswith("__") and name.endswith("__")}
        return sorted({*public, *own, *(name for name in inner if not name.startswith("_"))})

    return __dir__


def lazy_getattr(
    package: str, module_of: Mapping[str, str], moved: Mapping[str, str] | None = None
) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a package, which imports a name from its module when it is first read.

    Args:
        package: name of the package.
        module_of: the module of each name.
        moved: the package of each name that was here before, and is found here for one release with a FutureWarning.
    """
    moved = moved or {}

    def __getattr__(name: str) -> object:
        # jsonargparse looks for the shortest path of a class, to write it to configs: it must not be the old one
        if name in moved and sys._getframe(1).f_code.co_name != "get_import_path":
            warnings.warn(f"{package}.{name} is now {moved[name]}.{name}", FutureWarning, stacklevel=2)
            return getattr(import_module(moved[name]), name)
        if name not in module_of:
            nearest = "".join(f". Did you mean {one}?" for one in get_close_matches(name, module_of, n=1))
            raise AttributeError(f"module {package!r} has no attribute {name!r}{nearest}")
        return getattr(import_module(module_of[name]), name)

    return __getattr__
