"""Limits on the memory that reading a file needs beyond its own size, checked before it is allocated."""

import bz2
import gzip
import lzma
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_BYTES = 1 << 27  # default of the option max_bytes of all readers

_MAX_RATIO = 32  # largest ratio of unpacked to packed size; compressed text and numbers stay well below
_OPEN: dict[str, Callable[[Path, str], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_CHUNK = 1 << 20


def allowed_bytes(path: Path, max_bytes: int) -> int:
    """Return how many bytes reading a file may allocate: the larger of ``max_bytes`` and 32 times its size."""
    return max(max_bytes, _MAX_RATIO * path.stat().st_size)


def require_allowed(needed: int, path: Path, max_bytes: int, what: str) -> None:
    """Raise a ValueError if ``what``, the file or a part of it, needs more bytes than :func:`allowed_bytes`."""
    if needed > (allowed := allowed_bytes(path, max_bytes)):
        raise ValueError(
            f"{what} would take {min(needed, 10**18):.3g} bytes of memory; for this file {allowed} are allowed, the "
            f"larger of max_bytes={max_bytes} and {_MAX_RATIO} times its size. If it is right so, raise max_bytes"
        )


def require_unpackable(path: Path, max_bytes: int) -> None:
    """Check that a compressed file is intact and not too large, by unpacking it in chunks that are discarded.

    Raises:
        ValueError: if it is damaged, or larger than :func:`allowed_bytes`.
    """
    try:
        if path.suffix.lower() == ".zip":
            with zipfile.ZipFile(path) as file:
                _require_size(sum(member.file_size for member in file.infolist()), path, max_bytes)
        elif (opened := _OPEN.get(path.suffix.lower())) is not None:
            size = 0
            with opened(path, "rb") as stream:
                while piece := stream.read(_CHUNK):
                    size += len(piece)
                    _require_size(size, path, max_bytes)
    except (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be unpacked: {error}. Fetch or write it again") from error


def _require_size(size: int, path: Path, max_bytes: int) -> None:
    require_allowed(size, path, max_bytes, f"{path}, unpacked,")
