"""Models of sequences of unequal lengths. Shapes: B samples, T steps, F features, C classes, K values, S scores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias, get_args

import lightning as L
import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torchmetrics.aggregation import MeanMetric

from lightning_accel._private.lightning import has_trainer
from lightning_accel._private.torch import tree_leaves, tree_map
from lightning_accel.data.sequences.batch import IGNORED, SequenceBatch
from lightning_accel.models.hooks import (
    as_classes,
    keep_plain_hyperparameters,
    list_of_str,
    name_classes,
    require_class_names,
)
from lightning_accel.models.masked_loss import MaskedLoss, SupervisedModel, is_valid, masked_loss
from lightning_accel.nn.recurrent.block import RecurrentBlock, require_block_parts
from lightning_accel.nn.recurrent.dynamic import DynamicRNN
from lightning_accel.ops.bounds import if_set, require_integers, require_share
from lightning_accel.ops.options import options_of, read_options
from lightning_accel.ops.renames import renamed_arguments
from lightning_accel.strategies import DataParallelStrategy, PipelineStrategy
from lightning_accel.strategies.checkpoints.rank_states import RankStates

TargetKind: TypeAlias = Literal["classification", "regression", "labelling", "forecasting"]
_SIZES = ("num_features", "vocab_size", "num_classes", "num_targets")
States: TypeAlias = Any  # tensors (layers, B, H) in any nesting
_KEY = "carried_state"  # key in checkpoints


class _CarriedState:
    """Hold the states after the last batch, of training and of each kind of evaluation, in this process.

    A checkpoint contains the training states of every process; a run on another number of processes starts from zeros,
    with a warning.
    """

    def __init__(self) -> None:
        self._states: dict[str, States] = {}
        self._ranks = RankStates()

    def take(self, stage: str, carried: Tensor) -> States | None:
        """Return states for a batch whose sample i continues sample ``carried[i]`` of the batch before; zeros for -1.

        Raises:
            ValueError: if the batch before had no such sample.
        """
        states = self._states.get(stage)
        if states is None:
            return None
        rows = tree_leaves(states)[0].shape[1]
        if carried.numel() and int(carried.max()) >= rows:
            raise ValueError(
                f"SequenceBatch.carried names row {int(carried.max())} of the batch before, which had {rows} rows. "
                "Number the rows of that batch from 0, and use -1 for those that begin"
            )
        device = tree_leaves(states)[0].device
        carried = carried.to(device)
        goes_on = (carried >= 0)[:, None]
        return tree_map(lambda state: torch.where(goes_on, state[:, carried.clamp(min=0)], 0), states)

    def keep(self, stage: str, states: States) -> None:
        """Store ``states``, detached from the graph."""
        self._states[stage] = tree_map(torch.detach, states)

    def forget(self, stage: str) -> None:
        self._states.pop(stage, None)

    def save(self, checkpoint: dict[str, Any], trainer: L.Trainer) -> None:
        """Add the training states of all processes to ``checkpoint``; all processes must call it."""
        if "train" in self._states:
            mine = tree_map(Tensor.cpu, self._states["train"])
            checkpoint[_KEY] = self._ranks.gather(mine, trainer)

    def load(self, checkpoint: dict[str, Any], trainer: L.Trainer, device: torch.device) -> None:
        """Load the states that :meth:`save` added."""
        saved = checkpoint.get(_KEY)
        if saved is None:
            return
        if len(saved) != trainer.world_size:
            rank_zero_warn(
                f"the checkpoint holds states of sequences in {len(saved)} processes, this run has "
                f"{trainer.world_size}: sequences that were cut go on from a state of zeros"
            )
            self.forget("train")
            return
        self._states["train"] = tree_map(lambda state: state.to(device), saved[trainer.global_rank])


class SequenceOutput(NamedTuple):
    """Hold scores, and the states from which the sequences continue."""

    scores: Tensor  # (B, S), or (B, T, S) if each step has a target
    state: States  # a list with the state of each layer


@dataclass(frozen=True)
class RecurrentLayers:
    """Hold the options of a model's recurrent layers.

    Args:
        cell: kind of recurrence: ``rnn``, ``gru`` or ``lstm``, or a scan over all steps at once, ``mingru`` or
            ``minlstm`` (Feng et al. 2024, https://arxiv.org/abs/2410.01201); see :class:`lightning_accel.DynamicRNN`.
        hidden_dim: hidden width of each direction.
        num_layers: number of layers, each on the output of the one before.
        bidirectional: whether they run in both directions; not for forecasting, which must not see the future.
        residual: normalize the input of each layer, and add it to its output: for many layers, and for scan cells,
            which would be linear otherwise.
        conv_kernel: number of last steps that a depthwise convolution before each layer sums over, such as 4; 0 for
            none. Needs ``residual``.
        feed_forward_dim: hidden width of a perceptron after each layer, such as 4 times its width; 0 for none. Needs
            ``residual``.

    Example:
        >>> from lightning_accel import SequenceModel
        >>> model = SequenceModel(layers=RecurrentLayers("lstm", hidden_dim=256, num_layers=2))
    """

    cell: Literal["rnn", "gru", "lstm", "mingru", "minlstm"] = "gru"
    hidden_dim: int = 128
    num_layers: int = 1
    bidirectional: bool = False
    residual: bool = False
    conv_kernel: int = 0
    feed_forward_dim: int = 0


class SequenceModel(SupervisedModel):
    """Classify sequences, predict values of them, label their steps, or forecast them, by recurrent layers and a head.

    Batches are :class:`lightning_accel.data.SequenceBatch`, or plain tuples of the same: ``x`` (B, T, F) floating or
    (B, T) int64 tokens, ``lengths`` (B,), and a target of the ``target_kind``:

    - ``classification``: (B,) int64 in [0, C); ``IGNORED`` (-100) for missing ones.
    - ``regression``: (B,) or (B, K) floating; NaN for missing ones.
    - ``labelling``: a class of each step, (B, T) int64, ``IGNORED`` for missing ones, such as after the end.
    - ``forecasting``: the next step of ``x``, tokens or features; no target is needed, but one of the shape of ``x`` is
      used if present, so that the last step of a chunk can have one.

    The loss is cross entropy, or the squared error of values, in standard deviations of the training targets if the
    datamodule provides them (``target_mean``, ``target_std``): its sum over all valid targets of the batch, on all
    processes, divided by their number, so that W processes train as one with all samples does, and padding has no
    effect. With gradient accumulation, :class:`lightning_accel.callbacks.WeightedAccumulation` does the same for
    micro-batches.

    Logged: ``train/loss``; ``loss`` and ``accuracy``, or ``mse`` of values in the unit of the batches, under ``val/``
    and ``test/``, as means over all valid targets of the epoch. Forecasts, whose batches a ``SequenceDataModule``
    standardizes, have ``mse_if_repeated`` beside it, the error of repeating the last step, to fall below.
    ``predict`` returns classes with their probability, values, lists of the classes of steps, or continues each
    sequence for ``horizon`` steps.

    **Truncated back-propagation through time**: if batches have ``carried``, each sample continues from the final state
    of sample ``carried[i]`` of the batch before, or from zeros (-1), and no gradient flows back into that batch; the
    Trainer updates the parameters after each batch, as usual. A target of a whole sequence belongs to its last batch,
    with ``IGNORED`` or NaN in those before. Checkpoints contain the states of all processes.

    Args:
        num_features: F, the number of features of a step of floating sequences; by default the datamodule's attribute
            of that name, as for the next four.
        num_classes: C, the number of classes of ``classification`` and ``labelling``.
        vocab_size: number of different tokens, for sequences of tokens in place of ``num_features``.
        num_targets: K, the number of values of a sequence for ``regression``; 1 if the datamodule does not provide it.
        target_kind: what is predicted: a class (``classification``) or values (``regression``) of a sequence, a class
            of each step (``labelling``), or the next steps (``forecasting``).
        dim: width of token embeddings; with ``layers.residual`` it is that of the layers.
        layers: the options of the recurrent layers, see :class:`lightning_accel.models.RecurrentLayers`.
        pooling: how ``classification`` and ``regression`` summarize the steps; other kinds use each step.
        dropout: share of the input of each layer but the first, and of the head, that is dropped in training.
        horizon: number of steps that ``predict`` forecasts.
        class_names: names of the classes for predictions; by default the datamodule's, if it has any.
        optimizer: creates the optimizer; called with the parameters.

    Raises:
        TypeError: if an option has another type.
        ValueError: if options exclude each other; before a run starts, if sizes are neither given nor provided by the
            datamodule, or contradict it, or a strategy cannot carry states.

    Example:
        >>> layers = RecurrentLayers(hidden_dim=8)
        >>> model = SequenceModel(num_features=2, num_classes=3, target_kind="classification", layers=layers)
        >>> model(torch.randn(4, 6, 2), torch.tensor([6, 3, 1, 5])).scores.shape
        torch.Size([4, 3])
    """

    value_mean: Tensor  # (S,), of the training targets, or, in forecasting, of the unscaled features
    value_std: Tensor
    from_datamodule: ClassVar = dict.fromkeys(_SIZES, index) | {"target_kind": str, "class_names": list_of_str}

    @renamed_arguments(
        hidden_size="layers.hidden_dim", **{name: f"layers.{name}" for name in options_of(RecurrentLayers())}
    )
    def __init__(
        self,
        num_features: int | None = None,
        num_classes: int | None = None,
        *,
        vocab_size: int | None = None,
        num_targets: int | None = None,
        target_kind: TargetKind | None = None,
        dim: int = 64,
        layers: RecurrentLayers = RecurrentLayers(),
        pooling: Literal["last", "mean", "max", "attention"] = "last",
        dropout: float = 0.0,
        horizon: int = 1,
        class_names: Sequence[str] | None = None,
        optimizer: OptimizerCallable = torch.optim.AdamW,
    ) -> None:
        super().__init__()
        class_names = None if class_names is None else list_of_str(class_names)
        layers = read_options(RecurrentLayers, layers)
        self.save_hyperparameters(ignore=["optimizer"])
        keep_plain_hyperparameters(self)
        self.num_features, self.num_classes = num_features, num_classes
        self.vocab_size, self.num_targets = vocab_size, num_targets
        self.target_kind = target_kind
        self.class_names = class_names
        self.bidirectional, self.pooling, self.residual = layers.bidirectional, pooling, layers.residual
        self.cell = layers.cell
        self.horizon = horizon
        self.make_optimizer = optimizer
        sizes = {name: getattr(self, name) for name in _SIZES}
        require_integers(1, dim=dim, horizon=horizon, **{"layers.num_layers": layers.num_layers}, **if_set(**sizes))
        require_share(dropout=dropout)
        self._block_parts = {name: getattr(layers, name) for name in ("conv_kernel", "feed_forward_dim")}
        require_block_parts(layers.residual, **self._block_parts)
        self._width = layers.hidden_dim * (2 if layers.bidirectional else 1)
        self._dim = self._width if layers.residual else dim
        self._dropout = dropout
        self._hidden_dim, self._num_layers = layers.hidden_dim, layers.num_layers
        self.head: nn.Module | None = None
        self.val_repeated, self.test_repeated = MeanMetric(), MeanMetric()
        self._carried = _CarriedState()
        if target_kind is not None and self._num_scores() and (num_features or vocab_size):
            self.configure_model()

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit":
            self._carried.forget("train")  # states of another run; a resumed run loads its own later
        datamodule = self.trainer.datamodule  # type: ignore[attr-defined]  # set by a connector
        if getattr(datamodule, "chunk_steps", None):
            self._require_carrying()
        pipeline = isinstance(self.trainer.strategy, PipelineStrategy)
        if pipeline and stage == "predict" and self.target_kind == "forecasting":
            raise ValueError(
                "accel_pipeline runs through the layers once, and a forecast runs through them once a step. Predict "
                "on one device, from the checkpoint"
            )

    def _num_scores(self) -> int | None:
        """Return S, the number of scores."""
        if self.target_kind in ("classification", "labelling"):
            return self.num_classes
        return self.num_targets if self.target_kind == "regression" else self.vocab_size or self.num_features

    def _is_built(self) -> bool:
        return self.head is not None

    def _require_sizes(self) -> None:
        given = {name: getattr(self, name) for name in (*_SIZES, "target_kind") if getattr(self, name) is not None}
        if self.target_kind not in get_args(TargetKind):
            raise ValueError(
                f"SequenceModel needs target_kind, one of {', '.join(get_args(TargetKind))}; got {self.target_kind!r}. "
                "Pass it, or train with a datamodule that has an attribute so named, as SequenceDataModule has"
            )
        if self._num_scores() is None or (self.num_features is None and self.vocab_size is None):
            raise ValueError(
                "SequenceModel needs num_features or vocab_size of what comes in, and num_classes of classes that come "
                f"out; got {given}. Pass them, or train with a datamodule that has attributes so named, as "
                "SequenceDataModule has"
            )
        if self.target_kind in ("classification", "labelling"):
            require_class_names(self.class_names, self.num_classes)
        if self.target_kind == "forecasting" and self.bidirectional:
            raise ValueError("target_kind='forecasting' cannot be bidirectional: the model would see what it forecasts")

    def _build(self) -> None:
        size = self._dim
        if self.vocab_size is not None:
            self.encoder: nn.Module = nn.Embedding(self.vocab_size, size)
        elif self.residual:
            assert self.num_features is not None
            self.encoder = nn.Linear(self.num_features, size)
        else:
            assert self.num_features is not None
            self.encoder, size = nn.Identity(), self.num_features
        blocks = []
        for number in range(self._num_layers):
            pools = number == self._num_layers - 1 and self.target_kind in ("classification", "regression")
            options: dict[str, Any] = {"cell": self.cell, "bidirectional": self.bidirectional}
            rnn = DynamicRNN(size, self._hidden_dim, pooling=self.pooling if pools else "none", **options)
            dropout = self._dropout if number else 0.0
            blocks.append(RecurrentBlock(rnn, size, dropout, self.residual, **self._block_parts))
            size = self._width
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(size) if self.residual else nn.Identity()
        self.dropout = nn.Dropout(self._dropout)
        num_scores = self._num_scores()
        assert num_scores is not None
        self.head = nn.Linear(size, num_scores)
        self.register_buffer("value_mean", torch.zeros(num_scores))
        self.register_buffer("value_std", torch.ones(num_scores))

    def repeated_blocks(self) -> list[nn.Module]:
        """Return the blocks that strategies which shard parameters gather one at a time."""
        return list(self.blocks)

    def pipeline_layers(self) -> list[nn.Module]:
        """Return the layers in the order in which ``forward`` calls them, for strategies that split them."""
        assert self.head is not None
        return [self.encoder, *self.blocks, self.norm, self.dropout, self.head]

    if TYPE_CHECKING:  # Any, as torch declares it

        def __call__(self, x: Tensor, lengths: Tensor | None = None, state: States | None = None) -> SequenceOutput: ...

    def forward(self, x: Tensor, lengths: Tensor | None = None, state: States | None = None) -> SequenceOutput:
        """Score ``x`` (B, T, F) or (B, T) of ``lengths`` (B,), on any device, continuing from ``state``."""
        if self.head is None:
            raise RuntimeError("the sizes of this SequenceModel are not known yet; pass num_features and num_classes")
        if x.is_floating_point() and lengths is not None and self.residual:
            # a NaN in the padding would reach the gradient of the encoder's weight
            x = torch.where(_valid_steps(lengths, x.shape[1], x.device)[..., None], x, 0)
        features = self.encoder(x)
        states = []
        for number, block in enumerate(self.blocks):
            features, last = block(features, lengths, None if state is None else state[number])
            states.append(last)
        return SequenceOutput(self._score(features), states)

    def step(self, x: Tensor, state: States | None = None) -> SequenceOutput:
        """Score one more step, ``x`` (B, F) or (B,): (B, S), the output of ``forward`` for all steps so far.

        Raises:
            ValueError: if the model needs the whole sequence.
        """
        self.require_streaming()
        features, states = self.encoder(x), []
        for number, block in enumerate(self.blocks):
            assert isinstance(block, RecurrentBlock)
            features, last = block.step(features, None if state is None else state[number])
            states.append(last)
        return SequenceOutput(self._score(features), states)

    def _score(self, features: Tensor) -> Tensor:
        assert self.head is not None
        scores: Tensor = self.head(self.dropout(self.norm(features)))
        return self._unscale(scores) if self.target_kind == "regression" else scores

    @property
    def _unit(self) -> tuple[Tensor, Tensor]:
        return self.value_mean, self.value_std

    @property
    def _has_values(self) -> bool:
        return self.target_kind == "regression" or (self.target_kind == "forecasting" and self.vocab_size is None)

    def require_streaming(self) -> None:
        """Reject a model whose scores cannot be computed from the last step and a state."""
        pools = self.target_kind in ("classification", "regression") and self.pooling != "last"
        if self.bidirectional or pools:
            found = "bidirectional=True" if self.bidirectional else f"pooling={self.pooling!r}"
            raise ValueError(
                f"a model that takes sequences step by step, or in chunks, cannot have {found}, which needs the whole "
                "sequence at once. Take bidirectional=False and pooling='last'"
            )

    def _target(self, batch: Any, stage: str) -> Tensor:
        assert self.target_kind is not None
        batch = SequenceBatch(*batch)
        target = _target_of(batch, self.target_kind)
        if self.target_kind not in ("classification", "labelling"):
            return target
        assert self.num_classes is not None
        return as_classes(target, batch.x.shape[: 2 if self.target_kind == "labelling" else 1], self.num_classes, stage)

    def _num_samples(self, batch: Any) -> int:
        return len(batch[0])

    def _masked_loss(self, batch: Any, stage: str) -> MaskedLoss:
        unit = self.value_std if self.target_kind == "regression" else None
        return masked_loss(self._scores(SequenceBatch(*batch), stage), self._target(batch, stage), unit)

    def _evaluate(self, batch: Any, stage: str, loss: MeanMetric, score: MeanMetric) -> None:
        super()._evaluate(batch, stage, loss, score)
        if self.target_kind == "forecasting" and self.vocab_size is None:
            x, target = SequenceBatch(*batch).x, self._target(batch, stage)
            valid, repeated = is_valid(target), self.val_repeated if stage == "val" else self.test_repeated
            errors = torch.where(valid, target - x, 0.0).float().square()
            repeated.update(errors.sum() / valid.sum().clamp(min=1), weight=valid.sum())
            self.log(f"{stage}/mse_if_repeated", repeated, batch_size=self._num_samples(batch))

    def _scores(self, batch: SequenceBatch, stage: str) -> Tensor:
        if batch.carried is None:
            return self(batch.x, batch.lengths).scores
        self._require_carrying()
        scores, states = self(batch.x, batch.lengths, self._carried.take(stage, batch.carried))
        self._carried.keep(stage, states)
        return scores

    def _require_carrying(self) -> None:
        """Reject models and strategies that cannot carry states from batch to batch."""
        self.require_streaming()
        strategy = self.trainer.strategy if has_trainer(self) else None
        if isinstance(strategy, DataParallelStrategy | PipelineStrategy):
            raise ValueError(
                f"truncated back-propagation through time does not work under {type(strategy).__name__}, which splits "
                "batches by rows, while a row may go on from any row of the batch before. Train with 'accel_ddp' or "
                "'accel_fsdp2'"
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._carried.save(checkpoint, self.trainer)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if has_trainer(self):
            self._carried.load(checkpoint, self.trainer, self.device)

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self._carried.forget("val")

    def on_test_epoch_start(self) -> None:
        super().on_test_epoch_start()
        self._carried.forget("test")

    def on_predict_epoch_start(self) -> None:
        self._carried.forget("predict")

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Return the predictions for each sample, by kind of target.

        - ``classification``: ``class``, (B,) int64, or a list of names if the model knows them, its ``probability``,
          (B,), and ``probabilities`` of all, (B, C).
        - ``regression``: ``value``, (B,), or (B, K) for several.
        - ``labelling``: ``labels``, a list with a list of classes, or their names, for each sample.
        - ``forecasting``: the ``horizon`` steps that follow: ``token``, (B, horizon) int64, or ``value``, (B, horizon);
          ``value_0``, ``value_1`` ... for several features. Values are in the unit that the features had in the file.
        """
        batch = SequenceBatch(*batch)
        if self.target_kind == "forecasting":
            steps = forecast(self, batch.x, batch.lengths, self.horizon)
            return _name_steps(steps if self.vocab_size is not None else self._unscale(steps))
        scores = self._scores(batch, "predict")
        if self.target_kind == "regression":
            return {"value": scores.squeeze(dim=-1)}
        if self.target_kind == "classification":
            return name_classes(scores, self.class_names)
        return _name_labels(scores, batch.lengths, self.class_names)


def _valid_steps(lengths: Tensor, num_steps: int, device: torch.device) -> Tensor:
    """Return which steps are before each sample's end, (B, T) bool.

    >>> _valid_steps(torch.tensor([1, 0]), 2, torch.device("cpu")).tolist()
    [[True, False], [False, False]]
    """
    return torch.arange(num_steps, device=device) < lengths.to(device, non_blocking=True)[:, None]


def _next_steps(x: Tensor, lengths: Tensor) -> Tensor:
    """Return the step after each step of ``x`` (B, T) or (B, T, F); IGNORED, or NaN, from a sample's last step on."""
    there = _valid_steps(lengths - 1, x.shape[1], x.device)
    there = there if x.ndim == 2 else there[..., None]
    return torch.where(there, x.roll(-1, dims=1), torch.nan if x.is_floating_point() else IGNORED)


def _target_of(batch: SequenceBatch, kind: str) -> Tensor:
    """Return the target of ``batch``, on the device of its sequences.

    Raises:
        ValueError: if it has none.
    """
    if batch.target is not None:
        return batch.target.float() if kind == "regression" and not batch.target.is_floating_point() else batch.target
    if kind != "forecasting":
        raise ValueError(f"target_kind={kind!r} needs a target in each batch; got SequenceBatch.target=None")
    return _next_steps(batch.x, batch.lengths)


def _name_labels(scores: Tensor, lengths: Tensor, names: Sequence[str] | None) -> dict[str, Any]:
    """Return the most probable class of each valid step of ``scores`` (B, T, C), a list for each sample."""
    labels = scores.argmax(dim=-1).tolist()
    rows = [row[:length] for row, length in zip(labels, lengths.tolist(), strict=True)]
    return {"labels": rows if names is None else [[names[i] for i in row] for row in rows]}


def _name_steps(steps: Tensor) -> dict[str, Tensor]:
    """Name the columns of forecasts: tokens (B, steps) int64, or values (B, steps, F)."""
    if not steps.is_floating_point():
        return {"token": steps}
    if steps.shape[-1] == 1:
        return {"value": steps.squeeze(dim=-1)}
    return {f"value_{number}": feature for number, feature in enumerate(steps.unbind(dim=-1))}


@torch.no_grad()
def forecast(model: Callable[..., tuple[Tensor, Any]], x: Tensor, lengths: Tensor, horizon: int) -> Tensor:
    """Forecast ``horizon`` steps after each sample of ``x``, feeding back the model's predictions.

    Args:
        model: called with sequences, lengths and a state; returns scores of each step, and states.
        x: (B, T) int64 tokens, or (B, T, F) floating.
        lengths: (B,).
        horizon: number of steps.

    Returns:
        (B, horizon) int64, the most probable tokens, or (B, horizon, F).
    """
    scores, states = model(x, lengths)
    last = (lengths - 1).clamp(min=0).to(x.device)
    scores = scores[torch.arange(len(x), device=x.device), last]
    steps: list[Tensor] = []
    for _ in range(horizon):
        if steps:  # not by step(): strategies that shard parameters gather them in forward
            scores, states = model(steps[-1][:, None], None, states)
            scores = scores[:, 0]
        steps.append(scores.to(x.dtype) if x.is_floating_point() else scores.argmax(dim=-1))
    return torch.stack(steps, dim=1)
