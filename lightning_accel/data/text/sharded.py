"""Texts that are rows of files, as token ids on disk. Shapes: n rows of a block."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lightning_accel.data.quoting import shown
from lightning_accel.data.shards.blocks import Blocks, find_blocks
from lightning_accel.data.text.tokens import Tokenizer, encode, vocabulary_size
from lightning_accel.data.whole_files import whole_file
from lightning_accel.ops.extras import import_on_use

if TYPE_CHECKING:
    import pyarrow as pa
else:
    pa = import_on_use("pyarrow")


class TokenFiles(NamedTuple):
    """Hold the token ids of the rows of files, memory-mapped, one array a file, and the bytes of their texts.

    ``splits`` is what the path of each file says it is for, see :meth:`ShardFiles.splits`.
    """

    documents: list[np.ndarray]
    num_bytes: int
    splits: list[str | None]


def map_rows(location: str | Path, field: str, tokenizer: Tokenizer, separator: int, cache: Path) -> TokenFiles:
    """Memory-map the tokens of the rows of files, ``separator`` between two rows, which ``cache`` keeps.

    Each file is read once, block by block, several at a time. A column of lists holds token ids, which are taken as
    they are.

    Raises:
        FileNotFoundError: if there are no files.
        ValueError: if there is no column ``field``, or it holds something else than texts and token ids.
    """
    blocks = find_blocks(location, cache)
    blocks.require_columns([field])
    made = partial(_map_file, blocks, field, tokenizer, separator, cache)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        files = np.unique(blocks.file_of).tolist()
        found = [*pool.map(made, files)]
    said = blocks.files.splits()
    documents, sizes = [document for document, _ in found], [size for _, size in found]
    return TokenFiles(documents, sum(sizes), [said[file] for file in files])


def _map_file(
    blocks: Blocks, field: str, tokenizer: Tokenizer, separator: int, cache: Path, file: int
) -> tuple[np.ndarray, int]:
    path, version = blocks.files.path_of(file), blocks.files.versions[file]
    size = vocabulary_size(tokenizer)
    vocabulary: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    start = blocks.read(int(np.flatnonzero(blocks.file_of == file)[0]), [field])[field][0].as_py()
    tokens = tokenizer.encode(start[:4096]) if isinstance(start, str) else []
    of_tokenizer = type(tokenizer).__name__, sorted(vocabulary.items()), list(getattr(tokens, "ids", tokens))
    made_of = path, version, field, separator, of_tokenizer
    target = cache / f"{hashlib.sha256(repr(made_of).encode()).hexdigest()[:32]}.bin"
    dtype = np.uint16 if separator < 1 << 16 else np.uint32
    counted = target.with_suffix(".json")
    if not (target.exists() and counted.exists()):
        num_bytes, is_first = 0, True
        with whole_file(target) as partial_file, partial_file.open("wb") as opened:
            for block in np.flatnonzero(blocks.file_of == file).tolist():
                column = blocks.read(block, [field])[field]
                if column.null_count:
                    raise ValueError(
                        f"column {shown(field)} of {blocks.name_of(block)} lacks {column.null_count} of {len(column)} "
                        "texts. Remove those rows"
                    )
                for row in column.to_pylist():
                    tokens = _tokens_of(row, tokenizer, size, field, blocks.name_of(block))
                    num_bytes += len(row.encode()) if isinstance(row, str) else len(row)
                    np.array([*([] if is_first else [separator]), *tokens], dtype).tofile(opened)
                    num_bytes, is_first = num_bytes + (not is_first), False
        with whole_file(counted) as partial_file:
            partial_file.write_text(json.dumps(num_bytes))
    document = np.memmap(target, dtype, "r") if target.stat().st_size else np.empty(0, dtype)
    return document, json.loads(counted.read_text())


def _tokens_of(row: str | list[int], tokenizer: Tokenizer, size: int, field: str, where: str) -> list[int]:
    if isinstance(row, str):
        return encode(tokenizer, row, size)
    if not isinstance(row, list) or not all(isinstance(token, int) for token in row):
        raise ValueError(f"column {shown(field)} of {where} must hold texts, or lists of token ids; got {shown(row)}")
    if row and not 0 <= min(row) <= max(row) < size:
        raise ValueError(
            f"column {shown(field)} of {where} holds token ids from {min(row)} to {max(row)}, and the vocabulary of "
            f"{type(tokenizer).__name__} {size}; give the tokenizer that they were made with"
        )
    return row
