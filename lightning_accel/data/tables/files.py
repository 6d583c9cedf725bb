"""Readers of CSV and Parquet files that raise an error where a value would be misread."""

from __future__ import annotations

import difflib
import json
import re
import shlex
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from lightning_accel.data.bounds import allowed_bytes, require_allowed, require_unpackable
from lightning_accel.data.quoting import cut, lacking_column, listed, shown
from lightning_accel.data.shards.files import is_sharded
from lightning_accel.data.tables.column_checks import (
    MOST_TEXTS,
    are_dates,
    may_be_versions,
    may_have_leading_zeros,
    may_have_thousands,
    warn_of_leading_zeros,
    warn_of_thousands,
    warn_of_versions,
)
from lightning_accel.ops.extras import import_on_use

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = import_on_use("pandas")

pc = import_on_use("pyarrow.compute")
pq = import_on_use("pyarrow.parquet")
model_selection = import_on_use("sklearn.model_selection")

LARGEST = 1e30  # the standardization squares it
_PARQUET_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}  # bytes
_UNPACKED_PARQUET = "write it without compression and dictionaries"
TargetKind: TypeAlias = Literal["classification", "regression"]
A_QUANTITY = (  # ends the message of too many classes
    "TabularDataModule takes numbers for classes by default. To predict a quantity, set target_kind='regression' and "
    "take MoERegressor: --data.target_kind regression --model MoERegressor. For classes, name another column as "
    "target, or divide the quantity into classes, as pandas.cut does"
)
SET_REGRESSION = (
    "for a target that is a quantity, set layout.target_kind to regression, on the command line "
    "--data.layout.target_kind regression"
)
_MOST_NUMBERS = 20  # different numbers that may be classes whatever they are
_OTHER_SEPARATORS = ";\t|"
# a number as people write it, and no version or address such as 10.0.1.1
_FIGURE = r"(?!.*\.(\d{1,2}|\d{4,})\.)[$€£]? ?[-+]?[\d.,' ]*\d[\d.,' ]*[%$€£]?"
_WITH_COMMA = r"[-+]?\d+(,\d+)+"
_REMOVE_SIGNS = "Remove currency signs and marks of thousands"
_SET_DECIMAL = "set csv.decimal, as by --data.csv.decimal ',', if the comma is the decimal mark"
WITHOUT_DATES = "write year, month and day as columns of numbers"
NO_DATES = f"list it under exclude, or {WITHOUT_DATES}"


def read_table(
    path: Path,
    separator: str = ",",
    decimal: str = ".",
    missing: Sequence[str] = (),
    text_columns: Sequence[str] = (),
) -> pd.DataFrame:
    """Read a CSV file, gzipped or not, or a Parquet file; ``text_columns`` of a CSV file are not converted to numbers.

    Where the header has no comma, the fields may also be separated by semicolons, tabs or ``|``.

    Raises:
        ValueError: if it is neither, cannot be read, has no rows, has two columns of one name, or is too large
            unpacked, see :mod:`lightning_accel.data.bounds`.
    """
    name = path.name.lower()
    if not name.endswith((".csv", ".csv.gz", ".parquet")):
        raise ValueError(f"need a .csv, .csv.gz or .parquet file; got {path}")
    try:
        if name.endswith(".parquet"):
            _require_bounded(path)
            table = pd.read_parquet(path)
            table = table.mask(table.isin([*missing, *_numbers_among(missing)])) if missing else table
        else:
            if name.endswith(".gz"):
                require_unpackable(path)
            separator, header = _read_header(path, separator)
            _require_distinct_names(header, path)
            with warnings.catch_warnings():
                # If rows are longer than the header, pandas would use their first fields as index, or drop the last
                warnings.simplefilter("error", pd.errors.ParserWarning)
                table = pd.read_csv(
                    path,
                    sep=separator,
                    decimal=decimal,
                    na_values=list(missing),
                    dtype=dict.fromkeys(text_columns, str),  # else "01" beside "A1" is text, and alone the number 1
                    index_col=False,
                    low_memory=False,  # True infers a type per chunk, so that it depends on where a text stands
                )
            if decimal == ",":
                others = table.drop(columns=[*text_columns], errors="ignore")
                names = [*others.select_dtypes(exclude=["integer", "bool"])]
                texts = pd.read_csv(
                    path, sep=separator, usecols=names, dtype=str, na_values=list(missing), index_col=False
                )
                _require_no_points(texts, path)
            if doubtful := [column for column in table if may_have_thousands(table[column])]:
                texts = pd.read_csv(path, sep=separator, usecols=doubtful, dtype=str, index_col=False)
                for column in doubtful:
                    warn_of_thousands(table[column], texts[column], path, decimal)
            for may_be, warn in ((may_be_versions, warn_of_versions), (may_have_leading_zeros, warn_of_leading_zeros)):
                if doubtful := [column for column in table if may_be(table[column])]:
                    texts = pd.read_csv(
                        path, sep=separator, usecols=doubtful, dtype=str, index_col=False, nrows=MOST_TEXTS
                    )
                    for column in doubtful:
                        warn(texts[column], path)
    except pd.errors.EmptyDataError:
        raise ValueError(f"{path} is empty; a header and rows were needed") from None
    except (
        ValueError,
        pd.errors.ParserWarning,
        OSError,
        EOFError,
    ) as error:  # raised by pandas and pyarrow, mostly ValueErrors
        if str(path) in str(error):
            raise
        remedy = ". Save it as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        if isinstance(error, pd.errors.ParserError) and "fields" in str(error):
            remedy = ". A value that holds the separator has to stand in quotation marks"
        raise ValueError(f"{path} cannot be read as {path.suffix[1:]}: {cut(error, 200)}{remedy}") from error
    if table.empty:
        raise ValueError(f"{path} has a header but no rows")
    return table.rename(columns=str)


def _require_no_points(texts: pd.DataFrame, path: Path) -> None:
    """Raise a ValueError if numbers have a point, which pandas reads as a decimal mark beside the comma."""
    for name in texts:
        present = texts[name].dropna().str.strip()
        is_pointed = present.str.fullmatch(r"[-+]?(\d+\.\d+|\d{1,3}(\.\d{3})+(,\d+)?)")  # no date
        others = pd.to_numeric(present[~is_pointed].str.replace(",", "."), errors="coerce")
        if is_pointed.any() and others.notna().all():
            raise ValueError(
                f"column {shown(str(name))} of {path} holds {shown(present[is_pointed].iloc[0])}, with a point, where "
                "csv.decimal is ',': remove marks of thousands from the file, or write its decimals with a comma"
            )


def _read_header(path: Path, separator: str) -> tuple[str, pd.DataFrame]:
    """Return the separator, another one where a comma leaves one column alone, and the header."""
    for tried in separator + (_OTHER_SEPARATORS if separator == "," else ""):
        header = pd.read_csv(path, sep=tried, header=None, nrows=1, dtype=str)
        if header.shape[1] > 1:
            return tried, header
    return separator, pd.read_csv(path, sep=separator, header=None, nrows=1, dtype=str)


def _numbers_among(texts: Sequence[str]) -> list[float]:
    return pd.to_numeric(pd.Series(texts, dtype=object), errors="coerce").dropna().tolist()


def _require_distinct_names(header: pd.DataFrame, path: Path) -> None:
    names = header.iloc[0]
    if names.duplicated(keep=False).any() and (twice := names[names.duplicated()].dropna()).any():
        raise ValueError(f"{path} has two columns named {shown(twice.iloc[0])}; rename or remove one")


def existing_file(path: str | Path) -> Path:
    """Return the path of a regular file.

    Raises:
        FileNotFoundError: if there is none; the message names a file of a similar name.
        ValueError: if it is something else, such as a folder.
    """
    path = regular_file(path)
    if path.is_file():
        return path
    beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = "".join(
        f"; did you mean {path.parent / name}?" for name in difflib.get_close_matches(path.name, beside, n=1)
    )
    raise FileNotFoundError(f"no file {path}{hint}")


def regular_file(path: str | Path) -> Path:
    """Return ``path``, which may not exist but may be nothing but a file; opening a pipe would block forever.

    Raises:
        ValueError: if it is a folder, a pipe or a device.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe" if path.is_fifo() else "a device or socket"
        raise ValueError(f"{path} is {kind}; the path of a file was needed")
    return path


def require_columns(
    table: pd.DataFrame, needed: Sequence[str], path: Path, targets: Sequence[str] = (), option: str = ""
) -> None:
    """Raise a ValueError if a column is lacking that an option names.

    The message names ``predict_path`` if the column is one of the ``targets``.
    """
    columns = list(table.columns)
    for name in needed:
        if name in columns:
            continue
        found = lacking_column(name, columns, is_target=name in targets, option=option)
        if len(columns) == 1 and path.suffix.lower() != ".parquet":
            found += (
                ". There is one column only: separate the fields by commas, semicolons, tabs or |; TabularDataModule "
                "takes any other as csv.separator"
            )
        raise ValueError(f"{path} {found}")


def require_present(column: pd.Series, path: Path, remedy: str) -> pd.Series:
    """Return ``column``; raise a ValueError that ends in ``remedy`` if it lacks a value."""
    if (missing := column.isna()).any():
        raise ValueError(
            f"column {shown(column.name)} of {path} lacks {missing.sum()} of {len(column)} values, the first in "
            f"{_first_row(missing)}. {remedy}"
        )
    return column


def read_classes(
    column: pd.Series, path: Path, quantity: str = A_QUANTITY, num_unknown: int = 0
) -> tuple[np.ndarray, list[str]]:
    """Return the class of each row, (rows,) int64, and the sorted class names.

    ``quantity`` ends a message about numbers that are no classes, and ``num_unknown`` counts rows without a class.
    """
    require_present(column, path, "Remove those rows, or predict them with predict_path")
    where = f"the target column {shown(column.name)} of {path}"
    text = as_text(column, path)
    _require_one_kind(column, text, where)
    classes = sorted(text.unique(), key=numbers_first)
    labels = pd.Categorical(text, categories=classes).codes
    if len(classes) < 2:
        raise ValueError(f"{where} holds one class only, {shown(classes[0])}; two or more are needed")
    counts = np.bincount(labels)
    require_no_quantity(classes, bool(counts.min() < 3), where, quantity)
    warn_of_similar_classes(classes, where)
    if counts.min() < 3:
        rarest = classes[int(counts.argmin())]
        uncounted = f"; {num_unknown} rows without a class do not count" if num_unknown else ""
        otherwise = f"; {quantity}" if _numbers_of(classes).notna().all() else ""
        raise ValueError(
            f"{where} holds {len(classes)} classes, of which {shown(rarest)} has {counts.min()} of the rows; each "
            f"needs 3, one for each split. Merge rare classes, or leave their rows out{uncounted}{otherwise}"
        )
    return labels.astype(np.int64), classes


def warn_of_similar_classes(classes: Sequence[str], where: str) -> None:
    """Warn of classes that differ in upper and lower case or in spaces at their ends alone."""
    alike = Counter(name.strip().casefold() for name in classes)
    if similar := [shown(name) for name in classes if alike[name.strip().casefold()] > 1]:
        rank_zero_warn(
            f"{where} holds classes that differ in upper and lower case or in spaces at their ends alone, and count as "
            f"different: {listed(similar, 10)}. Write them in one way"
        )


def read_quantity(column: pd.Series, path: Path) -> np.ndarray:
    """Return the target of each row, a number, (rows,) float64.

    Raises:
        ValueError: if one is missing, or no number, or all are equal.
    """
    require_present(column, path, "Remove those rows, or predict them with predict_path")
    has_digits = column.astype(str).str.contains(r"\d").any()
    remedy = "Name a column of numbers as target, or leave target_kind='regression' out, which is for quantities"
    numbers = as_numbers(column, path, None if has_digits else remedy).to_numpy()
    if (numbers == numbers[0]).all():
        raise ValueError(
            f"the target column {shown(column.name)} of {path} holds one number only, {numbers[0]:g}; two or more are "
            "needed"
        )
    return numbers


def require_no_quantity(classes: Sequence[str], are_rare: bool, where: str, quantity: str) -> None:
    """Raise a ValueError, which ends in ``quantity``, if the classes are numbers that look like quantities.

    Numbers with fractions do if there are more than 20 of them or they ``are_rare``, whole numbers if both is true.
    """
    numbers = _numbers_of(classes)
    signs = len(classes) > _MOST_NUMBERS, are_rare, bool((numbers % 1 != 0).any())
    if numbers.notna().all() and sum(signs) > 1:
        raise ValueError(f"{where} holds {len(classes):,} different numbers, {listed(classes, 3)}; {quantity}")


def _numbers_of(classes: Sequence[str]) -> pd.Series:
    return pd.to_numeric(pd.Series(list(classes), dtype=object), errors="coerce")


def read_known_classes(column: pd.Series, path: Path, quantity: str) -> tuple[np.ndarray, list[str]]:
    """Return the class of each row, -100 where it is missing, and the class names, as :func:`read_classes` does."""
    known = column.notna().to_numpy()
    if not known.any():
        raise ValueError(f"the target {column.name!r} of {path} holds no label")
    numbers, classes = read_classes(column[known], path, quantity, int((~known).sum()))
    labels = np.full(len(column), -100, dtype=np.int64)  # ignored by torch.nn.functional.cross_entropy
    labels[known] = numbers
    return labels, classes


def _require_one_kind(column: pd.Series, text: pd.Series, where: str) -> None:
    """Raise a ValueError if a number and a text look alike, as 1 and "1" do in JSON."""
    if column.dtype != object:
        return
    as_text = {name for name, value in zip(text, column, strict=True) if isinstance(value, str)}
    as_other = {name for name, value in zip(text, column, strict=True) if not isinstance(value, str)}
    if both := sorted(as_text & as_other):
        raise ValueError(f"{where} holds {cut(both[0])} as a number and as a text; write it in one way")


def numbers_first(name: str) -> tuple[float, str]:
    """Return a sort key that puts 2 before 10, and numbers before words."""
    try:
        return float(name), name
    except ValueError:
        return np.inf, name


def holds_numbers(column: pd.Series, path: str | Path, has_options: bool = True) -> bool:
    """Return whether every value of a column is a number; False if none is.

    Args:
        column: the column.
        path: the file that it is from.
        has_options: whether messages may name ``exclude``, ``categorical`` and options of CSV files.

    Raises:
        ValueError: if only some are numbers, naming the first that is not; if the column holds dates, lists, bytes,
            numbers that are not parsed as they are written, or texts that hardly repeat.
    """
    where = f"column {shown(column.name)} of {path}"
    leave_out = "list it under exclude" if has_options else "remove it"
    no_dates = f"{leave_out}, or {WITHOUT_DATES}"
    if pd.api.types.is_numeric_dtype(column) or pd.api.types.is_bool_dtype(column):
        return True
    if pd.api.types.is_datetime64_any_dtype(column) or pd.api.types.is_timedelta64_dtype(column):
        raise ValueError(f"{where} holds dates; {no_dates}")
    present = column.dropna()
    if present.map(lambda value: isinstance(value, list | dict | np.ndarray | bytes)).any():
        raise ValueError(f"{where} holds lists or bytes; spread them over columns, or {leave_out}")
    is_text = pd.to_numeric(present.astype(object), errors="coerce").isna()
    if is_text.any() and not is_text.all():
        wrong = is_text.reindex(column.index, fill_value=False)
        first = str(column[wrong].iloc[0])
        written = "write null" if is_sharded(path) else "list it under csv.missing"
        mend = f"Mend the value, {written}" if has_options else "Mend the value"
        remedy = _REMOVE_SIGNS if _is_figure(first) else mend
        otherwise = ", or list the column under categorical" if has_options else ""
        raise ValueError(
            f"{where} holds {shown(first)} in {_first_row(wrong)}{_and_others(wrong)} among numbers. "
            f"{remedy}{otherwise}"
        )
    texts = present.astype(str)
    are_figures = is_text.any() and texts.str.fullmatch(_FIGURE).all()
    are_many = is_text.any() and len(present) > 20 and present.nunique() > len(present) / 2
    if (are_figures or are_many) and are_dates(texts):
        raise ValueError(f"{where} holds dates, such as {shown(texts.iloc[0])}; {no_dates}")
    each = ", or under categorical to make each text a feature" if has_options else ""
    if are_figures:
        has_comma = has_options and _is_csv(path) and texts.str.fullmatch(_WITH_COMMA).any()
        decimal = f"{_SET_DECIMAL}, " if has_comma else ""
        raise ValueError(
            f"{where} holds {shown(str(present.iloc[0]))} and the like, which are no numbers as they are written. If "
            f"they are amounts, {decimal}rewrite them without currency signs and marks of thousands; otherwise "
            f"{leave_out}{each}"
        )
    if are_many:
        raise ValueError(
            f"{where} holds {present.nunique()} different texts in {len(present)} rows; {leave_out} if it is a "
            f"key{each}"
        )
    return not is_text.any()


def which_hold_numbers(table: pd.DataFrame, path: str | Path, exclude: Sequence[str]) -> dict[str, bool]:
    """Return which columns of a table hold numbers.

    Raises:
        ValueError: as :func:`holds_numbers` does, of all columns of which it does, with the option that leaves them out
            beside those of ``exclude``.
    """
    found, wrong = dict[str, bool](), dict[str, ValueError]()
    for name in map(str, table):
        try:
            found[name] = holds_numbers(table[name], path)
        except ValueError as error:
            wrong[name] = error
    if len(wrong) > 1:
        names = [*exclude, *wrong]
        listing = shlex.quote(json.dumps([cut(name) for name in names[:20]], ensure_ascii=False))
        messages = "\n".join(map(str, [*wrong.values()][:5]))
        raise ValueError(f"{messages}\nTo leave out all {len(names)}: --data.exclude {listing}")
    if wrong:
        raise next(iter(wrong.values()))
    return found


def as_numbers(column: pd.Series, path: str | Path, remedy: str | None = None) -> pd.Series:
    is_plain = isinstance(column.dtype, np.dtype) and column.dtype.kind in "biuf"
    numbers = column if is_plain else pd.to_numeric(column.astype(object), errors="coerce")
    numbers = numbers.astype(np.float64)
    wrong = (numbers.isna() & column.notna()) | (numbers.abs() > LARGEST)
    if wrong.any():
        first = str(column[wrong].iloc[0])
        most = f" of at most {LARGEST:g}" if numbers[wrong].notna().any() else ""
        if remedy is None and _is_csv(path) and re.fullmatch(_WITH_COMMA, first):
            remedy = _SET_DECIMAL[0].upper() + _SET_DECIMAL[1:]
            if column[wrong].astype(str).str.fullmatch(r"[-+]?\d{1,3}(,\d{3})+").all():
                remedy = f"{_REMOVE_SIGNS} if {first.replace(',', '')} is meant; {_SET_DECIMAL}"
        remedy = remedy or (_REMOVE_SIGNS if _is_figure(first) else "Mend the value, or list it under csv.missing")
        raise ValueError(
            f"column {shown(column.name)} of {path} must hold numbers{most}; got {shown(first)} in "
            f"{_first_row(wrong)}{_and_others(wrong)}. {remedy}"
        )
    return numbers


def _is_csv(path: str | Path) -> bool:
    return str(path).lower().endswith((".csv", ".csv.gz"))


def _is_figure(text: str) -> bool:
    """Return whether a text is a number as people write it, which is none as files have it."""
    return bool(re.fullmatch(_FIGURE, text)) and pd.isna(pd.to_numeric(text, errors="coerce"))


def _and_others(wrong: pd.Series) -> str:
    """Return how many values are wrong beside the first."""
    return f" and {wrong.sum() - 1} more of {len(wrong)} values" if wrong.sum() > 1 else ""


def as_text(column: pd.Series, path: str | Path) -> pd.Series:
    """Convert the values to texts, missing ones to ``<missing>``.

    Raises:
        ValueError: if they are bytes.
    """
    if column.dtype == object and column.map(lambda value: isinstance(value, bytes)).any():
        raise ValueError(
            f"column {shown(column.name)} of {path} holds bytes; text or numbers were needed. Decode them, or leave "
            "the column out if it is no feature"
        )
    # convert_dtypes first: whole numbers with missing values are float, and would become "1.0" in place of "1"
    return column.convert_dtypes().astype("string").fillna("<missing>").astype(object)


def split_rows(
    rows: np.ndarray, classes: np.ndarray | None, share: float, seed: int, path: Path, kind: str = "rows"
) -> tuple[np.ndarray, np.ndarray]:
    """Split ``rows`` in two, the second with ``share`` of them, stratified by the ``classes`` of all rows.

    Errors call them ``kind``.
    """
    try:
        kept, held_out = model_selection.train_test_split(
            rows, test_size=share, random_state=seed, stratify=None if classes is None else classes[rows]
        )
    except ValueError as error:
        raise ValueError(f"{path} has too few {kind} to split as asked: {error}") from error
    return kept, held_out


def split_groups(
    groups: np.ndarray, shares: tuple[float, float], seed: int, path: Path
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split rows into training, validation and test, so that rows of equal ``groups`` are in one of them.

    ``shares`` are those of the latter two among all groups.
    """
    rest, held_out = np.arange(len(groups)), []
    for share in (shares[1], shares[0] / (1 - shares[1])):
        splitter = model_selection.GroupShuffleSplit(1, test_size=share, random_state=seed)
        try:
            [(kept, taken)] = splitter.split(rest, groups=groups[rest])
        except ValueError as error:
            raise ValueError(f"{path} has too few groups to split as asked: {error}") from error
        held_out.append(rest[taken])
        rest = rest[kept]
    test, val = held_out
    return rest, val, test


def split_in_three(
    classes: np.ndarray | None, num_rows: int, shares: tuple[float, float], seed: int, path: Path, kind: str = "rows"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split rows into training, validation and test; ``shares`` are those of the latter two among all rows.

    Errors call them ``kind``.
    """
    val_share, test_share = shares
    rest, test = split_rows(np.arange(num_rows), classes, test_share, seed, path, kind)
    train, val = split_rows(rest, classes, val_share / (1 - test_share), seed, path, kind)
    return train, val, test


def _first_row(mask: pd.Series) -> str:
    """Name the first row where ``mask`` is True: by its line, if the index has lines, or as in files of predictions."""
    first = int(mask.to_numpy().argmax())
    return f"line {mask.index[first]}" if mask.index.name == "line" else f"row {first} (from 0)"


def _require_bounded(path: Path) -> None:
    """Raise a ValueError if the rows of a Parquet file need more memory than :func:`allowed_bytes` permits.

    Columns of text or bytes are decoded only if their longest possible value, repeated in every row, would be too much.
    """
    with pq.ParquetFile(path) as file:
        metadata = file.metadata
        needed, texts = 0, dict[str, int]()
        for group in range(metadata.num_row_groups):
            for number in range(metadata.num_columns):
                column = metadata.row_group(group).column(number)
                unpacked = column.total_uncompressed_size
                needed += max(unpacked, column.num_values * _PARQUET_WIDTHS.get(column.physical_type, 8))
                if column.physical_type not in _PARQUET_WIDTHS:
                    name = column.path_in_schema
                    texts[name] = texts.get(name, 0) + column.num_values * unpacked
        require_allowed(needed, path, f"{path}, unpacked,", _UNPACKED_PARQUET)
        suspects = [name for name, most in texts.items() if needed + most > allowed_bytes(path)]
    for name in suspects:
        with pq.ParquetFile(path, read_dictionary=[name]) as file:
            for batch in file.iter_batches(batch_size=1 << 16, columns=[name]):
                for values in batch.columns:
                    if hasattr(values, "dictionary"):
                        lengths = pc.take(pc.binary_length(values.dictionary), values.indices)
                        needed += pc.sum(lengths).as_py() or 0
                require_allowed(needed, path, f"{path}, unpacked, up to column {shown(name)}", _UNPACKED_PARQUET)
