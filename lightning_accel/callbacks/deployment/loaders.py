"""Loaders of the same data as a run's, read beside it."""

import copy
from collections.abc import Sequence, Sized
from itertools import islice
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from lightning_accel._private.torch import tree_map_only
from lightning_accel.data.planned_sampler import PlannedSampler
from lightning_accel.data.shards.sampler import ShardSampler


def undistributed(loader: Any) -> Any:
    """Return the loader, or loaders, over all samples, without a DistributedSampler."""
    return tree_map_only(DataLoader, _undistributed_loader, loader)


def _undistributed_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    if not isinstance(loader.sampler, DistributedSampler):
        return loader
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=loader.sampler.for_one_process() if isinstance(loader.sampler, PlannedSampler | ShardSampler) else None,
        collate_fn=loader.collate_fn,
        drop_last=loader.drop_last,
        **_workers(loader, loader.num_workers),
    )


def _workers(loader: DataLoader[Any], count: int = 0) -> dict[str, Any]:
    """Return the options for ``count`` workers, or for one where ``worker_init_fn`` may open what samples come from."""
    if loader.num_workers and loader.worker_init_fn is not None:
        count = max(1, count)
    if not count:
        return {}
    context = loader.multiprocessing_context
    return {"num_workers": count, "worker_init_fn": loader.worker_init_fn, "multiprocessing_context": context}


def has_plain_order(loader: object) -> bool:
    """Return whether ``loader`` is a DataLoader of single indices, in order or shuffled, which can be read twice."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    return type(loader.sampler) in (SequentialSampler, RandomSampler) and loader.batch_size is not None


def with_order(loader: DataLoader[Any], order: Sequence[int]) -> DataLoader[Any]:
    """Return a loader of the same batch size over the samples ``order``, of which there is a batch at least."""
    is_whole = len(order) >= cast(int, loader.batch_size)
    return DataLoader(
        loader.dataset,
        loader.batch_size,
        sampler=order,
        collate_fn=loader.collate_fn,
        drop_last=loader.drop_last and is_whole,
        **_workers(loader),
    )


def first_batches_of(loader: Any) -> Any:
    """Return loaders of the first batch and of one as small as the last, or of two equal ones; others stay."""
    return tree_map_only(DataLoader, _first_batches, loader)


def _first_batches(loader: DataLoader[Any]) -> DataLoader[Any]:
    if not has_plain_order(loader):
        return loader
    size, length = cast(int, loader.batch_size), len(cast(Sized, loader.dataset))
    rest = 0 if loader.drop_last and length >= size else length % size
    return with_order(loader, range(min(size + (rest or size), length)))


def in_random_order(loader: Any) -> Any:
    """Return the loader, or loaders, in a fixed random order, for representative samples; other kinds unchanged."""
    return tree_map_only(DataLoader, _loader_in_random_order, loader)


def _loader_in_random_order(loader: DataLoader[Any]) -> DataLoader[Any]:
    if not has_plain_order(loader):
        return loader  # a custom sampler may use other keys and omit samples
    return with_order(
        loader, torch.randperm(len(cast(Sized, loader.dataset)), generator=torch.Generator().manual_seed(0)).tolist()
    )


def independent(count: int, loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader of the first samples or batches, or of a stream, that leaves the samplers of ``loader`` alone."""
    dataset, size = loader.dataset, loader.batch_size
    options = {"collate_fn": loader.collate_fn, **_workers(loader)}
    if isinstance(dataset, IterableDataset):
        return DataLoader(copy.copy(dataset), size, **options)
    gives_batches = size is None and loader.batch_sampler is not None
    order: Any = loader.batch_sampler if gives_batches else loader.sampler
    order = getattr(order, "index_sampler", order)  # of ExactResume, which is in its place
    taken = [*islice(copy.deepcopy(order, {id(dataset): dataset}), count)]
    if gives_batches:
        return DataLoader(dataset, batch_sampler=taken, **options)
    return DataLoader(dataset, size, sampler=taken, **options)
