"""What models with one mixture of experts on samples share. Shapes: B samples, D features, S scores, E experts."""

from collections.abc import Mapping
from operator import index
from typing import Any, ClassVar, TypeAlias

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torchmetrics.aggregation import MeanMetric

from lightning_accel._private.lightning import has_trainer
from lightning_accel.models.experts import Experts
from lightning_accel.models.hooks import EpochLoad, SizedModel, is_logging_step
from lightning_accel.nn import ExpertLoad, GateReport, MixtureOfExperts, summarise_load
from lightning_accel.nn.features import require_floating, require_rows
from lightning_accel.nn.moe.gating import GateFactory
from lightning_accel.ops.bounds import if_set, require_integers, require_share

Batch: TypeAlias = tuple[Tensor, Tensor]


class MixtureModel(SizedModel):
    """Score samples by an encoder, a residual mixture of experts, and a head; train by a loss of the scores.

    A subclass implements ``forward``, whose output has the scores and then the report of the gate, ``_num_scores``,
    ``_targets``, ``_loss`` and ``_build_metrics``, and lists the metrics in ``metric_names``: those of validation and
    test are the attributes ``val_NAME`` and ``test_NAME``, and the first has ``train_NAME``, too.
    """

    metric_names: ClassVar[tuple[str, ...]]
    needed_sizes: ClassVar[str]  # arguments, for messages
    unlike_tensor_parallelism = "'accel_expert_parallel', which deals its experts to them"

    def __init__(
        self,
        num_features: int | None,
        dim: int,
        experts: Experts,
        dropout: float,
        gate: GateFactory,
        encoder: nn.Module | None,
        optimizer: OptimizerCallable,
    ) -> None:
        super().__init__()
        require_integers(1, dim=dim, **if_set(num_features=num_features))
        require_share(dropout=dropout)
        dim, num_experts, k, hidden_dim = map(index, (dim, experts.num_experts, experts.k, experts.hidden_dim))
        self.num_features = num_features
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

    def _num_scores(self) -> int | None:
        """Return S, None if it is not known yet."""
        raise NotImplementedError

    def _targets(self, target: Tensor, scores: Tensor, batch_idx: int, stage: str) -> Tensor:
        """Return what :meth:`_loss` takes, or raise a ValueError if the targets do not fit the scores."""
        raise NotImplementedError

    def _loss(self, scores: Tensor, target: Tensor) -> Tensor:
        raise NotImplementedError

    def _build_metrics(self) -> None:
        raise NotImplementedError

    def _is_built(self) -> bool:
        return self.head is not None

    def configure_model(self) -> None:
        """Build the layers whose sizes may come from the datamodule or a checkpoint, once they are known."""
        if has_trainer(self) or self._sizes_are_known():  # load_from_checkpoint calls load_state_dict next
            super().configure_model()

    def _sizes_are_known(self) -> bool:
        return self._num_scores() is not None and (self.encoder is not None or self.num_features is not None)

    def _build(self) -> None:
        num_scores = self._num_scores()
        assert num_scores is not None
        if self.encoder is None:
            assert self.num_features is not None
            self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(self.num_features, self.dim), nn.GELU())
        self.head = nn.Sequential(nn.LayerNorm(self.dim), nn.Linear(self.dim, num_scores))
        self.val_loss, self.test_loss = MeanMetric(), MeanMetric()
        self._build_metrics()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load, taking sizes that were not given from the shapes in ``state_dict``."""
        if self.head is None and "head.1.weight" in state_dict:
            if self.encoder is None and "encoder.1.weight" in state_dict:
                self.num_features = state_dict["encoder.1.weight"].shape[-1]
            self.configure_model()
        return super().load_state_dict(state_dict, strict, assign)

    def pipeline_layers(self) -> list[nn.Module]:
        """Return the layers in the order in which ``forward`` calls them, for strategies that split them."""
        assert self.encoder is not None
        assert self.head is not None
        return [self.encoder, self.norm, self.mixture, self.dropout, self.head]

    def _score(self, x: Tensor) -> tuple[Tensor, GateReport]:
        """Return the head's output for samples ``x`` (B, ...), (B, S), and the report of the gate."""
        if self.encoder is None or self.head is None:
            raise RuntimeError(f"the sizes of this {type(self).__name__} are not known yet; pass {self.needed_sizes}")
        if self.takes_rows:
            assert self.num_features is not None
            require_rows(self, x, "num_features", self.num_features)
            require_floating(self, x, "rows", self.encoder.parameters())
        features = self.encoder(x)  # (B, D)
        mixed, report = self.mixture(self.norm(features))
        scores: Tensor = self.head(features + self.dropout(mixed))
        # Here, so that a subclass's own training_step need not do it; and after the last layer, since in a pipeline the
        # code before it runs on several stages.
        if self.training:
            self.expert_load.add([report])
        return scores, report

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, target = batch
        scores, report = self(x)
        target = self._targets(target, scores, batch_idx, "train")
        loss = self._loss(scores, target)
        self._metrics("train")[0].update(scores, target)
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
        super().on_fit_start()
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
        (metric,) = self._metrics("train")
        figures[f"train/{self.metric_names[0]}"] = metric.compute()
        self.log_dict(figures, sync_dist=True)  # equal on all processes; sync_dist avoids a warning
        self.epoch_load.reset()
        metric.reset()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, batch_idx, "val", self.val_loss)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, batch_idx, "test", self.test_loss)

    def _evaluate(self, batch: Batch, batch_idx: int, stage: str, loss: MeanMetric) -> None:
        x, target = batch
        scores = self(x)[0]
        target = self._targets(target, scores, batch_idx, stage)
        loss.update(self._loss(scores, target), weight=len(target))
        self.log(f"{stage}/loss", loss)
        for name, metric in zip(self.metric_names, self._metrics(stage), strict=True):
            metric.update(scores, target)
            self.log(f"{stage}/{name}", metric, prog_bar=True)

    def _metrics(self, stage: str) -> list[Any]:
        names = self.metric_names[:1] if stage == "train" else self.metric_names
        return [getattr(self, f"{stage}_{name}") for name in names]
