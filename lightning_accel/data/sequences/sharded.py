"""Sequences that are larger than memory, a row each. Shapes: R sequences, N steps of all, F features, K values."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lightning_accel.data.quoting import shown
from lightning_accel.data.sequences.batch import IGNORED, SequenceBatch
from lightning_accel.data.sequences.columns import find_sequence_column, steps_of_column
from lightning_accel.data.sequences.dataset import SequenceDataset
from lightning_accel.data.sequences.files import TOKEN_FIELDS, SequenceLayout
from lightning_accel.data.shards.blocks import Blocks, find_blocks
from lightning_accel.data.shards.moments import Moments
from lightning_accel.data.shards.reader import ReadOptions
from lightning_accel.data.shards.splits import Split, split_blocks
from lightning_accel.data.tables.columns import (
    codes_of_column,
    quantities_of_column,
    require_classes,
    texts_of_column,
)
from lightning_accel.data.tables.targets import SET_REGRESSION
from lightning_accel.data.tables.values import LARGEST
from lightning_accel.data.whole_files import kept_json
from lightning_accel.ops.extras import import_on_use

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc
else:
    pa = import_on_use("pyarrow")
    pc = import_on_use("pyarrow.compute")

_SORTED_STEPS = 256  # largest number of steps whose sequences are sorted by length together,
_SORTED_ROWS = 16384  # of their sequences,
_SORTED_BYTES = 64 << 20  # and of the bytes of these


@dataclass
class SequenceStatistics:
    """Hold what describes and encodes sequences: statistics over those that train.

    Args:
        column: column of the sequences.
        mean: (F,) of their steps; None for tokens.
        std: (F,) standard deviations, 1 for what is constant.
        vocab_size: number of tokens; None for values.
        classes: names of the classes, sorted; None for other targets.
        target_mean: (K,) of the targets; None unless they are numbers.
        target_std: (K,).
    """

    column: str
    mean: list[float] | None = None
    std: list[float] | None = None
    vocab_size: int | None = None
    classes: list[str] | None = None
    target_mean: list[float] | None = None
    target_std: list[float] | None = None


class ShardedSequences:
    """Hold sequences that are spread over files, a row each, their splits, and their statistics.

    Args:
        location: folder, pattern or URL.
        layout: which columns hold what, and how files are read.
        shares: shares of the blocks that validate and test, see :func:`split_blocks`.
        seed: seed of the split.

    Raises:
        FileNotFoundError: if there are no files.
        ValueError: if files or columns are not as needed.
    """

    def __init__(
        self,
        location: str | Path,
        layout: SequenceLayout,
        shares: tuple[float, float],
        seed: int,
    ) -> None:
        self.location = location
        self.layout = layout
        self._cache = Path(layout.shards.cache_dir).expanduser()
        blocks = find_blocks(location, self._cache)
        column = find_sequence_column(blocks.schema, layout, str(location))
        targets = [] if layout.target_kind == "forecasting" else [layout.target]
        blocks.require_columns(targets, targets)
        splits = split_blocks(blocks, shares, seed, location)
        target = layout.target_kind, layout.target
        made_of = blocks.digest(), blocks.files.versions, column, target, splits["train"].tolist()
        found = kept_json(self._cache, made_of, lambda: asdict(_collect(blocks, splits["train"], column, layout)))
        self.statistics = SequenceStatistics(**found)
        self.splits: dict[Split, Blocks] = {split: blocks.select(chosen) for split, chosen in splits.items()}
        self.digest = blocks.digest()

    @property
    def feature_names(self) -> list[str] | None:
        mean = self.statistics.mean
        return None if mean is None else [f"{self.statistics.column}_{number}" for number in range(len(mean))]

    def reading(self, global_batch_size: int, with_target: bool = True, in_order: bool = False) -> ReadOptions:
        """Return what is read of blocks, and how batches are made of it: of similar lengths, unless ``in_order``."""
        encoder = SequenceEncoder(self.statistics, self.layout, with_target, str(self.location))
        if in_order:
            return ReadOptions(encoder.columns, encoder)
        train = self.splits["train"]
        rows = min(_SORTED_ROWS, _SORTED_BYTES * train.num_rows // max(1, int(train.nbytes.sum())))
        steps = max(1, min(_SORTED_STEPS, rows // global_batch_size))
        return ReadOptions(encoder.columns, encoder, sort_by=encoder.lengths, sorted_rows=steps * global_batch_size)

    def to_predict(self, location: str | Path) -> Blocks:
        """Return the blocks of other files with sequences in the same column."""
        blocks = find_blocks(location, self._cache)
        blocks.require_columns([self.statistics.column])
        return blocks

    def ids(self, blocks: Blocks) -> list[str]:
        """Return the names of the rows of blocks, their numbers if they have none."""
        if self.layout.id_column not in blocks.schema.names:
            return [str(row) for row in range(blocks.num_rows)]
        column = self.layout.id_column
        return [str(one) for block in range(len(blocks)) for one in blocks.read(block, [column])[column].to_pylist()]


class SequenceEncoder:
    """Make a padded batch of a table with a sequence a row."""

    def __init__(self, statistics: SequenceStatistics, layout: SequenceLayout, with_target: bool, where: str) -> None:
        self.statistics = statistics
        self.layout = layout
        self.where = where
        self.kind = layout.target_kind if with_target else "forecasting"
        self.columns = [statistics.column] + ([] if self.kind == "forecasting" else [layout.target])
        self._numbers = {name: number for number, name in enumerate(statistics.classes or [])}

    def lengths(self, table: pa.Table) -> np.ndarray:
        column = table[self.statistics.column].combine_chunks()
        is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
        return (pc.binary_length if is_text else pc.list_value_length)(column).to_numpy(zero_copy_only=False)

    def __call__(self, table: pa.Table) -> SequenceBatch:
        found, lengths = steps_of_column(table[self.statistics.column], self.statistics.column, self.where)
        steps = self._encode(found)
        target = labels = None
        match self.kind:
            case "classification":
                target = torch.from_numpy(codes_of_column(table[self.layout.target], self._numbers))
            case "regression":
                numbers = quantities_of_column(table[self.layout.target], self.layout.target, self.where)
                target = torch.tensor(numbers, dtype=torch.float32)
                target = target.squeeze(1) if target.shape[1] == 1 else target
            case "labelling":
                labels = _labels(table[self.layout.target], self._numbers)
        rows = SequenceDataset(steps, torch.from_numpy(lengths), target, labels)
        return rows.__getitems__(range(len(rows)))

    def _encode(self, found: np.ndarray) -> Tensor:
        if self.statistics.mean is None:
            if len(found) and int(found.max()) >= (self.statistics.vocab_size or 0):
                raise ValueError(
                    f"{self.where} holds the token {int(found.max())}; those trained on go up to "
                    f"{(self.statistics.vocab_size or 0) - 1}"
                )
            return torch.tensor(found)  # copies: arrays of Arrow are read-only
        if found.ndim == 1 or (len(found) and found.shape[1] != len(self.statistics.mean)):
            raise ValueError(
                f"{self.where} must hold {len(self.statistics.mean)} values a step, as the training sequences; got "
                f"{'tokens' if found.ndim == 1 else found.shape[1]}"
            )
        mean, std = np.array(self.statistics.mean), np.array(self.statistics.std)
        scaled = (found.reshape(-1, len(mean)) - mean) / std
        return torch.from_numpy(scaled.astype(np.float32))


@dataclass
class _Found:
    """Hold the statistics of a block."""

    steps: Moments | None = None
    largest: int = -1
    classes: set[str] = field(default_factory=set)
    target: Moments | None = None


def _collect(blocks: Blocks, train: np.ndarray, column: str, layout: SequenceLayout) -> SequenceStatistics:
    """Read all blocks once, with threads, and return the statistics of those that ``train``."""
    read = partial(_of_block, blocks, column, layout)
    steps, target, largest = Moments(), Moments(), -1
    classes: tuple[set[str], set[str]] = set(), set()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        of_training = np.isin(np.arange(len(blocks)), train).tolist()
        for trains, found in zip(of_training, pool.map(read, range(len(blocks))), strict=True):
            classes[trains].update(found.classes)
            largest = max(largest, found.largest)
            if trains and found.steps is not None:
                steps.add(found.steps)
            if trains and found.target is not None:
                target.add(found.target)
    statistics = SequenceStatistics(column)
    if layout.target_kind in ("classification", "labelling"):
        where = f"the column {shown(layout.target)} of {blocks.files.root}"
        statistics.classes = require_classes(*classes, where, SET_REGRESSION)
    if layout.target_kind == "regression":
        statistics.target_mean, statistics.target_std = target.mean.tolist(), target.std.tolist()
    if steps.count:
        statistics.mean, statistics.std = steps.mean.tolist(), steps.std.tolist()
    elif largest < 0:
        raise ValueError(f"all sequences of {blocks.files.root} that train are empty; others are needed")
    else:
        is_text = column not in TOKEN_FIELDS
        statistics.vocab_size = 256 if is_text else largest + 1
    return statistics


def _of_block(blocks: Blocks, column: str, layout: SequenceLayout, block: int) -> _Found:
    where = blocks.name_of(block)
    with_target = layout.target_kind != "forecasting"
    table = blocks.read(block, [column, layout.target] if with_target else [column])
    steps, lengths = steps_of_column(table[column], column, where)
    found = _Found()
    if steps.ndim == 1:
        found.largest = int(steps.max()) if len(steps) else -1
    elif len(steps):
        if not (np.abs(steps) <= LARGEST).all():
            raise ValueError(f"column {shown(column)} of {where} must hold numbers of at most {LARGEST:g}")
        found.steps = Moments.of(steps)
    match layout.target_kind:
        case "classification":
            codes, names = texts_of_column(table[layout.target])
            if (codes < 0).any():
                raise ValueError(f"column {shown(layout.target)} of {where} lacks {int((codes < 0).sum())} classes")
            found.classes = {*names}
        case "regression":
            found.target = Moments.of(quantities_of_column(table[layout.target], layout.target, where))
        case "labelling":
            labels, of = table[layout.target].combine_chunks(), f"column {shown(layout.target)} of {where}"
            if not pa.types.is_list(labels.type) and not pa.types.is_large_list(labels.type):
                raise ValueError(
                    f"column {shown(layout.target)} of {where} must hold a list of classes; got {labels.type}"
                )
            if labels.null_count or (pc.list_value_length(labels).to_numpy(zero_copy_only=False) != lengths).any():
                raise ValueError(f"{of} must hold a class for each step")
            found.classes = {*texts_of_column(pa.chunked_array([labels.flatten()]))[1]}
    return found


def _labels(column: pa.ChunkedArray, numbers: dict[str, int]) -> Tensor:
    flat = pa.chunked_array([column.combine_chunks().flatten()])
    return torch.from_numpy(codes_of_column(flat, numbers, unknown=IGNORED, missing=IGNORED).astype(np.int32))
