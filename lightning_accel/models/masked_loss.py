"""Losses and metrics over the valid targets of batches. Shapes: S scores."""

from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.aggregation import MeanMetric
from torchmetrics.functional.classification import binary_auroc
from torchmetrics.utilities import dim_zero_cat

from lightning_accel.data.sequences.batch import IGNORED
from lightning_accel.models.hooks import SizedModel, as_classes, is_logging_step, take_unit
from lightning_accel.ops.float32 import at_least_float32

ValueLoss: TypeAlias = Literal["squared", "absolute", "logistic"]


class MaskedLoss(NamedTuple):
    """Hold sums over the valid targets of a batch, and their number; () each."""

    loss: Tensor  # sum of cross entropies in nats, or of squared or absolute errors in units
    score: Tensor  # number of correct classes or labels, or sum of squared or absolute errors
    valid: Tensor


def is_valid(target: Tensor) -> Tensor:
    """Return which targets are present, bool in the shape of ``target``."""
    return ~target.isnan() if target.is_floating_point() else target != IGNORED


def masked_loss(
    scores: Tensor, target: Tensor, unit: Tensor | None = None, value_loss: ValueLoss = "squared"
) -> MaskedLoss:
    """Compare ``scores`` (..., S) with classes (...), or with as many floating values.

    Values are compared by squared or absolute errors, which for the loss are divided by ``unit`` (S,), or as labels of
    0 and 1 by their cross entropy to the sigmoid of the scores.

    Raises:
        ValueError: if their shapes do not match.

    >>> masked_loss(torch.tensor([[1.0], [5.0]]), torch.tensor([3.0, torch.nan]))
    MaskedLoss(loss=tensor(4.), score=tensor(4.), valid=tensor(1))
    """
    scores = at_least_float32(scores)
    valid = is_valid(target)
    expected = tuple(scores.shape) if target.is_floating_point() else tuple(scores.shape[:-1])
    if tuple(target.shape) != expected and expected != (*target.shape, 1):
        raise ValueError(f"the model's scores need a target of shape {expected}; got {tuple(target.shape)}")
    if target.is_floating_point():
        target, there = target.view_as(scores), valid.view_as(scores)
        if value_loss == "logistic":
            entropy = F.binary_cross_entropy_with_logits(scores, target.nan_to_num(), reduction="none")
            correct = (scores > 0) == (target > 0.5)
            return MaskedLoss(torch.where(there, entropy, 0).sum(), (correct & there).sum(), valid.sum())
        error = torch.where(there, scores - target.nan_to_num(), 0)
        scaled = error if unit is None else error / unit
        measure = torch.square if value_loss == "squared" else torch.abs
        return MaskedLoss(measure(scaled).sum(), measure(error.detach()).sum(), valid.sum())
    loss = F.cross_entropy(scores.flatten(0, -2), target.flatten(), ignore_index=IGNORED, reduction="sum")
    return MaskedLoss(loss, (scores.argmax(dim=-1) == target).sum(), valid.sum())


class MeanAUROC(Metric):
    """Compute the mean area under the ROC curve over labels, those aside of which all targets are equal or missing.

    Source: the metric of Hu et al. 2020, Open Graph Benchmark, https://arxiv.org/abs/2005.00687, for molecules.
    """

    scores: list[Tensor]
    targets: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("scores", [], dist_reduce_fx="cat")
        self.add_state("targets", [], dist_reduce_fx="cat")

    def update(self, scores: Tensor, targets: Tensor) -> None:
        """Add scores and targets (B, K), NaN for missing ones."""
        self.scores.append(scores.detach().float())
        self.targets.append(targets.view_as(scores).float())

    def compute(self) -> Tensor:
        """Return the mean; NaN where no label has both targets."""
        areas = []
        for scores, targets in zip(dim_zero_cat(self.scores).T, dim_zero_cat(self.targets).T, strict=True):
            known = is_valid(targets)
            if len(targets[known].unique()) == 2:
                areas.append(binary_auroc(scores[known], targets[known].long()))
        return torch.stack(areas).mean() if areas else self.scores[0].new_tensor(torch.nan)


class SupervisedModel(SizedModel):
    """Train by the mean loss over the valid targets of all processes, and log means over those of an epoch.

    A subclass implements ``_target``, ``_masked_loss`` and ``_num_samples`` of a batch, and ``_unit``.
    """

    target_kind: str | None
    num_classes: int | None
    num_targets: int | None

    def __init__(self) -> None:
        super().__init__()
        self.value_loss: ValueLoss = "squared"
        self._valid_per_sample: Tensor | None = None
        self.val_loss, self.val_score = MeanMetric(), MeanMetric()
        self.test_loss, self.test_score = MeanMetric(), MeanMetric()

    def _target(self, batch: Any, stage: str) -> Tensor:
        raise NotImplementedError

    def _masked_loss(self, batch: Any, stage: str) -> MaskedLoss:
        raise NotImplementedError

    def _num_samples(self, batch: Any) -> int:
        raise NotImplementedError

    @property
    def _unit(self) -> tuple[Tensor, Tensor]:
        """Return the buffers of the mean and the standard deviation of values, (S,) each."""
        raise NotImplementedError

    @property
    def _has_values(self) -> bool:
        """Return whether targets are values, not classes."""
        return self.target_kind == "regression"

    def _unscale(self, values: Tensor) -> Tensor:
        mean, std = self._unit
        return at_least_float32(values) * std + mean

    def _read_datamodule(self) -> None:
        super()._read_datamodule()
        if self.target_kind in ("regression", "multilabel") and self.num_targets is None:
            self.num_targets = self.hparams["num_targets"] = 1

    def on_fit_start(self) -> None:
        """Copy the mean and standard deviation of values from the datamodule, if it provides them."""
        super().on_fit_start()
        if self._has_values:
            take_unit(self, *self._unit, of="feature" if self.target_kind == "forecasting" else "target")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Count the valid targets on all processes, before a strategy splits the batch further."""
        target = self._target(batch, "train")
        self._require_classes(target, "train", batch_idx)
        valid = is_valid(target).sum().float()
        count = self.trainer.strategy.reduce(valid, reduce_op="mean").clamp(min=1)
        self._valid_per_sample = count / self._num_samples(batch)

    def _require_classes(self, target: Tensor, stage: str, batch_idx: int) -> None:
        if batch_idx == 0 and self.num_classes is not None and not target.is_floating_point():
            as_classes(target, target.shape, self.num_classes, stage, look=True)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        measured, num_samples = self._masked_loss(batch, "train"), self._num_samples(batch)
        per_sample = self._valid_per_sample
        if per_sample is None:  # a subclass may override on_train_batch_start
            per_sample = measured.valid.clamp(min=1) / num_samples
        # The mean number of valid targets per process: the mean over processes of loss = sum / weight is then the mean
        # over all targets, and so is the mean over the samples of splits of this batch. WeightedAccumulation and
        # accel_dp read the weight.
        weight = per_sample * num_samples
        loss = measured.loss / weight
        if is_logging_step(self):
            self.log("train/loss", loss, prog_bar=True, sync_dist=True, batch_size=num_samples)
        return {"loss": loss, "weight": weight}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._require_classes(self._target(batch, "val"), "val", batch_idx)
        self._evaluate(batch, "val", self.val_loss, self.val_score)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._require_classes(self._target(batch, "test"), "test", batch_idx)
        self._evaluate(batch, "test", self.test_loss, self.test_score)

    def _evaluate(self, batch: Any, stage: str, loss: MeanMetric, score: MeanMetric) -> None:
        measured, num_samples = self._masked_loss(batch, stage), self._num_samples(batch)
        count = measured.valid.clamp(min=1)
        loss.update(measured.loss / count, weight=measured.valid)
        score.update(measured.score / count, weight=measured.valid)
        self.log(f"{stage}/loss", loss, batch_size=num_samples)
        name = ("mae" if self.value_loss == "absolute" else "mse") if self._has_values else "accuracy"
        self.log(f"{stage}/{name}", score, prog_bar=True, batch_size=num_samples)
