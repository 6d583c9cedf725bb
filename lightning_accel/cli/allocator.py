"""The memory allocator that a config names, with which a process can only begin."""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_accel.measure.allocators import ALLOCATORS, allocator_in_use, variables_for, why_no_allocator

_STARTED_AGAIN = "LIGHTNING_ACCEL_STARTED_WITH"


def restart_with_allocator(arguments: Sequence[str]) -> None:
    """Start this program again, as the same process, if its configs name an allocator that it does not run with.

    One that cannot be had here is left to :class:`lightning_accel.callbacks.Speedups`, which tells of it.

    Args:
        arguments: of the command line, whose configs are read.
    """
    named: list[Any] = [name for path in _configs_in(arguments) for name in _allocators_in(_content_of(path))]
    if not named or (name := named[-1]) not in ALLOCATORS or allocator_in_use() or why_no_allocator(name):
        return
    if _STARTED_AGAIN in os.environ:  # with a library that the loader did not take: it would start for ever
        return
    variables = variables_for(name) | {_STARTED_AGAIN: name}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | variables)


def _configs_in(arguments: Sequence[str]) -> Iterator[Path]:
    for option, value in zip(arguments, [*arguments[1:], ""], strict=True):
        if option in ("--config", "-c"):
            yield Path(value)
        elif option.startswith("--config="):
            yield Path(option.partition("=")[2])


def _content_of(path: Path) -> Any:
    try:
        return yaml.load(path.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # both are safe
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return None  # which the parser explains


def _allocators_in(value: Any, around: tuple[int, ...] = ()) -> Iterator[Any]:
    """Yield ``allocator`` of each Speedups in a config, whose values may hold themselves by an alias."""
    if id(value) in around:
        return
    around = (*around, id(value))
    if isinstance(value, dict):
        if str(value.get("class_path", "")).rpartition(".")[2] == "Speedups" and isinstance(
            value.get("init_args"), dict
        ):
            yield value["init_args"].get("allocator")
        for inner in value.values():
            yield from _allocators_in(inner, around)
    elif isinstance(value, list):
        for inner in value:
            yield from _allocators_in(inner, around)
