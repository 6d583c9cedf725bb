"""Tables for classification and regression. Shapes: B rows of a batch, D features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader

from lightning_accel.data.bounds import require_shares
from lightning_accel.data.digest import DIGEST, digest_of, require_same_data
from lightning_accel.data.in_memory import BatchTensorDataset, InMemoryDataModule
from lightning_accel.data.preprocessing import RawColumns
from lightning_accel.data.quoting import cut, listed, shown, told_classes
from lightning_accel.data.shards.files import is_sharded
from lightning_accel.data.shards.loader import datamodule_loader
from lightning_accel.data.shards.moments import Moments
from lightning_accel.data.shards.options import ShardOptions
from lightning_accel.data.shards.splits import Split
from lightning_accel.data.splits import split_groups, split_in_three
from lightning_accel.data.tables.column_checks import (
    doubts_of_classes,
    doubts_of_columns,
    doubts_of_dates,
    warn_of_new_numbers,
)
from lightning_accel.data.tables.encoding import make_encoder, names_of_features, to_tensor
from lightning_accel.data.tables.files import existing_file, read_table, require_columns
from lightning_accel.data.tables.leakage import doubts_of_answers, doubts_of_copies, doubts_of_groups
from lightning_accel.data.tables.sharded import ShardedTable, new_category_message
from lightning_accel.data.tables.statistics import Target
from lightning_accel.data.tables.targets import A_QUANTITY, TargetKind, read_classes, read_known_classes, read_quantity
from lightning_accel.data.tables.values import as_numbers, as_text, days_of_dates, require_present, which_hold_numbers
from lightning_accel.ops.bounds import require_integers
from lightning_accel.ops.extras import import_on_use
from lightning_accel.ops.names import list_of_names, require_one_of
from lightning_accel.ops.options import read_options
from lightning_accel.ops.renames import renamed_arguments

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = import_on_use("pandas")

_WITHOUT_CLASS = (
    "Remove those rows, or predict them with predict_path; or set csv.unlabeled, for a model that learns from them, as "
    "DeepBeliefNetwork does. In CSV files, None, NA and the like are missing values: give such a class another name"
)


@dataclass(frozen=True)
class CSVFormat:
    """Hold how a CSV file is written.

    Args:
        separator: separator of the fields.
        decimal: mark between a number's whole part and its fraction, ``.`` or ``,``.
        missing: texts that mean a missing value, in addition to the empty field, ``NA``, ``NaN``, ``None``, ``null``
            and the other defaults of pandas. A class needs another name than these.
        unlabeled: whether rows whose class is missing train, with the class -100; else they are an error. It is for
            :class:`lightning_accel.DeepBeliefNetwork`, which learns from them, and for Parquet, too. Torch's cross
            entropy leaves them out, and is NaN for a batch without any class.

    Example:
        >>> from lightning_accel import TabularDataModule
        >>> csv = CSVFormat(separator=";", decimal=",")
        >>> data = TabularDataModule("flowers.csv", target="species", csv=csv)  # doctest: +SKIP
    """

    separator: str = ","
    decimal: str = "."
    missing: str | Sequence[str] = ()
    unlabeled: bool = False


class TabularDataModule(InMemoryDataModule):
    """Load rows of a CSV or Parquet file, or of a folder of files, as features (B, D) float32 and targets (B,).

    A target is a class, int64, or with ``target_kind="regression"`` a quantity, float32, in the unit of the file.

    In numeric columns, missing values become the median, columns with missing values get an additional 0/1 indicator
    feature, and all are standardized to mean 0 and variance 1. Text columns are one-hot encoded, with a missing value
    as a category of its own. The encoding is fitted on the training rows alone; a category that they lack is all zeros.
    A column that mixes numbers and text is an error unless ``categorical`` names it, and one of many dates unless
    ``dates`` does. Splits of a file are stratified by class, if there are classes, and the same file and ``seed`` give
    the same split on every machine.

    **More than fits in memory.** A folder, a pattern or a URL (``s3://bucket/table``, see
    :func:`lightning_accel.data.shard_loader`) of Parquet, Arrow or JSON lines files is read ahead of training, block by
    block: row groups of Parquet, record batches of Arrow, 4 MiB of lines. The first run reads all of them once, for the
    statistics, and keeps these in ``shards.cache_dir``. Files whose path or name has the word ``train``, ``val``
    (``valid``, ``validation``, ``dev``) or ``test`` are for what it says; else whole blocks are the splits, evenly
    spread over the files. Columns that pandas wrote as an index are left out. Medians are those of up to 2 ** 24 values
    of all columns together. A run that is resumed in mid-epoch continues with the next row, also on another number of
    processes.

    After ``setup``: ``num_features`` and ``feature_names``, such as ``length``, ``colour=red`` and
    ``missingindicator_length``; ``num_classes`` and ``class_names`` (sorted), None unless targets are classes;
    ``num_targets``, 1, and ``target_mean`` and ``target_std`` (1,) of the training rows, None unless they are
    quantities; and ``predict_columns``, a DataFrame of what :class:`lightning_accel.PredictionWriter` adds to
    predictions: the target and the columns of ``exclude``, where the file has them, after ``file_row``, the row of
    ``path``, where the test rows of a single file are predicted.

    A checkpoint stores a description of the fitted data; loading it with another file, split or order of columns is an
    error, since the model would read features it was not trained on, or be tested on rows it was trained on.

    Args:
        path: file with a header: ``.csv``, ``.csv.gz`` or ``.parquet``; or a folder, pattern or URL of files.
        target: column of the classes, or of the quantity.
        target_kind: whether the target is a class (``classification``), or a quantity (``regression``), for
            :class:`lightning_accel.MoERegressor`.
        categorical: columns of numbers, or of numbers and text, to read as categories.
        dates: columns of dates, with or without a time, to read as numbers of days since 1970-01-01 in UTC. Texts are
            those of ISO 8601, such as ``2024-06-07``, ``2024/06/07`` and ``2024-06-07T12:30+02:00``; a time without an
            offset counts as UTC. An exported file takes these numbers.
        exclude: columns that are no features, such as a key.
        group: column of which equal values stay together among the rows that train, validate or test, such as a patient
            or a machine of which several rows tell; it is no feature. Shares are those of groups then, and not
            stratified. Files of a folder say themselves what they are for then, and are checked.
        csv: how a CSV file is written, see :class:`lightning_accel.data.CSVFormat`.
        val_share: share of the rows that validate.
        test_share: share of the rows that test.
        seed: seed of the split into training, validation and test rows.
        batch_size: samples per process and step.
        num_workers: workers that load batches; 0 is fastest, since the rows are in memory, or threads read them. Each
            worker holds the blocks of a folder in memory that all do.
        predict_path: file of rows to predict, with the same feature columns, with or without the target; by default the
            test rows. Where ``path`` is a folder, this is one, too.
        shards: how a folder of files is read, see :class:`lightning_accel.data.ShardOptions`.

    Raises:
        TypeError: if an option has another type.
        FileNotFoundError: if a file does not exist.
        ValueError: if a number is out of range, the shares leave no training rows, or ``dates`` and another option name
            one column; in ``setup``, if a file is empty or no table, lacks a column or its name, repeats a name, gives
            two features one name, holds text among numbers, infinities, dates in a column that ``dates`` does not name,
            something else in one that it does, a blank class or (without ``csv.unlabeled``) a missing one, or has too
            few rows of a class to split, or if a quantity is missing, no number, or the same in all rows; in
            ``load_state_dict``, if the checkpoint was trained on other rows.

    Example:
        >>> import pandas as pd
        >>> from tempfile import NamedTemporaryFile
        >>> table = pd.DataFrame({"length": range(20), "colour": ["red", "blue"] * 10, "kind": ["a", "b"] * 10})
        >>> with NamedTemporaryFile(suffix=".csv") as file:
        ...     table.to_csv(file.name, index=False)
        ...     data = TabularDataModule(file.name, target="kind")
        ...     data.setup("fit")
        >>> data.feature_names
        ['length', 'colour=blue', 'colour=red']
    """

    train_rows: BatchTensorDataset
    val_rows: BatchTensorDataset
    test_rows: BatchTensorDataset
    num_features: int
    feature_names: list[str]
    num_classes: int | None = None
    class_names: list[str] | None = None
    num_targets: int | None = None
    target_mean: list[float] | None = None
    target_std: list[float] | None = None
    _predict_columns: pd.DataFrame | None = None

    @renamed_arguments(
        split_seed="seed",
        ignore="exclude",
        missing="csv.missing",
        separator="csv.separator",
        decimal="csv.decimal",
    )
    def __init__(
        self,
        path: str | Path,
        target: str,
        *,
        target_kind: TargetKind = "classification",
        categorical: str | Sequence[str] = (),
        dates: str | Sequence[str] = (),
        exclude: str | Sequence[str] = (),
        group: str | None = None,
        csv: CSVFormat = CSVFormat(),
        val_share: float = 0.15,
        test_share: float = 0.15,
        seed: int = 0,
        batch_size: int = 64,
        num_workers: int = 0,
        predict_path: str | Path | None = None,
        shards: ShardOptions = ShardOptions(),
    ) -> None:
        super().__init__()
        self.shards = read_options(ShardOptions, shards)
        require_integers(1, batch_size=batch_size)
        require_integers(0, seed=seed, num_workers=num_workers)
        require_shares(val_share, test_share)
        self.is_sharded = is_sharded(path)
        self.path = path if self.is_sharded else existing_file(path)
        self.predict_path = predict_path
        if predict_path is not None and not self.is_sharded:
            self.predict_path = existing_file(predict_path)
        self.csv = read_options(CSVFormat, csv)
        require_one_of("csv.decimal", self.csv.decimal, [".", ","])
        is_plain = self.csv == CSVFormat(missing=self.csv.missing) and not list_of_names(self.csv.missing)
        if self.is_sharded and not is_plain:
            raise ValueError(f"{path} is a folder or URL of files, on which csv has no effect; leave it out")
        if target_kind not in get_args(TargetKind):
            raise ValueError(f"target_kind must be one of {', '.join(get_args(TargetKind))}; got {target_kind!r}")
        self._is_quantity = target_kind == "regression"
        if self._is_quantity and self.csv.unlabeled:
            raise ValueError("csv.unlabeled is for classes; leave it out with target_kind='regression'")
        self.target = target
        self.categorical = list_of_names(categorical, "categorical")
        self.dates = list_of_names(dates, "dates")
        self.exclude = list_of_names(exclude, "exclude")
        if target in self.exclude:
            raise ValueError(f"exclude names the target, {shown(target)}; leave it out there")
        self.group = group
        groups = [] if group is None else [group]
        if group is not None and not isinstance(group, str):
            raise ValueError(f"group must be the name of one column; got {group!r}")
        if group == self.target:
            raise ValueError(f"group={group!r} is the target; name the column whose equal values belong together")
        if group is not None and self.csv.unlabeled:
            raise ValueError(f"group={group!r} has no effect on rows of unknown class; leave csv.unlabeled out")
        others = {"target": [target], "categorical": self.categorical, "exclude": self.exclude, "group": groups}
        for option, names in others.items():
            if twice := [name for name in self.dates if name in names]:
                raise ValueError(f"dates names {shown(twice[0])}, which {option} names, too; leave it out of one")
        self.val_share = val_share
        self.test_share = test_share
        self.seed = seed
        self.batch_size = batch_size
        self.num_workers = num_workers

    def prepare_data(self) -> None:
        """List the blocks of a folder and collect its statistics, in one process per machine."""
        if self.is_sharded:
            self._sharded_table()

    def setup(self, stage: str | None = None) -> None:
        if hasattr(self, "train_rows") or hasattr(self, "_table"):  # the Trainer calls setup once per stage
            return
        is_doubted = self.trainer is not None or stage == "fit"
        num_rows = self._setup_folder(is_doubted) if self.is_sharded else self._setup_file(is_doubted)
        self._report_columns(num_rows)

    def _setup_folder(self, is_doubted: bool) -> list[int]:
        """Return the number of rows that train, validate and test."""
        found = self._table = self._sharded_table()
        self._predicted = found.splits["test"]
        if self.predict_path is not None:
            self._predicted = found.to_predict(self.predict_path, self.shards)
        self.feature_names, self.num_features = found.feature_names, len(found.feature_names)
        self._keep_target(found.class_names, found.target_moments)
        for doubt in found.doubts if is_doubted else ():
            rank_zero_warn(doubt)
        return [int(found.splits[split].rows.sum()) for split in ("train", "val", "test")]

    def _setup_file(self, is_doubted: bool) -> list[int]:
        """Return the number of rows that train, validate and test."""
        assert isinstance(self.path, Path)
        kept = [self.target, *self._no_features]
        as_written = [*self._no_features, *([] if self._is_quantity else [self.target])]
        table = self._read(self.path, [*as_written, *self.categorical])
        require_columns(table, [self.target], self.path, [self.target])
        groups = [] if self.group is None else [self.group]
        named = {"exclude": self.exclude, "group": groups, "categorical": self.categorical, "dates": self.dates}
        for option, names in named.items():
            require_columns(table, names, self.path, option=option)
        labels = self._read_target(table[self.target], self.path)
        train, val, test = self._split(labels, self.path, table)
        if self._is_quantity:
            moments = Moments.of(labels[train][:, None])
            self._keep_target(None, (float(moments.mean[0]), float(moments.std[0])))
        self._feature_columns = self._find_features(table)
        features, is_number = self._read_features(table, self.path)
        encoder = self._encoder = make_encoder(is_number).fit(features.iloc[train])
        self.feature_names = names_of_features(encoder, self.path)
        self.num_features = len(self.feature_names)
        self._centres = np.asarray(features.iloc[train].mean(numeric_only=True)).tolist()
        fitted = features.iloc[np.concatenate([train, val])]
        columns = [fitted[name].to_numpy() if number else fitted[name].tolist() for name, number in is_number.items()]
        self._digest = digest_of(labels[train], labels[val], *columns)
        rows = to_tensor(encoder.transform(features))
        targets = torch.from_numpy(labels.astype(np.float32 if self._is_quantity else np.int64))
        self.train_rows, self.val_rows, self.test_rows = (
            BatchTensorDataset(rows[chosen], targets[chosen]) for chosen in (train, val, test)
        )
        held_out = np.concatenate([val, test])
        texts = [name for name, number in is_number.items() if not number and name not in self.categorical]
        beside = table[[] if self._is_quantity or self.group else self.exclude]
        for doubt in self._doubts(features, labels, texts, train, held_out, beside) if is_doubted else ():
            rank_zero_warn(doubt)
        grouping = (
            "" if self.group else ". If its values stand for persons or things of several rows each, name it as group"
        )
        self._warn_of_new_categories(features.iloc[held_out], self.path, grouping)
        self.predict_rows = BatchTensorDataset(self.test_rows.tensors[0])
        self._predict_columns = table.loc[test, kept].assign(file_row=test)[["file_row", *kept]]
        if self.predict_path is not None:
            assert isinstance(self.predict_path, Path)
            written = [*as_written, *(name for name, number in is_number.items() if not number)]
            self._read_new_rows(self.predict_path, written, is_number, features.iloc[train])
        return [len(rows) for rows in (self.train_rows, self.val_rows, self.test_rows)]

    def _find_features(self, table: pd.DataFrame) -> list[str]:
        """Return the names of the columns that are features.

        Raises:
            ValueError: if there is none, or one has no name.
        """
        found = [name for name in table.columns if name != self.target and name not in self._no_features]
        if nameless := [name for name in found if name.startswith("Unnamed: ")]:
            raise ValueError(
                f"{self.path} has a column without a name, perhaps row numbers that were written with the table; list "
                f"it under exclude as {shown(nameless[0])}, or give it a name"
            )
        if not found:
            raise ValueError(
                f"{self.path} has no column left for features beside {shown(self.target)} and those excluded"
            )
        return found

    def _read_new_rows(
        self, path: Path, as_written: list[str], is_number: dict[str, bool], trained: pd.DataFrame
    ) -> None:
        """Take the rows of another file as those to predict."""
        table = self._read(path, as_written)
        require_columns(table, self._feature_columns, path)
        new, _ = self._read_features(table, path, is_number)
        self._warn_of_new_categories(new, path)
        warn_of_new_numbers(new, trained, path)
        self.predict_rows = BatchTensorDataset(to_tensor(self._encoder.transform(new)))
        self._predict_columns = table[[name for name in (self.target, *self._no_features) if name in table]]

    def _doubts(
        self,
        features: pd.DataFrame,
        labels: np.ndarray,
        texts: list[str],
        train: np.ndarray,
        held_out: np.ndarray,
        beside: pd.DataFrame,
    ) -> Iterator[str]:
        """Yield what is doubtful in the rows of a file, of which some train, and in columns that may be of groups."""
        assert isinstance(self.path, Path)
        quantity = pd.Series(labels, name=self.target) if self._is_quantity else None
        yield from doubts_of_columns(features, train, self.path, quantity)
        yield from doubts_of_dates(features[texts], self.path)
        yield from doubts_of_classes(labels, self.class_names or [], self.path) if not self._is_quantity else ()
        yield from doubts_of_copies(features, labels, train, held_out, self.path)
        yield from doubts_of_answers(features.iloc[train], labels[train], self.path, self._is_quantity)
        yield from doubts_of_groups(beside, features, labels, self.path)

    @property
    def predict_columns(self) -> pd.DataFrame:
        """Return what the file tells of the rows to predict; that of a folder is read when it is first asked for."""
        if self._predict_columns is None:
            self._predict_columns = self._table.beside(self._predicted)
        return self._predict_columns

    def _read_target(self, column: pd.Series, path: Path) -> np.ndarray:
        """Return the target of each row: a class, int64, -100 where it is unknown, or a quantity, float64."""
        if self._is_quantity:
            return read_quantity(column, path)
        if self.csv.unlabeled:
            labels, names = read_known_classes(column, path, A_QUANTITY)
        else:
            labels, names = read_classes(require_present(column, path, _WITHOUT_CLASS), path)
        if blank := [name for name in names if not name.strip()]:
            raise ValueError(
                f"the target column {shown(self.target)} of {path} holds a class without a name, "
                f"{shown(blank[0])}; name it, or list it under csv.missing if it means a missing class"
            )
        self._keep_target(names, None)
        return labels

    @property
    def _no_features(self) -> list[str]:
        return [*dict.fromkeys([*self.exclude, *([] if self.group is None else [self.group])])]

    def _split(self, labels: np.ndarray, path: Path, table: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the rows that train, validate and test; those of unknown class train."""
        shares = self.val_share, self.test_share
        if self.group is not None:
            groups = as_text(require_present(table[self.group], path, "Name the group of each row"), path)
            return self._split_groups(groups.to_numpy(), labels, path)
        if self._is_quantity:
            return split_in_three(None, len(labels), shares, self.seed, path)
        known, unknown = np.flatnonzero(labels >= 0), np.flatnonzero(labels < 0)
        kind = "rows of known class" if len(unknown) else "rows"
        train, val, test = (
            known[part] for part in split_in_three(labels[known], len(known), shares, self.seed, path, kind)
        )
        return np.concatenate([train, unknown]), val, test

    def _split_groups(
        self, groups: np.ndarray, labels: np.ndarray, path: Path
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the rows that train, validate and test, each group in one of them.

        Raises:
            ValueError: if there are too few groups, or a class is in none that trains.
        """
        train, val, test = split_groups(groups, (self.val_share, self.test_share), self.seed, path)
        lacking = set[int]() if self._is_quantity else {*labels.tolist()} - {*labels[train].tolist()}
        if lacking:
            assert self.class_names is not None
            names = listed([self.class_names[number] for number in sorted(lacking)], 5)
            raise ValueError(
                f"all rows of {path} with the classes {names} are in groups of {shown(self.group)} that validate or "
                "test, so that none trains. Take another seed, or smaller val_share and test_share"
            )
        return train, val, test

    def _keep_target(self, class_names: list[str] | None, moments: tuple[float, float] | None) -> None:
        """Set what models need to know of the target: its classes, or the mean and standard deviation of a quantity."""
        self.class_names = class_names
        self.num_classes = None if class_names is None else len(class_names)
        if moments is not None:
            self.num_targets, self.target_mean, self.target_std = 1, [moments[0]], [moments[1]]

    def _describe_target(self) -> str:
        if self.class_names is not None:
            rows = [] if self.is_sharded else [part.tensors[1].numpy() for part in (self.train_rows, self.val_rows)]
            return f"target {shown(self.target)} of {told_classes(self.class_names, *rows)}"
        assert self.target_mean is not None
        assert self.target_std is not None
        mean, std = self.target_mean[0], self.target_std[0]
        return f"target {shown(self.target)}, a quantity of mean {mean:.4g} and standard deviation {std:.4g}"

    def _report_columns(self, num_rows: Sequence[int]) -> None:
        """Tell how the columns are read, in a run."""
        if self.trainer is None:
            return
        columns = self.preprocessing().columns
        numbers = [column["name"] for column in columns if column["categories"] is None]
        texts = [f"{cut(c['name'])} ({len(c['categories'])})" for c in columns if c["categories"] is not None]
        kinds = [("numbers", numbers), ("categories", texts), ("left out", self._no_features)]
        rank_zero_info(
            f"{self.path}: {self._describe_target()}; "
            + "".join(f"{kind}: {listed(names, 10)}; " for kind, names in kinds if names)
            + "{:,} rows train, {:,} validate, {:,} test".format(*num_rows)
            + ("" if self.predict_path is None else f"; predict_path: {self.predict_path}")
        )

    def _warn_of_new_categories(self, features: pd.DataFrame, path: Path, advice: str = "") -> None:
        for column in RawColumns.of_encoder(self._encoder).columns:
            if column["categories"] is None:
                continue
            values = features[column["name"]]
            new = values[~values.isin(column["categories"])]
            if len(new):
                rank_zero_warn(new_category_message(column["name"], str(path), new.unique().tolist()) + advice)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader("train") if self.is_sharded else super().train_dataloader()

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader("val") if self.is_sharded else super().val_dataloader()

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader("test") if self.is_sharded else super().test_dataloader()

    def predict_dataloader(self) -> DataLoader[Any]:
        return self._loader("predict") if self.is_sharded else super().predict_dataloader()

    def _sharded_table(self) -> ShardedTable:
        shares = self.val_share, self.test_share
        target = Target(self.target, self._is_quantity)
        columns = self.categorical, self._no_features
        return ShardedTable(self.path, target, *columns, shares, self.seed, self.shards, self.group, self.dates)

    def _loader(self, split: Split | Literal["predict"]) -> DataLoader[Any]:
        blocks = self._predicted if split == "predict" else self._table.splits[split]
        reading = self._table.reading(with_target=split != "predict")
        return datamodule_loader(
            self, blocks, reading, self.batch_size, self.num_workers, self.shards, self.seed, split
        )

    def preprocessing(self) -> RawColumns:
        """Return the module that encodes rows of the table as features, for exported models that take raw rows."""
        if self.is_sharded:
            return self._table.encoder
        return RawColumns.of_encoder(self._encoder, list_of_names(self.csv.missing), self.csv.decimal)

    def state_dict(self) -> dict[str, Any]:
        return {
            "columns": self.feature_names,
            "classes": self.class_names,
            "split": [self.seed, self.val_share, self.test_share],
            "means of the training rows": self._table.encoder.mean.tolist() if self.is_sharded else self._centres,
            DIGEST: self._table.digest if self.is_sharded else self._digest,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        remedy = "Give the file and the split of its run; new rows go in predict_path"
        require_same_data(state_dict, self.state_dict(), f"data than {self.path}", remedy)

    def _read(self, path: Path, text_columns: Sequence[str]) -> pd.DataFrame:
        separator = self.csv.separator.replace("\\t", "\t")  # as a shell passes it
        as_written = [*text_columns, *self.dates]
        table = read_table(path, separator, self.csv.decimal, list_of_names(self.csv.missing), as_written)
        for name in self.dates:
            if name in table:
                table[name] = days_of_dates(table[name], path)
        return table

    def _read_features(
        self, table: pd.DataFrame, path: Path, is_number: dict[str, bool] | None = None
    ) -> tuple[pd.DataFrame, dict[str, bool]]:
        """Return the feature columns as float64 or text, and which are numbers; ``is_number`` says so if known."""
        if is_number is None:
            undecided = [name for name in self._feature_columns if name not in self.categorical]
            holding = which_hold_numbers(table[undecided], path, self.exclude)
            is_number = {name: holding.get(name, False) for name in self._feature_columns}
        columns = {
            name: as_numbers(table[name], path) if number else as_text(table[name], path)
            for name, number in is_number.items()
        }
        return pd.DataFrame(columns, index=table.index), is_number
