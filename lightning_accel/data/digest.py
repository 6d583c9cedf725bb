"""Digests that detect data other than those that a checkpoint was trained on."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from lightning_accel.data.quoting import shown

DIGEST = "digest of the data"

Part: TypeAlias = np.ndarray | Sequence[str]


def digest_of(*parts: Part) -> str:
    """Return a digest that changes if a value, a type, a shape or the order of anything in ``parts`` changes.

    Every value is read, at about a gigabyte per second. Pass values as a file has them: computed values, such as means,
    are rounded differently on another machine.

    >>> digest_of(np.array([1, 2])) == digest_of(np.array([2, 1])), digest_of(["ab", "c"]) == digest_of(["a", "bc"])
    (False, False)
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        if not isinstance(part, np.ndarray):
            digest.update(np.array([len(text) for text in part], dtype="<i8").tobytes())
            part = np.frombuffer("".join(part).encode("utf-8", "surrogatepass"), dtype=np.uint8)
        if part.dtype.kind == "f" and (missing := np.isnan(part)).any():
            part = np.where(missing, part.dtype.type(np.nan), part)  # NaNs may differ in their bits
        part = np.ascontiguousarray(part, dtype=part.dtype.newbyteorder("<"))
        digest.update(f"{part.dtype.str}{part.shape}".encode())
        digest.update(part.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def require_same_data(saved: Mapping[str, Any], now: Mapping[str, Any], what: str, remedy: str) -> None:
    """Compare a datamodule's state in a checkpoint with its state in this run.

    Args:
        saved: state in the checkpoint; entries that it lacks, since an older release wrote it, are not compared.
        now: state in this run.
        what: the data, for the message, such as ``images than those of mnist``.
        remedy: sentence on what to do, for the message.

    Raises:
        ValueError: if they differ; the message names the first difference and says what to do.
    """
    for name, value in now.items():
        if name in saved and not _values_equal(saved[name], value):
            raise ValueError(
                f"the checkpoint was trained on other {what} as configured: {name} {shown(saved[name], 200)} there, "
                f"{shown(value, 200)} here. {remedy}. Where the data grew or were mended on purpose, this run cannot "
                "go on as if they had not: begin a new one without ckpt_path, from the weights of the old one if you "
                "like (load_from_checkpoint)"
            )


def _values_equal(saved: Any, now: Any) -> bool:
    """Return whether two values are equal, floats up to rounding; tuples equal lists, which some checkpoints load."""
    if isinstance(now, list | tuple):
        return (
            isinstance(saved, list | tuple)
            and len(saved) == len(now)
            and all(_values_equal(*pair) for pair in zip(saved, now, strict=True))
        )
    if isinstance(now, float) and isinstance(saved, int | float):
        return math.isclose(saved, now, rel_tol=1e-5, abs_tol=1e-8) or (math.isnan(saved) and math.isnan(now))
    return bool(saved == now)
