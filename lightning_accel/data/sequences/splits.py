"""Splits of the sequences of files, of the adding problem and of digits for training, validation and test."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_accel.data.digest import digest_of
from lightning_accel.data.sequences.dataset import SequenceDataset
from lightning_accel.data.sequences.files import FileSequences, SequenceLayout, TargetKind, read_sequences
from lightning_accel.data.sequences.leakage import doubts_of_sequences
from lightning_accel.data.splits import split_in_three
from lightning_accel.data.tables.column_checks import warn_of_code, warn_of_new_range
from lightning_accel.data.tables.targets import SET_REGRESSION, read_classes, read_known_classes
from lightning_accel.ops.extras import import_on_use

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = import_on_use("pandas")
datasets = import_on_use("sklearn.datasets")

TaskName = Literal["digits_rows", "digits_pixels", "digits_permuted", "adding"]
Length = int | tuple[int, int]

_BYTES = 256


@dataclass(frozen=True)
class GeneratedSequences:
    """Hold how many sequences are generated, and of how many steps.

    Args:
        length: steps of a sequence, or a pair of their minimum and maximum; by default 100.
        test_length: like ``length``, for test sequences; by default equal to ``length``.
        num_sequences: number of sequences, for training, validation and test together; by default 10,000.

    Example:
        >>> from lightning_accel import SequenceDataModule
        >>> data = SequenceDataModule(task="adding", generated=GeneratedSequences(length=(50, 100)))
    """

    length: Length | None = None
    test_length: Length | None = None
    num_sequences: int | None = None


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
    lowest: np.ndarray | None = None  # (F,), as those
    highest: np.ndarray | None = None
    digest: str | None = None  # digest of the training and validation sequences of a file


def generated_splits(
    lengths: tuple[Length, Length], num_sequences: int, shares: tuple[float, float], seed: int
) -> SequenceSplits:
    """Generate the three splits of ``num_sequences``, each from a seed of its own; test lengths are ``lengths[1]``."""
    held_out = [max(1, round(share * num_sequences)) for share in shares]
    counts = [num_sequences - sum(held_out), *held_out]
    if counts[0] < 1:
        raise ValueError(
            f"generated.num_sequences must leave some to train on; got {num_sequences}, of which {held_out} do not"
        )
    train, val, test = (
        adding_problem(count, (length, length) if isinstance(length, int) else length, 3 * seed + part)
        for part, (count, length) in enumerate(zip(counts, (lengths[0], *lengths), strict=True))
    )
    order = test.lengths.argsort(stable=True)
    ids = [str(row) for row in order.tolist()]
    val = val.select(val.lengths.argsort(stable=True))
    return SequenceSplits(train, val, test.select(order), "regression", feature_names=["number", "mark"], test_ids=ids)


def adding_problem(num_sequences: int, lengths: tuple[int, int], seed: int) -> SequenceDataset:
    """Generate the adding problem: features are a number in [0, 1) and a mark, 1 at two steps; the target is their sum.

    Lengths are uniformly distributed between the two numbers ``lengths``, both inclusive. Predicting 1 always has a
    mean squared error of 1/6.

    Source: Hochreiter & Schmidhuber 1997, https://doi.org/10.1162/neco.1997.9.8.1735, task 5.4; the marks are anywhere,
    as in Bai et al. 2018, https://arxiv.org/abs/1803.01271, while the former have one in either half.

    Raises:
        ValueError: if a sequence would have fewer than two steps.
    """
    if not 2 <= lengths[0] <= lengths[1]:
        raise ValueError(f"lengths must be a pair (least, most) from 2 up; got {lengths}")
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(lengths[0], lengths[1] + 1, (num_sequences,), generator=generator)
    starts = steps.cumsum(0) - steps
    first = _random_below(steps, generator)
    second = _random_below(steps - 1, generator)
    second += second >= first  # any step but that of the first mark
    values = torch.zeros(int(steps.sum()), 2)
    values[:, 0] = torch.rand(len(values), generator=generator)
    values[starts + first, 1] = values[starts + second, 1] = 1
    total = values[starts + first, 0] + values[starts + second, 0]
    return SequenceDataset(values, steps, target=total)


def _random_below(limits: Tensor, generator: torch.Generator) -> Tensor:
    """Draw an integer in [0, limit) for each of ``limits``."""
    # float64, as a float32 just below 1 times the limit may be rounded up to the limit
    return (torch.rand(len(limits), generator=generator, dtype=torch.float64) * limits).long()


def digit_splits(task: TaskName, shares: tuple[float, float], seed: int) -> SequenceSplits:
    """Split the digits as :class:`lightning_accel.DigitsDataModule` does with the same shares and seed."""
    rows = digit_pixels(rows_at_once=task == "digits_rows", permuted=task == "digits_permuted")
    assert rows.target is not None
    train, val, test = split_in_three(rows.target.numpy(), len(rows), shares, seed, Path("the digits of scikit-learn"))
    names = [f"pixel_{i}" for i in range(rows.steps.shape[1])]
    ids = [str(row) for row in test]
    digits = list("0123456789")
    return SequenceSplits(
        rows.select(train), rows.select(val), rows.select(test), "classification", digits, None, names, ids
    )


def digit_pixels(rows_at_once: bool, permuted: bool = False) -> SequenceDataset:
    """Return the 1,797 digits of scikit-learn in [0, 1] as 8 rows of 8 pixels, or as 64 pixels, equally ``permuted``.

    Source: Le et al. 2015, https://arxiv.org/abs/1504.00941, sec. 4.2, where the digits are 28 x 28.
    """
    pixels, labels = datasets.load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().div(16)
    if permuted:
        images = images[:, torch.randperm(64, generator=torch.Generator().manual_seed(0))]
    steps, features = (8, 8) if rows_at_once else (64, 1)
    lengths = torch.full((len(images),), steps)
    return SequenceDataset(images.reshape(-1, features), lengths, target=torch.from_numpy(labels).long())


def file_splits(path: Path, layout: SequenceLayout, shares: tuple[float, float], seed: int) -> SequenceSplits:
    """Read and split the sequences of a file, its values standardized over the training steps."""
    read = read_sequences(path, layout)
    if empty := int((read.lengths == 0).sum()):
        rank_zero_warn(
            f"{empty} of {len(read.lengths)} sequences of {path} have no steps, so that they all get one prediction; "
            "leave them out, unless that is meant"
        )
    target, labels, classes = _encode_target(read, layout, path)
    stratify = target.numpy() if layout.target_kind == "classification" and target is not None else None
    train, val, test = split_in_three(stratify, len(read.lengths), shares, seed, path)
    val, test = (part[np.argsort(read.lengths[part], kind="stable")] for part in (val, test))
    fitted = _values_that_train(read, train, path)
    digest = _digest(read, np.concatenate([train, val]), target, labels)
    mean, std = (None, None) if fitted is None else _scale_of(fitted)
    rows = SequenceDataset(_to_steps(read, mean, std), torch.from_numpy(read.lengths), target, labels)
    splits = SequenceSplits(rows.select(train), rows.select(val), rows.select(test), layout.target_kind, classes)
    splits.test_ids, splits.digest = [read.ids[row] for row in test], digest
    if fitted is None:
        splits.vocab_size = _BYTES if read.steps.dtype == np.uint8 else int(read.steps.max()) + 1
    else:
        splits.feature_names, splits.mean, splits.std = read.names, mean, std
        splits.lowest, splits.highest = fitted.min(axis=0), fitted.max(axis=0)
        for name, values in zip(read.names, read.steps.T, strict=True):
            warn_of_code(pd.Series(values, name=name), path, "fill it, or leave those steps out")
    of_each = None if target is None else target.numpy()
    for doubt in doubts_of_sequences(read, of_each, train, np.concatenate([val, test]), path):
        rank_zero_warn(doubt)
    return splits


def _digest(read: FileSequences, rows: np.ndarray, target: Tensor | None, labels: Tensor | None) -> str:
    """Digest the sequences ``rows``, before standardization, and their targets."""
    of_steps = _steps_of(read, rows)
    parts = [rows, read.lengths[rows], read.steps[of_steps]]
    parts += [] if target is None else [target.numpy()[rows]]
    parts += [] if labels is None else [labels.numpy()[of_steps]]
    return digest_of(*parts)


def _steps_of(read: FileSequences, rows: np.ndarray) -> np.ndarray:
    """Return which of all steps are in the sequences ``rows``, (N,) bool."""
    return np.repeat(np.isin(np.arange(len(read.lengths)), rows), read.lengths)


def _values_that_train(read: FileSequences, train: np.ndarray, path: Path) -> np.ndarray | None:
    """Return all steps of the sequences ``train``, (N, F); None for tokens."""
    if read.steps.ndim == 1:
        return None
    fitted = read.steps[_steps_of(read, train)]
    if not len(fitted):
        raise ValueError(f"all sequences of {path} that train are empty; others are needed")
    return fitted


def _scale_of(fitted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    std = fitted.std(axis=0)
    return fitted.mean(axis=0), np.where(std > 0, std, 1)  # 1 for a constant column


def file_to_predict(path: Path, layout: SequenceLayout, splits: SequenceSplits) -> tuple[SequenceDataset, list[str]]:
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
    elif splits.lowest is not None and splits.highest is not None and len(read.steps):
        ranges = zip(splits.lowest, splits.highest, strict=True)
        for name, values, (low, high) in zip(splits.feature_names, read.steps.T, ranges, strict=True):
            warn_of_new_range(pd.Series(values, name=name), low, high, path)
    return SequenceDataset(_to_steps(read, splits.mean, splits.std), torch.from_numpy(read.lengths)), read.ids


def _to_steps(read: FileSequences, mean: np.ndarray | None, std: np.ndarray | None) -> Tensor:
    if mean is None or std is None:
        return torch.from_numpy(read.steps.copy())  # numpy's arrays from bytes are read-only
    return torch.from_numpy(((read.steps - mean) / std).astype(np.float32))


def _encode_target(
    read: FileSequences, layout: SequenceLayout, path: Path
) -> tuple[Tensor | None, Tensor | None, list[str] | None]:
    match layout.target_kind:
        case "forecasting":
            return None, None, None
        case "regression":
            target = torch.from_numpy(read.target.astype(np.float32))
            return target.squeeze(1) if target.shape[1] == 1 else target, None, None
        case "classification":
            numbers, classes = read_classes(read.target, path, SET_REGRESSION)
            return torch.from_numpy(numbers), None, classes
        case "labelling":
            advice = "for quantities of each step there is no target_kind"
            labels, classes = read_known_classes(read.target, path, advice)
            return None, torch.from_numpy(labels.astype(np.int32)), classes
