"""Write the pages of the API reference, one for each package, from the names that the packages export."""

from __future__ import annotations

import importlib
import inspect
import pprint
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import lightning_accel

if TYPE_CHECKING:
    from sphinx.application import Sphinx

PACKAGES = {
    "models": "Models",
    "nn": "Layers",
    "data": "Data",
    "strategies": "Strategies",
    "precision": "Precision",
    "callbacks": "Callbacks",
    "compress": "Compression",
    "tuning": "tune",
    "diagnosis": "doctor",
    "planning": "plan",
    "measure": "Measurement",
    "ops": "Operations",
    "cli": "Command line",
}


def write_pages(folder: Path) -> None:
    """Write ``folder/<package>.rst`` for each package and the index of them; files that would be equal stay."""
    folder.mkdir(exist_ok=True)
    index = [*_heading("API reference"), ".. toctree::", "   :maxdepth: 1", ""]
    for package, title in PACKAGES.items():
        module = importlib.import_module(f"lightning_accel.{package}")
        _write(folder / f"{package}.rst", _package_page(module, title))
        index.append(f"   {package}")
    _write(folder / "index.rst", index)


def _package_page(module: ModuleType, title: str) -> list[str]:
    """Return the lines of a page: the docstring of the package, and tables of its names by the rooms they live in."""
    lines = [*_heading(title), f"*{module.__name__}*", "", inspect.getdoc(module) or "", ""]
    names = sorted(module.__all__, key=str.lower)
    constants = [name for name in names if not callable(getattr(module, name))]
    rooms: dict[str, list[str]] = {}
    for name in names:
        if name not in constants:
            rooms.setdefault(_room(getattr(module, name), module), []).append(name)
    for room, names in rooms.items():
        if len(rooms) > 1:
            lines += _heading(room, "-")
        lines += [".. autosummary::", "   :toctree: generated", "   :nosignatures:", ""]
        lines += [f"   {_shortest_path(name, module)}" for name in names] + [""]
    if constants:
        lines += _heading("Constants", "-")
    for name in constants:
        lines += [f".. py:data:: {module.__name__}.{name}", "", "   .. code-block:: python", ""]
        lines += [f"      {line}" for line in pprint.pformat(getattr(module, name), width=100).splitlines()] + [""]
    return lines


def _room(value: object, module: ModuleType) -> str:
    """Return the package within ``module`` that defines ``value``, as a heading; empty where it is no package."""
    parts = getattr(value, "__module__", "").removeprefix(f"{module.__name__}.").split(".")
    return parts[0].replace("_", " ").capitalize() if len(parts) > 1 else "Others"


def _shortest_path(name: str, module: ModuleType) -> str:
    return f"lightning_accel.{name}" if name in lightning_accel.__all__ else f"{module.__name__}.{name}"


def _heading(title: str, line: str = "=") -> list[str]:
    return [title, line * len(title), ""]


def _write(path: Path, lines: list[str]) -> None:
    text = "\n".join(lines) + "\n"
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def _skip_field(app: Sphinx, what: str, name: str, value: object, skip: bool, options: object) -> bool | None:
    """Leave out the fields of named tuples that have no sentence of their own, and what scikit-learn adds."""
    ours = str(getattr(value, "__module__", None) or "lightning_accel").startswith("lightning_accel")
    return True if not ours or (inspect.getdoc(value) or "").startswith("Alias for field number") else None


def _plain_defaults(
    app: Sphinx, what: str, name: str, value: object, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Write ... for the default of a dataclass field that a function makes, since <factory> cannot be parsed."""
    return signature and signature.replace("<factory>", "..."), returns


def setup(app: Sphinx) -> dict[str, bool]:
    """Write the pages before Sphinx looks for files."""
    write_pages(Path(app.srcdir) / "api")
    app.connect("autodoc-process-signature", _plain_defaults)
    app.connect("autodoc-skip-member", _skip_field)
    return {"parallel_read_safe": True}
