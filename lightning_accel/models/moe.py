"""Mixture-of-experts classifier and regressor. Shapes: B samples, D features, C classes, E experts."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError, MeanSquaredError, Metric
from torchmetrics.classification import MulticlassAccuracy

from lightning_accel.models.experts import Experts
from lightning_accel.models.hooks import (
    keep_plain_hyperparameters,
    list_of_str,
    name_classes,
    require_class_names,
    take_unit,
    targets_of_scores,
)
from lightning_accel.models.mixture_model import Batch, MixtureModel
from lightning_accel.nn import GateReport, TopKGate
from lightning_accel.nn.moe.gating import GateFactory
from lightning_accel.ops.bounds import if_set, require_integers
from lightning_accel.ops.float32 import at_least_float32
from lightning_accel.ops.options import options_of, read_options
from lightning_accel.ops.renames import renamed_arguments


class ClassifierOutput(NamedTuple):
    """Hold the scores of the classes, and the report of the gate."""

    logits: Tensor  # (B, C)
    report: GateReport


class RegressorOutput(NamedTuple):
    """Hold the values, in the unit of the target, and the report of the gate."""

    values: Tensor  # (B,)
    report: GateReport


class MoEClassifier(MixtureModel):
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
        TypeError: if an option has another type.
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
    metric_names = ("accuracy",)
    needed_sizes = "num_features and num_classes"

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
        experts = read_options(Experts, experts)
        require_integers(1, **if_set(num_classes=num_classes))
        super().__init__(num_features, dim, experts, dropout, gate, encoder, optimizer)
        class_names = None if class_names is None else list_of_str(class_names)
        self.save_hyperparameters(ignore=["encoder", "optimizer"])
        keep_plain_hyperparameters(self)
        self.num_classes = num_classes
        self.class_names = class_names
        if self._sizes_are_known():
            self.configure_model()

    def _num_scores(self) -> int | None:
        return self.num_classes

    def _read_datamodule(self) -> None:
        datamodule = self.trainer.datamodule  # type: ignore[attr-defined]  # set by a connector
        if getattr(datamodule, "num_classes", None) is None and getattr(datamodule, "num_targets", None) is not None:
            raise ValueError(
                f"{type(self).__name__} predicts classes, and {type(datamodule).__name__} has a quantity as target. "
                "Take MoERegressor, or name a column of classes as target and leave target_kind='regression' out"
            )
        super()._read_datamodule()

    def _require_sizes(self) -> None:
        if not self._sizes_are_known():
            raise ValueError(
                f"MoEClassifier needs num_features and num_classes; got num_features={self.num_features}, "
                f"num_classes={self.num_classes}. Pass them, or train with a datamodule that has attributes so named, "
                "as TabularDataModule, DigitsDataModule and IdxDataModule have"
            )
        require_class_names(self.class_names, self.num_classes)

    def _build_metrics(self) -> None:
        assert self.num_classes is not None
        self.train_accuracy = MulticlassAccuracy(int(self.num_classes), average="micro")
        self.val_accuracy, self.test_accuracy = self.train_accuracy.clone(), self.train_accuracy.clone()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load, taking sizes that were not given from the shapes in ``state_dict``."""
        if self.head is None and "head.1.weight" in state_dict:
            self.num_classes = len(state_dict["head.1.weight"])
        return super().load_state_dict(state_dict, strict, assign)

    if TYPE_CHECKING:  # Any, as torch declares it

        def __call__(self, x: Tensor) -> ClassifierOutput: ...

    def forward(self, x: Tensor) -> ClassifierOutput:
        """Score samples ``x`` (B, ...)."""
        return ClassifierOutput(*self._score(x))

    def _targets(self, target: Tensor, scores: Tensor, batch_idx: int, stage: str) -> Tensor:
        return targets_of_scores(target, scores, batch_idx, stage)

    def _loss(self, scores: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(scores, target)

    def predict_step(self, batch: Batch | tuple[Tensor] | Tensor, batch_idx: int) -> dict[str, Any]:
        """Return the most probable class of each sample, (B,), its probability, (B,), and ``probabilities``, (B, C).

        ``class`` is a list of names if the model knows them, else an int64 tensor.
        """
        x = batch if isinstance(batch, Tensor) else batch[0]
        return name_classes(self(x).logits, self.class_names)


class MoERegressor(MixtureModel):
    """Predict a quantity of samples by an encoder, a residual mixture of experts as in :class:`MoEClassifier`, a head.

    Batches are pairs of samples, (B, ...) floating, and targets, (B,) floating and finite. The loss is the mean squared
    error, in standard deviations of the training targets if the datamodule provides them (``target_mean``,
    ``target_std``), so that a model that always predicts their mean has a loss of about 1, plus what the gate adds.
    Logged: what :class:`MoEClassifier` logs, with ``train/rmse`` in place of the accuracy; ``loss``, ``rmse`` and
    ``mae``, the latter two in the unit of the target, under ``val/`` and ``test/``.

    Args:
        num_features: values in a sample once flattened; by default the datamodule's attribute of that name.
        dim: width of the encoder's output and of the mixture.
        experts: the options of the mixture, see :class:`lightning_accel.models.Experts`.
        dropout: share of the mixture's output that is dropped in training.
        gate: class or function that creates the gate, called with ``dim``, ``num_experts`` and ``k``; pass it to
            ``load_from_checkpoint`` again, unless a config named it.
        encoder: maps samples (B, ...) to (B, ``dim``), which makes ``num_features`` unnecessary; by default flatten,
            linear layer, GELU. Hyperparameters do not contain it: pass it to ``load_from_checkpoint`` again.
        optimizer: creates the optimizer; called with the parameters.

    Raises:
        ValueError: if a size is below 1 or ``k`` not in [1, ``num_experts``]; before a run starts, if ``num_features``
            is neither given nor provided by the datamodule, or contradicts it, or the datamodule has classes.

    Source: as for :class:`MoEClassifier`.

    Example:
        >>> model = MoERegressor(num_features=6, dim=8, experts=Experts(hidden_dim=8))
        >>> model(torch.randn(5, 6)).values.shape
        torch.Size([5])
    """

    target_mean: Tensor  # (1,), of the training targets
    target_std: Tensor
    from_datamodule: ClassVar = {"num_features": int}
    metric_names = ("rmse", "mae")
    needed_sizes = "num_features"

    def __init__(
        self,
        num_features: int | None = None,
        *,
        dim: int = 128,
        experts: Experts = Experts(),
        dropout: float = 0.0,
        gate: GateFactory = TopKGate,
        encoder: nn.Module | None = None,
        optimizer: OptimizerCallable = torch.optim.AdamW,
    ) -> None:
        experts = read_options(Experts, experts)
        super().__init__(num_features, dim, experts, dropout, gate, encoder, optimizer)
        self.save_hyperparameters(ignore=["encoder", "optimizer"])
        keep_plain_hyperparameters(self)
        self.register_buffer("target_mean", torch.zeros(1))
        self.register_buffer("target_std", torch.ones(1))
        if self._sizes_are_known():
            self.configure_model()

    def _num_scores(self) -> int:
        return 1

    def _read_datamodule(self) -> None:
        datamodule = self.trainer.datamodule  # type: ignore[attr-defined]  # set by a connector
        if getattr(datamodule, "num_classes", None) is not None:
            raise ValueError(
                f"{type(self).__name__} predicts a quantity, and {type(datamodule).__name__} has classes as target. "
                "Take MoEClassifier, or target_kind='regression' of TabularDataModule (--data.target_kind regression)"
            )
        super()._read_datamodule()

    def _require_sizes(self) -> None:
        if not self._sizes_are_known():
            raise ValueError(
                "MoERegressor needs num_features; got None. Pass it, or train with a datamodule that has an attribute "
                "so named, as TabularDataModule with target_kind='regression' has"
            )

    def _build_metrics(self) -> None:
        for stage in ("train", "val", "test"):
            self.add_module(f"{stage}_rmse", MeanSquaredError(squared=False))
        self.val_mae: Metric = MeanAbsoluteError()
        self.test_mae: Metric = MeanAbsoluteError()

    def on_fit_start(self) -> None:
        """Copy the mean and standard deviation of targets from the datamodule, if it provides them."""
        super().on_fit_start()
        take_unit(self, self.target_mean, self.target_std)

    if TYPE_CHECKING:  # Any, as torch declares it

        def __call__(self, x: Tensor) -> RegressorOutput: ...

    def forward(self, x: Tensor) -> RegressorOutput:
        """Predict the value of samples ``x`` (B, ...)."""
        scores, report = self._score(x)
        return RegressorOutput(at_least_float32(scores).squeeze(dim=1) * self.target_std + self.target_mean, report)

    def _targets(self, target: Tensor, scores: Tensor, batch_idx: int, stage: str) -> Tensor:
        if target.shape != scores.shape:  # (B, 1) would be broadcast to (B, B)
            raise ValueError(f"targets must be of shape {tuple(scores.shape)}; got {tuple(target.shape)}")
        return target

    def _loss(self, scores: Tensor, target: Tensor) -> Tensor:
        return ((scores - target) / self.target_std).square().mean()

    def predict_step(self, batch: Batch | tuple[Tensor] | Tensor, batch_idx: int) -> dict[str, Tensor]:
        """Return ``value`` of each sample, (B,), in the unit of the target."""
        x = batch if isinstance(batch, Tensor) else batch[0]
        return {"value": self(x).values}
