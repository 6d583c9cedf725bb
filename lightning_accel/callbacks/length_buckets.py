"""Batches of samples of similar length for any padding DataLoader, in place of random ones."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Number
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, default_collate
from torch.utils.data.distributed import DistributedSampler

from lightning_accel._private.torch import makes_own_iterators
from lightning_accel.data.sequences.length_sampler import LengthBatchSampler


def length_of(sample: Any) -> int | None:
    """Return the length of the first tensor, array or list of numbers with one dimension in a sample, if there is any.

    >>> length_of({"label": 3, "tokens": [5, 6]})
    2
    """
    if isinstance(sample, Tensor | np.ndarray):
        return len(sample) if sample.ndim == 1 else None
    if isinstance(sample, Mapping):
        sample = list(sample.values())
    if not isinstance(sample, list | tuple):
        return None
    if sample and all(isinstance(value, Number) for value in sample):
        return len(sample) if isinstance(sample, list) else None
    return next((length for value in sample if (length := length_of(value)) is not None), None)


def lengths_of(dataset: Any, indices: Sequence[int]) -> list[int | None]:
    """Return the lengths of samples, without a change of the random numbers that the run draws."""
    with isolate_rng():
        return [length_of(dataset[index]) for index in indices]


def why_not_bucketed(loader: DataLoader[Any], num_samples: int | None = None) -> str:
    """Return why batches of ``loader`` cannot be of samples of similar length, or nothing.

    Args:
        loader: the training loader.
        num_samples: samples whose lengths are looked at, spread over the data set; None for all.
    """
    if isinstance(loader.dataset, IterableDataset):
        return "the loader has an IterableDataset, whose length and order nobody knows"
    if makes_own_iterators(loader):
        return f"{type(loader).__name__} makes iterators of its own"
    if type(loader.batch_sampler) is not BatchSampler:
        return f"the loader's batches are made by {type(loader.batch_sampler or loader.dataset).__name__}"
    if loader.collate_fn is default_collate:
        return "the loader collates by default, which pads nothing"
    total = len(loader.dataset)  # type: ignore[arg-type]  # map-style
    if not _is_plain_shuffle(loader.sampler, total):
        return f"the loader does not shuffle all samples, each once: {type(loader.sampler).__name__}"
    spread = np.linspace(0, total - 1, min(num_samples or total, total)).astype(int).tolist()
    try:
        lengths = lengths_of(loader.dataset, spread)
    except Exception as error:  # a dataset that is set up for workers alone, which ends no run as it is
        return f"samples cannot be read outside of the loader: {type(error).__name__}: {error}"
    if None in lengths:
        return "samples have no length: no tensor, array or list of numbers with one dimension"
    return "all samples are equally long" if len(set(lengths)) == 1 else ""


def _is_plain_shuffle(sampler: Any, total: int) -> bool:
    if isinstance(sampler, RandomSampler):
        return not sampler.replacement and sampler.num_samples == total
    return isinstance(sampler, DistributedSampler) and sampler.shuffle


@contextmanager
def length_buckets(loader: DataLoader[Any], seed: int) -> Iterator[None]:
    """Let iterators of ``loader`` that begin meanwhile have batches of samples of similar length.

    Args:
        loader: one that :func:`why_not_bucketed` has no objection to; its batch size is that of each process.
        seed: of the batches, which each epoch draws anew; equal on all processes.
    """
    given = {name: vars(loader)[name] for name in ("sampler", "batch_sampler")}
    lengths = lengths_of(loader.dataset, range(len(loader.dataset)))  # type: ignore[arg-type]  # map-style
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    sampler = LengthBatchSampler(
        torch.tensor(lengths), loader.batch_sampler.batch_size * world_size, seed=seed  # type: ignore[union-attr]
    )  # fmt: skip
    vars(loader).update(dict.fromkeys(given, sampler))  # a DataLoader takes no others after its __init__
    try:
        yield
    finally:
        vars(loader).update(given)
