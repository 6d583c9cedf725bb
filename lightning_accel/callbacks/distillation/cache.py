"""What a teacher answered, kept on disk by the inputs of each sample. Shapes: B samples, k classes of each position."""

import hashlib
import os
import struct
import uuid
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lightning_accel._private.torch import tree_flatten
from lightning_accel.callbacks.distillation.loss import TopClasses
from lightning_accel.callbacks.recorded_calls import Call
from lightning_accel.compress.calls import num_samples

_MAGIC = b"topk"
_HEADER = struct.Struct("<4s16sBI")  # magic, key, number of dimensions before the last, k
_SIZE = struct.Struct("<I")
_SUFFIX = ".topk"


class _Place(NamedTuple):
    path: Path
    offset: int  # of the values
    shape: tuple[int, ...]  # (..., k)


class AnswerCache:
    """Keep the most probable classes of a teacher's answers in files, each record by a digest of a sample's inputs.

    Records are only ever added, each with a checksum, to a file of the process that computed them, so that several
    processes and runs share a folder, and a kill costs no more than the last record. The digest covers the teacher's
    weights: another teacher finds nothing.

    Args:
        folder: of the files; made if it is missing.
        top_k: k.
        temperature: divisor of the logits before the probabilities are stored.
        teacher: the module whose answers are kept.

    Raises:
        NotADirectoryError: if ``folder`` is a file.
    """

    def __init__(self, folder: Path, top_k: int, temperature: float, teacher: nn.Module) -> None:
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"the cache of a teacher's answers is a folder; {folder} is a file. Name another")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.top_k = folder, top_k
        self._seed = _digest_of(teacher, f"{top_k} {temperature}")
        self._places: dict[bytes, _Place] = {}
        self._ends: dict[Path, int] = {}  # up to which files are read
        self._own = folder / f"{uuid.uuid4().hex}{_SUFFIX}"
        self._file: BinaryIO | None = None
        self.hits = self.misses = 0
        self.find_new()

    def find_new(self) -> None:
        """Find what other processes, or earlier runs, have added."""
        for path in sorted(self.folder.glob(f"*{_SUFFIX}")):
            if path != self._own:
                self._ends[path] = self._scan(path, self._ends.get(path, 0))

    def _scan(self, path: Path, offset: int) -> int:
        size = path.stat().st_size
        with path.open("rb") as file:
            while offset + _HEADER.size <= size:
                file.seek(offset)
                magic, key, ndim, top_k = _HEADER.unpack(file.read(_HEADER.size))
                sizes = file.read(ndim * _SIZE.size)
                if magic != _MAGIC or len(sizes) < ndim * _SIZE.size:
                    break
                shape = (*(one for (one,) in _SIZE.iter_unpack(sizes)), top_k)
                start = file.tell()
                end = start + _num_bytes(shape) + _SIZE.size
                if end > size:
                    break
                self._places[key] = _Place(path, start, shape)
                offset = end
        return offset

    def keys_of(self, call: Call, shape: Sequence[int]) -> list[bytes]:
        """Return a digest of each sample of a call's inputs, and of the ``shape`` of the answer to it."""
        leaves = tree_flatten((call.args, call.kwargs))[0]
        count = num_samples((call.args, call.kwargs))
        digests = [self._seed.copy() for _ in range(count)]
        for leaf in [*leaves, tuple(shape)]:
            is_tensor = isinstance(leaf, Tensor)
            is_split = is_tensor and leaf.ndim > 0 and len(leaf) == count
            values = leaf.detach().cpu().contiguous() if is_tensor else leaf
            for number, digest in enumerate(digests):
                _update(digest, values[number] if is_split else values)
        return [digest.digest() for digest in digests]

    def get(self, keys: Sequence[bytes]) -> TopClasses | None:
        """Return the answers (B, ..., k) to samples, None if that to one is missing or they differ in shape."""
        found = [self._read(key) for key in keys]
        known = [one for one in found if one is not None]
        if len(known) < len(keys) or len({one[0].shape for one in known}) > 1:
            self.misses += 1
            return None
        self.hits += 1
        values, classes = (torch.from_numpy(np.stack(parts)) for parts in zip(*known, strict=True))
        return TopClasses(values, classes.long())

    def _read(self, key: bytes) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None:
        place = self._places.get(key)
        if place is None:
            return None
        size = _num_bytes(place.shape)
        with place.path.open("rb") as file:
            file.seek(place.offset)
            content = file.read(size + _SIZE.size)
        if len(content) < size + _SIZE.size or _SIZE.unpack(content[size:])[0] != zlib.crc32(content[:size]):
            return None
        values = np.frombuffer(content, np.float32, size // 8).reshape(place.shape)
        classes = np.frombuffer(content, np.int32, size // 8, size // 2).reshape(place.shape)
        return values, classes

    def put(self, keys: Sequence[bytes], answers: TopClasses) -> None:
        """Add the answers (B, ..., k) to samples that are not known yet."""
        if self._file is None:
            self._file = self._own.open("ab")
        values = answers.log_probs.detach().float().cpu().contiguous().numpy()
        classes = answers.classes.detach().to(torch.int32).cpu().contiguous().numpy()
        for key, value, own in zip(keys, values, classes, strict=True):
            if key not in self._places:
                shape = value.shape
                sizes = b"".join(_SIZE.pack(one) for one in shape[:-1])
                content = value.tobytes() + own.tobytes()
                start = self._file.tell() + _HEADER.size + len(sizes)
                header = _HEADER.pack(_MAGIC, key, len(shape) - 1, shape[-1])
                self._file.write(header + sizes + content + _SIZE.pack(zlib.crc32(content)))
                self._places[key] = _Place(self._own, start, shape)
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def _num_bytes(shape: tuple[int, ...]) -> int:
    return 8 * int(np.prod(shape, dtype=np.int64))  # float32 and int32


def _digest_of(teacher: nn.Module, options: str) -> Any:
    digest = hashlib.blake2b(options.encode(), digest_size=16)
    for name, value in teacher.state_dict().items():
        digest.update(name.encode())
        _update(digest, value.detach().cpu().contiguous() if isinstance(value, Tensor) else value)
    return digest


def _update(digest: Any, value: Any) -> None:
    if not isinstance(value, Tensor):
        digest.update(repr(value).encode())
        return
    digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
    digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
