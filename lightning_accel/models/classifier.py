"""A convolutional classifier, or a plain perceptron. Shapes: B samples, C classes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from lightning_accel.models.hooks import hint_at_removed_channels, name_classes, targets_of_scores
from lightning_accel.nn.features import require_floating, require_rows, require_width
from lightning_accel.ops.bounds import require_integers
from lightning_accel.ops.names import list_of_sizes
from lightning_accel.ops.renames import renamed_arguments


class Classifier(L.LightningModule):
    """Classify images by convolutions, or vectors by a perceptron, as a baseline for other models.

    Each convolution is 3 by 3, with a batch norm and a ReLU; all but the first halve height and width. Features of
    the last are averaged over the image. Without ``channels`` inputs are flattened. Batches are pairs of inputs,
    (B, ``num_features``, H, W) with ``channels``, else (B, ...) with ``num_features`` values a sample, floating, and
    classes, (B,) int64. Logged: ``train/loss``; ``loss`` and ``accuracy`` under ``val/`` and ``test/``.

    Args:
        num_features: channels of an image, or values in a sample.
        num_classes: number of classes, the length of the output.
        channels: width of each convolution.
        hidden_dims: width of each hidden layer of the perceptron.
        optimizer: creates the optimizer; called with the parameters.

    Raises:
        TypeError: if an option has another type.
        ValueError: if a size is below 1.

    Example:
        >>> Classifier(1, 3, channels=[4, 6])(torch.randn(5, 1, 8, 8)).shape
        torch.Size([5, 3])
    """

    @renamed_arguments(in_features="num_features")
    def __init__(
        self,
        num_features: int = 64,
        num_classes: int = 10,
        *,
        channels: Sequence[int] = (),
        hidden_dims: Sequence[int] = (),
        optimizer: OptimizerCallable = torch.optim.AdamW,
    ) -> None:
        super().__init__()
        require_integers(1, num_features=num_features, num_classes=num_classes)
        for name, sizes in (("channels", channels), ("hidden_dims", hidden_dims)):
            for size in list_of_sizes(name, sizes):
                require_integers(1, **{name: size})
        self.save_hyperparameters(ignore="optimizer")
        hint_at_removed_channels(self)
        self.num_features = num_features
        self.takes_images = bool(channels)
        layers: list[nn.Module] = []
        width = num_features
        for number, out in enumerate(channels):
            stride = 1 if number == 0 else 2
            layers += [nn.Conv2d(width, out, 3, stride, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
            width = out
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()] if channels else [nn.Flatten()]
        for out in hidden_dims:
            layers += [nn.Linear(width, out), nn.ReLU()]
            width = out
        self.network = nn.Sequential(*layers, nn.Linear(width, num_classes))
        self.make_optimizer = optimizer
        self.val_accuracy: Metric = MulticlassAccuracy(num_classes, average="micro")
        self.test_accuracy: Metric = MulticlassAccuracy(num_classes, average="micro")

    if TYPE_CHECKING:  # Any, as torch declares it

        def __call__(self, x: Tensor) -> Tensor: ...

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits (B, C) of ``x``.

        Raises:
            TypeError: if ``x`` is not floating, or its dtype differs from that of the weights without autocast.
            ValueError: if ``x`` does not have the shape that the classifier was created for.
        """
        if self.takes_images:
            shape = "images (B, {}, H, W)"
            require_width(self, x, "num_features", self.num_features, shape, ndim=4, dim=1)
        else:
            require_rows(self, x, "num_features", self.num_features)
        require_floating(self, x, "inputs", self.network.parameters())
        logits: Tensor = self.network(x)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, target = batch
        logits = self(x)
        loss = F.cross_entropy(logits, targets_of_scores(target, logits, batch_idx, "train"))
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, batch_idx, "val", self.val_accuracy)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, batch_idx, "test", self.test_accuracy)

    def _evaluate(self, batch: tuple[Tensor, Tensor], batch_idx: int, stage: str, accuracy: Metric) -> None:
        x, target = batch
        logits = self(x)
        target = targets_of_scores(target, logits, batch_idx, stage)
        accuracy(logits, target)
        self.log(f"{stage}/loss", F.cross_entropy(logits, target), batch_size=len(target), sync_dist=True)
        self.log(f"{stage}/accuracy", accuracy, prog_bar=True)

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Return the most probable class of each sample, (B,) int64, its probability, (B,), and all of them, (B, C)."""
        x = batch if isinstance(batch, Tensor) else batch[0]
        return name_classes(self(x), None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters())
