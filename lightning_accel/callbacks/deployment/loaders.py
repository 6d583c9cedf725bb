"""Loaders of the same data as a run's, read beside it."""

import copy
from collections.abc import Sequence, Sized
from itertools import islice
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from lightning_accel._private.torch import tree_map_only
from lightning_accel.data.planned_sampler import PlannedSampler


def undistributed(loader: Any) -> Any:
    """Return the loader, or loaders, over all samples, without a DistributedSampler."""
    return tree_map_only(DataLoader, _undistributed_loader, loader)


def _undistributed_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    if not isinstance(loader.sampler, DistributedSampler):
        return loader
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=loader.sampler.for_one_process() if isinstance(loader.sampler, PlannedSampler) else None,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
    )


def has_plain_order(loader: object) -> bool:
    """Return whether ``loader`` is a DataLoader of single indices, in order or shuffled, which can be read twice."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    return type(loader.sampler) in (SequentialSampler, RandomSampler) and loader.batch_size is not None


def with_order(loader: DataLoader[Any], order: Sequence[int]) -> DataLoader[Any]:
    """Return a loader of the same batch size over the samples ``order``."""
    return DataLoader(loader.dataset, loader.batch_size, sampler=order, collate_fn=loader.collate_fn)


def first_batch_of(loader: DataLoader[Any]) -> DataLoader[Any]:
    return with_order(loader, range(min(cast(int, loader.batch_size), len(cast(Sized, loader.dataset)))))


def in_random_order(loader: Any) -> Any:
    """Return a loader in a fixed random order, for representative samples; loaders of other kinds unchanged."""
    if not has_plain_order(loader):
        return loader  # a custom sampler may use other keys and omit samples
    return with_order(loader, torch.randperm(len(loader.dataset), generator=torch.Generator().manual_seed(0)).tolist())


def independent(count: int, loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader of the first samples or batches, or of a stream, that leaves the samplers of ``loader`` alone."""
    dataset, size, collate = loader.dataset, loader.batch_size, loader.collate_fn
    if isinstance(dataset, IterableDataset):
        return DataLoader(copy.copy(dataset), size, collate_fn=collate)
    gives_batches = size is None and loader.batch_sampler is not None
    order: Any = loader.batch_sampler if gives_batches else loader.sampler
    order = getattr(order, "index_sampler", order)  # of ExactResume, which is in its place
    taken = [*islice(copy.deepcopy(order, {id(dataset): dataset}), count)]
    if gives_batches:
        return DataLoader(dataset, batch_sampler=taken, collate_fn=collate)
    return DataLoader(dataset, size, sampler=taken, collate_fn=collate)
