"""Evaluation of deep belief networks. Shapes: B samples, V visible units, H top hidden units, C classes."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_warn
from torch import Generator, Tensor, nn
from torchmetrics import Metric
from torchmetrics.aggregation import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_accel.models.dbn_stages import Schedule
from lightning_accel.models.hooks import SizedModel, name_classes, require_classes
from lightning_accel.nn.boltzmann.partition import LogZ
from lightning_accel.nn.boltzmann.rbm import RBM
from lightning_accel.nn.boltzmann.stack import UNKNOWN, RBMStack

Batch: TypeAlias = Tensor | Sequence[Tensor]
Likelihood: TypeAlias = Literal["none", "exact", "ais"]
_LARGE = 1e6  # more than the loss of any sample


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
            figures["accuracy"] = MulticlassAccuracy(num_classes, average="micro", ignore_index=UNKNOWN)
        if likelihood != "none":
            figures["log_prob"] = MeanMetric()
        self.figures = nn.ModuleDict(figures)
        self.num_known = SumMetric()  # samples of known class
        self.likelihood = likelihood
        self.log_z_gap: float | None = None  # in nats, between annealing upwards and downwards
        self._log_z: LogZ | None = None

    def items(self) -> Iterator[tuple[str, Metric]]:
        return ((name, cast("Metric", figure)) for name, figure in self.figures.items())

    def begin(self) -> None:
        # Trainer.validate leaves metrics with tensors created in inference mode, which fit could not update
        self.num_known.reset()
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
            classes: (B,), if there are any, -100 where unknown; without ``scores`` the stack's labels predict them.
        """
        error = (stack.reconstruct(rows, num_layers) - rows).square().mean()
        values = {"loss": error, "reconstruction_error": error}
        weights = dict.fromkeys(self.figures, torch.tensor(len(rows), device=rows.device))
        if self.likelihood != "none":
            values["log_prob"] = self._log_prob(stack, num_layers, rows).mean()
            values["loss"] = -values["log_prob"]
        if scores is not None and classes is not None:
            weights["loss"] = (classes != UNKNOWN).sum()
            values["loss"] = cross_entropy_of_known(scores, classes)
        if classes is not None:
            self.num_known.update((classes != UNKNOWN).sum())
            cast("Metric", self.figures["accuracy"]).update(
                stack.class_log_prob(rows) if scores is None else scores, classes
            )
        for name, value in values.items():
            cast("Metric", self.figures[name]).update(value, weight=weights[name])

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


class EvaluatedNetwork(SizedModel):
    """Evaluate a deep belief network, of which training has completed the lowest layers, and predict by it."""

    stack: RBMStack | None
    head: nn.Linear | None
    hidden_dims: list[int]
    labels: bool
    finetune: str
    num_classes: int | None
    class_names: list[str] | None
    schedule: Schedule
    val_figures: BeliefMetrics
    test_figures: BeliefMetrics
    _stage = 0

    @property
    def _needs_classes(self) -> bool:
        return self.labels or self.finetune == "classifier"

    @property
    def built_stack(self) -> RBMStack:
        """Return the stack; raise a RuntimeError if its sizes are not known yet."""
        if self.stack is None:
            raise RuntimeError(
                "the sizes of this DeepBeliefNetwork are not known yet; pass num_visible and num_classes"
            )
        return self.stack

    if TYPE_CHECKING:  # Any, as torch declares it

        def __call__(self, x: Tensor) -> Tensor: ...

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits (B, C) of a classifier, else means of the top hidden units (B, H), of samples (B, ...)."""
        features = self.built_stack.transform(flat(x))
        return features if self.head is None else self.head(features.to(self.head.weight.dtype))

    def on_validation_epoch_start(self) -> None:
        self.val_figures.begin()
        self._copy_recognition_weights()
        if epochs := self._epochs_to_last_stage():
            self.log("val/loss", _LARGE * epochs, logger=False, sync_dist=True)

    def on_test_epoch_start(self) -> None:
        self.test_figures.begin()
        self._copy_recognition_weights()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "val", self.val_figures)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "test", self.test_figures)

    def _evaluate(self, batch: Batch, stage: str, figures: BeliefMetrics) -> None:
        x = first_of(batch)
        classes = classes_of(batch) if self._needs_classes else None
        if classes is not None:
            require_classes(classes, (len(x),), self.num_classes or 0, f"{stage} classes")
        scores = None if self.head is None else self(x)
        figures.update(self.built_stack, self._num_trained(), flat(x), scores, classes)
        if figures.log_z_gap is not None:
            self.log(f"{stage}/log_z_gap", figures.log_z_gap, sync_dist=True)

    def _log_figures(self, stage: str, figures: BeliefMetrics) -> None:
        """Log figures over all processes, but for those that need a class where not one is known."""
        left_out = {"loss"} if self._epochs_to_last_stage() else set()
        if self._needs_classes and not figures.num_known.compute():
            of_classes = {"accuracy"} if self.head is None else {"accuracy", "loss"}
            left_out |= of_classes
            if not self.trainer.sanity_checking:
                rank_zero_warn(
                    f"no {stage} sample has a known class, which {' and '.join(sorted(of_classes))} need: they are not "
                    "logged. Give the class of some samples"
                )
        for name, figure in figures.items():
            if name not in left_out:
                self.log(f"{stage}/{name}", figure, prog_bar=name in ("loss", "accuracy"))

    def on_test_epoch_end(self) -> None:
        self._log_figures("test", self.test_figures)

    def on_validation_epoch_end(self) -> None:
        self._log_figures("val", self.val_figures)

    def _epochs_to_last_stage(self) -> int:
        if self.trainer.state.fn != "fit":
            return 0
        return max(0, self.schedule.spans[-1].first_epoch - self.current_epoch)

    def _num_trained(self) -> int:
        """Return the number of layers trained so far, including the current one; all outside of ``fit``."""
        return min(self._stage + 1, len(self.hidden_dims)) if self.trainer.state.fn == "fit" else len(self.hidden_dims)

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """Return the most probable class of each sample, (B,), and probabilities; without classes, the top features.

        ``class`` is a list of names if the model knows them, else an int64 tensor; ``probability``, (B,), is that of
        this class, ``probabilities`` are (B, C), and ``feature`` is (B, H).
        """
        x = first_of(batch)
        if not self._needs_classes:
            return {"feature": self(x)}
        scores = self(x) if self.head is not None else self.built_stack.class_log_prob(flat(x))
        return name_classes(scores, self.class_names)

    def _copy_recognition_weights(self) -> None:
        """Copy the RBMs' weights to separate recognition weights, which are trained only in the last stage."""
        if self.finetune == "updown" and self.trainer.state.fn == "fit" and self._stage < len(self.hidden_dims):
            self.built_stack.untie_()


def cross_entropy_of_known(scores: Tensor, classes: Tensor) -> Tensor:
    """Compute the mean cross entropy of the samples of known class, (); 0 if there are none."""
    total = F.cross_entropy(scores, classes, ignore_index=UNKNOWN, reduction="sum")
    return total / (classes != UNKNOWN).sum().clamp(min=1)


def first_of(batch: Batch) -> Tensor:
    return batch if isinstance(batch, Tensor) else batch[0]


def flat(x: Tensor) -> Tensor:
    """Flatten ``x`` (B, ...) to floating samples (B, V)."""
    return x.flatten(1) if x.is_floating_point() else x.flatten(1).float()


def classes_of(batch: Batch) -> Tensor:
    if isinstance(batch, Tensor) or len(batch) < 2:
        raise ValueError(
            "labels=True and fine-tuning by 'classifier' need batches of rows and classes; got rows alone. Let the "
            "data module give both, or train without classes"
        )
    classes = batch[1]
    return classes if classes.is_floating_point() else classes.long()
