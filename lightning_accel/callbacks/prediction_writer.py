"""Writing of predictions to a CSV file. Shapes: B samples, M values per sample."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from lightning_accel._private.torch import tree_leaves
from lightning_accel.callbacks.deployment.copies import raise_in_all_processes, run_folder
from lightning_accel.ops.bounds import require_filename
from lightning_accel.ops.extras import import_on_use, require_module

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = import_on_use("pandas")


class PredictionWriter(BasePredictionWriter):
    """Write the results of ``predict_step`` to one CSV file, one line per sample, in the order of the data.

    ``predict_step`` returns a tensor (B,) or (B, M), or a dict of such tensors and of lists of B values; each name
    becomes a column, or M columns ``name_0`` ..., and ``row`` counts the samples of the data from 0. Samples from
    several processes are gathered, samples that a sampler repeated to give every process the same number are written
    once, and several data loaders give a column ``loader``; columns that only some of them have are blank for the
    others. ``probabilities`` (B, C) have the names of the classes in place of numbers, ``probabilities_setosa``, if the
    module has ``class_names``. If the datamodule has ``predict_ids``, a list with a name for each sample, they become
    the column ``id``; ``predict_columns``, a DataFrame with a line for each sample, becomes the first columns, with
    ``file_`` before a name that the predictions have, too.

    Texts are written unchanged: a spreadsheet that opens the file takes a class or id that begins with ``=``, ``+``,
    ``-`` or ``@`` for a formula; an escape would change names such as ``-1``. If the classes or ids come from untrusted
    sources, import the columns as text.

    Args:
        filename: path of the file, absolute, or relative to the run folder (the Trainer's ``log_dir``).

    Raises:
        TypeError: at the first batch, if ``predict_step`` returned another type, which the message names. At the end,
            if there was no batch.
        ValueError: at the first batch, if it did not return one value for each sample, or two columns of one name. At
            the end, if the batches of a loader do not all have the same columns.

    Example:
        >>> import lightning as L
        >>> from lightning_accel import PredictionWriter
        >>> trainer = L.Trainer(callbacks=[PredictionWriter("new_flowers.csv")])  # for trainer.predict
    """

    def __init__(self, filename: str = "predictions.csv") -> None:
        super().__init__(write_interval="batch_and_epoch")
        require_filename("filename", filename, "predictions.csv")
        self.filename = filename

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "predict":
            require_module("pandas")

    def write_on_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        if batch_idx == 0:  # find errors now, not hours later
            _batch_table(_name_probabilities(prediction, pl_module), batch_indices or None)

    def write_on_epoch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by a connector
            return
        path = run_folder(trainer) / self.filename
        loaders = [predictions] if len(batch_indices) == 1 else predictions
        if not trainer.strategy.reduce_boolean_decision(any(map(len, loaders)), all=False):
            raise TypeError("PredictionWriter has nothing to write: no loader gave a batch. Give predict some rows")
        _warn_of_order(trainer, batch_indices)
        named = [[_name_probabilities(batch, pl_module) for batch in batches] for batches in loaders]
        tables = [_gather(make_table(batches, rows)) for batches, rows in zip(named, batch_indices, strict=True)]

        def write() -> None:
            if trainer.is_global_zero:
                self._write(trainer, tables, path)

        # every process returns only after the file is complete
        raise_in_all_processes(trainer, write, "write predictions")

    def _write(self, trainer: L.Trainer, tables: Sequence[pd.DataFrame], path: Path) -> None:
        filled = {number: table for number, table in enumerate(tables) if len(table.columns)}
        table = tables[0] if len(tables) == 1 else pd.concat(filled, names=["loader"])
        names = getattr(trainer.datamodule, "predict_ids", None)  # type: ignore[attr-defined]  # set by a connector
        if names is not None and len(tables) == 1 and "id" not in table:
            table.insert(0, "id", [names[row] for row in table.index])
        columns = getattr(trainer.datamodule, "predict_columns", None)  # type: ignore[attr-defined]
        if columns is not None and len(tables) == 1:
            added = columns.iloc[table.index].set_axis(table.index)
            taken = {"row", *table.columns}
            table = pd.concat([added.rename(columns=lambda name: _free_name(name, taken)), table], axis=1)
        path.parent.mkdir(parents=True, exist_ok=True)
        table.to_csv(path)
        rank_zero_info(f"wrote {len(table)} predictions to {path}")


def _free_name(name: str, taken: set[str]) -> str:
    while name in taken:
        name = f"file_{name}"
    return name


def _name_probabilities(prediction: Any, module: L.LightningModule) -> Any:
    """Spread ``probabilities`` (B, C) over entries that are named by the module's classes, if it has their names."""
    names = getattr(module, "class_names", None)
    values = prediction.get("probabilities") if isinstance(prediction, dict) else None
    if not names or not isinstance(values, Tensor) or values.ndim != 2 or values.shape[1] != len(names):
        return prediction
    parts = {f"probabilities_{name}": column for name, column in zip(names, values.unbind(dim=1), strict=True)}
    return {name: value for name, value in prediction.items() if name != "probabilities"} | parts


def _warn_of_order(trainer: L.Trainer, rows: Sequence[Any]) -> None:
    loaders = [loader for loader in tree_leaves(trainer.predict_dataloaders) if isinstance(loader, DataLoader)]
    for loader, numbers in zip(loaders, rows, strict=False):
        in_order = isinstance(loader.sampler, SequentialSampler) or getattr(loader.sampler, "exact", False)
        ordered = in_order or isinstance(loader.dataset, IterableDataset)
        if not ordered and not any(numbers):  # the Trainer knows indices only of samplers that yield single ones
            rank_zero_warn(
                f"PredictionWriter: batches came in the order of {type(loader.sampler).__name__}, which does not tell "
                "which rows they hold, so the column 'row' counts that order. Predict with a loader in order, "
                "DataLoader(dataset, batch_size=...)"
            )


def make_table(batches: Sequence[Any], rows: Sequence[Sequence[int]]) -> pd.DataFrame:
    """Build a table with one line for each index in ``rows``, given per batch; numbered from 0 if there are none.

    Raises:
        ValueError: if the batches do not all have the same columns.
    >>> make_table([{"label": torch.tensor([3, 1])}, {"label": torch.tensor([4])}], [[0, 1], [2]]).label.tolist()
    [3, 1, 4]
    """
    if not batches:
        return pd.DataFrame()
    numbers = rows if any(rows) else [None] * len(batches)  # an IterableDataset has no indices
    tables = [_batch_table(batch, numbered) for batch, numbered in zip(batches, numbers, strict=True)]
    return _stack(tables, ignore_index=not any(rows))


def _stack(tables: Sequence[pd.DataFrame], ignore_index: bool = False) -> pd.DataFrame:
    names: list[set[object]] = [set(table.columns) for table in tables]
    if lacking := set.union(*names) - set.intersection(*names):  # pandas would leave blanks
        raise ValueError(
            f"predict_step must return the same columns for every batch; some lack {sorted(map(str, lacking))}. Return "
            "them always, with nan or None where there is no value"
        )
    return pd.concat(tables, ignore_index=ignore_index)


def _batch_table(batch: Any, rows: Sequence[int] | None) -> pd.DataFrame:
    columns = _columns(batch)
    lengths = {name: len(values) for name, values in columns.items()}
    wanted = next(iter(lengths.values()), 0) if rows is None else len(rows)
    if set(lengths.values()) != {wanted}:
        raise ValueError(f"predict_step must return one value for each of the {wanted} rows of a batch; got {lengths}")
    return pd.DataFrame(columns, index=None if rows is None else pd.Index(rows, name="row"))


def _columns(batch: Any) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    new: dict[str, Any]
    for name, values in (batch if isinstance(batch, dict) else {"prediction": batch}).items():
        if isinstance(values, np.ndarray):
            values = torch.from_numpy(values) if values.dtype.kind in "biuf" else values.tolist()
        if isinstance(values, Tensor) and values.ndim in (1, 2):
            values = values.detach().to("cpu", torch.float32 if values.dtype == torch.bfloat16 else None)
            parts = {f"{name}_{i}": column for i, column in enumerate(values.unbind(dim=1))} if values.ndim == 2 else {}
            new = {key: column.numpy() for key, column in (parts or {name: values}).items()}
        elif isinstance(values, list):
            new = {name: [_plain(value, name) for value in values]}
        else:
            raise _unwritable(_kind(values), name, "Change predict_step")
        if twice := new.keys() & {*columns, "row", "loader"}:
            raise ValueError(f"predict_step returned two columns named {min(twice)!r}, or one that numbers the rows")
        columns |= new
    return columns


def _plain(value: Any, name: str) -> Any:
    if not isinstance(value, Tensor | np.ndarray):
        return value
    if len(value.reshape(-1)) != 1:
        raise _unwritable(f"list of {_kind(value)}", name, "Make them one tensor (B, M) with torch.stack")
    return value.item()


def _kind(value: Any) -> str:
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor | np.ndarray) else ""
    return f"{type(value).__name__}{shape}"


def _unwritable(kind: str, name: str, remedy: str) -> TypeError:
    return TypeError(
        "PredictionWriter writes tensors (B,) or (B, M), lists of B values, and dicts of them; predict_step returned "
        f"{kind} for {name!r}. {remedy}, or use your own lightning.pytorch.callbacks.BasePredictionWriter"
    )


def _gather(table: pd.DataFrame) -> pd.DataFrame:
    """Gather the lines of all processes on process 0, sorted and without duplicates."""
    gathered = torch.distributed.is_available() and torch.distributed.is_initialized()
    if gathered:
        tables: list[Any] | None = None
        if torch.distributed.get_rank() == 0:
            tables = [None] * torch.distributed.get_world_size()
        torch.distributed.gather_object(table, tables)
        filled = [table for table in tables or [table] if len(table.columns)]
        table = _stack(filled) if filled else table
    if table.index.name is None:
        return table.reset_index(drop=True).rename_axis("row")
    return (table[~table.index.duplicated()] if gathered else table).sort_index(kind="stable")
