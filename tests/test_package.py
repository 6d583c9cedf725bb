"""What holds for the package as a whole."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
import warnings
from pathlib import Path

import lightning as L
import pytest

import lightning_accel
from lightning_accel import DigitsDataModule, MoEClassifier
from lightning_accel.callbacks import ExpertLoadMonitor

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_accel"
FLOORS = {
    "_lazy": -1, "_private": -1,
    "ops": 0,
    "nn": 1, "data": 1, "strategies": 1, "precision": 1,
    "compress": 2, "measure": 2,
    "models": 3, "callbacks": 3,
    "planning": 4,
    "tuning": 5, "diagnosis": 5,
    "cli": 6, "__main__": 7,
}  # fmt: skip
WITHOUT_LIGHTNING = {"ops", "nn", "compress"}

SHORT_NAMES = {"RO3Pooling": "RelationalOrder3Pooling"}


def part_of(path: Path) -> str:
    """``nn`` for ``lightning_accel/nn/moe/layer.py``; empty for the package's own ``__init__``."""
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if part == "__init__" else part


def imported_modules(path: Path) -> list[str]:
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append(node.module or "")
    return modules


@pytest.mark.slow
def test_imports_go_down_the_floors():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        part = part_of(path)
        if not part:  # its imports are for type checkers alone: test_public_names_resolve_lazily
            continue
        assert part in FLOORS, f"give {part} a floor"
        for module in imported_modules(path):
            top, _, rest = module.partition(".")
            other = rest.split(".")[0]
            is_upward = top == "lightning_accel" and other not in ("", part) and FLOORS[other] >= FLOORS[part]
            needs_lightning = top in ("lightning", "torchmetrics") or rest == "_private.lightning"
            if is_upward or (part in WITHOUT_LIGHTNING and needs_lightning):
                found.append(f"{path.relative_to(PACKAGE)} (floor {FLOORS[part]}) imports {module}")
    assert not found


@pytest.mark.slow
def test_private_names_stay_in_their_module():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_accel"):
                assert not [alias.name for alias in node.names if re.match(r"_[^_]", alias.name)], path


def test_public_names_resolve_lazily():
    script = (
        "import sys; before = {*sys.modules}; import lightning_accel; "
        "others = {name.split('.')[0] for name in {*sys.modules} - before} - sys.stdlib_module_names; "
        "assert others == {'lightning_accel'}, others"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    names: dict[str, object] = {}
    exec("from lightning_accel import *", names)
    assert names["MoEClassifier"] is lightning_accel.MoEClassifier
    for name in {*lightning_accel.__all__} - {"__version__"}:
        assert getattr(lightning_accel, name).__name__ == SHORT_NAMES.get(name, name)
        assert name in dir(lightning_accel)
    with pytest.raises(AttributeError, match=r"no attribute 'MoEClasifier'\. Did you mean MoEClassifier"):
        _ = lightning_accel.MoEClasifier


def test_dir_shows_public_names_alone():
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    for name in ("", ".callbacks", ".data", ".models", ".precision", ".strategies"):
        module = importlib.import_module(f"lightning_accel{name}")
        names = {one for one in dir(module) if not re.fullmatch("__.*__", one)}
        assert names >= {*module.__all__} - {"__version__"}
        more = names - {*module.__all__}
        assert more <= packages if not name else all(inspect.ismodule(getattr(module, one)) for one in more)
        assert not [one for one in names if one.startswith("_")]


def test_names_that_moved_into_their_packages_warn():
    for name, package in lightning_accel._MOVED.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of an import, or of a name that is deprecated itself
            expected = getattr(importlib.import_module(package), name)
        with pytest.warns(FutureWarning, match=f"lightning_accel.{name} is now {package}.{name}"):
            assert getattr(lightning_accel, name) is expected


def test_rooms_name_modules_that_are_there():
    for path in PACKAGE.glob("*/*/__init__.py"):
        named = set(re.findall(r"``([a-z_0-9]+)``", ast.get_docstring(ast.parse(path.read_text()))))
        modules = {module.stem for module in path.parent.glob("*.py")} - {"__init__"}
        assert named == modules, path


HEAVY = ("torch_geometric", "sklearn", "pandas", "matplotlib", "networkx")


@pytest.mark.slow
def test_the_command_line_is_imported_without_what_only_some_runs_need():
    """Torchmetrics imports matplotlib itself, so what counts is what the modules of this package import."""
    script = (
        "import builtins, sys, lightning.pytorch.cli, torchmetrics.classification\n"
        f"heavy, found, real = {HEAVY}, set(), builtins.__import__\n"
        "def recorded(name, values=None, *more):\n"
        "    importer = (values or {}).get('__name__', '')\n"
        "    if importer.startswith('lightning_accel') and name.partition('.')[0] in heavy:\n"
        "        found.add((importer, name))\n"
        "    return real(name, values, *more)\n"
        "before = {one for one in heavy if one in sys.modules}\n"
        "builtins.__import__ = recorded\n"
        "import lightning_accel.cli\n"
        "assert not found, found\n"
        "assert {one for one in heavy if one in sys.modules} == before"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


@pytest.mark.slow
def test_layers_are_imported_without_lightning():
    script = (
        "import sys; from lightning_accel import TopKGate; "
        "assert 'torch' in sys.modules; assert 'lightning' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_packages_export_what_they_say():
    for path in PACKAGE.glob("*/__init__.py"):
        module = importlib.import_module(f"lightning_accel.{path.parent.name}")
        assert all(hasattr(module, name) for name in module.__all__)
        assert not [
            node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef | ast.ClassDef)
        ]


def test_version_stands_in_one_place():
    assert re.fullmatch(r"\d+\.\d+\.\d+", lightning_accel.__version__)
    holders = [
        path.name
        for path in (*PACKAGE.rglob("*.py"), ROOT / "pyproject.toml", ROOT / "README.md")
        if f'"{lightning_accel.__version__}"' in path.read_text()
    ]
    assert holders == ["__init__.py"]


def test_constraints_satisfy_the_ranges():
    tomllib = pytest.importorskip("tomllib")
    requirements = pytest.importorskip("packaging.requirements")
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            requirement = requirements.Requirement(line)
            pinned[requirement.name.replace("_", "-")] = next(iter(requirement.specifier)).version
    for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        requirement = requirements.Requirement(text)
        assert requirement.specifier.contains(pinned[requirement.name.replace("_", "-")]), text


def test_a_misspelt_name_is_told_its_nearest():
    with pytest.raises(AttributeError, match=r"no attribute 'MixtureOfExpert'. Did you mean MixtureOfExperts\?"):
        lightning_accel.MixtureOfExpert  # noqa: B018


def test_a_missing_package_is_named_with_its_extra_before_training(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    module = MoEClassifier(3, 2)
    with pytest.raises(ModuleNotFoundError, match=r"matplotlib is needed .* pip install \"lightning_accel\[plots\]\""):
        ExpertLoadMonitor().on_fit_start(L.Trainer(logger=False, enable_checkpointing=False), module)
    with pytest.raises(ModuleNotFoundError, match=r"sklearn is needed .* pip install \"lightning_accel\[data\]\""):
        DigitsDataModule().setup()


@pytest.mark.slow
def test_all_modules_are_imported_without_extras():
    extras = (
        "bitsandbytes matplotlib networkx ninja onnx onnxruntime onnxscript pandas peft pyarrow rich sklearn "
        "tensorboard torchao"
    )
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in PACKAGE.rglob("*.py")
        if not path.name.endswith(("__main__.py", "triton.py", "estimators.py"))
    ]
    script = (
        "import importlib, sys\n"
        "import lightning.pytorch, torch_geometric.nn  # which import some of them where they are installed\n"
        "class Missing:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name.split('.')[0] in {extras.split()}: raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        f"for module in {modules}: importlib.import_module(module)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
