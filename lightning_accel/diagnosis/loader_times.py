"""DataLoaders of a fit that is examined: their settings, their workers, and what they take alone."""

import time
from statistics import median
from typing import Any

import lightning as L
from torch.utils.data import DataLoader

from lightning_accel._private.lightning import data_fetcher_of
from lightning_accel._private.torch import forget_workers, tree_leaves


def facts_of(loader: Any) -> dict[str, Any]:
    """Return the class of a loader and its settings, None for what it does not have."""
    names = ("batch_size", "num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
    return {"class": type(loader).__name__, **{name: getattr(loader, name, None) for name in names}}


def use_fewer_workers(trainer: L.Trainer, loaders: list[DataLoader[Any]], cores: int) -> None:
    """Begin to iterate over the loaders anew, with one worker for each core."""
    most = max(cores // len(loaders), 1)
    for loader in loaders:
        set_workers(loader, min(loader.num_workers, most))
    iter(data_fetcher_of(trainer.fit_loop))


def set_workers(loader: DataLoader[Any], num_workers: int) -> None:
    """Set how many workers the next iteration over a loader starts."""
    loader.num_workers = num_workers
    forget_workers(loader)


def start_ms(loaders: list[DataLoader[Any]]) -> float:
    """Return the median time of an epoch of one batch of each loader in ms."""
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        for loader in loaders:
            next(iter(loader), None)
        times.append(time.perf_counter() - begin)
    return 1000 * median(times)


def loading_ms(loaders: Any, seconds: float, max_batches: int) -> float | None:
    """Return the time of a batch of all training loaders in ms, nothing else running, from the second batch on."""
    total = 0.0
    for loader in tree_leaves(loaders):
        batches = iter(loader)
        times: list[float] = []
        if next(batches, None) is None:
            return None
        start = begin = time.perf_counter()
        while len(times) < max_batches and begin - start < seconds and next(batches, None) is not None:
            end = time.perf_counter()
            times.append(end - begin)
            begin = end
        if not times:
            return None
        total += 1000 * sum(times) / len(times)
    return total
