"""Readers of sequences from files. Shapes: R sequences, N steps of all, F features, K values of a target."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from lightning_accel.data.bounds import MAX_BYTES, allowed_bytes, require_allowed
from lightning_accel.data.quoting import cut, listed, shown
from lightning_accel.data.tables import LARGEST, as_numbers, as_text, read_table, require_columns
from lightning_accel.data.text_lines import holds_booleans, lines_of, parse_object

TargetKind = Literal["classification", "regression", "labelling", "forecasting"]

_TOKEN_FIELDS = ("tokens", "input_ids")
_SEQUENCE_FIELDS = ("values", *_TOKEN_FIELDS, "text")
_TOKEN_BYTES = 256  # per token of the vocabulary, as in a narrow embedding


@dataclass(frozen=True)
class Layout:
    """Describe which columns of a table, or fields of a JSON line, hold what.

    Args:
        kind: kind of the target.
        target: column or field of the target.
        values: columns of the features, or the field of the sequence; by default all columns without another role, or
            the field ``values``, ``tokens``, ``input_ids`` or ``text``.
        id: column with the id of a row's sequence, or field with the id of a line.
        step: column that orders the rows of a sequence; None for the order of the file.
        ignore: columns to ignore.
        separator: separator of the fields of a CSV file.
        decimal: decimal mark of a CSV file.
        max_bytes: largest size of an unpacked compressed file, and of the vocabulary of its tokens at 256 bytes each.
    """

    kind: TargetKind = "classification"
    target: str = "target"
    values: Sequence[str] = ()
    id: str = "id"
    step: str | None = "step"
    ignore: Sequence[str] = ()
    separator: str = ","
    decimal: str = "."
    max_bytes: int = MAX_BYTES


@dataclass
class FileSequences:
    """Hold the sequences and targets of a file, before classes are encoded as numbers."""

    steps: np.ndarray  # (N, F) float64, or (N,) integers, the tokens
    lengths: np.ndarray  # (R,) int64
    ids: list[str]
    names: list[str]  # names of the F features, or of the field of the tokens
    target: Any = None  # Series (R,) of classes, or (N,) for labelling, None for a step without one; or (R, K) float64


def read_sequences(path: Path, layout: Layout, with_target: bool = True) -> FileSequences:
    """Read sequences from a file, by its suffix, which ``.gz`` may follow.

    ``.jsonl`` and ``.ndjson`` files have one object per line, ``.csv`` and ``.parquet`` files one row per step. Lines
    of ``.txt`` files are a label, a tab and a text, whose bytes are the steps.

    Raises:
        ValueError: if the suffix is another, the file is empty, or its content does not match the layout; the message
            names the line or the row.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"]
    with_target = with_target and layout.kind != "forecasting"
    match suffixes[-1:]:
        case [".jsonl" | ".ndjson"]:
            return _read_json_lines(path, layout, with_target)
        case [".csv" | ".parquet"]:
            return _read_long_table(path, layout, with_target)
        case [".txt"]:
            return _read_text_lines(path, layout, with_target)
    raise ValueError(
        "need a .jsonl file with an object a line, a .csv or .parquet file with a row a step, or a .txt file with a "
        f"text a line; got {path}"
    )


def _read_json_lines(path: Path, layout: Layout, with_target: bool) -> FileSequences:
    """Read lines such as ``{"id": "a7", "values": [[0.1, 2], [0.3, 1]], "target": "walk"}``."""
    sequences: list[np.ndarray] = []
    targets, ids, places = [], [], []
    field = ""
    most_tokens = allowed_bytes(path, layout.max_bytes) // _TOKEN_BYTES
    for where, line in lines_of(path, "a sequence", layout.max_bytes):
        entry = parse_object(line, where, '{"values": [1, 2], "target": 0}')
        field = field or _sequence_field(entry, layout, where)
        _require_field(entry, field, where)
        sequences.append(_read_sequence(entry[field], field, where))
        if field in _TOKEN_FIELDS and len(sequences[-1]) and (largest := int(sequences[-1].max())) >= most_tokens:
            what = f"a vocabulary up to the token {largest} in {where}, of {_TOKEN_BYTES} bytes each,"
            require_allowed((largest + 1) * _TOKEN_BYTES, path, layout.max_bytes, what)
        ids.append(str(entry.get(layout.id, where.split()[1])))
        places.append(where)
        if with_target:
            _require_field(entry, layout.target, where)
            targets.append(_validated_target(entry[layout.target], len(sequences[-1]), layout, where))
    if twice := pd.Series(ids)[pd.Series(ids).duplicated()].tolist():
        raise ValueError(f"{path} has two lines with {layout.id} {shown(twice[0])}; give each sequence its own")
    steps = _concatenate(sequences, places)
    names = [field] if steps.ndim == 1 else [f"{field}_{i}" for i in range(steps.shape[1])]
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    return FileSequences(steps, lengths, ids, names, _join_targets(targets, places, layout) if with_target else None)


def _sequence_field(entry: dict[str, Any], layout: Layout, where: str) -> str:
    if len(layout.values) > 1:
        raise ValueError(f"values must name one field of {where}, which holds the sequence; got {list(layout.values)}")
    for name in layout.values or _SEQUENCE_FIELDS:
        if name in entry or layout.values:
            return name
    raise ValueError(
        f"{where} has no field {', '.join(_SEQUENCE_FIELDS)}; name the field of the sequence in values. Its fields: "
        f"{listed(list(entry))}"
    )


def _require_field(entry: dict[str, Any], name: str, where: str) -> None:
    if name not in entry:
        near = difflib.get_close_matches(name, entry, n=1)
        hint = f"; did you mean {shown(near[0])}?" if near else "."
        raise ValueError(f"{where} has no field {name!r}{hint} Its fields: {listed(list(entry))}")


def _read_sequence(found: Any, field: str, where: str) -> np.ndarray:
    """Convert a field to tokens (T,), or values (T, F), (0, 0) for an empty sequence."""
    if isinstance(found, str) and field not in _TOKEN_FIELDS:
        return np.frombuffer(found.encode(), dtype=np.uint8)
    if not isinstance(found, list):
        raise ValueError(f"{field!r} in {where} must hold a list or a text; got {shown(found)}")
    if holds_booleans(found):
        raise ValueError(
            f"{field!r} in {where} must hold numbers; got booleans among them, which would count as 1 and 0"
        )
    try:
        steps = np.array(found)
    except (ValueError, OverflowError):  # numpy's message does not name the step
        raise ValueError(
            f"{field!r} in {where} must hold equally many numbers for each step; {_describe_mismatch(found)}"
        ) from None
    if field in _TOKEN_FIELDS:
        if steps.size and (steps.ndim != 1 or steps.dtype.kind not in "iu" or steps.min() < 0):
            raise ValueError(
                f"{field!r} in {where} must hold whole numbers from 0; got {shown(found)}. Number words by a "
                f"tokenizer, "
                "or give the text itself in a field text"
            )
        return steps.reshape(-1) if steps.size else np.zeros(0, np.int64)
    if steps.size and (steps.dtype.kind not in "biuf" or steps.ndim > 2):
        raise ValueError(
            f"{field!r} in {where} must hold numbers, or a list of numbers for each step; {_describe_mismatch(found)}"
        )
    if steps.size and not (np.abs(steps) <= LARGEST).all():  # NaN too
        step = int(np.argwhere(~(np.abs(steps) <= LARGEST))[0][0])
        raise ValueError(
            f"{field!r} in {where} must hold numbers of at most {LARGEST:g}; got {shown(found[step])} in step {step}, "
            "counted from 0. Fill what is missing, or leave the step out"
        )
    steps = steps.astype(np.float64)
    return steps.reshape(len(steps), -1 if steps.size else 0)


def _describe_mismatch(found: list[Any]) -> str:
    """Describe, for a message, the first step that is no number or is not as long as the first one."""

    def like(step: Any) -> object:
        return len(step) if isinstance(step, list) else None

    for number, step in enumerate(found):
        inner = step if isinstance(step, list) else [step]
        if wrong := [value for value in inner if not isinstance(value, int | float)]:
            return f"got {shown(wrong[0])} in step {number}, counted from 0"
        if like(step) != like(found[0]):
            return f"step {number}, counted from 0, is {shown(step)} and the first one {shown(found[0])}"
    return f"got {shown(found)}"


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


def _validated_target(found: Any, length: int, layout: Layout, where: str) -> Any:
    field = f"{layout.target!r} in {where}"
    if layout.kind == "labelling":
        if not isinstance(found, list) or len(found) != length:
            got = f"{len(found)} of them" if isinstance(found, list) else f"{shown(found)}"
            raise ValueError(f"{field} must be a list with a class for each of its {length} steps; got {got}")
        return found
    if layout.kind == "regression":
        numbers = np.array(found) if isinstance(found, int | float | list) else np.array(None)
        if numbers.dtype.kind not in "biuf" or numbers.ndim > 1 or not (np.abs(numbers) <= LARGEST).all():
            raise ValueError(f"{field} must be a number, or a list of numbers; got {shown(found)}")
        return numbers.reshape(-1)
    if not isinstance(found, str | int | float) or found != found:
        raise ValueError(
            f"{field} must be a class, a text or a number; got {shown(found)}. For a target that is a list, set "
            "target_kind to labelling or regression"
        )
    return found


def _join_targets(targets: Sequence[Any], places: Sequence[str], layout: Layout) -> Any:
    if layout.kind == "regression":
        for target, place in zip(targets, places, strict=True):
            if len(target) != len(targets[0]):
                raise ValueError(
                    f"all targets must be equally long; {place} has {len(target)}, {places[0]} {len(targets[0])}"
                )
        return np.stack(targets).astype(np.float64)
    if layout.kind == "labelling":
        targets = [label for labels in targets for label in labels]
    return pd.Series(targets, name=layout.target, dtype=object)


def _read_text_lines(path: Path, layout: Layout, with_target: bool) -> FileSequences:
    if layout.kind == "labelling":
        raise ValueError(
            f"{path} holds a text a line, which has no room for labels of steps; write a .jsonl file with the fields "
            "text and target"
        )
    texts, targets, ids = [], [], []
    for where, line in lines_of(path, "a sequence", layout.max_bytes):
        label, tab, text = line.partition("\t")
        if with_target and not tab:
            raise ValueError(f"{where} has no tab between a label and its text; got {shown(line)}")
        whole = layout.kind == "forecasting" or not tab
        texts.append((line if whole else text).encode())
        targets.append(label)
        ids.append(where.split()[1])
    read: Any = None
    if with_target:
        read = pd.Series(targets, name=layout.target, dtype=object).replace("", None)
        if layout.kind == "regression":
            read = _present_numbers(read, path, "Give each text a number").to_numpy()[:, None]
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    return FileSequences(np.frombuffer(b"".join(texts), dtype=np.uint8), lengths, ids, ["text"], read)


def _read_long_table(path: Path, layout: Layout, with_target: bool) -> FileSequences:
    """Read a table with one row per step, in any order; rows of a sequence share its target unless it labels steps."""
    targets = [layout.target] if with_target else []
    as_written = [layout.id, *([] if layout.kind == "regression" else targets)]
    table = read_table(path, layout.separator, layout.decimal, text_columns=as_written, max_bytes=layout.max_bytes)
    steps = [] if layout.step is None else [layout.step]
    require_columns(table, [layout.id, *steps, *targets, *layout.values, *layout.ignore], path)
    others = [layout.id, *steps, layout.target, *layout.ignore]
    names = list(layout.values) or [name for name in table.columns if name not in others]
    if not names:
        raise ValueError(f"{path} has no column left for values beside {listed(others)}")
    remedy = "Fill what is missing, leave the row out, or list a column that is no feature under ignore"
    values = np.stack([_present_numbers(table[name], path, remedy) for name in names], axis=1)
    sequence, ids = pd.factorize(
        as_text(_require_present(table[layout.id], path, "Name the sequence of each row"), path)
    )
    order = _row_order(table, sequence, layout, path)
    sequence = sequence[order]
    lengths = np.bincount(sequence).astype(np.int64)
    read = _table_target(table[layout.target], sequence, order, layout, path) if with_target else None
    return FileSequences(values[order], lengths, list(ids), names, read)


def _require_present(column: pd.Series, path: Path, remedy: str) -> pd.Series:
    if (missing := column.isna()).any():
        raise ValueError(
            f"column {shown(column.name)} of {path} lacks {missing.sum()} of {len(column)} values, the first in row "
            f"{int(missing.to_numpy().argmax()) + 1}. {remedy}"
        )
    return column


def _present_numbers(column: pd.Series, path: Path, remedy: str) -> pd.Series:
    return as_numbers(_require_present(column, path, remedy), path, remedy)


def _row_order(table: pd.DataFrame, sequence: np.ndarray, layout: Layout, path: Path) -> np.ndarray:
    if layout.step is None:
        return np.argsort(sequence, kind="stable")
    step = _sort_key(_require_present(table[layout.step], path, "Number the steps, or set step_column to null"), path)
    order = np.lexsort((step, sequence))
    same = (np.diff(sequence[order]) == 0) & (step[order][1:] == step[order][:-1])
    if same.any():
        first, second = sorted(order[same.argmax() :][:2].tolist())
        raise ValueError(
            f"{path} has two rows of {layout.id} {shown(table[layout.id][first])} with {layout.step} "
            f"{cut(table[layout.step][first])}: rows {first + 1} and {second + 1}. Each step of a sequence "
            f"may stand once"
        )
    return order


def _sort_key(column: pd.Series, path: Path) -> np.ndarray:
    if pd.api.types.is_numeric_dtype(column) or pd.api.types.is_datetime64_any_dtype(column):
        return column.to_numpy()
    dates = pd.to_datetime(column, errors="coerce", format="ISO8601", utc=True)
    if (wrong := dates.isna()).any():
        raise ValueError(
            f"column {shown(column.name)} of {path} must hold numbers, or dates such as 2026-01-31T12:00; got "
            f"{shown(str(column[wrong].iloc[0]))} in row {int(wrong.to_numpy().argmax()) + 1}"
        )
    return dates.to_numpy()


def _table_target(column: pd.Series, sequence: np.ndarray, order: np.ndarray, layout: Layout, path: Path) -> Any:
    if layout.kind == "labelling":
        return column.iloc[order].reset_index(drop=True)
    if layout.kind == "regression":
        column = _present_numbers(column, path, "Give every row the target of its sequence")
    else:
        column = _require_present(
            column, path, "Give every row the target of its sequence, or predict it with predict_path"
        )
    values = column.iloc[order].reset_index(drop=True)
    changed = (np.diff(sequence) == 0) & (values.to_numpy()[1:] != values.to_numpy()[:-1])
    if changed.any():
        first = int(changed.argmax())
        raise ValueError(
            f"the target column {layout.target!r} of {path} must be the same in all rows of a sequence; rows "
            f"{order[first] + 1} and {order[first + 1] + 1}, of one {layout.id}, hold {cut(values[first])} and "
            f"{cut(values[first + 1])}. For a target of each step, set target_kind to labelling"
        )
    values = values[np.flatnonzero(np.diff(sequence, prepend=-1))].reset_index(drop=True)
    return values.to_numpy()[:, None] if layout.kind == "regression" else values
