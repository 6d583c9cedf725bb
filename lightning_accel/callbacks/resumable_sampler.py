"""Resumable sampler, whose order of batches depends on the seed and the epoch alone."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from lightning_accel.callbacks.random_state import RandomStream, derived_seed

_DRAW_AT_THE_START = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


class ResumableSampler:
    """Replace a DataLoader's sampler with one that has its own random state and starts at the first batch not yet done.

    The sampler is replaced inside the loader, since other objects hold the loader itself.

    Args:
        loader: a loader over a map-style data set.
        seed: returns the seed of this process; a generator that the user gave to the loader overrides it.
        position: returns the epoch and how many of its batches have been trained on, infinite for all.
    """

    def __init__(
        self, loader: DataLoader[Any], seed: Callable[[], int], position: Callable[[], tuple[int, float]]
    ) -> None:
        self._loader = loader
        self._slot = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._inner: Any = getattr(loader, self._slot)
        self._given = loader.generator
        given = [g for g in (loader.generator, *_generators(self._inner)) if g is not None]
        first_seed = given[0].initial_seed() if given else None
        self._seed = seed if first_seed is None else lambda: first_seed
        self._position = position
        own = torch.Generator() if loader.generator is None else loader.generator  # it seeds the workers
        loader.generator = own
        self._reseeded = {id(generator): generator for generator in (own, *given)}.values()
        # DataLoader.__setattr__ rejects another sampler, since a running iteration would ignore it
        object.__setattr__(loader, self._slot, self)

    @property
    def index_sampler(self) -> Any:
        """Return the sampler of item indices, or the user's batch sampler."""
        return self._inner.sampler if type(self._inner) is BatchSampler else self._inner

    def release(self) -> None:
        """Restore the loader's own sampler."""
        object.__setattr__(self._loader, self._slot, self._inner)
        self._loader.generator = self._given

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        self._reseed()  # the loader draws the seeds of its workers before the first batch
        return self._batches()

    def _reseed(self) -> tuple[int, float]:
        """Seed all generators for the current epoch; return the seed and the number of batches to skip."""
        epoch, skipped = self._position()
        cycle = 0
        if isinstance(skipped, int) and hasattr(self._inner, "__len__"):
            cycle, skipped = divmod(skipped, max(1, len(self._inner)))  # a shorter loader beside others starts over
        seed = derived_seed(self._seed(), epoch, cycle)
        for generator in self._reseeded:
            generator.manual_seed(seed)
        for sampler in (self._inner, getattr(self._inner, "sampler", None)):
            if set_epoch := getattr(sampler, "set_epoch", None):
                set_epoch(epoch)  # the Trainer calls it only after workers have got their first batches
        return seed, skipped

    def _batches(self) -> Iterator[Any]:
        seed, skipped = self._reseed()
        if skipped == math.inf:
            return
        stream = RandomStream(seed)
        with stream.drawing():
            batches = iter(self._inner)
            batch = next(batches, self)
        while batch is not self:
            if skipped == 0:
                yield batch
            skipped = max(0, skipped - 1)
            if type(self.index_sampler) in _DRAW_AT_THE_START:
                batch = next(batches, self)
            else:
                with stream.drawing():
                    batch = next(batches, self)


def is_map_style(loader: object) -> bool:
    """Return whether batches of ``loader`` can be skipped without loading them."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def _generators(sampler: Any) -> Iterable[torch.Generator | None]:
    for owner in (sampler, getattr(sampler, "sampler", None)):
        generator = getattr(owner, "generator", None)
        yield generator if isinstance(generator, torch.Generator) else None
