"""Readers of sequences from files. Shapes: R sequences, N steps of all, F features, K values of a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lightning_accel.data.bounds import allowed_bytes, require_allowed
from lightning_accel.data.quoting import cut, lacking_column, listed, shown
from lightning_accel.data.shards.options import ShardOptions
from lightning_accel.data.tables.files import read_table, require_columns
from lightning_accel.data.tables.values import LARGEST, as_numbers, as_text, require_present
from lightning_accel.data.text.lines import lines_of, numbers_of, parse_object, require_distinct_ids, require_field
from lightning_accel.ops.extras import import_on_use

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = import_on_use("pandas")

TargetKind = Literal["classification", "regression", "labelling", "forecasting"]

TOKEN_FIELDS = ("tokens", "input_ids")
SEQUENCE_FIELDS = ("values", *TOKEN_FIELDS, "text")
_TOKEN_BYTES = 256  # per token of the vocabulary, as in a narrow embedding


@dataclass(frozen=True)
class SequenceLayout:
    """Describe which columns of a table, or fields of a JSON line, hold what.

    Args:
        target_kind: a class (``classification``) or one or K numbers (``regression``) for each sequence, a class for
            each step (``labelling``; steps without one do not count), or none (``forecasting``).
        target: column or field of the target.
        values: columns of the features, or the field of the sequence; by default all columns without another role, or
            the field ``values``, ``tokens``, ``input_ids`` or ``text``.
        id_column: column with the id of a row's sequence, or field with the id of a line.
        step_column: column of numbers or dates that orders the rows of a sequence; None for the order of the file.
        shards: how a folder of files is read.

    Example:
        >>> from lightning_accel import SequenceDataModule
        >>> data = SequenceDataModule("gestures.jsonl", layout=SequenceLayout(target="label"))  # doctest: +SKIP
    """

    target_kind: TargetKind = "classification"
    target: str = "target"
    values: str | Sequence[str] = ()
    id_column: str = "id"
    step_column: str | None = "step"
    shards: ShardOptions = ShardOptions()


@dataclass
class FileSequences:
    """Hold the sequences and targets of a file, before classes are encoded as numbers."""

    steps: np.ndarray  # (N, F) float64, or (N,) integers, the tokens
    lengths: np.ndarray  # (R,) int64
    ids: list[str]
    names: list[str]  # names of the F features, or of the field of the tokens
    target: Any = None  # Series (R,) of classes, or (N,) for labelling, None for a step without one; or (R, K) float64


def read_sequences(path: Path, layout: SequenceLayout, with_target: bool = True) -> FileSequences:
    """Read sequences from a file, by its suffix, which ``.gz`` may follow.

    ``.jsonl`` and ``.ndjson`` files have one object per line, ``.csv`` and ``.parquet`` files one row per step.

    Raises:
        ValueError: if the suffix is another, the file is empty, or its content does not match the layout; the message
            names the line or the row.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"]
    with_target = with_target and layout.target_kind != "forecasting"
    match suffixes[-1:]:
        case [".jsonl" | ".ndjson"]:
            return _read_json_lines(path, layout, with_target)
        case [".csv" | ".parquet"]:
            return _read_long_table(path, layout, with_target)
    raise ValueError(
        f"need a .jsonl file with an object a line, or a .csv or .parquet file with a row a step; got {path}"
    )


def _read_json_lines(path: Path, layout: SequenceLayout, with_target: bool) -> FileSequences:
    """Read lines such as ``{"id": "a7", "values": [[0.1, 2], [0.3, 1]], "target": "walk"}``."""
    sequences: list[np.ndarray] = []
    targets, ids, places = [], [], []
    field = ""
    most_tokens = allowed_bytes(path) // _TOKEN_BYTES
    for where, line in lines_of(path, "a sequence"):
        entry = parse_object(line, where, '{"values": [1, 2], "target": 0}')
        field = field or _sequence_field(entry, layout, where)
        require_field(entry, field, where)
        sequences.append(_read_sequence(entry[field], field, where))
        if field in TOKEN_FIELDS and len(sequences[-1]) and (largest := int(sequences[-1].max())) >= most_tokens:
            what = f"a vocabulary up to the token {largest} in {where}, of {_TOKEN_BYTES} bytes each,"
            require_allowed((largest + 1) * _TOKEN_BYTES, path, what, "number the tokens from 0 without gaps")
        ids.append(str(entry.get(layout.id_column, where.split()[1])))
        places.append(where)
        if with_target:
            require_field(entry, layout.target, where, is_target=True)
            targets.append(_validated_target(entry[layout.target], len(sequences[-1]), layout, where))
    require_distinct_ids(ids, [place.split()[1] for place in places], path)
    steps = _concatenate(sequences, places)
    names = [field] if steps.ndim == 1 else [f"{field}_{i}" for i in range(steps.shape[1])]
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    return FileSequences(steps, lengths, ids, names, _join_targets(targets, places, layout) if with_target else None)


def _sequence_field(entry: dict[str, Any], layout: SequenceLayout, where: str) -> str:
    if len(layout.values) > 1:
        raise ValueError(
            f"layout.values must name one field of {where}, which holds the sequence; got {list(layout.values)}"
        )
    for name in layout.values or SEQUENCE_FIELDS:
        if name in entry or layout.values:
            return name
    raise ValueError(
        f"{where} has no field {', '.join(SEQUENCE_FIELDS)}; name the field of the sequence in layout.values. "
        f"Its fields: {listed(list(entry))}"
    )


def _read_sequence(found: Any, field: str, where: str) -> np.ndarray:
    """Convert a field to tokens (T,), or values (T, F), (0, 0) for an empty sequence."""
    if isinstance(found, str) and field not in TOKEN_FIELDS:
        return np.frombuffer(found.encode(), dtype=np.uint8)
    steps = numbers_of(found, field, where, whole=field in TOKEN_FIELDS)
    if field not in TOKEN_FIELDS:
        return steps.astype(np.float64).reshape(len(steps), -1 if steps.size else 0)
    if steps.ndim != 1 or (steps.size and steps.min() < 0):
        raise ValueError(f"{field!r} in {where} must hold whole numbers from 0; got {shown(found)}")
    return steps


def _concatenate(sequences: Sequence[np.ndarray], places: Sequence[str]) -> np.ndarray:
    filled = [i for i, sequence in enumerate(sequences) if len(sequence)]
    if not filled:
        raise ValueError(f"every sequence is empty up to {places[-1]}; steps were needed")
    shapes = [sequences[i].shape[1:] for i in filled]
    for i, shape in zip(filled, shapes, strict=True):
        if shape != shapes[0]:
            first, this = (shape[0] if shape else "text" for shape in (shapes[0], shape))
            raise ValueError(
                f"all steps must have equally many values; {places[i]} has {this} a step, {places[filled[0]]} {first}"
            )
        if shape == (0,):
            raise ValueError(f"{places[i]} has steps without values")
    steps = np.concatenate([sequences[i] for i in filled])
    return steps.astype(np.int64, copy=False) if steps.dtype.kind in "iu" and steps.dtype != np.uint8 else steps


def _validated_target(found: Any, length: int, layout: SequenceLayout, where: str) -> Any:
    field = f"{layout.target!r} in {where}"
    if layout.target_kind == "labelling":
        if not isinstance(found, list) or len(found) != length:
            got = f"{len(found)} of them" if isinstance(found, list) else f"{shown(found)}"
            raise ValueError(f"{field} must be a list with a class for each of its {length} steps; got {got}")
        return found
    if layout.target_kind == "regression":
        numbers = np.array(found) if isinstance(found, int | float | list) else np.array(None)
        if numbers.dtype.kind not in "biuf" or numbers.ndim > 1 or not (np.abs(numbers) <= LARGEST).all():
            raise ValueError(f"{field} must be a number, or a list of numbers; got {shown(found)}")
        return numbers.reshape(-1)
    if not isinstance(found, str | int | float) or found != found:
        raise ValueError(
            f"{field} must be a class, a text or a number; got {shown(found)}. For a target that is a list, set "
            "layout.target_kind to labelling or regression"
        )
    return found


def _join_targets(targets: Sequence[Any], places: Sequence[str], layout: SequenceLayout) -> Any:
    if layout.target_kind == "regression":
        for target, place in zip(targets, places, strict=True):
            if len(target) != len(targets[0]):
                raise ValueError(
                    f"all targets must be equally long; {place} has {len(target)}, {places[0]} {len(targets[0])}"
                )
        return np.stack(targets).astype(np.float64)
    if layout.target_kind == "labelling":
        targets = [label for labels in targets for label in labels]
    return pd.Series(targets, name=layout.target, dtype=object)


def _read_long_table(path: Path, layout: SequenceLayout, with_target: bool) -> FileSequences:
    """Read a table with one row per step, in any order; rows of a sequence share its target unless it labels steps."""
    targets = [layout.target] if with_target else []
    as_written = [layout.id_column, *([] if layout.target_kind == "regression" else targets)]
    table = read_table(path, text_columns=as_written)
    steps = [] if layout.step_column is None else [layout.step_column]
    for option, name in (("id_column", layout.id_column), *(("step_column", name) for name in steps)):
        if name not in table:
            found = lacking_column(name, [*table])
            null = ", or set it to null for the order of the file" if option == "step_column" else ""
            raise ValueError(f"{path} {found}. Name the column in layout.{option}{null}")
    require_columns(table, [*targets, *layout.values], path, targets)
    others = [layout.id_column, *steps, layout.target]
    names = list(layout.values) or [name for name in table.columns if name not in others]
    if not names:
        raise ValueError(f"{path} has no column left for values beside {listed(others)}")
    remedy = "Fill what is missing, leave the row out, or name the columns of the features in layout.values"
    values = np.stack([_present_numbers(table[name], path, remedy) for name in names], axis=1)
    sequence, ids = pd.factorize(
        as_text(require_present(table[layout.id_column], path, "Name the sequence of each row"), path)
    )
    order = _row_order(table, sequence, layout, path)
    sequence = sequence[order]
    lengths = np.bincount(sequence).astype(np.int64)
    read = _table_target(table[layout.target], sequence, order, layout, path) if with_target else None
    return FileSequences(values[order], lengths, list(ids), names, read)


def _present_numbers(column: pd.Series, path: Path, remedy: str) -> pd.Series:
    return as_numbers(require_present(column, path, remedy), path, remedy)


def _row_order(table: pd.DataFrame, sequence: np.ndarray, layout: SequenceLayout, path: Path) -> np.ndarray:
    if layout.step_column is None:
        return np.argsort(sequence, kind="stable")
    step = _sort_key(
        require_present(table[layout.step_column], path, "Number the steps, or set layout.step_column to null"), path
    )
    order = np.lexsort((step, sequence))
    same = (np.diff(sequence[order]) == 0) & (step[order][1:] == step[order][:-1])
    if same.any():
        first, second = sorted(order[same.argmax() :][:2].tolist())
        raise ValueError(
            f"{path} has two rows of {layout.id_column} {shown(table[layout.id_column][first])} with "
            f"{layout.step_column} {cut(table[layout.step_column][first])}: rows {first} and {second} (from 0). "
            f"Each step of a sequence may stand once"
        )
    return order


def _sort_key(column: pd.Series, path: Path) -> np.ndarray:
    if pd.api.types.is_numeric_dtype(column) or pd.api.types.is_datetime64_any_dtype(column):
        return column.to_numpy()
    dates = pd.to_datetime(column, errors="coerce", format="ISO8601", utc=True)
    if (wrong := dates.isna()).any():
        raise ValueError(
            f"column {shown(column.name)} of {path} must hold numbers, or dates such as 2026-01-31T12:00; got "
            f"{shown(str(column[wrong].iloc[0]))} in row {int(wrong.to_numpy().argmax())} (from 0)"
        )
    return dates.to_numpy()


def _table_target(
    column: pd.Series, sequence: np.ndarray, order: np.ndarray, layout: SequenceLayout, path: Path
) -> Any:
    if layout.target_kind == "labelling":
        return column.iloc[order].reset_index(drop=True)
    if layout.target_kind == "regression":
        column = _present_numbers(column, path, "Give every row the target of its sequence")
    else:
        column = require_present(
            column, path, "Give every row the target of its sequence, or predict it with predict_path"
        )
    values = column.iloc[order].reset_index(drop=True)
    changed = (np.diff(sequence) == 0) & (values.to_numpy()[1:] != values.to_numpy()[:-1])
    if changed.any():
        first = int(changed.argmax())
        raise ValueError(
            f"the target column {layout.target!r} of {path} must be the same in all rows of a sequence; rows "
            f"{order[first]} and {order[first + 1]} (from 0), of one {layout.id_column}, hold {cut(values[first])} and "
            f"{cut(values[first + 1])}. For a target of each step, set layout.target_kind to labelling"
        )
    values = values[np.flatnonzero(np.diff(sequence, prepend=-1))].reset_index(drop=True)
    return values.to_numpy()[:, None] if layout.target_kind == "regression" else values
