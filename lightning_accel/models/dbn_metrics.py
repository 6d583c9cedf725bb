"""Evaluation metrics of deep belief networks. Shapes: B samples, V visible units, C classes."""

from collections.abc import Iterator
from typing import Literal, TypeAlias, cast

import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_warn
from torch import Generator, Tensor, nn
from torchmetrics import Metric
from torchmetrics.aggregation import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_accel.nn.boltzmann.partition import LogZ
from lightning_accel.nn.boltzmann.rbm import RBM
from lightning_accel.nn.boltzmann.stack import RBMStack

Likelihood: TypeAlias = Literal["none", "exact", "ais"]


class BeliefMetrics(nn.Module):
    """Compute the metrics of one kind of evaluation, over all its batches and processes.

    Args:
        num_classes: number of classes, if there are any.
        likelihood: whether, and how, the log-probability of samples is computed.
    """

    def __init__(self, num_classes: int | None, likelihood: Likelihood) -> None:
        super().__init__()
        figures: dict[str, nn.Module] = {"loss": MeanMetric(), "reconstruction_error": MeanMetric()}
        if num_classes is not None:
            figures["accuracy"] = MulticlassAccuracy(num_classes, average="micro")
        if likelihood != "none":
            figures["log_prob"] = MeanMetric()
        self.figures = nn.ModuleDict(figures)
        self.likelihood = likelihood
        self.log_z_gap: float | None = None  # in nats, between annealing upwards and downwards
        self._log_z: LogZ | None = None

    def items(self) -> Iterator[tuple[str, Metric]]:
        return ((name, cast("Metric", figure)) for name, figure in self.figures.items())

    def begin(self) -> None:
        # Trainer.validate leaves metrics with tensors created in inference mode, which fit could not update
        for _, figure in self.items():
            figure.reset()
        self._log_z = self.log_z_gap = None

    def update(
        self, stack: RBMStack, num_layers: int, rows: Tensor, scores: Tensor | None, classes: Tensor | None
    ) -> None:
        """Add a batch.

        Args:
            stack: the stack, whose lowest ``num_layers`` layers are trained.
            num_layers: number of trained layers.
            rows: samples (B, V).
            scores: logits of a classifier on top, (B, C), if there is one.
            classes: (B,), if there are any; without ``scores`` the stack's labels predict them.
        """
        error = (stack.reconstruct(rows, num_layers) - rows).square().mean()
        values = {"loss": error, "reconstruction_error": error}
        if self.likelihood != "none":
            values["log_prob"] = self._log_prob(stack, num_layers, rows).mean()
            values["loss"] = -values["log_prob"]
        if scores is not None and classes is not None:
            values["loss"] = F.cross_entropy(scores, classes)
        if classes is not None:
            cast("Metric", self.figures["accuracy"]).update(
                stack.class_log_prob(rows) if scores is None else scores, classes
            )
        for name, value in values.items():
            cast("Metric", self.figures[name]).update(value, weight=len(rows))

    def _log_prob(self, stack: RBMStack, num_layers: int, rows: Tensor) -> Tensor:
        """Compute the log-probability, or a lower bound of it, of samples (B, V) under the lowest layers, (B,)."""
        if num_layers < len(stack.layers):
            stack = RBMStack(stack.layers[:num_layers])
        if self._log_z is None:
            self._log_z = stack.top.log_z("exact") if self.likelihood == "exact" else self._anneal(stack.top)
        return stack.log_prob_bound(rows, self._log_z).estimate

    def _anneal(self, top: RBM) -> LogZ:
        generator = Generator(top.weight.device).manual_seed(0)  # evaluation must not change random numbers of training
        found = top.log_z("ais", generator=generator)
        self.log_z_gap = float(top.log_z("reverse_ais", generator=generator).upper - found.lower)
        if self.log_z_gap > 1:
            rank_zero_warn(
                f"log Z is known to {self.log_z_gap:.3g} nats only: annealing upwards and downwards disagree, as they "
                "do where training diverges. Lower the learning rate, or take likelihood='exact' for small RBMs"
            )
        return found
