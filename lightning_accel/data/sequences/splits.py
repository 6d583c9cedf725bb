"""Splits of the sequences of files, generated tasks and digits for training, validation and test."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from lightning_accel.data.digest import digest_of
from lightning_accel.data.sequences.dataset import SequenceDataset
from lightning_accel.data.sequences.files import FileSequences, Layout, TargetKind, read_sequences
from lightning_accel.data.sequences.tasks import (
    adding_problem,
    counting,
    digit_pixels,
    parity,
    random_counts,
    selective_copying,
)
from lightning_accel.data.tables.files import read_classes, read_known_classes, split_in_three

TaskName = Literal[
    "digits_rows",
    "digits_pixels",
    "digits_permuted",
    "adding",
    "parity",
    "parity_steps",
    "selective_copying",
    "counting",
]
Length = int | tuple[int, int]

_LENGTHS: dict[str, tuple[Length, Length]] = {  # default lengths for training and test
    "adding": (100, 100),
    "parity": ((3, 40), (40, 256)),
    "parity_steps": ((3, 40), (40, 256)),
    "selective_copying": (256, 256),
    "counting": ((1, 50), (1, 256)),
}
_BYTES = 256


@dataclass
class SequenceSplits:
    """Hold training, validation and test sequences and their description; the latter two are sorted by length."""

    train: SequenceDataset
    val: SequenceDataset
    test: SequenceDataset
    kind: TargetKind
    class_names: list[str] | None = None
    vocab_size: int | None = None
    feature_names: list[str] | None = None
    test_ids: list[str] = field(default_factory=list)
    mean: np.ndarray | None = None  # (F,) over the training steps; None if values are not standardized
    std: np.ndarray | None = None
    digest: str | None = None  # digest of the training and validation sequences of a file


def task_lengths(
    task: TaskName, length: Length | None = None, test_length: Length | None = None
) -> tuple[Length, Length] | None:
    """Return the lengths of training and of test sequences, by default those of the task; None for digits.

    Raises:
        ValueError: if there is no such task, or a range of lengths is given where it needs one length.
    """
    if task not in get_args(TaskName):
        raise ValueError(f"task must be one of {', '.join(get_args(TaskName))}; got {task!r}")
    if task not in _LENGTHS:
        return None
    usual, usual_test = _LENGTHS[task]
    train = usual if length is None else length
    test = (train if usual == usual_test else usual_test) if test_length is None else test_length
    for given in (train, test):
        if task == "selective_copying" and not isinstance(given, int):
            raise ValueError(f"{task} has sequences of one length; got {given}")
    return train, test


def generated_splits(
    task: TaskName, lengths: tuple[Length, Length], num_sequences: int, shares: tuple[float, float], seed: int
) -> SequenceSplits:
    """Generate the three splits of ``num_sequences``, each from a seed of its own; test lengths are ``lengths[1]``."""
    held_out = [max(1, round(share * num_sequences)) for share in shares]
    counts = [num_sequences - sum(held_out), *held_out]
    if counts[0] < 1:
        raise ValueError(f"num_sequences must leave some to train on; got {num_sequences}, of which {held_out} do not")
    parts = [
        _generate(task, count, length, 3 * seed + part)
        for part, (count, length) in enumerate(zip(counts, (lengths[0], *lengths), strict=True))
    ]
    if task == "counting":
        parts[2] = counting(torch.arange(*_length_range(lengths[1], 1)))  # each number once
    train, val, test = parts[0], _sort_by_length(parts[1]), _sort_by_length(parts[2])
    test_ids = [str(row) for row in parts[2].lengths.argsort(stable=True).tolist()]
    match task:
        case "adding":
            return SequenceSplits(train, val, test, "regression", None, None, ["number", "mark"], test_ids)
        case "parity":
            return SequenceSplits(train, val, test, "classification", ["even", "odd"], 2, None, test_ids)
        case "parity_steps":
            return SequenceSplits(train, val, test, "labelling", ["even", "odd"], 2, None, test_ids)
        case "counting":
            return SequenceSplits(train, val, test, "labelling", ["a or b", "b", "end"], 2, None, test_ids)
    vocab_size = int(train.steps.max()) + 1
    names = [str(symbol) for symbol in range(1, vocab_size - 1)]
    return SequenceSplits(train, val, test, "labelling", names, vocab_size, None, test_ids)


def _length_range(length: Length, beyond: int = 0) -> tuple[int, int]:
    least, most = (length, length) if isinstance(length, int) else length
    return least, most + beyond


def _generate(task: TaskName, count: int, length: Length, seed: int) -> SequenceDataset:
    between = _length_range(length)
    match task:
        case "adding":
            return adding_problem(count, between, seed)
        case "parity" | "parity_steps":
            return parity(count, between, seed, each_step=task == "parity_steps")
        case "selective_copying":
            return selective_copying(count, between[1], seed)
        case "counting":
            return counting(random_counts(count, between, seed))
    raise AssertionError(task)


def digit_splits(task: TaskName, shares: tuple[float, float], seed: int) -> SequenceSplits:
    """Split the digits as :class:`lightning_accel.data.DigitsDataModule` does with the same shares and seed."""
    rows = digit_pixels(rows_at_once=task == "digits_rows", permuted=task == "digits_permuted")
    assert rows.target is not None
    train, val, test = split_in_three(rows.target.numpy(), len(rows), shares, seed, Path("the digits of scikit-learn"))
    names = [f"pixel_{i}" for i in range(rows.steps.shape[1])]
    ids = [str(row) for row in test]
    digits = list("0123456789")
    return SequenceSplits(
        rows.select(train), rows.select(val), rows.select(test), "classification", digits, None, names, ids
    )


def file_splits(path: Path, layout: Layout, shares: tuple[float, float], seed: int) -> SequenceSplits:
    """Read and split the sequences of a file, its values standardized over the training steps."""
    read = read_sequences(path, layout)
    target, labels, classes = _encode_target(read, layout, path)
    stratify = target.numpy() if layout.kind == "classification" and target is not None else None
    train, val, test = split_in_three(stratify, len(read.lengths), shares, seed, path)
    val, test = (part[np.argsort(read.lengths[part], kind="stable")] for part in (val, test))
    mean, std = _fit_scale(read, train, path)
    digest = _digest(read, np.concatenate([train, val]), target, labels)
    rows = SequenceDataset(_to_steps(read, mean, std), torch.from_numpy(read.lengths), target, labels)
    splits = SequenceSplits(rows.select(train), rows.select(val), rows.select(test), layout.kind, classes)
    splits.test_ids, splits.digest = [read.ids[row] for row in test], digest
    if mean is None:
        splits.vocab_size = _BYTES if read.steps.dtype == np.uint8 else int(read.steps.max()) + 1
    else:
        splits.feature_names, splits.mean, splits.std = read.names, mean, std
    return splits


def _digest(read: FileSequences, rows: np.ndarray, target: Tensor | None, labels: Tensor | None) -> str:
    """Digest the sequences ``rows``, before standardization, and their targets."""
    inside = np.zeros(len(read.lengths), dtype=bool)
    inside[rows] = True
    of_steps = np.repeat(inside, read.lengths)
    parts = [rows, read.lengths[rows], read.steps[of_steps]]
    parts += [] if target is None else [target.numpy()[rows]]
    parts += [] if labels is None else [labels.numpy()[of_steps]]
    return digest_of(*parts)


def _fit_scale(read: FileSequences, train: np.ndarray, path: Path) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return means and standard deviations, (F,), over the steps of the sequences ``train``; None for tokens."""
    if read.steps.ndim == 1:
        return None, None
    inside = np.zeros(len(read.lengths), dtype=bool)
    inside[train] = True
    fitted = read.steps[np.repeat(inside, read.lengths)]
    if not len(fitted):
        raise ValueError(f"all sequences of {path} that train are empty; others are needed")
    std = fitted.std(axis=0)
    return fitted.mean(axis=0), np.where(std > 0, std, 1)  # 1 for a constant column


def file_to_predict(path: Path, layout: Layout, splits: SequenceSplits) -> tuple[SequenceDataset, list[str]]:
    """Read the sequences of another file and their ids, without targets, standardized like those of ``splits``.

    Raises:
        ValueError: if they have other features, or tokens outside the vocabulary.
    """
    if splits.feature_names is not None and {".csv", ".parquet"} & {suffix.lower() for suffix in path.suffixes}:
        layout = replace(layout, values=tuple(splits.feature_names))  # the file may have more columns
    read = read_sequences(path, layout, with_target=False)
    if read.steps.ndim == 1:
        if splits.vocab_size is None:
            raise ValueError(f"{path} holds {read.names[0]}; the training sequences hold values")
        if (largest := int(read.steps.max())) >= splits.vocab_size:
            raise ValueError(f"{path} holds the token {largest}; those trained on go up to {splits.vocab_size - 1}")
    elif splits.feature_names is None or len(read.names) != len(splits.feature_names):
        needed = "tokens or text" if splits.feature_names is None else f"{len(splits.feature_names)} values a step"
        raise ValueError(f"{path} has {len(read.names)} values a step; the training sequences have {needed}")
    return SequenceDataset(_to_steps(read, splits.mean, splits.std), torch.from_numpy(read.lengths)), read.ids


def _to_steps(read: FileSequences, mean: np.ndarray | None, std: np.ndarray | None) -> Tensor:
    if mean is None or std is None:
        return torch.from_numpy(read.steps.copy())  # numpy's arrays from bytes are read-only
    return torch.from_numpy(((read.steps - mean) / std).astype(np.float32))


def _encode_target(
    read: FileSequences, layout: Layout, path: Path
) -> tuple[Tensor | None, Tensor | None, list[str] | None]:
    match layout.kind:
        case "forecasting":
            return None, None, None
        case "regression":
            target = torch.from_numpy(read.target.astype(np.float32))
            return target.squeeze(1) if target.shape[1] == 1 else target, None, None
        case "classification":
            advice = "for a target that is a quantity, set target_kind to regression"
            numbers, classes = read_classes(read.target, path, advice)
            return torch.from_numpy(numbers), None, classes
        case "labelling":
            advice = "for quantities of each step there is no target_kind"
            labels, classes = read_known_classes(read.target, path, advice)
            return None, torch.from_numpy(labels.astype(np.int32)), classes


def _sort_by_length(rows: SequenceDataset) -> SequenceDataset:
    """Sort by length, so that consecutive batches have little padding."""
    return rows.select(rows.lengths.argsort(stable=True))
