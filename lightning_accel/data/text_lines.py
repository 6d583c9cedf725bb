"""Files with an entry a line."""

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
    """Lines that are not blank, without their ends, each after words that say where it stands.

    Args:
        path: UTF-8, gzipped if its name ends in ``.gz``.
        entry: what a line holds, for the error of an empty file.
        max_bytes: that a gzipped file may unpack to, see :mod:`lightning_accel.data.bounds`.

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
    """The JSON object of a line.

    Raises:
        ValueError: if it holds none, a field stands twice, lists stand too deep in one another, a number has thousands
            of digits, or a text holds half of a surrogate pair; the message shows the ``example`` where it helps.
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
    except ValueError as error:  # of distinct, or of int, which reads no more digits than Python lets it
        if where in str(error):
            raise
        raise ValueError(f"{where} holds a number that cannot be read: {error}") from None
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must hold an object, such as {example}; got {shown(line)}")
    return entry


def holds_booleans(found: list[Any]) -> bool:
    """Whether booleans stand among numbers, which would count as 1 and 0, in a list or in lists of a list."""
    kinds = set(map(type, found))
    if list in kinds:
        kinds.update(*(map(type, inner) for inner in found if isinstance(inner, list)))
    return bool in kinds and bool(kinds & {int, float})
