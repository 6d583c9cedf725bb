"""Batches that a dataset indexes at once, in place of samples that are read one by one and stacked."""

import random
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from lightning_accel._private.torch import change_iterators, makes_own_iterators

_CHECKED = 3  # batches that are read both ways, before those read at once are taken


def fetch_batches(loader: DataLoader[Any]) -> None:
    """Let all further iterators of ``loader`` index whole batches, as far as :func:`why_by_sample` has no objection.

    Batches are those that it would yield otherwise: equal tensors of equal strides, in the same order. The attributes
    of the loader, its dataset among them, are left as they are.

    Tensors of a TensorDataset, or of a Subset of one, are indexed at once. ``__getitem__`` of another dataset is called
    with the array of all indices in place of one. The first three batches are read both ways: if they are not equal bit
    for bit, or if reading them draws random numbers, all are read by sample. From then on, one sample of each batch is
    compared, and if it is another, a warning says so, and what follows is read by sample.
    """
    change_iterators(loader, _fetch_batches)


def why_by_sample(loader: DataLoader[Any]) -> str:
    """Return why samples of ``loader`` have to be fetched one by one, or nothing if batches can be indexed at once.

    Some samples of a dataset that is no TensorDataset are read to find out.
    """
    if reason := _why_never(loader):
        return reason
    dataset = _without_subsets(loader.dataset)
    if type(dataset) is TensorDataset:
        return ""
    rows = np.linspace(0, len(dataset) - 1, min(8, len(dataset))).astype(int).tolist()  # type: ignore[arg-type]
    with isolate_rng(include_cuda=False):
        return _read_both_ways(dataset, rows)[1]


def _why_never(loader: DataLoader[Any]) -> str:
    if loader.batch_sampler is None:
        return "the loader returns what the dataset does, without collating it"
    if loader.collate_fn is not default_collate:
        return "the loader has a collate_fn of its own"
    if makes_own_iterators(loader):
        return f"{type(loader).__name__} makes iterators of its own"
    if loader.num_workers and not _is_lightnings(loader.worker_init_fn):
        return "the loader has a worker_init_fn, which may change the dataset"
    dataset = _without_subsets(loader.dataset)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return f"the dataset yields samples in an order of its own: {type(dataset).__name__}"
    if hasattr(dataset, "__getitems__"):
        return f"{type(dataset).__name__} reads batches in a way of its own"
    if type(dataset) is TensorDataset and not all(map(_is_plain, dataset.tensors)):
        return "the dataset holds tensors that are not dense, contiguous and without gradients"
    return ""


class _Batches(Dataset[Any]):
    """Fetch batches of a dataset that are collated already."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset
        self._num_checked = 0
        self._by_sample = False

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        """Return the batch of these samples; the DataLoader's fetcher asks for it by this name."""
        dataset, rows = self.dataset, _as_rows(indices, len(self.dataset))  # type: ignore[arg-type]
        while rows is not None and type(dataset) is Subset:
            rows, dataset = _look_up(dataset.indices, rows), dataset.dataset
            rows = rows and _as_rows(rows, len(dataset))  # type: ignore[arg-type]
        if rows and type(dataset) is TensorDataset and all(map(_is_plain, dataset.tensors)):
            chosen = torch.tensor(rows)
            return [tensor.index_select(0, chosen.to(tensor.device)) for tensor in dataset.tensors]
        # a single index that is an array may pass for a number
        if not rows or len(rows) == 1 or self._by_sample or type(dataset) is TensorDataset:
            return default_collate([self.dataset[index] for index in indices])
        if self._num_checked < _CHECKED:
            batch, reason = _read_both_ways(dataset, rows)
            self._num_checked += 1
            self._by_sample = bool(reason)
            return batch
        return self._read_at_once(dataset, rows)

    def _read_at_once(self, dataset: Dataset[Any], rows: list[int]) -> Any:
        place = sum(rows) % len(rows)
        batch, sample = _at_once(dataset, rows), default_collate([dataset[rows[place]]])
        if batch is not None and _are_equal(_part_of(batch, place), sample):
            return batch
        warnings.warn(
            f"{type(dataset).__name__} does not return for an array of indices what it does for single ones, though it "
            "did in the batches before: from now on, samples are read one by one, as without batched_fetch",
            stacklevel=2,
        )
        self._by_sample = True
        return default_collate([dataset[row] for row in rows])


def _fetch_batches(loader: DataLoader[Any]) -> None:
    if not _why_never(loader):
        vars(loader)["dataset"] = _Batches(loader.dataset)  # a DataLoader takes no other after its __init__
        loader.collate_fn = _as_it_is


def _as_it_is(batch: Any) -> Any:
    return batch


def _without_subsets(dataset: Dataset[Any]) -> Dataset[Any]:
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


def _read_both_ways(dataset: Dataset[Any], rows: list[int]) -> tuple[Any, str]:
    """Return the batch of single samples, and why it cannot be read at once, or nothing if it can."""
    with isolate_rng(include_cuda=False):
        found = _at_once(dataset, rows)
    before = random_state()
    batch = default_collate([dataset[row] for row in rows])
    name = type(dataset).__name__
    if random_state() != before:
        return batch, f"{name} draws random numbers for its samples"
    if found is None or not _are_equal(found, batch):
        return batch, f"{name} does not return for an array of indices what it does for single ones"
    return batch, ""


def _at_once(dataset: Dataset[Any], rows: list[int]) -> Any:
    """Return what a dataset makes of an array of indices as a collated batch, None if it is not arrays of samples."""
    try:
        return _collated(dataset[np.array(rows)], len(rows))
    except Exception:  # whatever a user's code raises for what it is not made for
        return None


def _collated(found: Any, size: int) -> Any:
    """Return arrays of ``size`` samples as default_collate returns the samples.

    Raises:
        TypeError: if something else is found.
    """
    if type(found) is dict:
        return {key: _collated(value, size) for key, value in found.items()}
    if type(found) in (tuple, list):
        return [_collated(value, size) for value in found]
    if type(found) not in (np.ndarray, Tensor) or found.shape[:1] != (size,):
        raise TypeError(f"{type(found).__name__} is no array of {size} samples")
    return torch.as_tensor(found).contiguous()


def _part_of(batch: Any, place: int) -> Any:
    """Return the batch of one sample of a collated batch."""
    if isinstance(batch, dict):
        return {key: _part_of(value, place) for key, value in batch.items()}
    if isinstance(batch, list):
        return [_part_of(value, place) for value in batch]
    return batch[place : place + 1]


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two collated batches hold the same bits in the same layout."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(_are_equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if (one.dtype, one.shape, one.stride()) != (other.dtype, other.shape, other.stride()):
        return False
    return torch.equal(one, other) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def random_state() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002  # the global one, which datasets use
    return torch.get_rng_state().tolist(), kind, np.asarray(keys).tolist(), rest, random.getstate()


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
