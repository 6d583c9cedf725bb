"""Bounds of options, and of the memory that reading a file needs beyond its own size, before it is allocated."""

import gzip
import os
import zlib
from pathlib import Path

from lightning_accel.ops.bounds import require_above

MAX_BYTES = "LIGHTNING_ACCEL_MAX_BYTES"  # environment variable: bytes that any file may need

_MAX_BYTES = 1 << 27
_MAX_RATIO = 32  # largest ratio of unpacked to packed size; compressed text and numbers stay well below
_CHUNK = 1 << 20


def require_shares(val_share: float, test_share: float) -> None:
    """Raise a ValueError unless both shares are positive and leave a rest."""
    require_above(0, val_share=val_share, test_share=test_share)
    if not val_share + test_share < 1:
        raise ValueError(
            f"val_share and test_share must leave items to train on; got val_share={val_share}, test_share={test_share}"
        )


def allowed_bytes(path: Path) -> int:
    """Return how many bytes reading a file may allocate.

    It is the larger of 32 times its size and the environment variable ``LIGHTNING_ACCEL_MAX_BYTES``, by default 128
    MiB.
    """
    return max(int(os.environ.get(MAX_BYTES, _MAX_BYTES)), _MAX_RATIO * path.stat().st_size)


def require_allowed(needed: int, path: Path, what: str, remedy: str = "unpack it first") -> None:
    """Raise a ValueError if ``what``, the file or a part of it, needs more bytes than :func:`allowed_bytes`."""
    if needed > (allowed := allowed_bytes(path)):
        raise ValueError(
            f"{what} would take {min(needed, 10**18):.3g} bytes of memory; for this file {allowed} are allowed. If it "
            f"is right so, {remedy}, or set the environment variable {MAX_BYTES}"
        )


def require_unpackable(path: Path) -> None:
    """Check that a gzipped file is intact and not too large, by unpacking it in chunks that are discarded.

    Raises:
        ValueError: if it is damaged, or larger than :func:`allowed_bytes`.
    """
    size = 0
    try:
        with gzip.open(path) as stream:
            while piece := stream.read(_CHUNK):
                size += len(piece)
                require_allowed(size, path, f"{path}, unpacked,")
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be unpacked: {error}. Fetch or write it again") from error
