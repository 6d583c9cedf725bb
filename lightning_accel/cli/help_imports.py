"""Fewer imports for a process that prints the help of a subcommand and ends.

Lightning imports all of torchmetrics, which imports scipy, matplotlib and transformers where they are installed, and
``torch._dynamo``: more than half of the time to start, and nothing of it is in the text.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import Distribution, PackageNotFoundError
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest.mock import patch

_OPTIONAL = ("matplotlib", "scipy", "transformers")  # for torchmetrics, as lightning_utilities tells it
_DYNAMO = "torch._dynamo"


class _Dynamo(ModuleType):
    """Stand for ``torch._dynamo`` with the two names that Lightning reads; any other imports the package itself."""

    OptimizedModule = type("OptimizedModule", (), {})

    def __init__(self) -> None:
        super().__init__(_DYNAMO)
        torch = find_spec("torch")
        assert torch is not None
        self.__path__ = [f"{folder}/_dynamo" for folder in torch.submodule_search_locations or ()]  # of submodules

    @staticmethod
    def disable(function: Any, *_: Any, **__: Any) -> Any:
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # inspect asks all modules for their file
            raise AttributeError(name)
        sys.modules.pop(_DYNAMO, None)
        return getattr(import_module(_DYNAMO), name)


@contextmanager
def imports_for_help() -> Iterator[None]:
    """Hide optional packages, and ``torch._dynamo``, from what is imported while open.

    Modules that are imported then lack them for good: only for a process that ends with its help.
    """
    from lightning_utilities.core.imports import package_available

    hidden = [name for name in _OPTIONAL if name not in sys.modules]
    find = Distribution.from_name

    def find_unless_hidden(name: str) -> Distribution:
        if name in hidden:
            raise PackageNotFoundError(name)
        return find(name)

    stand_in = _Dynamo()
    modules: dict[str, Any] = sys.modules
    modules |= dict.fromkeys(hidden)  # None: an import of it fails, and no module is found
    modules.setdefault(_DYNAMO, stand_in)
    try:
        with patch.object(Distribution, "from_name", find_unless_hidden):
            yield
    finally:
        package_available.cache_clear()
        for name in hidden:
            del modules[name]
        if modules.get(_DYNAMO) is stand_in:
            del modules[_DYNAMO]
