"""Text for language models. Shapes: B windows, T tokens."""

import math
import sysconfig
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader

from lightning_accel.data.bounds import require_shares
from lightning_accel.data.digest import DIGEST, require_same_data
from lightning_accel.data.in_memory import in_memory_loader, resumable_loader
from lightning_accel.data.samplers import ResumableSampler, replicas_and_rank
from lightning_accel.data.shards.files import SUFFIXES, is_sharded
from lightning_accel.data.tables.files import existing_file
from lightning_accel.data.text.sharded import TokenFiles, map_rows
from lightning_accel.data.text.tokens import (
    ByteTokenizer,
    Tokenizer,
    TokenStream,
    TokenWindows,
    encode,
    map_file,
    vocabulary_size,
)
from lightning_accel.ops.bounds import local_path, require_integers
from lightning_accel.ops.names import list_of_names

_WINDOWS_PER_GROUP = 16  # adjacent windows in one split, so that few windows border on another split


class TextDataModule(L.LightningDataModule):
    """Load windows of text as batches of token ids (B, T + 1) int64: T inputs and, shifted by one, T targets.

    All documents are concatenated, a separator after each, and split into windows without overlap or padding. Groups of
    sixteen adjacent windows are assigned to the splits at random. Files are memory-mapped, not loaded: bytes directly,
    other tokens from a cache that is written once. The training order depends on ``seed`` and the epoch alone; a run
    resumed in mid-epoch continues with the next batch, also on another number of processes.

    ``predict`` runs over ``prompts``, token ids (1, T) each.

    ``vocab_size`` is the tokenizer's vocabulary size plus one: the last id is the separator. After ``setup``,
    ``bytes_per_token`` is the mean over the whole text.

    Args:
        path: a text file, or a folder whose files with these ``suffixes`` are read, including subfolders, sorted by
            name; by default the text that comes with Python: its language reference and its top-level modules, about 6
            MB of English and code. Also a Parquet, Arrow or JSON lines file, or a folder (without texts), pattern or
            URL of such files (see :func:`lightning_accel.data.shard_loader`), whose rows are documents.
            Where paths have the words train, val (valid, validation, dev) and test, these are the splits.
        context_length: T, the number of tokens that a window has as inputs.
        batch_size: windows per process and step.
        tokenizer: has ``encode``, ``decode`` and a vocabulary size, as in the packages tokenizers and transformers; by
            default each byte is a token.
        suffixes: file name suffixes to read from a folder.
        field: column of the documents, where they are rows of files: texts, or lists of token ids of ``tokenizer``.
        val_share: share of the windows that validate.
        test_share: share of the windows that test.
        seed: seed of the split and of the training order.
        prompts: texts that ``predict`` continues.
        cache_dir: folder where the tokens of a ``tokenizer`` are stored.
        num_workers: workers that load batches; 0 is fastest for text on a local disk.

    Raises:
        FileNotFoundError: if there is no such file, or no file with these suffixes in the folder.
        TypeError: if the tokenizer lacks a method or its vocabulary size.
        ValueError: if a number is out of range; in ``setup``, if the text is too short for a window in each split, or
            not UTF-8; in ``load_state_dict``, if a run is resumed on other text, or resumed or tested on another split
            of the same text.

    Example:
        >>> data = TextDataModule(context_length=64, batch_size=4)  # the text that comes with Python
        >>> data.vocab_size
        257
    """

    vocab_size: int
    bytes_per_token: float

    def __init__(
        self,
        path: str | Path | None = None,
        context_length: int = 128,
        batch_size: int = 16,
        *,
        tokenizer: Tokenizer | None = None,
        suffixes: Sequence[str] = (".txt", ".md", ".rst"),
        field: str = "text",
        val_share: float = 0.05,
        test_share: float = 0.05,
        seed: int = 0,
        prompts: Sequence[str] = (),
        cache_dir: str | Path = Path("~/.cache/lightning_accel/tokens"),
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        require_integers(1, batch_size=batch_size, context_length=context_length)
        require_integers(0, seed=seed, num_workers=num_workers)
        require_shares(val_share, test_share)
        self.of_python = path is None
        self.rows_of = path if path is not None and _holds_rows(path, list_of_names(suffixes)) else None
        self.field = field
        self.paths: list[Path] = []
        if path is None:
            self.paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))  # empty if they are in an archive
        elif self.rows_of is None:
            self.paths = _find_texts(local_path(path), list_of_names(suffixes))
        self.context_length = context_length
        self.batch_size = batch_size
        if not isinstance(tokenizer, Tokenizer | None):
            raise TypeError(f"a tokenizer has methods encode and decode; got {tokenizer!r}")
        self.tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
        self.val_share = val_share
        self.test_share = test_share
        self.seed = seed
        self.prompts = list_of_names(prompts, "prompts")
        self.cache_dir = local_path(cache_dir, "cache_dir")
        self.num_workers = num_workers
        self.vocab_size = vocabulary_size(self.tokenizer) + 1

    def prepare_data(self) -> None:
        """Fill the token cache, in one process per machine."""
        for path in self.paths:
            map_file(path, self.tokenizer, self.cache_dir)
        if self.rows_of is not None:
            self._map_rows(self.rows_of)

    def _map_rows(self, location: str | Path) -> TokenFiles:
        return map_rows(location, self.field, self.tokenizer, self.vocab_size - 1, self.cache_dir)

    def setup(self, stage: str | None = None) -> None:
        if hasattr(self, "train_windows"):  # the Trainer calls setup once per stage
            return
        documents = [map_file(path, self.tokenizer, self.cache_dir) for path in self.paths]
        num_bytes, named = sum(path.stat().st_size for path in self.paths), list[str | None]()
        if self.rows_of is not None:
            documents, num_bytes, named = self._map_rows(self.rows_of)
        if self.of_python:
            reference = "\n\n".join(topics.values())
            documents.append(np.array(encode(self.tokenizer, reference, self.vocab_size - 1)))
            num_bytes += len(reference.encode())
        self.stream = TokenStream(documents, separator=self.vocab_size - 1)
        self.bytes_per_token = (num_bytes + len(documents)) / max(1, len(self.stream))
        windows = len(self.stream) // (self.context_length + 1)
        shares = self.val_share, self.test_share
        splits = _split(windows, *shares, self.seed)
        if any(named):
            splits = _split_by_name(self.stream, named, self.context_length + 1, shares, self.seed)
        if not all(map(len, splits)):
            raise ValueError(
                f"the text of {self._where()} holds {len(self.stream)} tokens, {windows} windows of "
                f"context_length={self.context_length}; {3 * _WINDOWS_PER_GROUP} or more are needed for three splits. "
                "Give more text, or a smaller context_length"
            )
        self.train_windows, self.val_windows, self.test_windows = (
            TokenWindows(self.stream, self.context_length + 1, numbers) for numbers in splits
        )

    def _where(self) -> str:
        more = f" and {len(self.paths) - 1} more files" if len(self.paths) > 1 else ""
        if self.rows_of is not None:
            return str(self.rows_of)
        return f"{self.paths[0]}{more}" if self.paths else "Python's reference"

    def state_dict(self) -> dict[str, Any]:
        return {
            "tokens and vocabulary": [len(self.stream), self.vocab_size],
            "split": [self.context_length, self.val_share, self.test_share, self.seed],
            DIGEST: self._digest,
        }

    @cached_property
    def _digest(self) -> str:
        return self.stream.digest()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        trainer: Any = self.trainer
        resuming = trainer is None or trainer.state.fn == TrainerFn.FITTING
        now = self.state_dict()
        if not resuming and any(
            state_dict.get(name, now[name]) != now[name] for name in ("tokens and vocabulary", DIGEST)
        ):
            return  # any part of a text may be tested if the model was not trained on it
        remedy = "'split' is context_length, shares and seed. Give the text and the options of its run"
        require_same_data(state_dict, now, f"text than that of {self._where()}", remedy)

    def train_dataloader(self) -> DataLoader[Any]:
        replicas, rank = replicas_and_rank(self)
        if len(self.train_windows) < self.batch_size * replicas:
            raise ValueError(
                f"{len(self.train_windows)} windows train, fewer than batch_size={self.batch_size} on each of "
                f"{replicas} processes; give more text, or a smaller batch_size"
            )
        sampler = ResumableSampler(self.train_windows, self.batch_size, replicas, rank, self.seed)
        return resumable_loader(self.train_windows, sampler, self, self.num_workers, self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return in_memory_loader(self.val_windows, self, self.batch_size, self.num_workers)

    def test_dataloader(self) -> DataLoader[Any]:
        return in_memory_loader(self.test_windows, self, self.batch_size, self.num_workers)

    def predict_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the prompts, one per batch, since they differ in length."""
        if not self.prompts:
            raise ValueError("predict goes on from prompts; give some: TextDataModule(prompts=[...])")
        rows = [
            torch.tensor(encode(self.tokenizer, prompt, self.vocab_size - 1), dtype=torch.int64)
            for prompt in self.prompts
        ]
        if empty := [prompt for prompt, row in zip(self.prompts, rows, strict=True) if not len(row)]:
            raise ValueError(f"a prompt must hold a token; got {empty[0]!r}")
        return DataLoader(rows, batch_size=1)  # type: ignore[arg-type]  # a list is a dataset


def _holds_rows(path: str | Path, suffixes: Sequence[str]) -> bool:
    """Return whether a path is of files whose rows are documents, rather than of texts.

    Raises:
        ValueError: if a folder has both; a README or a license beside rows is no text.
    """
    folder = local_path(path)
    if not folder.is_dir():
        return is_sharded(path) or (str(path).lower().endswith(SUFFIXES) and folder.is_file())
    rows = _texts_in(folder, SUFFIXES)
    texts = [text for text in _texts_in(folder, suffixes) if not text.name.upper().startswith(("README", "LICENSE"))]
    if rows and texts:
        raise ValueError(
            f"{path} holds texts ({texts[0].name}) and files of rows ({rows[0].name}); name one kind, such as "
            f"{path}/*{rows[0].suffix}, or suffixes that leave out the other"
        )
    return bool(rows)


def _split_by_name(
    stream: TokenStream, names: Sequence[str | None], length: int, shares: tuple[float, float], seed: int
) -> list[np.ndarray]:
    """Return the indices of the windows that train, validate and test, by the split that each document's name says.

    Windows that two splits share are left out. Where none validate or test, some of those that train do.
    """
    starts = np.arange(len(stream) // length) * length
    changes = np.cumsum([False, *(one != other for one, other in pairwise(names))])
    ends = np.array(stream.ends)
    first, last = (np.searchsorted(ends, at, side="right") for at in (starts, starts + length - 1))
    of_window = np.where(changes[first] == changes[last], np.array(names)[first], "")
    train, val, test = (np.flatnonzero(of_window == split) for split in ("train", "val", "test"))
    val_share, test_share = (0.0 if len(part) else share for part, share in zip((val, test), shares, strict=True))
    kept, more_val, more_test = (train[part] for part in _split(len(train), val_share, test_share, seed))
    return [kept, val if len(val) else more_val, test if len(test) else more_test]


def _find_texts(path: Path, suffixes: Sequence[str]) -> list[Path]:
    if not path.is_dir():
        return [existing_file(path)]
    files = _texts_in(path, suffixes)
    if not files:
        wanted = sorted(f".{suffix.lstrip('.')}".lower() for suffix in suffixes)
        raise FileNotFoundError(f"no file in {path} ends in {', '.join(wanted)}; set suffixes to those of your texts")
    return files


def _texts_in(path: Path, suffixes: Sequence[str]) -> list[Path]:
    wanted = {f".{suffix.lstrip('.')}".lower() for suffix in suffixes}
    return sorted(file for file in path.rglob("*") if file.is_file() and file.suffix.lower() in wanted)


def _split(windows: int, val_share: float, test_share: float, seed: int) -> list[np.ndarray]:
    """Return the indices of the windows that train, validate and test."""
    groups = np.array_split(np.arange(windows), max(1, math.ceil(windows / _WINDOWS_PER_GROUP)))
    order = np.random.default_rng(seed).permutation(len(groups))
    num_val, num_test = (math.ceil(share * len(groups)) for share in (val_share, test_share))
    parts = order[num_val + num_test :], order[:num_val], order[num_val : num_val + num_test]
    return [np.concatenate([groups[g] for g in sorted(part)]) if len(part) else np.empty(0, np.int64) for part in parts]
