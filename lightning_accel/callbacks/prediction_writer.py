"""Predictions to a file. Shapes: B rows."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import pandas as pd
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor


class PredictionWriter(BasePredictionWriter):
    """Write what ``predict_step`` returns to one CSV file, a line a row of the data, in the order of the data.

    ``predict_step`` returns a tensor (B,) or (B, M), or a dict of such tensors and of lists of B values; each name
    becomes a column, or M columns ``name_0`` ..., and ``row`` counts the rows of the data from 0. Rows from several
    processes are gathered, those that a sampler repeated to give every process equally many are written once, and
    several data loaders give a column ``loader``.

    Args:
        filename: absolute, or relative to the run folder (the Trainer's ``log_dir``).

    Raises:
        TypeError: if ``predict_step`` returned something else; the message says what.
    """

    def __init__(self, filename: str = "predictions.csv") -> None:
        super().__init__(write_interval="epoch")
        self.filename = filename

    def write_on_epoch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        assert trainer.log_dir is not None
        path = Path(trainer.log_dir) / self.filename
        loaders = [predictions] if len(batch_indices) == 1 else predictions
        tables = [_gather(make_table(batches, rows)) for batches, rows in zip(loaders, batch_indices, strict=True)]
        if trainer.is_global_zero:
            table = tables[0] if len(tables) == 1 else pd.concat(tables, keys=range(len(tables)), names=["loader"])
            path.parent.mkdir(parents=True, exist_ok=True)
            table.to_csv(path)
            rank_zero_info(f"wrote {len(table)} predictions to {path}")
        trainer.strategy.barrier()  # the file is whole when predict returns, on every process


def make_table(batches: Sequence[Any], rows: Sequence[Sequence[int]]) -> pd.DataFrame:
    """One line for each of ``rows``, the numbers of the rows in each of ``batches``; unnumbered if none are known.

    >>> make_table([{"label": torch.tensor([3, 1])}, {"label": torch.tensor([4])}], [[0, 1], [2]]).label.tolist()
    [3, 1, 4]
    """
    if not batches:
        raise TypeError("PredictionWriter has nothing to write: predict_step returned None, or there was no batch")
    table = pd.concat([pd.DataFrame(_columns(batch)) for batch in batches], ignore_index=True)
    numbers = list(chain.from_iterable(rows))  # empty for an IterableDataset
    return table.set_index(pd.Index(numbers, name="row")) if numbers else table


def _columns(batch: Any) -> dict[str, Any]:
    named = batch if isinstance(batch, dict) else {"prediction": batch}
    columns: dict[str, Any] = {}
    for name, values in named.items():
        if isinstance(values, Tensor) and values.ndim in (1, 2):
            values = values.detach().to("cpu", torch.float32 if values.dtype == torch.bfloat16 else None)
            if values.ndim == 1:
                columns[name] = values.numpy()
            else:
                columns |= {f"{name}_{i}": column.numpy() for i, column in enumerate(values.unbind(dim=1))}
        elif isinstance(values, list):
            columns[name] = values
        else:
            shape = f" of shape {tuple(values.shape)}" if isinstance(values, Tensor) else ""
            raise TypeError(
                "PredictionWriter writes tensors (B,) or (B, M), lists, and dicts of them; predict_step returned "
                f"{type(values).__name__}{shape} for {name!r}. Change predict_step, or use your own "
                "lightning.pytorch.callbacks.BasePredictionWriter"
            )
    return columns


def _gather(table: pd.DataFrame) -> pd.DataFrame:
    """All processes' rows on process 0, in order, each once."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        tables: list[Any] | None = None
        if torch.distributed.get_rank() == 0:
            tables = [None] * torch.distributed.get_world_size()
        torch.distributed.gather_object(table, tables)
        table = table if tables is None else pd.concat(tables)
    if table.index.name is None:
        return table.reset_index(drop=True).rename_axis("row")
    return table[~table.index.duplicated()].sort_index()
