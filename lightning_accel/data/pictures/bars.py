"""Bars and stripes, a distribution small enough to be known exactly. Shapes: B images of a batch, N images in all."""

import math

import torch
from torch import Tensor

from lightning_accel.data.in_memory import BatchTensorDataset, InMemoryDataModule
from lightning_accel.ops.bounds import require_integers


class BarsAndStripesDataModule(InMemoryDataModule):
    """Generate all bars and stripes as batches of binary images (B, 1, size, size) float32 and labels (B,) int64.

    There are N = 2 * 2**size images. The first half, the bars of class 0, have constant rows; the other half, the
    stripes of class 1, have constant columns. The all-0 and the all-1 image are both, so each occurs twice, once in
    each class: a density model should give them twice the probability of any other, and a classifier is right about at
    most N - 2 of the N.

    Training, validation, test and prediction use the same images, since there are no others: the question is how close
    a model's distribution comes to this one. The log-likelihood summed over the N images is at most
    ``max_log_likelihood``: -41.59 nats for size 3, -108.13 for size 4.

    Args:
        size: pixels along each side, 2 to 12.
        batch_size: samples per process and step.
        copies: how often a training epoch visits each image; starting and ending an epoch of a few samples takes
            longer than training on them.
        num_workers: workers that load batches; 0 is fastest, since the images are in memory.

    Raises:
        TypeError: if an option has another type.
        ValueError: if a number is out of range; in ``load_state_dict``, if ``size`` differs from the checkpoint's.

    Source: MacKay 2003, Information Theory, Inference, and Learning Algorithms, chapter 43, which draws the direction
    first and then each line, so that the uniform images occur twice, as in ``BarsAndStripes.h`` of the library Shark.
    Counted once, N would be 2 * 2**size - 2 and the bound -N log N: -36.95 for size 3, -102.04 for size 4.

    Example:
        >>> data = BarsAndStripesDataModule(size=3, batch_size=16)
        >>> data.setup("fit")
        >>> images, labels = next(iter(data.train_dataloader()))
        >>> images.shape
        torch.Size([16, 1, 3, 3])
    """

    num_classes = 2
    class_names = ("bars", "stripes")

    def __init__(self, size: int = 3, batch_size: int = 16, copies: int = 1, num_workers: int = 0) -> None:
        super().__init__()
        require_integers(1, size=size, batch_size=batch_size, copies=copies)
        require_integers(0, num_workers=num_workers)
        if not 2 <= size <= 12:
            raise ValueError(f"size must lie in [2, 12], there being 2 * 2**size pictures; got {size}")
        self.size = size
        self.batch_size = batch_size
        self.copies = copies
        self.num_workers = num_workers

    @property
    def num_features(self) -> int:
        """Return the number of pixels of an image."""
        return self.size**2

    @property
    def max_log_likelihood(self) -> float:
        """Return the largest log-likelihood, in nats, that any distribution reaches summed over the N images.

        N - 4 images are distinct and have probability 1 / N at best; the other four are two images, with 2 / N each.

        >>> round(BarsAndStripesDataModule(size=3).max_log_likelihood, 2)
        -41.59
        """
        num_pictures = 2 * 2**self.size
        return 4 * math.log(2) - num_pictures * math.log(num_pictures)

    def setup(self, stage: str | None = None) -> None:
        rows = BatchTensorDataset(*bars_and_stripes(self.size))
        self.train_rows = BatchTensorDataset(*(tensor.repeat_interleave(self.copies, dim=0) for tensor in rows.tensors))
        self.val_rows = self.test_rows = self.predict_rows = rows

    def state_dict(self) -> dict[str, int]:
        return {"size": self.size}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        if state_dict["size"] != self.size:
            raise ValueError(
                f"the checkpoint was trained with size={state_dict['size']}, and size is {self.size} here; give the "
                "size of its run"
            )


def bars_and_stripes(size: int) -> tuple[Tensor, Tensor]:
    """Return all images (N, 1, size, size) float32, N = 2 * 2**size, and classes (N,): 0 for bars, 1 for stripes."""
    lines = torch.arange(2**size)[:, None] >> torch.arange(size) & 1  # (2**size, size)
    bars = lines[:, None, :, None].expand(-1, 1, size, size)
    images = torch.cat([bars, bars.transpose(2, 3)]).float()
    return images, torch.arange(2).repeat_interleave(2**size)
