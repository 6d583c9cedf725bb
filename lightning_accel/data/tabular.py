"""Tables of the user's own, for classification. Shapes: B rows, D features."""

import difflib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pandas as pd
import torch
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_accel.data.in_memory import TensorRows, row_loader


class TabularDataModule(L.LightningDataModule):
    """Rows of a CSV or Parquet file; batches are features (B, D) float32 and classes (B,) int64.

    Columns of numbers are features with missing values set to the median, an extra 0/1 feature where values are
    missing, mean 0 and variance 1; columns of text are one feature for each category, a missing value being one too.
    All of that is fitted on the training rows alone; a category that they lack is all zeros. A column that mixes
    numbers and text is refused until ``categorical`` names it. Classes keep their proportions in every split, and the
    same file and ``split_seed`` give the same split everywhere.

    After ``setup``: ``num_features``, ``num_classes``, ``class_names`` (sorted) and ``feature_names``.

    Args:
        path: file with a header, ``.csv`` (also compressed, ``.csv.gz``) or ``.parquet``.
        target: column of the classes.
        categorical: columns of numbers, or of numbers and text, to read as categories.
        ignore: columns that are no features, such as a key.
        missing: texts that mean a missing value, besides the empty field, ``NA``, ``NaN``, ``null`` and their like.
        separator: between the fields of a CSV file.
        val_share: share of the rows that validate.
        test_share: share of the rows that test.
        split_seed: picks the rows of each split.
        batch_size: rows per process and step.
        num_workers: processes that fetch batches; 0 is fastest, since the rows are in memory.
        predict_path: file of rows to predict, with the same feature columns and no need of the target; by default the
            test rows.

    Raises:
        FileNotFoundError: if a file is not there.
        ValueError: if the shares leave no training rows; in ``setup``, if a file is empty or not a table, lacks a
            column, holds text among numbers, infinities, dates or no class, or has too few rows of a class to split.
    """

    num_features: int
    num_classes: int
    class_names: list[str]
    feature_names: list[str]

    def __init__(
        self,
        path: str | Path,
        target: str,
        *,
        categorical: Sequence[str] = (),
        ignore: Sequence[str] = (),
        missing: Sequence[str] = (),
        separator: str = ",",
        val_share: float = 0.15,
        test_share: float = 0.15,
        split_seed: int = 0,
        batch_size: int = 64,
        num_workers: int = 0,
        predict_path: str | Path | None = None,
    ) -> None:
        super().__init__()
        if min(val_share, test_share) <= 0 or val_share + test_share >= 1:
            raise ValueError(
                "val_share and test_share must be above 0 and leave rows to train on; "
                f"got val_share={val_share}, test_share={test_share}"
            )
        self.path = _existing_file(path)
        self.predict_path = None if predict_path is None else _existing_file(predict_path)
        self.target = target
        self.categorical = categorical
        self.ignore = ignore
        self.missing = missing
        self.separator = separator
        self.val_share = val_share
        self.test_share = test_share
        self.split_seed = split_seed
        self.batch_size = batch_size
        self.num_workers = num_workers

    def setup(self, stage: str | None = None) -> None:
        if hasattr(self, "train_rows"):  # a trainer calls setup once a stage
            return
        table = self._read(self.path)
        _require_columns(table, [self.target, *self.categorical, *self.ignore], self.path)
        labels, self.class_names = _read_classes(table[self.target], self.path)
        self.num_classes = len(self.class_names)
        rest, test = _split(np.arange(len(labels)), labels, self.test_share, self.split_seed, self.path)
        train, val = _split(rest, labels, self.val_share / (1 - self.test_share), self.split_seed, self.path)
        self._feature_columns = [c for c in table.columns if c != self.target and c not in self.ignore]
        features, is_number = self._read_features(table, self.path)
        encoder = _make_encoder(is_number).fit(features.iloc[train])
        self.feature_names = list(encoder.get_feature_names_out())
        self.num_features = len(self.feature_names)
        rows, targets = _to_tensor(encoder.transform(features)), torch.from_numpy(labels)
        self.train_rows, self.val_rows, self.test_rows = (
            TensorRows(rows[chosen], targets[chosen]) for chosen in (train, val, test)
        )
        self.predict_rows = TensorRows(self.test_rows.tensors[0])
        if self.predict_path is not None:
            table = self._read(self.predict_path)
            _require_columns(table, self._feature_columns, self.predict_path)
            features, _ = self._read_features(table, self.predict_path, is_number)
            self.predict_rows = TensorRows(_to_tensor(encoder.transform(features)))

    def _read(self, path: Path) -> pd.DataFrame:
        return read_table(path, self.separator, self.missing)

    def _read_features(
        self, table: pd.DataFrame, path: Path, is_number: dict[str, bool] | None = None
    ) -> tuple[pd.DataFrame, dict[str, bool]]:
        """Feature columns as float64 or text, and which are which, ``is_number`` telling where it is known."""
        if is_number is None:
            is_number = {
                name: name not in self.categorical and _holds_numbers(table[name], path)
                for name in self._feature_columns
            }
        columns = {
            name: _as_numbers(table[name], path) if number else _as_text(table[name])
            for name, number in is_number.items()
        }
        return pd.DataFrame(columns, index=table.index), is_number

    def train_dataloader(self) -> DataLoader[Any]:
        return row_loader(self.train_rows, self, self.batch_size, self.num_workers, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return row_loader(self.val_rows, self, self.batch_size, self.num_workers)

    def test_dataloader(self) -> DataLoader[Any]:
        return row_loader(self.test_rows, self, self.batch_size, self.num_workers)

    def predict_dataloader(self) -> DataLoader[Any]:
        return row_loader(self.predict_rows, self, self.batch_size, self.num_workers)


def read_table(path: Path, separator: str = ",", missing: Sequence[str] = ()) -> pd.DataFrame:
    """Read a CSV or Parquet file with at least one row.

    Raises:
        ValueError: if it is neither, cannot be read as one, or has no rows.
    """
    try:
        if ".csv" in path.suffixes:
            with warnings.catch_warnings():
                # Rows longer than the header: pandas would take their first fields for an index, or drop the last
                warnings.simplefilter("error", pd.errors.ParserWarning)
                # low_memory guesses types chunk by chunk, so a column's type would depend on where its text stands
                table = pd.read_csv(path, sep=separator, na_values=list(missing), index_col=False, low_memory=False)
        elif path.suffix == ".parquet":
            table = pd.read_parquet(path)
            table = table.replace(list(missing), None) if missing else table
        else:
            raise ValueError(f"need a .csv or .parquet file; got {path}")
    except pd.errors.EmptyDataError:
        raise ValueError(f"{path} is empty; a header and rows were needed") from None
    except (pd.errors.ParserError, pd.errors.ParserWarning, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path} cannot be read as {path.suffix[1:]}: {error}") from error
    if table.empty:
        raise ValueError(f"{path} has a header but no rows")
    return table.rename(columns=str)


def _existing_file(path: str | Path) -> Path:
    path = Path(path)
    if path.is_file():
        return path
    beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = "".join(
        f"; did you mean {path.parent / name}?" for name in difflib.get_close_matches(path.name, beside, n=1)
    )
    raise FileNotFoundError(f"no file {path}{hint}")


def _require_columns(table: pd.DataFrame, needed: Sequence[str], path: Path) -> None:
    columns = list(table.columns)
    for name in needed:
        if name in columns:
            continue
        near = difflib.get_close_matches(name, columns, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        if len(columns) == 1:
            hint += " There is one column only: set separator to what stands between the fields."
        raise ValueError(f"{path} has no column {name!r}{hint} Its columns: {', '.join(columns)}")


def _read_classes(column: pd.Series, path: Path) -> tuple[np.ndarray, list[str]]:
    """Class of each row, (rows,) int64, and the names of the classes in order."""
    where = f"the target column {column.name!r} of {path}"
    if (missing := column.isna()).any():
        raise ValueError(
            f"{where} lacks {missing.sum()} of {len(column)} values, the first in row {_first_row(missing)}; remove "
            "those rows, or predict them with predict_path"
        )
    labels, classes = pd.factorize(column.convert_dtypes(), sort=True)
    if len(classes) < 2:
        raise ValueError(f"{where} holds one class only, {classes[0]!r}; two or more are needed")
    counts = np.bincount(labels)
    if counts.min() < 3:
        rarest = classes[int(counts.argmin())]
        raise ValueError(
            f"{where} holds {len(classes)} classes, of which {rarest!r} has {counts.min()} rows; each needs 3, one for "
            "each split. Merge rare classes; a target that is a quantity is not supported"
        )
    return labels.astype(np.int64), [str(name) for name in classes]


def _split(rows: np.ndarray, labels: np.ndarray, share: float, seed: int, path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        kept, held_out = train_test_split(rows, test_size=share, random_state=seed, stratify=labels[rows])
    except ValueError as error:
        raise ValueError(f"{path} has too few rows to split as asked: {error}") from error
    return kept, held_out


def _holds_numbers(column: pd.Series, path: Path) -> bool:
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
    is_text = pd.to_numeric(present.astype(object), errors="coerce").isna()
    if is_text.any() and not is_text.all():
        wrong = is_text.reindex(column.index, fill_value=False)
        raise ValueError(
            f"{where} holds {str(column[wrong].iloc[0])!r} in row {_first_row(wrong)} among numbers; mend the value, "
            "list it under missing, or list the column under categorical"
        )
    if is_text.any() and len(present) > 20 and present.nunique() > len(present) / 2:
        raise ValueError(
            f"{where} holds {present.nunique()} different texts in {len(present)} rows; list it under ignore if it is "
            "a key, or under categorical to make each text a feature"
        )
    return not is_text.any()


def _as_numbers(column: pd.Series, path: Path) -> pd.Series:
    numbers = pd.to_numeric(column.astype(object), errors="coerce").astype(np.float64)
    wrong = (numbers.isna() & column.notna()) | np.isinf(numbers)
    if wrong.any():
        raise ValueError(
            f"column {column.name!r} of {path} must hold finite numbers; got {str(column[wrong].iloc[0])!r} in row "
            f"{_first_row(wrong)}. Mend the value, or list it under missing"
        )
    return numbers


def _as_text(column: pd.Series) -> pd.Series:
    # convert_dtypes first: a column of whole numbers is float where values are missing, and 1.0 is no name for 1
    return column.convert_dtypes().astype("string").fillna("<missing>").astype(object)


def _first_row(mask: pd.Series) -> int:
    """Number of the first row that ``mask`` holds, the header not counted."""
    return int(mask.to_numpy().argmax()) + 1


def _make_encoder(is_number: dict[str, bool]) -> ColumnTransformer:
    numbers = make_pipeline(
        SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True), StandardScaler()
    )
    categories = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    return ColumnTransformer(
        [
            ("number", numbers, [name for name, number in is_number.items() if number]),
            ("category", categories, [name for name, number in is_number.items() if not number]),
        ],
        verbose_feature_names_out=False,
    )


def _to_tensor(features: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(features, dtype=np.float32))
