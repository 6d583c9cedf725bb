"""Data sets that fit in memory, fetched one batch at a time, and the datamodules and loaders of them."""

import warnings
from abc import ABC, abstractmethod
from typing import Any

import lightning as L
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_accel.data.planned_sampler import PlannedSampler
from lightning_accel.data.samplers import ResumableLoader, ResumableSampler, progress_of


class BatchTensorDataset(Dataset[tuple[Tensor, ...]]):
    """Index tensors of equal length together along dimension 0.

    A DataLoader fetches a whole batch with one indexing operation per tensor; collating sample by sample costs many
    times as much (``benchmarks/bench_fit_loop.py`` measures it).

    Raises:
        ValueError: if the lengths differ.
    """

    def __init__(self, *tensors: Tensor) -> None:
        if len({len(tensor) for tensor in tensors}) != 1:
            raise ValueError(f"tensors must have equal lengths; got {[len(tensor) for tensor in tensors]}")
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        """Return the batch of items ``indices``; the DataLoader's fetcher prefers it to ``__getitem__``."""
        chosen = torch.tensor(indices)
        return tuple(tensor[chosen] for tensor in self.tensors)


class InMemoryDataModule(L.LightningDataModule, ABC):
    """Load batches of the data sets that ``setup`` makes, in order but for those that train.

    Subclasses set ``batch_size`` and ``num_workers``, and in ``setup`` the data sets that the run needs.
    """

    batch_size: int
    num_workers: int
    train_rows: Dataset[Any]
    val_rows: Dataset[Any]
    test_rows: Dataset[Any] | None
    predict_rows: Dataset[Any] | None

    @abstractmethod
    def setup(self, stage: str | None = None) -> None: ...

    def train_dataloader(self) -> DataLoader[Any]:
        return in_memory_loader(self.train_rows, self, self.batch_size, self.num_workers, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return in_memory_loader(self.val_rows, self, self.batch_size, self.num_workers)

    def test_dataloader(self) -> DataLoader[Any]:
        assert self.test_rows is not None  # setup raises otherwise
        return in_memory_loader(self.test_rows, self, self.batch_size, self.num_workers)

    def predict_dataloader(self) -> DataLoader[Any]:
        assert self.predict_rows is not None  # setup raises otherwise
        return in_memory_loader(self.predict_rows, self, self.batch_size, self.num_workers)


def in_memory_loader(
    rows: Dataset[Any], datamodule: L.LightningDataModule, batch_size: int, num_workers: int, shuffle: bool = False
) -> DataLoader[Any]:
    """Return a loader of the batches of ``rows.__getitems__``; memory is pinned if the Trainer runs on CUDA."""
    return DataLoader(rows, batch_size=batch_size, shuffle=shuffle, **_loader_options(datamodule, num_workers))


def resumable_loader(
    rows: Dataset[Any],
    sampler: PlannedSampler | ResumableSampler,
    datamodule: L.LightningDataModule,
    num_workers: int,
    batch_size: int | None = None,
) -> ResumableLoader:
    """Return a loader of the batches of ``rows`` that ``sampler`` lists; memory is pinned if the Trainer runs on CUDA.

    ``batch_size`` is for a sampler of single items. Where ``sampler`` shuffles, the Trainer's progress is the loader's.
    """
    loader = ResumableLoader(rows, batch_size=batch_size, sampler=sampler, **_loader_options(datamodule, num_workers))
    if sampler.shuffle and datamodule.trainer is not None:
        loader.progress = progress_of(datamodule.trainer)
    return loader


def _loader_options(datamodule: L.LightningDataModule, num_workers: int) -> dict[str, Any]:
    if num_workers == 0:  # indexing takes microseconds: following Lightning's advice to add workers would slow the run
        warnings.filterwarnings("ignore", message=".*does not have many workers", category=UserWarning)
    on_cuda = datamodule.trainer is not None and isinstance(datamodule.trainer.accelerator, CUDAAccelerator)
    return {
        "num_workers": num_workers,
        "collate_fn": identity_collate,
        "pin_memory": on_cuda,
        "persistent_workers": num_workers > 0,
    }


def identity_collate(batch: Any) -> Any:
    return batch
