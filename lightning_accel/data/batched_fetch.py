"""Batches of a TensorDataset by one indexing operation per tensor, in place of one per sample and a stack."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from lightning_accel._private.torch import change_iterators, makes_own_iterators


def fetch_batches(loader: DataLoader[Any]) -> None:
    """Let all further iterators of ``loader`` index whole batches, as far as :func:`why_by_sample` has no objection.

    Batches are those that it would yield otherwise: equal tensors of equal strides in a list, in the same order. The
    attributes of the loader, its dataset among them, are left as they are.
    """
    change_iterators(loader, _fetch_batches)


def why_by_sample(loader: DataLoader[Any]) -> str:
    """Return why samples of ``loader`` have to be fetched one by one, or nothing if batches can be indexed at once."""
    if loader.batch_sampler is None:
        return "the loader returns what the dataset does, without collating it"
    if loader.collate_fn is not default_collate:
        return "the loader has a collate_fn of its own"
    if makes_own_iterators(loader):
        return f"{type(loader).__name__} makes iterators of its own"
    if loader.num_workers and not _is_lightnings(loader.worker_init_fn):
        return "the loader has a worker_init_fn, which may change the dataset"
    dataset = loader.dataset
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset:
        return f"the dataset is no TensorDataset: {type(dataset).__name__}"
    if not all(map(_is_plain, dataset.tensors)):
        return "the dataset holds tensors that are not dense, contiguous and without gradients"
    return ""


class _Batches(Dataset[Any]):
    """Fetch batches of a dataset that are collated already."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        """Return the batch of these samples; the DataLoader's fetcher asks for it by this name."""
        dataset, rows = self.dataset, _as_rows(indices, len(self.dataset))  # type: ignore[arg-type]
        while rows is not None and type(dataset) is Subset:
            rows, dataset = _look_up(dataset.indices, rows), dataset.dataset
            rows = rows and _as_rows(rows, len(dataset))  # type: ignore[arg-type]
        if not rows or not isinstance(dataset, TensorDataset) or not all(map(_is_plain, dataset.tensors)):
            return default_collate([self.dataset[index] for index in indices])
        chosen = torch.tensor(rows)
        return [tensor.index_select(0, chosen.to(tensor.device)) for tensor in dataset.tensors]


def _fetch_batches(loader: DataLoader[Any]) -> None:
    if not why_by_sample(loader):
        vars(loader)["dataset"] = _Batches(loader.dataset)  # a DataLoader takes no other after its __init__
        loader.collate_fn = _as_it_is


def _as_it_is(batch: Any) -> Any:
    return batch


def _as_rows(indices: Sequence[Any], length: int) -> list[int] | None:
    """Return indices as a list of rows if they are plain integers, none counted from the end, and in range."""
    rows = list(indices)
    is_plain = bool(rows) and set(map(type, rows)) <= {int, np.int64} and min(rows) >= 0 and max(rows) < length
    return rows if is_plain else None


def _look_up(indices: Any, rows: list[int]) -> list[Any]:
    """Return the entries of a Subset's indices, which are often an array or a tensor."""
    if hasattr(indices, "dtype") and str(indices.dtype).endswith("int64") and indices.ndim == 1:
        return indices[rows].tolist()
    return [indices[row] for row in rows]


def _is_plain(tensor: Tensor) -> bool:
    """Return whether rows of a tensor, stacked, have the same strides and type as if selected at once."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    return tensor.is_contiguous() and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())


def _is_lightnings(worker_init_fn: Any) -> bool:
    """Return whether there is no function for new workers, or the one by which Lightning seeds them."""
    function = worker_init_fn.func if isinstance(worker_init_fn, partial) else worker_init_fn
    return function is None or function is pl_worker_init_function
