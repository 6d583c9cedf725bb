"""Private names of other libraries and replaced methods of their objects: all stand in ``_private``."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "lightning_accel"
TREES = {
    path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0] != "_private"
}
DOCUMENTED = {"_asdict", "_replace", "_fields", "_field_defaults", "_getframe", "_current_frames"}  # of tuples and sys


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


def test_only_the_private_modules_touch_private_names_of_others():
    known = classes()
    found = [
        f"{path}:{line}: {name}"
        for path, tree in TREES.items()
        for line, name in private_uses(tree, defined_in(tree), defined_in(tree), known)
    ]
    assert not found, "\n".join(found)
