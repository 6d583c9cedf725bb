"""Private names of other libraries and replaced methods of their objects: all stand in ``_private``."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from torch_geometric.nn import MessagePassing
from torchmetrics import Metric

from lightning_accel._private import OVERRIDDEN, REPLACED

PACKAGE = Path(__file__).parents[1] / "lightning_accel"
TREES = {
    path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0] != "_private"
}
DOCUMENTED = {
    "_asdict",
    "_replace",
    "_fields",
    "_field_defaults",
    "_getframe",
    "_current_frames",
    "_exit",
}  # of tuples, sys, os


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined_in(tree: ast.AST) -> set[str]:
    """Return the names that a module or class defines, those of ``self`` included."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            names.add(node.attr)
    return names


def is_own(value: ast.expr) -> bool:
    """Return whether ``value`` is ``self``, ``cls`` or ``super()``."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def classes() -> dict[str, list[ast.ClassDef]]:
    found = defaultdict(list)
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(node)
    return found


def defined_in_family(name: str, known: dict[str, list[ast.ClassDef]]) -> set[str]:
    """Return the names that a class of the package and its bases of the package define."""
    names = set()
    for node in known.get(name, ()):
        names |= defined_in(node)
        for base in node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(base, ast.Name):
                names |= defined_in_family(base.id, known)
    return names


def private_uses(tree: ast.AST, here: set[str], family: set[str], known: dict[str, list[ast.ClassDef]]) -> Iterator:
    """Yield the place and the name of each private name of another library that a module touches."""
    for node in ast.iter_child_nodes(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [] if node.attr in (family if is_own(node.value) else here) else [node.attr]
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("lightning_accel"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
            names = [one.value for one in node.args[1:2] if isinstance(one, ast.Constant) and one.value not in here]
        yield from ((node.lineno, name) for name in names if is_private(name) and name not in DOCUMENTED)
        inner = defined_in_family(node.name, known) if isinstance(node, ast.ClassDef) else family
        yield from private_uses(node, here, inner, known)


@pytest.mark.slow
def test_only_the_private_modules_touch_private_names_of_others():
    known = classes()
    found = [
        f"{path}:{line}: {name}"
        for path, tree in TREES.items()
        for line, name in private_uses(tree, defined_in(tree), defined_in(tree), known)
    ]
    assert not found, "\n".join(found)


def package_classes() -> Iterator[type]:
    for path in TREES:
        if not path.endswith(("__main__.py", "triton.py")):
            module = importlib.import_module(".".join(["lightning_accel", *path.removesuffix(".py").split("/")]))
            yield from (one for one in vars(module).values() if getattr(one, "__module__", "") == module.__name__)


def test_overridden_private_methods_are_listed():
    found = set()
    for kind in filter(inspect.isclass, package_classes()):
        for name in vars(kind):
            bases = [base for base in kind.__mro__[1:] if not base.__module__.startswith(("lightning_accel", "typing"))]
            if is_private(name) and inspect.isfunction(vars(kind)[name]) and any(name in vars(base) for base in bases):
                found.add(f"{kind.__module__.removeprefix('lightning_accel.')}.{kind.__qualname__}.{name}")
    assert found == set(OVERRIDDEN)


PATCHABLE = (
    torch.nn.Module, torch.utils.data.DataLoader, torch.optim.Optimizer, torch.amp.GradScaler, LightningModule,
    LightningDataModule, Trainer, ModelCheckpoint, Precision, Profiler, Strategy, Metric,
    _FitLoop, MessagePassing,
)  # fmt: skip


def assigned_names(node: ast.AST) -> list[str]:
    """Return the attributes that an expression sets on objects other than ``self``."""
    if isinstance(node, ast.Call) and (called := ast.unparse(node.func)) in SETTERS and not is_own(node.args[0]):
        if called == "set_compiled_call":
            return ["__call__"]
        return [one.value for one in node.args[1:2] if isinstance(one, ast.Constant)]
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and not is_own(node.value):
        return [node.attr]
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(node.slice, ast.Constant):
        return [node.slice.value] if re.match(r"vars\(|.*__dict__$", ast.unparse(node.value)) else []
    return []


SETTERS = ("setattr", "object.__setattr__", "set_compiled_call")


@pytest.mark.slow
def test_replaced_methods_are_listed():
    """By the names of methods: a plain function assigned to an attribute that is none is not found."""
    methods = {name for kind in PATCHABLE for name in dir(kind) if callable(getattr(kind, name, None))}
    found = defaultdict(set)
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            found[path] |= {name for name in assigned_names(node) if name in methods}
    listed = {path: set(names) for path, names in REPLACED.items()}
    assert {path: names for path, names in found.items() if names} == listed


@pytest.mark.weekly
@pytest.mark.slow
def test_imports_leave_nothing_to_run_at_exit():
    """Torch, Lightning and others register functions of their own, so what counts is who registers."""
    modules = [
        ".".join(["lightning_accel", *path.removesuffix(".py").removesuffix("/__init__").split("/")])
        for path in TREES
        if not path.endswith(("__init__.py", "__main__.py", "triton.py"))
    ]
    script = (
        "import atexit, importlib, signal, sys, threading\n"
        "found, real = [], atexit.register\n"
        "def register(function, *args, **kwargs):\n"
        "    found.append(str(function.__module__))\n"
        "    return real(function, *args, **kwargs)\n"
        "atexit.register, handler, before = register, signal.getsignal(signal.SIGTERM), threading.active_count()\n"
        f"for module in {modules}: importlib.import_module(module)\n"
        "assert not [one for one in found if one.startswith('lightning_accel')], found\n"
        "assert signal.getsignal(signal.SIGTERM) is handler\n"
        "assert threading.active_count() == before"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
