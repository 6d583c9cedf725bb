"""Graph networks with order-3 relations. Shapes: B graphs, N nodes, M edges, F features, K values, S scores."""

from collections.abc import Sequence
from dataclasses import replace
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, get_args

import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch_geometric.data import Data

from lightning_accel._private.lightning import has_trainer
from lightning_accel.data.graphs.splits import require_labels
from lightning_accel.data.sequences.batch import IGNORED
from lightning_accel.models.graph_layers import (
    ConvolutionLayers,
    EdgeKind,
    GraphHead,
    GraphLayers,
    GraphReadout,
    NormName,
    has_equal_nodes,
    make_layers,
)
from lightning_accel.models.graph_marking import Marking, choose_marking
from lightning_accel.models.hooks import (
    as_classes,
    keep_plain_hyperparameters,
    list_of_str,
    name_classes,
    require_class_names,
)
from lightning_accel.models.masked_loss import MaskedLoss, MeanAUROC, SupervisedModel, masked_loss
from lightning_accel.nn.features import (
    check_edge_attr,
    check_edge_index,
    require_floating,
    require_width,
    wrong_edge_attr,
)
from lightning_accel.nn.relational.layers import RO3Conv
from lightning_accel.nn.relational.pooling import Estimate, RelationalPooling
from lightning_accel.ops.bounds import if_set, require_integers
from lightning_accel.ops.names import require_one_of
from lightning_accel.ops.options import options_of, read_options
from lightning_accel.ops.renames import renamed_arguments
from lightning_accel.ops.triples.cache import triples_of
from lightning_accel.ops.triples.find import Triples
from lightning_accel.strategies import PipelineStrategy

Level: TypeAlias = Literal["graph", "node"]
TargetKind: TypeAlias = Literal["classification", "multilabel", "regression"]
_SIZES = ("num_features", "edge_dim", "num_relations", "num_classes", "num_targets")


class RelationalGNN(SupervisedModel):
    """Classify graphs or nodes, or predict values of them, by convolutions with order-3 relations and a readout.

    Three options, alone or together, distinguish graphs that message passing cannot:

    - ``layers.conv="RO3Conv"``: each layer sees triangles and 2-paths (:class:`lightning_accel.RO3Conv`);
    - ``layers.triple_readout``: the readout of graphs adds the sum over all triangles and 2-paths
      (:class:`lightning_accel.nn.RelationalOrder3Pooling`);
    - ``marking``: the mean over runs in which one, two or three nodes are marked, joined by edges or any
      (:class:`lightning_accel.nn.RelationalPooling`), the most expressive. Training marks one random tuple per
      graph and step, evaluation all of them, or ``marking.samples``.

    Batches are those of PyTorch Geometric: ``x`` (N, F) floating, or absent for ones (N, 1); ``edge_index`` (2, M);
    ``edge_attr``, (M, edge_dim) floating or (M,) types; ``y``: (B,) or (N,) classes, ``IGNORED`` (-100) for missing
    ones, or values or labels of 0 and 1, (B,), (B, K), (N,) or (N, K), NaN for missing ones; ``triangle_index`` if
    :class:`lightning_accel.data.AddRelationalTriples` was applied.

    For ``level="node"``, targets are those of the nodes in ``target_index``, see
    :class:`lightning_accel.GraphDataModule`; or those in ``train_mask``, ``val_mask`` and ``test_mask`` in the
    respective stage, and the first ``batch_size`` nodes of PyG's neighbour loaders.

    The loss is cross entropy, of labels that of each by itself, or the squared or absolute error of values in standard
    deviations of the training targets if the datamodule provides them: its sum over all valid targets of the batch, on
    all processes, divided by their number, so that W processes train as one with all graphs does, except for
    ``layers.norm="batch"``, which normalizes each process's graphs.

    Logged: ``train/loss``; ``loss`` and ``accuracy``, or ``mse`` or ``mae`` of values in their own unit, under ``val/``
    and ``test/``, as means over all valid targets of the epoch; ``auroc`` of labels, the mean over those of which the
    epoch has both values. ``predict`` returns classes with their probability,
    probabilities of labels, or values, and the standard error of what was averaged over marks.

    Args:
        num_features: F, the number of features of a node; by default the datamodule's attribute of that name, as for
            the next six.
        num_classes: number of classes for classification.
        num_targets: K, the number of values or labels of a target; 1 if the datamodule does not provide it.
        edge_dim: number of features of an edge.
        num_relations: number of edge types.
        level: what has targets, ``graph`` or ``node``.
        target_kind: ``classification``; ``multilabel``, K labels that may be 1 together; or ``regression``.
        error: which error of values is minimized and logged, ``squared`` or ``absolute``.
        layers: the options of the convolutions, see :class:`lightning_accel.models.ConvolutionLayers`; with
            ``num_layers=0`` only the triples of ``layers.triple_readout`` are used.
        marking: which nodes are marked, see :class:`lightning_accel.models.Marking`; by default none.
        class_names: names of the classes for predictions; by default the datamodule's, if it has any.
        optimizer: creates the optimizer; called with the parameters.

    Raises:
        TypeError: if an option has another type.
        ValueError: if options exclude each other; before a run starts, if sizes are neither given nor provided by the
            datamodule, or contradict it, or the convolution is not suitable.

    Example:
        >>> layers = ConvolutionLayers(dim=8)
        >>> model = RelationalGNN(2, 3, level="graph", target_kind="classification", layers=layers)
        >>> edge_index, batch = torch.tensor([[0, 1, 2], [1, 2, 0]]), torch.tensor([0, 0, 0, 1])
        >>> model(torch.randn(4, 2), edge_index, batch=batch).shape
        torch.Size([2, 3])
    """

    target_mean: Tensor  # (S,), mean of the training targets
    target_std: Tensor
    can_export: ClassVar = False  # as a whole: shapes depend on the values of batch
    from_datamodule: ClassVar = dict.fromkeys(_SIZES, index) | {
        "level": str,
        "target_kind": str,
        "class_names": list_of_str,
    }

    @renamed_arguments(
        **{name: f"layers.{name}" for name in options_of(ConvolutionLayers()) if name != "compress_sums"},
        marks="marking.num_nodes",
        tuples="marking.tuples",
        samples="marking.samples",
        train_samples="marking.train_samples",
    )
    def __init__(
        self,
        num_features: int | None = None,
        num_classes: int | None = None,
        *,
        num_targets: int | None = None,
        edge_dim: int | None = None,
        num_relations: int | None = None,
        level: Level | None = None,
        target_kind: TargetKind | None = None,
        error: Literal["squared", "absolute"] = "squared",
        layers: ConvolutionLayers = ConvolutionLayers(),
        marking: Marking = Marking(),
        class_names: Sequence[str] | None = None,
        optimizer: OptimizerCallable = torch.optim.AdamW,
    ) -> None:
        super().__init__()
        class_names = None if class_names is None else list_of_str(class_names)
        layers, marking = read_options(ConvolutionLayers, layers), read_options(Marking, marking)
        self.save_hyperparameters(ignore=["optimizer"])
        keep_plain_hyperparameters(self)
        self.num_features, self.num_classes, self.num_targets = num_features, num_classes, num_targets
        self.edge_dim, self.num_relations = edge_dim, num_relations
        self.level, self.target_kind = level, target_kind
        self.class_names = class_names
        self.convolutions, self.marking = layers, marking
        self.value_loss = error
        self.make_optimizer = optimizer
        require_integers(1, **if_set(**{name: getattr(self, name) for name in _SIZES}))
        self._require_options()
        self.layers: GraphLayers | None = None
        known = level is not None and target_kind is not None and self._num_scores() and num_features
        if known and marking.num_nodes != "auto":
            self.configure_model()

    def _require_options(self) -> None:
        layers, marking = self.convolutions, self.marking
        if layers.num_layers < 0 or layers.dim < 1:
            raise ValueError(
                "layers.num_layers must be at least 0, and layers.dim at least 1; got "
                f"{layers.num_layers} and {layers.dim}"
            )
        if layers.norm is not None:
            require_one_of("layers.norm", layers.norm, get_args(NormName))
        if layers.attention_heads < 0 or (layers.attention_heads and layers.dim % layers.attention_heads):
            raise ValueError(
                f"layers.attention_heads must divide layers.dim={layers.dim}, or be 0; got {layers.attention_heads}"
            )
        if marking.num_nodes != "auto" and (not isinstance(marking.num_nodes, int) or marking.num_nodes < 0):
            raise ValueError(f"marking.num_nodes must be 0 or more, or 'auto'; got {marking.num_nodes!r}")
        if marking.num_nodes == "auto" and marking.tuples is not None:
            raise ValueError(
                f"marking.num_nodes='auto' chooses the tuples, too; leave marking.tuples={marking.tuples!r} out, or "
                "give the number of nodes"
            )
        if not layers.num_layers and not layers.triple_readout:
            raise ValueError("layers.num_layers=0 leaves the edges out; give some, or layers.triple_readout=True")
        if self.value_loss not in ("squared", "absolute"):
            raise ValueError(f"error must be squared or absolute; got {self.value_loss!r}")
        if not marking.num_nodes and marking != Marking():
            raise ValueError(
                f"marking.tuples={marking.tuples!r}, samples={marking.samples} and train_samples="
                f"{marking.train_samples} say which nodes are marked, but marking.num_nodes=0: give their number"
            )
        if marking.num_nodes and layers.triple_readout:
            raise ValueError(
                "with marked nodes the readout is the sum over nodes and the marked ones; leave layers.triple_readout "
                "out"
            )

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if self.marking.num_nodes and isinstance(self.trainer.strategy, PipelineStrategy):
            raise ValueError(
                "marks run through the layers once for each of many copies of a graph, which accel_pipeline cannot; "
                "take 'accel_ddp' or 'accel_fsdp2', or marking.num_nodes=0"
            )

    def _read_datamodule(self) -> None:
        super()._read_datamodule()
        if self.marking.num_nodes == "auto":
            self.marking = choose_marking(self._training_graphs(), self.convolutions, self.marking)
            self.hparams["marking"] = options_of(self.marking)

    def _training_graphs(self) -> Sequence[Data]:
        """Return the training graphs of the datamodule.

        Raises:
            ValueError: if it does not tell them, or targets are those of nodes.
        """
        datamodule = self.trainer.datamodule  # type: ignore[attr-defined]  # set by a connector
        graphs = getattr(datamodule, "train_dataset", None)
        if graphs is None or self.level == "node":
            found = f"level={self.level!r}" if self.level == "node" else f"{type(datamodule).__name__} without any"
            raise ValueError(
                "marking.num_nodes='auto' compares the training graphs, which are the datamodule's attribute "
                f"train_dataset, by their targets; got {found}. Give the number of nodes to mark"
            )
        seen = []
        for graph in (graphs[i] for i in range(len(graphs))):
            edges = self._edges(graph) if self._uses_edges else None
            seen.append(Data(graph.x, graph.edge_index, edges, y=graph.y, num_nodes=graph.num_nodes))
        return seen

    def _num_scores(self) -> int | None:
        """Return S, the number of scores."""
        return self.num_classes if self.target_kind == "classification" else self.num_targets

    def _is_built(self) -> bool:
        return self.layers is not None

    def _require_sizes(self) -> None:
        if self.marking.num_nodes == "auto":
            raise ValueError(
                "marking.num_nodes='auto' compares the training graphs of a datamodule in a Trainer; without one, give "
                "the number, such as choose_marking(graphs, layers) returns"
            )
        given = {name: getattr(self, name) for name in (*_SIZES, "level", "target_kind")}
        known = {name: value for name, value in given.items() if value is not None}
        if self.level not in get_args(Level) or self.target_kind not in get_args(TargetKind):
            raise ValueError(
                f"RelationalGNN needs level, one of {', '.join(get_args(Level))}, and target_kind, one of "
                f"{', '.join(get_args(TargetKind))}; got {known}. Pass them, or train with a datamodule that has "
                "attributes so named, as GraphDataModule has"
            )
        if self._num_scores() is None or self.num_features is None:
            raise ValueError(
                f"RelationalGNN needs num_features of nodes, and num_classes or num_targets; got {known}. Pass them, "
                "or train with a datamodule that has attributes so named, as GraphDataModule has"
            )
        if self.level == "node" and self.convolutions.triple_readout:
            raise ValueError("layers.triple_readout has no effect on level='node': leave it out")
        if self.target_kind != "regression" and self.value_loss != "squared":
            raise ValueError(
                f"error={self.value_loss!r} is of target_kind='regression', and this is {self.target_kind!r}: leave it "
                "out"
            )
        if self.target_kind == "classification":
            require_class_names(self.class_names, self.num_classes)

    def _build(self) -> None:
        num_scores = self._num_scores()
        assert num_scores is not None
        assert self.num_features is not None
        assert self.level is not None
        dim, marks = self.convolutions.dim, self.marking.num_nodes
        assert isinstance(marks, int)
        edges = EdgeKind(self.edge_dim, self.num_relations)
        norm = self.convolutions.norm or ("graph" if marks else "batch")
        layers = make_layers(self.num_features + marks, edges, replace(self.convolutions, norm=norm))
        width = dim
        self.readout: GraphReadout | None = None
        if marks:
            width += dim * marks if self.level == "graph" else 0
        elif self.level == "graph":
            self.readout = GraphReadout(dim, self.convolutions.triple_readout)
            width = self.readout.out_channels
        if self.target_kind == "multilabel":
            self.value_loss = "logistic"
            self.val_auroc, self.test_auroc = MeanAUROC(), MeanAUROC()
        self.head = GraphHead(width, dim, num_scores)
        self.marked: RelationalPooling | None = None
        if marks:
            self.marked = RelationalPooling(
                layers,
                marks,
                self.marking.tuples,
                level=self.level,
                head=self.head,
                samples=self.marking.samples,
                train_samples=self.marking.train_samples,
            )
        self.layers = layers
        self.register_buffer("target_mean", torch.zeros(num_scores))
        self.register_buffer("target_std", torch.ones(num_scores))

    def repeated_blocks(self) -> list[nn.Module]:
        """Return the blocks that strategies which shard parameters gather one at a time."""
        assert self.layers is not None
        return list(self.layers.blocks)

    def pipeline_layers(self) -> list[nn.Module]:
        """Return the layers in the order in which ``forward`` calls them, for strategies that split them."""
        assert self.layers is not None
        readout = [] if self.readout is None else [self.readout]
        return [self.layers.encoder, *self.layers.blocks, *readout, self.head]

    if TYPE_CHECKING:  # Any, as torch declares it

        def __call__(
            self,
            x: Tensor,
            edge_index: Tensor,
            edge_attr: Tensor | None = None,
            batch: Tensor | None = None,
            size: int | None = None,
            triangle_index: Tensor | None = None,
        ) -> Tensor: ...

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        batch: Tensor | None = None,
        size: int | None = None,
        triangle_index: Tensor | None = None,
    ) -> Tensor:
        """Score graphs, (B, S), or nodes, (N, S).

        Args:
            x: (N, F) features of the nodes.
            edge_index: (2, M) int64.
            edge_attr: (M, edge_dim) floating, or (M,) int64 types; ignored without ``edge_dim`` and ``num_relations``.
            batch: (N,) int64, the graph of each node, ascending; one graph by default.
            size: B, if the last graphs may have no nodes.
            triangle_index: (3, T) int64, if it is known.
        """
        if self.layers is None:
            raise RuntimeError(
                "the sizes of this RelationalGNN, or the nodes that 'auto' marks, are not known yet; pass num_features "
                "and num_classes, and a number of nodes, or train it"
            )
        if self.num_features:
            require_width(self, x, "num_features", self.num_features, "x (N, {})", ndim=2)
        require_floating(self, x, "x", self.layers.parameters())
        edge_attr = self._checked_edges(x, edge_index, edge_attr)
        if self.marked is not None:
            draws = self._mark_generator()
            return self._unscale(self.marked(x, edge_index, edge_attr, batch, size, generator=draws))
        triples = self._triples(x, edge_index, triangle_index)
        nodes = self.layers(x, edge_index, edge_attr, triples, batch)
        if self.readout is not None:
            nodes = self.readout(nodes, edge_index, batch, size, triples)
        return self._unscale(self.head(nodes))

    def estimate(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        batch: Tensor | None = None,
        size: int | None = None,
        triangle_index: Tensor | None = None,
    ) -> Estimate:
        """Return the output of ``forward`` and its standard error: 0 unless ``marking.samples`` tuples were drawn."""
        if self.marked is None:
            mean = self(x, edge_index, edge_attr, batch, size, triangle_index)
            return Estimate(mean, torch.zeros_like(mean), torch.ones_like(mean[:, :1], dtype=torch.int64))
        edge_attr = self._checked_edges(x, edge_index, edge_attr)
        found = self.marked.estimate(x, edge_index, edge_attr, batch, size)
        error = found.standard_error * self.target_std if self._has_values else found.standard_error
        return Estimate(self._unscale(found.mean), error, found.num_samples)

    def _checked_edges(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None) -> Tensor | None:
        """Return ``edge_attr`` if the model uses it; it must have a row for each edge anyway."""
        if edge_attr is None and not self._uses_edges:
            return None
        num_edges = edge_index.shape[1]
        instead = "If it is batch, pass it by name: batch=batch"
        check_edge_attr("RelationalGNN", edge_attr, len(x), num_edges, instead)
        if not self._uses_edges:
            _warn_of_ignored_edges()
            return None
        if wrong := wrong_edge_attr(edge_attr, num_edges, self.edge_dim, self.num_relations):
            raise ValueError(f"RelationalGNN needs {wrong}")
        return edge_attr

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave sums over triples uncompressed if the checkpoint is from before there was this option."""
        saved = checkpoint.get("hyper_parameters", {})
        options = saved.get("layers", {})
        if "compress_sums" in options or not (options or "conv" in saved):
            return
        self.convolutions = replace(self.convolutions, compress_sums=False)
        self.hparams["layers"]["compress_sums"] = False
        for part in self.modules():
            if isinstance(part, RO3Conv) and "compress_sums" not in (self.convolutions.conv_options or {}):
                part.compress_sums = False

    def on_train_batch_start(self, batch: Data, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if batch_idx or self.current_epoch or self.convolutions.norm is not None or self.marking.num_nodes:
            return
        x, edge_index, edge_attr, graph, *_ = self._inputs(batch)
        if self.convolutions.num_layers and edge_attr is None and has_equal_nodes(x, edge_index, graph):
            rank_zero_warn(
                "the nodes of each graph of the first batch have equal features and degrees, so that those of a graph "
                "stay almost equal. Running statistics of a batch norm, the default, are too coarse for that: training "
                "may succeed and validation stay at chance. Set layers.norm='layer' or 'none', or 'batch' to keep it"
            )

    def _mark_generator(self) -> torch.Generator | None:
        """Create a generator for the marks of training, since processes that are seeded alike would mark equal nodes.

        It is seeded by torch's global generator, whose state checkpoints contain.
        """
        if not self.training or not has_trainer(self) or self.trainer.world_size == 1:
            return None
        return torch.Generator().manual_seed(int(torch.randint(2**31, ())) + 2**31 * self.global_rank)

    def _triples(self, x: Tensor, edge_index: Tensor, triangle_index: Tensor | None) -> Triples | None:
        if not (self.convolutions.triple_readout or self.convolutions.conv == "RO3Conv"):
            return None
        check_edge_index("RelationalGNN", edge_index)
        return triples_of(edge_index, len(x), triangle_index)

    @property
    def _unit(self) -> tuple[Tensor, Tensor]:
        return self.target_mean, self.target_std

    def _unscale(self, values: Tensor) -> Tensor:
        return super()._unscale(values) if self._has_values else values

    def _num_samples(self, batch: Data) -> int:
        return int(getattr(batch, "num_graphs", 1))

    def _masked_loss(self, batch: Data, stage: str) -> MaskedLoss:
        target = self._target(batch, stage)
        unit = self.target_std if self.target_kind == "regression" else None
        scores = self(*self._inputs(batch))[self._target_index(batch)]
        if self.target_kind == "multilabel" and stage != "train":
            metric = self.val_auroc if stage == "val" else self.test_auroc
            metric.update(scores, target)
            self.log(f"{stage}/auroc", metric, batch_size=self._num_samples(batch))
        return masked_loss(scores, target, unit, self.value_loss)

    def _inputs(self, batch: Data) -> tuple[Any, ...]:
        x = batch.x
        if x is None:
            x = torch.ones(batch.num_nodes, 1, device=batch.edge_index.device, dtype=self.dtype)  # type: ignore[arg-type]
        size, edges = self._size(batch), self._edges(batch)
        # the precision "bf16-true" converts tensors of a batch, but not those of graphs
        x, edges = (one.to(self.dtype) if one is not None and one.is_floating_point() else one for one in (x, edges))
        return x, batch.edge_index, edges, batch.batch, size, getattr(batch, "triangle_index", None)

    def _size(self, batch: Data) -> int | None:
        """Return the number of graphs where it may not follow from ``batch.batch``, as a file would hold it."""
        if batch.batch is None:
            return None
        size = self._num_samples(batch)
        is_plain = not self.training and len(batch.batch) and int(batch.batch[-1]) == size - 1
        return None if is_plain else size

    @property
    def _uses_edges(self) -> bool:
        return self.edge_dim is not None or self.num_relations is not None

    def _edges(self, batch: Data) -> Tensor | None:
        """Return the edge features or types for the convolutions.

        Raises:
            ValueError: if the batch lacks them.
        """
        if not self._uses_edges:
            if batch.edge_attr is not None:
                _warn_of_ignored_edges()
            return None
        edges = batch.edge_attr if batch.edge_attr is not None else getattr(batch, "edge_type", None)
        if edges is None:
            raise ValueError(
                f"RelationalGNN(edge_dim={self.edge_dim}, num_relations={self.num_relations}) needs edge_attr in each "
                f"batch; got {batch}"
            )
        return edges

    def _target(self, batch: Data, stage: str) -> Tensor:
        """Return the targets of the stage, with IGNORED or NaN for nodes of other stages.

        Raises:
            ValueError: if the batch has none.
        """
        target = batch.y
        if target is None:
            raise ValueError(f"RelationalGNN needs a target y in each batch of {stage}; got {batch}")
        if self.target_kind == "classification":
            assert self.num_classes is not None
            num_rows = self._num_samples(batch) if self.level == "graph" else batch.num_nodes
            target = target.view(-1) if target.ndim == 0 or target.shape[1:] == (1,) else target
            target = as_classes(target, (num_rows,), self.num_classes, stage)
        elif not target.is_floating_point():
            target = target.float().masked_fill(target == IGNORED, torch.nan)
        if self.target_kind == "multilabel" and target.is_cpu:
            require_labels(target, f"a batch of {stage}")
        rows = self._target_index(batch)
        mask = None if "target_index" in batch or self.level == "graph" else getattr(batch, f"{stage}_mask", None)
        if mask is not None:
            mask = mask.view(-1, *[1] * (target.ndim - 1))
            target = torch.where(mask, target, torch.nan if target.is_floating_point() else IGNORED)
        return target[rows]

    def _target_index(self, batch: Data) -> Tensor | slice:
        """Return the index of the outputs that have targets."""
        if self.level == "graph":
            return slice(None)
        if "target_index" in batch:
            return batch.target_index
        return slice(batch.batch_size if "batch_size" in batch else None)  # not the property, which counts graphs

    def predict_step(self, batch: Data, batch_idx: int) -> dict[str, Any]:
        """Return the predictions for each graph or node.

        - ``classification``: ``class``, (B,) int64, or a list of names if the model knows them, its ``probability``,
          (B,), ``probabilities`` of all, (B, C), and ``score`` and its ``standard_error``, (B,), of that class before
          the softmax.
        - ``multilabel``: ``probability`` that a label is 1, and its ``score`` before the sigmoid with its
          ``standard_error``, (B, K) each.
        - ``regression``: ``value`` and its ``standard_error``, (B,), or (B, K) for several.

        Predicted nodes are those of ``target_index``, or the first ``batch_size``, or all.
        """
        rows = self._target_index(batch)
        mean, error, _ = (part[rows] for part in self.estimate(*self._inputs(batch)))
        if self.target_kind == "regression":
            return {"value": mean.squeeze(dim=-1), "standard_error": error.squeeze(dim=-1)}
        if self.target_kind == "multilabel":
            return {"probability": mean.sigmoid(), "score": mean, "standard_error": error}
        best = mean.argmax(dim=-1, keepdim=True)
        predictions = name_classes(mean, self.class_names)
        return {**predictions, "score": mean.gather(1, best)[:, 0], "standard_error": error.gather(1, best)[:, 0]}


def _warn_of_ignored_edges() -> None:
    rank_zero_warn(
        "RelationalGNN ignores edge_attr: pass edge_dim for features of edges, or num_relations for their types"
    )
