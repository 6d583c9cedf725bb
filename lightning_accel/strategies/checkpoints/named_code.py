"""Detection of code that the settings of a checkpoint would import, call or read."""

import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_OWN = "lightning_accel"


def code_named_in(settings: Any) -> list[str]:
    """Return the import paths, files and URLs in ``settings``, at any depth, that would load or call code.

    A config parser takes a string for the path of a class or function, which it calls with the arguments beside it, for
    YAML that names one, or for the name of a file that contains such YAML. Harmless, whatever the arguments, are
    modules, optimizers and schedulers of this package or imported already, classes of the user's own that are imported
    already, and operations on tensors.
    """
    found: dict[str, None] = {}
    for text in _texts(settings):
        found |= dict.fromkeys(path for path in re.findall(r"[^\W\d]\w*(?:\.\w+)+", text) if _brings_code(path))
        words = [text, *re.findall(r"[^\s\"'{}\[\],]+", text)]
        found |= dict.fromkeys(word for word in words if "://" in word or os.path.isfile(os.path.expanduser(word)))
    return list(found)


def _texts(settings: Any) -> Iterator[str]:
    if isinstance(settings, str):
        yield settings
        if "\\" in settings and (meant := _without_escapes(settings)) != settings:
            yield from _texts(meant)
    elif isinstance(settings, Mapping):
        for pair in settings.items():
            yield from _texts(pair)
    elif isinstance(settings, list | tuple | set | frozenset):
        for one in settings:
            yield from _texts(one)


def _without_escapes(text: str) -> Any:
    """Return what a parser of configs takes ``text`` for, in which an escape may stand for any character of a path."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _brings_code(path: str) -> bool:
    package, *rest = path.split(".")
    if package not in sys.modules:
        return find_spec(package) is not None
    found: Any = sys.modules[package]
    for count, part in enumerate(rest, start=1):
        name = ".".join([package, *rest[:count]])
        try:
            found = import_module(name) if _is_own_module(name) else sys.modules.get(name) or getattr(found, part)
        except Exception:  # a lazy module's own, too
            return _is_module(name)
    return callable(found) and not _is_harmless(found)


def _is_own_module(name: str) -> bool:
    return name.startswith(f"{_OWN}.") and _is_module(name)


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _is_harmless(found: Any) -> bool:
    if isinstance(found, type):
        return issubclass(found, nn.Module | Optimizer | LRScheduler) or _is_of_user(found)
    name = getattr(found, "__name__", "")
    return found is getattr(nn.functional, name, None) or (
        found is getattr(torch, name, None) and hasattr(torch.Tensor, name)
    )


def _is_of_user(cls: type) -> bool:
    """Return whether a class stands in a file outside the folders of Python and of installed packages."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file is None or cls.__module__.partition(".")[0] == _OWN:
        return False
    path = Path(file).resolve()
    is_installed = {"site-packages", "dist-packages"} & set(path.parts)
    return not is_installed and not path.is_relative_to(Path(sysconfig.get_path("stdlib")).resolve())
