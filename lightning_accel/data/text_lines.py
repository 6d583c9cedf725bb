"""Readers of text files with one entry per line."""

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_accel.data.bounds import MAX_BYTES, require_unpackable
from lightning_accel.data.quoting import shown

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def lines_of(path: Path, entry: str, max_bytes: int = MAX_BYTES) -> Iterator[tuple[str, str]]:
    """Yield the location (``line 3 of FILE``, for messages) and the text of each line that is not blank.

    Args:
        path: UTF-8, gzipped if its name ends in ``.gz``.
        entry: what a line holds, for the error of an empty file.
        max_bytes: largest size of an unpacked gzipped file, see :mod:`lightning_accel.data.bounds`.

    Raises:
        ValueError: if the file is empty, cannot be read, or is too large unpacked.
    """
    is_packed = path.suffix.lower() == ".gz"
    if is_packed:
        require_unpackable(path, max_bytes)
    opened = gzip.open if is_packed else open
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
    """Parse the JSON object of a line.

    Raises:
        ValueError: if it holds none, repeats a field, nests lists too deeply, has a number of thousands of digits, or
            half of a surrogate pair in a text; the message shows ``example`` where it helps.
    """

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for place, name in enumerate(names) if name in names[:place])
            raise ValueError(f"{where} has the field {shown(twice)} twice; remove one")
        return fields

    try:
        entry = json.loads(line, object_pairs_hook=distinct)
        if _SURROGATE.search(line):
            json.dumps(entry, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is no JSON: {error}. Each line must hold one whole object") from error
    except RecursionError:
        raise ValueError(f"{where} holds lists or objects too deep in one another; got {shown(line)}") from None
    except UnicodeEncodeError as error:
        half = shown(error.object[error.start])
        raise ValueError(f"{where} holds {half}, half of a surrogate pair, which is no text; remove it") from None
    except ValueError as error:  # raised by distinct, or by int, which limits the number of digits
        if where in str(error):
            raise
        raise ValueError(f"{where} holds a number that cannot be read: {error}") from None
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must hold an object, such as {example}; got {shown(line)}")
    return entry


def holds_booleans(found: list[Any]) -> bool:
    """Return whether a list, or a list of lists, mixes booleans with numbers, where they would count as 1 and 0."""
    kinds = set(map(type, found))
    if list in kinds:
        kinds.update(*(map(type, inner) for inner in found if isinstance(inner, list)))
    return bool in kinds and bool(kinds & {int, float})
