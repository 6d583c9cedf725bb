"""CSV and Parquet files, read so that a value that is not what it seems is an error and not a number."""

import difflib
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.model_selection import train_test_split

_LARGEST = 1e30  # the normalisation squares it


def read_table(
    path: Path,
    separator: str = ",",
    decimal: str = ".",
    missing: Sequence[str] = (),
    text_columns: Sequence[str] = (),
) -> pd.DataFrame:
    """Read a CSV or Parquet file with at least one row; ``text_columns`` of a CSV file stay as they are written.

    Raises:
        ValueError: if it is neither, cannot be read as one, has no rows, or has columns of one name or of none.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if ".csv" not in suffixes and ".parquet" not in suffixes:
        raise ValueError(f"need a .csv or .parquet file; got {path}")
    try:
        if suffixes[-1] == ".parquet":
            table = pd.read_parquet(path)
            table = table.mask(table.isin([*missing, *_numbers_among(missing)])) if missing else table
        else:
            _require_distinct_names(pd.read_csv(path, sep=separator, header=None, nrows=1, dtype=str), path)
            with warnings.catch_warnings():
                # Rows longer than the header: pandas would take their first fields for an index, or drop the last
                warnings.simplefilter("error", pd.errors.ParserWarning)
                table = pd.read_csv(
                    path,
                    sep=separator,
                    decimal=decimal,
                    na_values=list(missing),
                    dtype=dict.fromkeys(text_columns, str),  # else 01 in one file and A1 in the next are 1 and A1
                    index_col=False,
                    low_memory=False,  # it guesses types chunk by chunk: one by where the text of a column stands
                )
    except pd.errors.EmptyDataError:
        raise ValueError(f"{path} is empty; a header and rows were needed") from None
    except (pd.errors.ParserError, pd.errors.ParserWarning, UnicodeDecodeError, OSError, EOFError) as error:
        raise ValueError(f"{path} cannot be read as {path.suffix[1:]}: {error}") from error
    if table.empty:
        raise ValueError(f"{path} has a header but no rows")
    return table.rename(columns=str)


def _numbers_among(texts: Sequence[str]) -> list[float]:
    return pd.to_numeric(pd.Series(texts, dtype=object), errors="coerce").dropna().tolist()


def _require_distinct_names(header: pd.DataFrame, path: Path) -> None:
    names = header.iloc[0]
    if names.duplicated(keep=False).any() and (twice := names[names.duplicated()].dropna()).any():
        raise ValueError(f"{path} has two columns named {twice.iloc[0]!r}; rename or remove one")


def existing_file(path: str | Path) -> Path:
    path = Path(path)
    if path.is_file():
        return path
    beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = "".join(
        f"; did you mean {path.parent / name}?" for name in difflib.get_close_matches(path.name, beside, n=1)
    )
    raise FileNotFoundError(f"no file {path}{hint}")


def require_columns(table: pd.DataFrame, needed: Sequence[str], path: Path) -> None:
    columns = list(table.columns)
    for name in needed:
        if name in columns:
            continue
        near = difflib.get_close_matches(name, columns, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        if len(columns) == 1 and path.suffix.lower() != ".parquet":
            hint += " There is one column only: set separator to what stands between the fields."
        raise ValueError(f"{path} has no column {name!r}{hint} Its columns: {', '.join(columns)}")


def read_classes(
    column: pd.Series, path: Path, quantity: str = "a target that is a quantity is not supported"
) -> tuple[np.ndarray, list[str]]:
    """Class of each row, (rows,) int64, and the names of the classes in order; ``quantity`` ends a message."""
    where = f"the target column {column.name!r} of {path}"
    if (missing := column.isna()).any():
        raise ValueError(
            f"{where} lacks {missing.sum()} of {len(column)} values, the first in row {_first_row(missing)}; remove "
            "those rows, or predict them with predict_path"
        )
    text = as_text(column)
    classes = sorted(text.unique(), key=_numbers_first)
    labels = pd.Categorical(text, categories=classes).codes
    if len(classes) < 2:
        raise ValueError(f"{where} holds one class only, {classes[0]!r}; two or more are needed")
    counts = np.bincount(labels)
    if counts.min() < 3:
        rarest = classes[int(counts.argmin())]
        raise ValueError(
            f"{where} holds {len(classes)} classes, of which {rarest!r} has {counts.min()} rows; each needs 3, one for "
            f"each split. Merge rare classes; {quantity}"
        )
    return labels.astype(np.int64), classes


def _numbers_first(name: str) -> tuple[float, str]:
    """Sort key that puts 2 before 10, and numbers before words."""
    try:
        return float(name), name
    except ValueError:
        return np.inf, name


def holds_numbers(column: pd.Series, path: Path) -> bool:
    """Whether every value is a number; False if none is.

    Raises:
        ValueError: if some are, naming the first that is not; if it holds dates, or text that never repeats.
    """
    where = f"column {column.name!r} of {path}"
    if pd.api.types.is_numeric_dtype(column) or pd.api.types.is_bool_dtype(column):
        return True
    if pd.api.types.is_datetime64_any_dtype(column) or pd.api.types.is_timedelta64_dtype(column):
        raise ValueError(f"{where} holds dates; turn it into numbers first, or list it under ignore")
    present = column.dropna()
    if present.map(lambda value: isinstance(value, list | dict | np.ndarray)).any():
        raise ValueError(f"{where} holds lists; spread them over columns, or list it under ignore")
    is_text = pd.to_numeric(present.astype(object), errors="coerce").isna()
    if is_text.any() and not is_text.all():
        wrong = is_text.reindex(column.index, fill_value=False)
        raise ValueError(
            f"{where} holds {str(column[wrong].iloc[0])!r} in row {_first_row(wrong)} among numbers; mend the value, "
            "list it under missing, or list the column under categorical"
        )
    if is_text.any() and present.astype(str).str.fullmatch(r"[-+]?[\d.,' ]*\d[\d.,' ]*[%$€£]?").all():
        raise ValueError(
            f"{where} holds {str(present.iloc[0])!r} and the like, which are no numbers as they are written; set "
            "decimal, rewrite them, or list the column under categorical"
        )
    if is_text.any() and len(present) > 20 and present.nunique() > len(present) / 2:
        raise ValueError(
            f"{where} holds {present.nunique()} different texts in {len(present)} rows; list it under ignore if it is "
            "a key, or under categorical to make each text a feature"
        )
    return not is_text.any()


def as_numbers(column: pd.Series, path: Path, remedy: str = "Mend the value, or list it under missing") -> pd.Series:
    numbers = pd.to_numeric(column.astype(object), errors="coerce").astype(np.float64)
    wrong = (numbers.isna() & column.notna()) | (numbers.abs() > _LARGEST)
    if wrong.any():
        first = str(column[wrong].iloc[0])
        raise ValueError(
            f"column {column.name!r} of {path} must hold numbers of at most {_LARGEST:g}; got {first!r} in row "
            f"{_first_row(wrong)}. {remedy}"
        )
    return numbers


def as_text(column: pd.Series) -> pd.Series:
    # convert_dtypes first: a column of whole numbers is float where values are missing, and 1.0 is no name for 1
    return column.convert_dtypes().astype("string").fillna("<missing>").astype(object)


def split_rows(
    rows: np.ndarray, classes: np.ndarray | None, share: float, seed: int, path: Path
) -> tuple[np.ndarray, np.ndarray]:
    """Part ``rows`` in two, the second of ``share``; where there are ``classes``, of all rows, each in proportion."""
    try:
        kept, held_out = train_test_split(
            rows, test_size=share, random_state=seed, stratify=None if classes is None else classes[rows]
        )
    except ValueError as error:
        raise ValueError(f"{path} has too few rows to split as asked: {error}") from error
    return kept, held_out


def _first_row(mask: pd.Series) -> int:
    """Number of the first row that ``mask`` holds, the header not counted."""
    return int(mask.to_numpy().argmax()) + 1
