"""Reader of IDX files, the format of MNIST: arrays of one type and any number of dimensions, unknown to numpy."""

import gzip
import math
import re
import zlib
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from lightning_accel.data.bounds import MAX_BYTES, require_allowed
from lightning_accel.data.quoting import shown
from lightning_accel.data.tables import regular_file

IdxPart: TypeAlias = Literal["train-images", "train-labels", "test-images", "test-labels"]

_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_GZIP = b"\x1f\x8b"


def read_idx(path: str | Path, max_bytes: int = MAX_BYTES) -> np.ndarray:
    """Read the array of an IDX file, gzipped or not, whatever its name.

    Args:
        path: the file.
        max_bytes: largest size of an unpacked gzipped file in bytes; 32 times its packed size if that is more.

    Returns:
        A writable array of the file's type (uint8, int8, int16, int32, float32 or float64) in the machine's byte order.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no IDX file, is truncated, is longer than its header says, holds no values, is too large
            unpacked, or is a folder or a device.

    Source: Y. LeCun, C. Cortes and C. Burges, The MNIST database of handwritten digits, section on the file format
    """
    path = regular_file(path)
    with path.open("rb") as start:
        is_packed = start.read(2) == _GZIP
    try:
        with gzip.open(path) if is_packed else path.open("rb") as file:
            return _read(file, path, max_bytes, None if is_packed else path.stat().st_size)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is gzipped and cannot be unpacked: {error}. Fetch or write it again") from error


def _read(file: Any, path: Path, max_bytes: int, size: int | None) -> np.ndarray:
    """Read the array of an open file; ``size`` is its length in bytes, None for a gzipped file."""
    header = file.read(4)
    header += file.read(4 * header[3]) if len(header) == 4 else b""
    dtype, shape, begin = _read_header(header, path)
    promised = math.prod(shape) * dtype.itemsize
    if promised == 0:
        raise ValueError(f"{path} holds no values: its shape is {shape}")
    if size is None:
        require_allowed(promised, path, max_bytes, f"{path}, whose header says {shown(shape, 100)},")
    found = promised if size is None else size - begin
    values = np.empty(math.prod(shape) if found == promised else 0, dtype)
    if found == promised:
        room, found = values.view(np.uint8).data, 0
        while found < promised and (count := file.readinto(room[found:])):
            found += count
        found += len(file.read(1)) if size is None else 0
    if found < promised:
        raise ValueError(
            f"{path} is cut short: its header says {shown(shape, 99)} of {dtype.itemsize} bytes each, "
            f"{shown(promised)} bytes, and {found} are there. Fetch or write it again"
        )
    if found > promised:
        raise ValueError(
            f"{path} is longer than its header says: {shown(shape, 100)} of {dtype.itemsize} bytes each are "
            f"{shown(promised)} bytes, and "
            f"{found}{' or more' if size is None else ''} are there. Write it again, with the right shape"
        )
    return values.reshape(shape).astype(dtype.newbyteorder("="), copy=False)


def _read_header(content: bytes, path: Path) -> tuple[np.dtype, tuple[int, ...], int]:
    """Return the type, the shape, and the offset of the first value in bytes."""
    if not content:
        raise ValueError(f"{path} is empty; an IDX file was needed")
    magic = content[:4]
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _DTYPES or magic[3] == 0:
        raise ValueError(
            f"{path} is no IDX file: those begin with two bytes of 0, one of "
            f"{', '.join(f'{code:02x}' for code in _DTYPES)} for the type, and the number of dimensions; it begins "
            f"with {magic.hex(' ')}"
        )
    rank = magic[3]
    begin = 4 + 4 * rank
    if len(content) < begin:
        raise ValueError(
            f"{path} is cut short: a header of {rank} dimensions takes {begin} bytes, and {len(content)} are there"
        )
    return np.dtype(_DTYPES[magic[2]]), tuple(np.frombuffer(content, ">u4", rank, 4).tolist()), begin


def find_idx(folder: Path, part: IdxPart) -> Path | None:
    """Find the file of ``part`` in ``folder`` by its usual names; return None if there is none.

    Usual names are ``train-images-idx3-ubyte``, ``train-images.idx3-ubyte``,
    ``emnist-letters-train-images-idx3-ubyte.gz`` and the like, with ``t10k`` or ``test`` for the test files. A file
    goes before its gzipped copy.

    Raises:
        ValueError: if several files match.
    """
    found = sorted(_matching_files(folder, part)) if folder.is_dir() else []
    found = [path for path in found if path.suffix != ".gz" or path.with_suffix("") not in found]
    if len(found) > 1:
        raise ValueError(
            f"{folder} has several files of {part}: {', '.join(path.name for path in found)}. Say which with "
            f"{part.replace('-', '_')}"
        )
    return found[0] if found else None


def require_idx(folder: Path, part: IdxPart, remedy: str = "") -> Path:
    """Return the file of ``part`` in ``folder``.

    Raises:
        FileNotFoundError: if there is none, naming the expected names; ``remedy`` ends the message.
    """
    path = find_idx(folder, part)
    if path is not None:
        return path
    prefix, kind = part.split("-")
    names = [
        f"{start}-{kind}{mark}idx{3 if kind == 'images' else 1}-ubyte"
        for start in (("train",) if prefix == "train" else ("t10k", "test"))
        for mark in "-."
    ]
    below = [sub for depth in ("*/", "*/*/") for sub in sorted(folder.glob(depth)) if any(_matching_files(sub, part))]
    hint = f"There is one in {below[0]}; give that folder" if below else f"Or name it with {part.replace('-', '_')}"
    raise FileNotFoundError(f"no {' or '.join(names)}, gzipped or not, in the folder {folder}. {hint}{remedy}")


def _matching_files(folder: Path, part: IdxPart) -> list[Path]:
    start = part.replace("test-", "(t10k|test)-")
    return [path for path in folder.iterdir() if re.fullmatch(rf"(.+-)?{start}[-.]idx\d+-\w+(\.gz)?", path.name)]
