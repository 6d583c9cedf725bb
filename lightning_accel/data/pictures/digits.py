"""The handwritten digits that come with scikit-learn. Shapes: B images, C channels, H and W pixels."""

from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_accel.data.in_memory import BatchTensorDataset, InMemoryDataModule
from lightning_accel.data.preprocessing import ScaledPixels
from lightning_accel.data.sequences.batch import IGNORED
from lightning_accel.ops.bounds import require_flags, require_integers
from lightning_accel.ops.extras import import_on_use
from lightning_accel.ops.renames import renamed_arguments

datasets = import_on_use("sklearn.datasets")
model_selection = import_on_use("sklearn.model_selection")


class DigitsDataModule(InMemoryDataModule):
    """Load 1,797 grayscale digits as batches of images (B, 1, 8, 8) float32 in [0, 1] and labels (B,) int64.

    Seventy percent train, ten validate and twenty test, stratified by class; the same ``seed`` gives the same
    split on every machine. ``predict`` runs over the test images.

    Args:
        batch_size: samples per process and step.
        seed: seed of the split into training, validation and test images.
        max_shift: largest random shift of training images, in pixels, 0 to 7, vertically and horizontally.
        num_workers: workers that load batches; 0 is fastest, since the images are in memory.
        binarize: make every pixel exactly 0 or 1, 1 above 0.5; shifted images stay binary, since they move by whole
            pixels and are padded with zeros.
        num_labeled: training images that keep their class, 10 to 1247, stratified; the others have the class -100, as
            :class:`lightning_accel.DeepBeliefNetwork` takes them. By default all keep it.

    Raises:
        TypeError: if an option has another type.
        ValueError: if a number is out of range; in ``load_state_dict``, if ``seed`` or ``binarize`` differs from
            the checkpoint's.

    Source: E. Alpaydin and C. Kaynak 1998, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository

    Example:
        >>> data = DigitsDataModule(batch_size=32)
        >>> data.setup("fit")
        >>> images, labels = next(iter(data.train_dataloader()))
        >>> images.shape
        torch.Size([32, 1, 8, 8])
    """

    num_features = 64
    num_classes = 10
    class_names = tuple("0123456789")

    @renamed_arguments(split_seed="seed")
    def __init__(
        self,
        batch_size: int = 64,
        seed: int = 0,
        max_shift: int = 0,
        num_workers: int = 0,
        binarize: bool = False,
        num_labeled: int | None = None,
    ) -> None:
        super().__init__()
        require_integers(1, batch_size=batch_size)
        require_integers(0, seed=seed, max_shift=max_shift, num_workers=num_workers)
        require_flags(binarize=binarize)
        if max_shift > 7:
            raise ValueError(f"max_shift must lie in [0, 7], the images being 8 pixels wide; got {max_shift}")
        if num_labeled is not None and not (isinstance(num_labeled, Integral) and 10 <= num_labeled <= 1247):
            raise ValueError(
                f"num_labeled must lie in [10, 1247], of 1257 training images, as an integer; got {num_labeled}"
            )
        self.num_labeled = num_labeled
        self.batch_size = batch_size
        self.seed = seed
        self.max_shift = max_shift
        self.num_workers = num_workers
        self.binarize = binarize

    def setup(self, stage: str | None = None) -> None:
        split = model_selection.train_test_split
        pixels, labels = datasets.load_digits(return_X_y=True)
        rest, test = split(range(len(labels)), test_size=0.2, random_state=self.seed, stratify=labels)
        train, val = split(rest, test_size=0.125, random_state=self.seed, stratify=labels[rest])
        images = torch.from_numpy(pixels).float().div(16).view(-1, 1, 8, 8)
        if self.binarize:
            images = images.gt(0.5).float()
        targets = torch.from_numpy(labels).long()
        if self.num_labeled is not None:
            _, without = split(train, train_size=self.num_labeled, random_state=self.seed, stratify=labels[train])
            targets[without] = IGNORED
        self.train_rows, self.val_rows, self.test_rows = (
            BatchTensorDataset(images[chosen], targets[chosen]) for chosen in (train, val, test)
        )

    def preprocessing(self) -> ScaledPixels:
        """Return the module that scales scikit-learn's pixels in [0, 16] as batches have them, for exported models."""
        return ScaledPixels(16, self.binarize)

    def state_dict(self) -> dict[str, Any]:
        return {"split_seed": self.seed, "binarize": self.binarize}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["split_seed"] != self.seed:
            raise ValueError(
                f"the checkpoint was trained with seed={state_dict['split_seed']}; with {self.seed}, "
                "images that it was trained on would be tested"
            )
        trained_on = state_dict.get("binarize", False)  # older checkpoints lack it
        if trained_on != self.binarize:
            raise ValueError(
                f"the checkpoint was trained with binarize={trained_on}; with {self.binarize}, the model would read "
                "images of a kind that it never saw"
            )

    def predict_dataloader(self) -> DataLoader[Any]:
        return self.test_dataloader()

    def on_after_batch_transfer(self, batch: tuple[Tensor, ...], dataloader_idx: int) -> tuple[Tensor, ...]:
        if self.max_shift == 0 or self.trainer is None or not self.trainer.training:
            return batch
        images, *rest = batch
        return shift_images(images, self.max_shift), *rest


def shift_images(images: Tensor, max_shift: int) -> Tensor:
    """Shift each of ``images`` (B, C, H, W) at random by up to ``max_shift`` pixels along H and W; pad with zeros."""
    num_images, channels, height, width = images.shape
    device = images.device
    top, left = torch.randint(2 * max_shift + 1, (2, num_images, 1), device=device)
    image = torch.arange(num_images, device=device).view(-1, 1, 1, 1)
    channel = torch.arange(channels, device=device).view(-1, 1, 1)
    rows = (top + torch.arange(height, device=device)).view(num_images, 1, height, 1)
    columns = (left + torch.arange(width, device=device)).view(num_images, 1, 1, width)
    return F.pad(images, (max_shift,) * 4)[image, channel, rows, columns]
