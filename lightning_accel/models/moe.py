"""Mixture-of-experts classifier. Shapes: B samples, D features, C classes, E experts."""

from collections.abc import Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.aggregation import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_accel._private.lightning import has_trainer
from lightning_accel.models.experts import Experts
from lightning_accel.models.hooks import (
    EpochLoad,
    SizedModel,
    is_logging_step,
    keep_plain_hyperparameters,
    list_of_str,
    name_classes,
    require_class_names,
    targets_of_scores,
)
from lightning_accel.nn import ExpertLoad, GateReport, MixtureOfExperts, TopKGate, summarise_load
from lightning_accel.nn.features import require_floating, require_rows
from lightning_accel.nn.moe.gating import GateFactory
from lightning_accel.ops.options import options_of, read_options
from lightning_accel.ops.renames import renamed_arguments

Batch: TypeAlias = tuple[Tensor, Tensor]


class ClassifierOutput(NamedTuple):
    """Hold the scores of the classes, and the report of the gate."""

    logits: Tensor  # (B, C)
    report: GateReport


class MoEClassifier(SizedModel):
    """Classify samples by an encoder, a residual mixture that routes each sample to ``k`` experts, and a head.

    Batches are pairs of samples, (B, ...) floating, and classes, (B,) int64 in [0, C). The loss is cross entropy plus
    ``experts.balance_weight`` times the gate's balance loss and ``experts.z_weight`` times its z-loss. Logged:
    ``train/loss`` (cross entropy), ``train/balance_loss`` and the statistics of the gate by
    :func:`lightning_accel.nn.summarise_load`; at the end of each training epoch ``train/accuracy`` and
    ``train/expert_load_0`` ..., the share of the slots requested of each expert in it; ``loss`` and ``accuracy`` under
    ``val/`` and ``test/``.

    Args:
        num_features: values in a sample once flattened; by default the datamodule's attribute of that name.
        num_classes: number of classes; by default the datamodule's attribute of that name.
        dim: width of the encoder's output and of the mixture.
        experts: the options of the mixture, see :class:`lightning_accel.models.Experts`.
        dropout: share of the mixture's output that is dropped in training.
        gate: class or function that creates the gate, such as :class:`lightning_accel.TopKGate` or
            :class:`lightning_accel.nn.ExpertChoiceGate`; called with ``dim``, ``num_experts`` and ``k``.
            Hyperparameters contain it if a config named it, else pass it to ``load_from_checkpoint`` again.
        encoder: maps samples (B, ...) to (B, ``dim``), which makes ``num_features`` unnecessary; by default flatten,
            linear layer, GELU. Hyperparameters do not contain it: pass it to ``load_from_checkpoint`` again.
        class_names: names of the classes for predictions; by default the datamodule's, if it has any.
        optimizer: creates the optimizer; called with the parameters.

    Raises:
        ValueError: if a size is below 1 or ``k`` not in [1, ``num_experts``]; before a run starts, if sizes are
            neither given nor provided by the datamodule, contradict it, or do not match ``class_names``.

    Source: Shazeer et al. 2017, Outrageously Large Neural Networks, https://arxiv.org/abs/1701.06538; balance loss:
    Fedus et al. 2021, https://arxiv.org/abs/2101.03961; z-loss: Zoph et al. 2022, https://arxiv.org/abs/2202.08906.

    Example:
        >>> model = MoEClassifier(num_features=6, num_classes=3, dim=8, experts=Experts(hidden_dim=8))
        >>> model(torch.randn(5, 6)).logits.shape
        torch.Size([5, 3])
    """

    from_datamodule: ClassVar = {"num_features": int, "num_classes": int, "class_names": list_of_str}
    unlike_tensor_parallelism = "'accel_expert_parallel', which deals its experts to them"

    @renamed_arguments(expert_dim="experts.hidden_dim", **{name: f"experts.{name}" for name in options_of(Experts())})
    def __init__(
        self,
        num_features: int | None = None,
        num_classes: int | None = None,
        *,
        dim: int = 128,
        experts: Experts = Experts(),
        dropout: float = 0.0,
        gate: GateFactory = TopKGate,
        encoder: nn.Module | None = None,
        class_names: Sequence[str] | None = None,
        optimizer: OptimizerCallable = torch.optim.AdamW,
    ) -> None:
        super().__init__()
        experts = read_options(Experts, experts)
        dim, num_experts, k, hidden_dim = map(index, (dim, experts.num_experts, experts.k, experts.hidden_dim))
        class_names = None if class_names is None else list_of_str(class_names)
        self.save_hyperparameters(ignore=["encoder", "optimizer"])
        keep_plain_hyperparameters(self)
        self.num_features = num_features
        self.num_classes = num_classes
        self.class_names = class_names
        self.balance_weight = experts.balance_weight
        self.z_weight = experts.z_weight or 0.0
        self.make_optimizer = optimizer
        self.dim = dim
        self.encoder = encoder
        self.takes_rows = encoder is None  # a given encoder checks its own input
        self.mixture = MixtureOfExperts(dim, hidden_dim, num_experts, k, gate=gate)
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)
        self.head: nn.Module | None = None
        self.expert_load = ExpertLoad([self.mixture.gate])
        self.epoch_load = EpochLoad(1, num_experts)
        if self._sizes_are_known():
            self.configure_model()

    def _is_built(self) -> bool:
        return self.head is not None

    def configure_model(self) -> None:
        """Build the layers whose sizes may come from the datamodule or a checkpoint, once they are known."""
        if has_trainer(self) or self._sizes_are_known():  # load_from_checkpoint calls load_state_dict next
            super().configure_model()

    def _sizes_are_known(self) -> bool:
        return self.num_classes is not None and (self.encoder is not None or self.num_features is not None)

    def _require_sizes(self) -> None:
        if not self._sizes_are_known():
            raise ValueError(
                f"MoEClassifier needs num_features and num_classes; got num_features={self.num_features}, "
                f"num_classes={self.num_classes}. Pass them, or train with a datamodule that has attributes so named, "
                "as TabularDataModule, DigitsDataModule and IdxDataModule have"
            )
        require_class_names(self.class_names, self.num_classes)

    def _build(self) -> None:
        assert self.num_classes is not None
        if self.encoder is None:
            assert self.num_features is not None
            self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(self.num_features, self.dim), nn.GELU())
        self.head = nn.Sequential(nn.LayerNorm(self.dim), nn.Linear(self.dim, self.num_classes))
        self.train_accuracy = MulticlassAccuracy(int(self.num_classes), average="micro")
        self.val_loss, self.val_accuracy = MeanMetric(), self.train_accuracy.clone()
        self.test_loss, self.test_accuracy = MeanMetric(), self.train_accuracy.clone()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load, taking sizes that were not given from the shapes in ``state_dict``."""
        if self.head is None and "head.1.weight" in state_dict:
            self.num_classes = len(state_dict["head.1.weight"])
            if self.encoder is None and "encoder.1.weight" in state_dict:
                self.num_features = state_dict["encoder.1.weight"].shape[-1]
            self.configure_model()
        return super().load_state_dict(state_dict, strict, assign)

    def pipeline_layers(self) -> list[nn.Module]:
        """Return the layers in the order in which ``forward`` calls them, for strategies that split them."""
        assert self.encoder is not None
        assert self.head is not None
        return [self.encoder, self.norm, self.mixture, self.dropout, self.head]

    if TYPE_CHECKING:  # Any, as torch declares it

        def __call__(self, x: Tensor) -> ClassifierOutput: ...

    def forward(self, x: Tensor) -> ClassifierOutput:
        """Score samples ``x`` (B, ...)."""
        if self.encoder is None or self.head is None:
            raise RuntimeError("the sizes of this MoEClassifier are not known yet; pass num_features and num_classes")
        if self.takes_rows:
            assert self.num_features is not None
            require_rows(self, x, "num_features", self.num_features)
            require_floating(self, x, "rows", self.encoder.parameters())
        features = self.encoder(x)  # (B, D)
        mixed, report = self.mixture(self.norm(features))
        logits = self.head(features + self.dropout(mixed))
        # Here, so that a subclass's own training_step need not do it; and after the last layer, since in a pipeline the
        # code before it runs on several stages.
        if self.training:
            self.expert_load.add([report])
        return ClassifierOutput(logits, report)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, target = batch
        logits, report = self(x)
        target = targets_of_scores(target, logits, batch_idx, "train")
        loss = F.cross_entropy(logits, target)
        self.train_accuracy.update(logits, target)
        self.epoch_load.update([report])
        if is_logging_step(self):
            self.log("train/loss", loss, prog_bar=True)
            self.log("train/balance_loss", report.balance_loss)
        return loss + self.auxiliary_loss(report)

    def auxiliary_loss(self, report: GateReport) -> Tensor:
        """Compute what the gate adds to the loss, ()."""
        loss = self.balance_weight * report.balance_loss
        return loss + self.z_weight * report.z_loss if self.z_weight else loss  # skips a backward pass for 0

    def on_fit_start(self) -> None:
        self.expert_load = ExpertLoad([self.mixture.gate])  # a subclass may have replaced it
        self.epoch_load = EpochLoad(1, self.mixture.num_experts).to(self.device)
        self.expert_load.start()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        statistics = self.expert_load.step()
        if statistics and is_logging_step(self):
            self.log_dict({f"train/{name}": value for name, value in summarise_load(statistics).items()})
            self.expert_load.warn_if_collapsed()

    def on_train_epoch_end(self) -> None:
        if not self.epoch_load.update_called:  # a subclass's own training_step may not update it
            return
        load = self.epoch_load.compute()[0].tolist()
        figures = {f"train/expert_load_{expert}": share for expert, share in enumerate(load)}
        figures["train/accuracy"] = self.train_accuracy.compute()
        self.log_dict(figures, sync_dist=True)  # equal on all processes; sync_dist avoids a warning
        self.epoch_load.reset()
        self.train_accuracy.reset()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, batch_idx, "val", self.val_loss, self.val_accuracy)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, batch_idx, "test", self.test_loss, self.test_accuracy)

    def predict_step(self, batch: Batch | tuple[Tensor] | Tensor, batch_idx: int) -> dict[str, Any]:
        """Return the most probable class of each sample, (B,), its probability, (B,), and ``probabilities``, (B, C).

        ``class`` is a list of names if the model knows them, else an int64 tensor.
        """
        x = batch if isinstance(batch, Tensor) else batch[0]
        return name_classes(self(x).logits, self.class_names)

    def _evaluate(self, batch: Batch, batch_idx: int, stage: str, loss: Metric, accuracy: Metric) -> None:
        x, target = batch
        logits = self(x).logits
        target = targets_of_scores(target, logits, batch_idx, stage)
        loss.update(F.cross_entropy(logits, target), weight=len(target))
        accuracy.update(logits, target)
        self.log(f"{stage}/loss", loss)
        self.log(f"{stage}/accuracy", accuracy, prog_bar=True)
