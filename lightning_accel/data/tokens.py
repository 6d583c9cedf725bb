"""Texts as one stream of token numbers, on disk until they are read."""

import hashlib
import os
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_accel.data.digest import digest_of

_PIECE = 1 << 20  # characters that are encoded at a time
_MOST_DIGESTED = 1 << 28  # bytes
_STRETCH = 1 << 15  # tokens


class Tokenizer(ABC):
    """Any class with these two methods counts as one, those of the packages tokenizers and transformers among them.

    A protocol would ask for the same names of parameters, too, when a config names the class.
    """

    @abstractmethod
    def encode(self, text: str) -> Any:
        """Token numbers of ``text``, or an object that has them as ``ids``."""

    @abstractmethod
    def decode(self, tokens: list[int]) -> str: ...

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        if cls is not Tokenizer:
            return NotImplemented
        return all(callable(getattr(other, name, None)) for name in ("encode", "decode"))


class ByteTokenizer(Tokenizer):
    """A token for each byte of the text as UTF-8."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


def vocabulary_size(tokenizer: Any) -> int:
    """One more than the largest token number, from ``get_vocab_size()``, ``len()`` or ``vocab_size``.

    Raises:
        TypeError: if it has none of them.
    """
    if callable(count := getattr(tokenizer, "get_vocab_size", None)):
        return int(count())
    size = len(tokenizer) if hasattr(tokenizer, "__len__") else getattr(tokenizer, "vocab_size", None)
    if size is None:
        raise TypeError(
            f"{type(tokenizer).__name__} does not tell the size of its vocabulary; give it an attribute vocab_size"
        )
    return int(size)


def encode(tokenizer: Tokenizer, text: str, vocab_size: int) -> list[int]:
    """Token numbers of ``text``.

    Raises:
        ValueError: if one is not below ``vocab_size``.
    """
    tokens = tokenizer.encode(text)
    numbers = list(getattr(tokens, "ids", tokens))
    if numbers and not 0 <= min(numbers) <= max(numbers) < vocab_size:
        raise ValueError(
            f"{type(tokenizer).__name__} gives token numbers from {min(numbers)} to {max(numbers)}, but says that its "
            f"vocabulary holds {vocab_size}; mend its vocab_size"
        )
    return numbers


class TokenStream:
    """Documents one after the other, the token ``separator`` after each, read where they lie."""

    def __init__(self, documents: Sequence[np.ndarray], separator: int) -> None:
        self.documents = documents
        self.separator = separator
        self.ends = np.cumsum([len(document) + 1 for document in documents]).tolist()

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.ends else 0

    def checksum(self) -> int:
        """Of a hundred stretches of the tokens: of other texts it differs, most likely."""
        starts = np.linspace(0, max(0, len(self) - 256), 100, dtype=np.int64).tolist()
        return zlib.crc32(b"".join(self.read(at, min(at + 256, len(self))).tobytes() for at in starts))

    def digest(self) -> str:
        """Digest the lengths of the documents and all tokens; of more than 256 MiB of them, 1,024 even stretches.

        To read more would take longer than many a run takes to resume. What changed in files of such a size, and left
        every length as it was, is surely seen where it is as long as the gap between two stretches.
        """
        lengths = np.array([len(document) for document in self.documents])
        if sum(document.nbytes for document in self.documents) <= _MOST_DIGESTED:
            return digest_of(lengths, *self.documents)
        starts = np.linspace(0, len(self) - _STRETCH, 1024, dtype=np.int64).tolist()
        return digest_of(lengths, *(self.read(at, at + _STRETCH) for at in starts))

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens ``start`` to ``stop``, less the last, (stop - start,) int64."""
        parts = []
        number = bisect_right(self.ends, start)
        while start < stop:
            document, end = self.documents[number], self.ends[number]
            begin = end - len(document) - 1
            parts.append(document[start - begin : stop - begin].astype(np.int64))
            if stop >= end:
                parts.append(np.array([self.separator], dtype=np.int64))
            start, number = end, number + 1
        return np.concatenate(parts)


class TokenWindows(Dataset[Tensor]):
    """Windows of equal length of a stream, (T,) int64; a batch is fetched whole, (B, T).

    Args:
        stream: the tokens.
        length: T.
        numbers: the windows to take, window i being tokens i * T to (i + 1) * T.
    """

    def __init__(self, stream: TokenStream, length: int, numbers: np.ndarray) -> None:
        self.stream = stream
        self.length = length
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Tensor:
        start = int(self.numbers[index]) * self.length
        return torch.from_numpy(self.stream.read(start, start + self.length))

    def __getitems__(self, indices: list[int]) -> Tensor:
        return torch.stack([self[index] for index in indices])


def map_file(path: Path, tokenizer: Tokenizer, cache: Path) -> np.ndarray:
    """Tokens of a text file, mapped from it for bytes, else from a file in ``cache`` that is made once.

    Raises:
        ValueError: if the file is not UTF-8 text; bytes may be any.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    size = vocabulary_size(tokenizer)
    dtype = np.uint16 if size < 1 << 16 else np.uint32
    made_of = path.resolve(), path.stat().st_size, path.stat().st_mtime_ns, size, _fingerprint(tokenizer, path)
    target = cache / f"{hashlib.sha256(repr(made_of).encode()).hexdigest()[:32]}.bin"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}")  # so that a run that is killed leaves no half of a file
        try:
            with partial.open("wb") as file:
                for piece in _pieces(path):
                    np.array(encode(tokenizer, piece, size), dtype=dtype).tofile(file)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    return np.memmap(target, dtype, "r") if target.stat().st_size else np.empty(0, dtype)


def _pieces(path: Path) -> Iterator[str]:
    """The text in pieces of whole lines."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            while lines := file.readlines(_PIECE):
                yield "".join(lines)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text: {error}. Convert it, or leave tokenizer out to train on bytes"
        ) from None


def _fingerprint(tokenizer: Tokenizer, path: Path) -> str:
    """What tells the tokenizer from another: its vocabulary, if it shows one, and what it makes of the text's start."""
    vocabulary: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    with path.open(encoding="utf-8", errors="replace") as file:
        start = tokenizer.encode(file.read(4096))
    return repr((type(tokenizer).__name__, sorted(vocabulary.items()), list(getattr(start, "ids", start))))
