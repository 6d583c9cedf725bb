"""What measurements of a run depend on, so that none is used again for another run."""

import hashlib
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml

import lightning_accel
from lightning_accel.callbacks.speedups import machine_name
from lightning_accel.tuning.project import Project

# variables that decide how fast something runs
_PREFIXES = (
    "ATEN_", "CUBLAS_", "CUDA_", "CUDNN_", "DNNL_", "GLIBC_TUNABLES", "GOMP_", "KMP_", "LD_PRELOAD", "MALLOC_", "MKL_",
    "NCCL_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTORCH_", "TORCH", "TRITON_",
)  # fmt: skip

_BUDGET = re.compile(rb"""(\btune\([^()]*?\b)budget\s*=\s*("[^"\n]*"|'[^'\n]*'|[\d.]+)""")


def identity_of(project: Project, goal: str, files: Iterable[Path]) -> dict[str, Any]:
    """Return what tells measurements of a project from others before it has run, as plain values.

    What a budget suffices for and what is allowed do not belong to it: they decide what is measured, not the result.

    Args:
        project: what is tuned.
        goal: what is measured of it.
        files: configs and code that it is made of; those that a config names are looked for.
    """
    every = dict.fromkeys(one for file in files for one in _with_named(file))
    return {
        "goal": goal,
        "project": project.to_dict(),
        "folder": str(Path.cwd()),  # where relative paths begin
        "files": {str(file): _digest(file) for file in every},
        "machine": machine_name(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lightning": L.__version__,
            "lightning_accel": lightning_accel.__version__,
        },
        "variables": {name: value for name, value in sorted(os.environ.items()) if _decides_speed(name)},
    }


def _decides_speed(variable: str) -> bool:
    """Return whether a variable may; places of caches, and what libraries set as they are imported, do not."""
    set_by_libraries = variable.endswith(("_CACHE_DIR", "_CACHE_PATH")) or variable == "KMP_DUPLICATE_LIB_OK"
    return variable.startswith(_PREFIXES) and not set_by_libraries


def files_in(arguments: Sequence[str]) -> list[Path]:
    """Return the files that arguments of a command line name, as ``--config X.yaml`` or ``--config=X.yaml``."""
    return [path for one in arguments for path in (Path(one), Path(one.partition("=")[2])) if path.is_file()]


def _with_named(file: Path) -> Iterator[Path]:
    """Yield a file and, if it is a config, the configs and checkpoints that it names, from its folder or this one."""
    yield file
    if file.suffix in (".yaml", ".yml"):
        try:
            content = yaml.safe_load(file.read_text())
        except (yaml.YAMLError, UnicodeDecodeError):  # which the run itself explains
            return
        for text in _strings_in(content):
            if text.endswith((".yaml", ".yml", ".json", ".ckpt")):
                yield from (one for one in dict.fromkeys((file.parent / text, Path(text))) if one.is_file())


def _strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _strings_in(one)


def imported_code() -> dict[str, list[str]]:
    """Return the files of the code that this process has imported outside of packages, and the names of packages."""
    standard = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
    files, packages = set(), set()
    for name, module in list(sys.modules.items()):
        package = name.partition(".")[0]
        file, top = (getattr(one, "__file__", None) or "" for one in (module, sys.modules.get(package)))
        if any(part in (top or file) for part in ("site-packages", "dist-packages")):
            packages.add(package)
        elif os.path.isabs(file) and file.endswith(".py") and not file.startswith(standard):
            files.add(file)
    return {"files": sorted(files), "packages": sorted(packages)}


def distributions_of(packages: Iterable[str]) -> list[str]:
    """Return the names under which packages are installed."""
    installed = _installed()
    return sorted({name for package in packages for name in installed.get(package, ())})


@cache
def _installed() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()  # it reads a file of each distribution, which takes half a second


def state_of(files: Iterable[str], distributions: Iterable[str]) -> dict[str, dict[str, str | None]]:
    """Return the digests of files and the versions of what is installed; None of what is not there."""
    return {
        "files": {file: _digest(Path(file)) for file in files},
        "versions": {name: _version(name) for name in distributions},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _digest(file: Path) -> str | None:
    """Return the digest of a file, or None without one; budgets of tune decide how much is measured, not what."""
    if not file.is_file():
        return None
    content = file.read_bytes()
    return hashlib.sha256(_BUDGET.sub(rb"\1", content) if file.suffix == ".py" else content).hexdigest()


def require_same(then: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Check that measurements in a folder are of what is measured now.

    Raises:
        ValueError: if they are not, with all that differs.
    """
    if found := _differences(then, now):
        raise ValueError(
            f"{folder} holds measurements of another run, or of this one under other conditions: {'; '.join(found)}. "
            "Remove the folder, or choose another by --output, output= in Python"
        )


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    found = []
    for name in dict.fromkeys([*then, *now]):
        before, after = then.get(name), now.get(name)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            found += _differences(before, after)
        elif _is_digest(before) or _is_digest(after):
            what = (
                "belongs to it now" if before is None else "belongs to it no more" if after is None else "has changed"
            )
            found.append(f"{name} {what}")
        else:
            found.append(f"{name} was {_shown(before)}, and is {_shown(after)}")
    return found


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _shown(value: Any) -> str:
    return "not given" if value is None else str(value)
