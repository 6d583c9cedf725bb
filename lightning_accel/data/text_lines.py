"""Files with an entry a line."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def lines_of(path: Path, entry: str) -> Iterator[tuple[str, str]]:
    """Lines that are not blank, without their ends, each after words that say where it stands.

    Args:
        path: UTF-8, gzipped if its name ends in ``.gz``.
        entry: what a line holds, for the error of an empty file.

    Raises:
        ValueError: if the file is empty or cannot be read.
    """
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    found = False
    try:
        with opened(path, "rt", encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    found = True
                    yield f"line {number} of {path}", line.rstrip("\r\n")
    except (UnicodeDecodeError, OSError, EOFError) as error:
        raise ValueError(f"{path} cannot be read as UTF-8 text: {error}") from error
    if not found:
        raise ValueError(f"{path} is empty; {entry} a line was needed")


def parse_object(line: str, where: str, example: str) -> dict[str, Any]:
    """The JSON object of a line.

    Raises:
        ValueError: if it holds none; the message shows the ``example``.
    """
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is no JSON: {error}. Each line must hold one whole object") from error
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must hold an object, such as {example}; got {line[:60]!r}")
    return entry
