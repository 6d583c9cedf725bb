"""Texts as one stream of token ids, memory-mapped from disk. Shapes: B windows of a batch, T tokens of a window."""

import hashlib
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
from lightning_accel.data.whole_files import whole_file

_CHUNK = 1 << 20  # characters that are encoded at a time
_MOST_DIGESTED = 1 << 28  # bytes; longer streams are sampled
_SAMPLE = 1 << 15  # tokens of each sample


class Tokenizer(ABC):
    """Convert text to token ids and back; any class with these two methods is accepted as a subclass.

    The tokenizers of the packages tokenizers and transformers are. A ``typing.Protocol`` would also require the same
    names of parameters where a config names the class.
    """

    @abstractmethod
    def encode(self, text: str) -> Any:
        """Return the token ids of ``text``, or an object with them as its attribute ``ids``."""

    @abstractmethod
    def decode(self, tokens: list[int]) -> str: ...

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        if cls is not Tokenizer:
            return NotImplemented
        return all(callable(getattr(other, name, None)) for name in ("encode", "decode"))


class ByteTokenizer(Tokenizer):
    """Encode text as the bytes of its UTF-8 encoding, one token each."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


def vocabulary_size(tokenizer: Any) -> int:
    """Return the tokenizer's vocabulary size, from ``get_vocab_size()``, ``len()`` or ``vocab_size``.

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
    """Return the token ids of ``text``.

    Raises:
        ValueError: if one is not in [0, ``vocab_size``).
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
    """Concatenate tokenized documents, the token ``separator`` after each, without copying them."""

    def __init__(self, documents: Sequence[np.ndarray], separator: int) -> None:
        self.documents = documents
        self.separator = separator
        self.ends = np.cumsum([len(document) + 1 for document in documents]).tolist()

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.ends else 0

    def digest(self) -> str:
        """Digest the lengths of the documents and all tokens; above 256 MiB, 1,024 evenly spaced samples of tokens.

        Reading more would take longer than many a run takes to resume. In files of such a size, a change that keeps
        every length is certain to be detected only if it is as long as the gap between two samples.
        """
        lengths = np.array([len(document) for document in self.documents])
        if sum(document.nbytes for document in self.documents) <= _MOST_DIGESTED:
            return digest_of(lengths, *self.documents)
        starts = np.linspace(0, len(self) - _SAMPLE, 1024, dtype=np.int64).tolist()
        return digest_of(lengths, *(self.read(at, at + _SAMPLE) for at in starts))

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the tokens from ``start`` up to but not including ``stop``, (stop - start,) int64."""
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
    """Read windows of equal length from a stream, (T,) int64 each, or (B, T) for a batch.

    Args:
        stream: the tokens.
        length: T.
        numbers: indices of the windows to use; window i holds the tokens i * T to (i + 1) * T.
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
    """Memory-map the tokens of a text file: the file itself for bytes, else a file in ``cache`` that is written once.

    Raises:
        ValueError: if the file is not UTF-8 text and the tokens are not bytes.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    size = vocabulary_size(tokenizer)
    dtype = np.uint16 if size < 1 << 16 else np.uint32
    info = path.stat()
    # ctime too: mtime can be set, and copies may keep that of their source
    times = info.st_mtime_ns, info.st_ctime_ns
    made_of = path.resolve(), info.st_size, *times, size, _tokenizer_digest(tokenizer, path)
    target = cache / f"{hashlib.sha256(repr(made_of).encode()).hexdigest()[:32]}.bin"
    if not target.exists():
        with whole_file(target) as partial, partial.open("wb") as file:
            for piece in _read_chunks(path):
                np.array(encode(tokenizer, piece, size), dtype=dtype).tofile(file)
    return np.memmap(target, dtype, "r") if target.stat().st_size else np.empty(0, dtype)


def _read_chunks(path: Path) -> Iterator[str]:
    """Yield the text in chunks of whole lines."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            while lines := file.readlines(_CHUNK):
                yield "".join(lines)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text: {error}. Convert it, or leave tokenizer out to train on bytes"
        ) from None


def _tokenizer_digest(tokenizer: Tokenizer, path: Path) -> str:
    """Return a text that identifies the tokenizer: its vocabulary, if known, and the tokens of the text's start."""
    vocabulary: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    with path.open(encoding="utf-8", errors="replace") as file:
        start = tokenizer.encode(file.read(4096))
    return repr((type(tokenizer).__name__, sorted(vocabulary.items()), list(getattr(start, "ids", start))))
