"""Bars and stripes, a density small enough to know. Shapes: B rows, N pictures."""

import math
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_accel.data.in_memory import TensorRows, require_loading_options, row_loader


class BarsAndStripesDataModule(L.LightningDataModule):
    """Every picture of bars or stripes; batches are images (B, 1, size, size) float32, 0 or 1, and labels (B,) int64.

    N = 2 * 2**size pictures: those with rows of one value each, the bars, of class 0, then those with columns of one
    value each, the stripes, of class 1. The all-0 and the all-1 picture are both, so they are among the pictures twice,
    once in each class: a model of the density should give them twice the probability of another, and no classifier is
    right about more than N - 2 of the N.

    Training, validation, test and prediction run over the same pictures, since there are no others to hold back: what
    is asked is how near a model's distribution comes to this one. The log-likelihood summed over the N pictures is at
    most ``max_log_likelihood``: -41.59 nats for size 3, -108.13 for size 4.

    Args:
        size: pixels along each side, 2 to 12.
        batch_size: rows per process and step.
        copies: how often an epoch of training takes each picture; epochs of a few rows cost more to begin and to end
            than to train on.
        num_workers: processes that fetch batches; 0 is fastest, since the rows are in memory.

    Raises:
        ValueError: if a number is out of range; in ``load_state_dict``, if the size is another.

    Source: MacKay 2003, Information Theory, Inference, and Learning Algorithms, chapter 43, where first the direction
    is drawn and then each line, hence the uniform pictures twice, as also in ``BarsAndStripes.h`` of the library Shark.
    Counted once, N would be 2 * 2**size - 2 and the bound -N log N: -36.95 for size 3, -102.04 for size 4.
    """

    num_classes = 2
    class_names = ("bars", "stripes")

    def __init__(self, size: int = 3, batch_size: int = 16, copies: int = 1, num_workers: int = 0) -> None:
        super().__init__()
        require_loading_options(batch_size, 0, num_workers)
        if not 2 <= size <= 12:
            raise ValueError(f"size must lie in [2, 12], there being 2 * 2**size pictures; got {size}")
        if copies < 1:
            raise ValueError(f"copies must be at least 1; got {copies}")
        self.size = size
        self.batch_size = batch_size
        self.copies = copies
        self.num_workers = num_workers

    @property
    def num_features(self) -> int:
        """Pixels of a picture."""
        return self.size**2

    @property
    def max_log_likelihood(self) -> float:
        """The largest sum of log-probabilities, in nats, that any distribution gives the N pictures.

        N - 4 of them are told from all others and have probability 1 / N at best, the other four, which are two, 2 / N.

        >>> round(BarsAndStripesDataModule(size=3).max_log_likelihood, 2)
        -41.59
        """
        num_pictures = 2 * 2**self.size
        return 4 * math.log(2) - num_pictures * math.log(num_pictures)

    def setup(self, stage: str | None = None) -> None:
        self.rows = TensorRows(*bars_and_stripes(self.size))
        self.train_rows = TensorRows(*(tensor.repeat_interleave(self.copies, dim=0) for tensor in self.rows.tensors))

    def state_dict(self) -> dict[str, int]:
        return {"size": self.size}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        if state_dict["size"] != self.size:
            raise ValueError(
                f"the checkpoint was trained with size={state_dict['size']}, and size is {self.size} here; give the "
                "size of its run"
            )

    def train_dataloader(self) -> DataLoader[Any]:
        return row_loader(self.train_rows, self, self.batch_size, self.num_workers, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return row_loader(self.rows, self, self.batch_size, self.num_workers)

    def test_dataloader(self) -> DataLoader[Any]:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[Any]:
        return self.val_dataloader()


def bars_and_stripes(size: int) -> tuple[Tensor, Tensor]:
    """All pictures (N, 1, size, size) float32, N = 2 * 2**size, and their classes (N,): 0 of bars, 1 of stripes."""
    lines = torch.arange(2**size)[:, None] >> torch.arange(size) & 1  # (2**size, size)
    bars = lines[:, None, :, None].expand(-1, 1, size, size)
    images = torch.cat([bars, bars.transpose(2, 3)]).float()
    return images, torch.arange(2).repeat_interleave(2**size)
