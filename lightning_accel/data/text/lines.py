"""Readers of text files with one entry per line."""

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_accel.data.bounds import require_unpackable
from lightning_accel.data.quoting import WITHOUT_TARGET, did_you_mean, listed, shown
from lightning_accel.data.tables.values import LARGEST

_NAME_TARGET = ". If one of them is the target, name it in layout.target, on the command line --data.layout.target NAME"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def lines_of(path: Path, entry: str) -> Iterator[tuple[str, str]]:
    """Yield the location (``line 3 of FILE``, for messages) and the text of each line that is not blank.

    Args:
        path: UTF-8, gzipped if its name ends in ``.gz``.
        entry: what a line holds, for the error of an empty file.

    Raises:
        ValueError: if the file is empty, cannot be read, or is too large unpacked.
    """
    is_packed = path.suffix.lower() == ".gz"
    if is_packed:
        require_unpackable(path)
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


def require_field(entry: dict[str, Any], name: str, where: str, is_target: bool = False) -> None:
    """Raise a ValueError if a field is lacking; if it is the target's, it names ``target`` and ``predict_path``."""
    if name not in entry:
        fields = listed(list(entry)) + (_NAME_TARGET + WITHOUT_TARGET if is_target else "")
        raise ValueError(f"{where} has no field {name!r}{did_you_mean(name, entry)} Its fields: {fields}")


def require_distinct_ids(ids: Sequence[str], lines: Sequence[str], path: Path) -> None:
    if len({*ids}) < len(ids):
        twice = Counter(ids).most_common(1)[0][0]
        numbers = [line for name, line in zip(ids, lines, strict=True) if name == twice]
        raise ValueError(
            f"{path} has two lines with id {shown(twice)}, {' and '.join(numbers[:2])}, where a line without an id has "
            "its number; give each its own"
        )


def numbers_of(found: Any, name: str, where: str, whole: bool = False) -> np.ndarray:
    """Convert a list of numbers, or of equally long lists of numbers, to an array of one or two dimensions.

    Raises:
        ValueError: if it is something else, mixes booleans with numbers, or holds fractions where ``whole``, or numbers
            beyond 1e30; the message names the first wrong entry.
    """
    if isinstance(found, list) and _holds_booleans(found):
        raise ValueError(f"{name!r} in {where} must be a list of numbers; got booleans among them")
    try:
        values = np.array(found) if isinstance(found, list) else np.array(None)
    except (ValueError, OverflowError):
        values = np.array(None)
    if values.size == 0:
        return np.zeros((len(values), *values.shape[1:]), np.int64)
    fits = values.dtype.kind in ("iu" if whole else "biuf") and values.ndim <= 2
    if not fits or not (np.abs(values.astype(np.float64)) <= LARGEST).all():
        raise ValueError(
            f"{name!r} in {where} must be a list of {'whole ' if whole else ''}numbers of at most {LARGEST:g}, or of "
            f"equally long lists of them; {_describe_mismatch(found)}"
        )
    return values


def _describe_mismatch(found: Any) -> str:
    """Describe, for a message, the first entry that is no number or is not as long as the first one."""
    entries = found if isinstance(found, list) else []
    widths = [len(entry) if isinstance(entry, list) else None for entry in entries]
    for number, entry in enumerate(entries):
        if widths[number] != widths[0]:
            return f"entry {number}, counted from 0, is {shown(entry)} and the first one {shown(entries[0])}"
        inner = entry if isinstance(entry, list) else [entry]
        if wrong := [part for part in inner if not isinstance(part, int | float) or not abs(part) <= LARGEST]:
            return f"got {shown(wrong[0])} in entry {number}, counted from 0"
    return f"got {shown(found)}"


def _holds_booleans(found: list[Any]) -> bool:
    """Return whether a list, or a list of lists, mixes booleans with numbers, where they would count as 1 and 0."""
    kinds = set(map(type, found))
    if list in kinds:
        kinds.update(*(map(type, inner) for inner in found if isinstance(inner, list)))
    return bool in kinds and bool(kinds & {int, float})
