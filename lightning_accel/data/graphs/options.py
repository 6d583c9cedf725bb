"""Options of data of graphs, by subject. Shapes: n nodes of a graph, S splits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from torch_geometric.data import Dataset

from lightning_accel.data.graphs.tasks import Family, Level, TargetKind
from lightning_accel.data.shards.options import ShardOptions
from lightning_accel.ops.bounds import if_set, require_integers
from lightning_accel.ops.names import list_of_names


@dataclass(frozen=True)
class GraphLayout:
    """Hold where the targets of graphs are, and how files store them.

    Args:
        level: whether a target belongs to a ``graph`` or a ``node``; by default, nodes if ``y`` of a data set has an
            entry for each node, or if the table of nodes has the target, else graphs.
        target_kind: a class (``classification``), numbers (``regression``), or labels of 0 and 1 that are predicted
            each by itself (``multilabel``, in memory); by default classes, for a data set with floating ``y`` numbers.
        target: column or field of the target in a file, by default ``y``, or several with one number each; for
            ``substructures``, which of them to count, by default all seven.
        nodes_path: table of nodes that accompanies an edge list.
        shards: how a folder of files is read.

    Example:
        >>> from lightning_accel import GraphDataModule
        >>> data = GraphDataModule("molecules.jsonl", layout=GraphLayout(target_kind="regression"))  # doctest: +SKIP
    """

    level: Level | None = None
    target_kind: TargetKind | None = None
    target: str | Sequence[str] | None = None
    nodes_path: str | Path | None = None
    shards: ShardOptions = ShardOptions()

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns or fields of the target in a file."""
        return tuple(list_of_names(self.target or "y"))


@dataclass(frozen=True)
class GeneratedGraphs:
    """Hold which graphs of ``substructures`` are generated.

    Args:
        family: ``erdos_renyi`` or ``regular`` random graphs.
        num_graphs: number of graphs, for training, validation and test; by default 5,000.

    Example:
        >>> from lightning_accel import GraphDataModule
        >>> data = GraphDataModule(task="substructures", generated=GeneratedGraphs("regular", num_graphs=1000))
    """

    family: Family = "erdos_renyi"
    num_graphs: int | None = None


@dataclass(frozen=True)
class GraphBatches:
    """Hold how large batches of graphs, or of parts of one, may be, beside ``global_batch_size``.

    Args:
        max_nodes: largest number of nodes of a batch, over all processes; each process gets about an equal share.
        max_edges: largest number of edges (columns of ``edge_index``) of a batch, likewise.
        num_neighbors: for a single large graph with node targets, how many neighbours to sample of a seed node, of each
            of those, and so on, -1 for all; batches hold all edges among them. ``n_id`` maps a batch's nodes to those
            of the graph.

    Example:
        >>> from lightning_accel import GraphDataModule
        >>> data = GraphDataModule(task="csl", batches=GraphBatches(max_nodes=2000))
    """

    max_nodes: int | None = None
    max_edges: int | None = None
    num_neighbors: Sequence[int] | None = None


@dataclass(frozen=True)
class GraphSplitOptions:
    """Hold what validates and tests.

    Args:
        val_share: share of the graphs, or nodes, that validate; by default .1, for ``substructures`` .2.
        test_share: share of the graphs, or nodes, that test; by default .2, for ``substructures`` .5.
        fold: fold of ``csl``, 0 to 4, or column of masks (n, S) of a data set, 0 to S - 1.
        val_dataset: validation graphs, beside a data set of training graphs; needs ``test_dataset``.
        test_dataset: test graphs, beside a data set of training graphs; needs ``val_dataset``.

    Example:
        >>> from lightning_accel import GraphDataModule
        >>> data = GraphDataModule(task="csl", split=GraphSplitOptions(fold=2))
    """

    val_share: float | None = None
    test_share: float | None = None
    fold: int = 0
    val_dataset: Dataset | None = None
    test_dataset: Dataset | None = None


_PARTS = {"path", "dataset", "karate", "substructures"}
_SOURCES: dict[str, set[str]] = {  # the sources (path, dataset, or a task) for which an option has an effect
    **{name: {"dataset"} for name in ("split.val_dataset", "split.test_dataset")},
    **{name: {"path"} for name in ("layout.nodes_path", "predict_path")},
    **{name: {"substructures"} for name in ("generated.family", "generated.num_graphs")},
    "layout.level": {"path", "dataset", "substructures"},
    "layout.target_kind": {"path", "dataset"},
    "layout.target": {"path", "substructures"},
    "split.fold": {"csl", "dataset"},
    "batches.num_neighbors": {"path", "dataset", "karate"},
    "split.val_share": _PARTS,
    "split.test_share": _PARTS,
}
_DEFAULTS: dict[str, Any] = {"split.fold": 0, "generated.family": "erdos_renyi"}


def require_effect(source: str, options: Mapping[str, Any]) -> None:
    """Raise a ValueError if an option, ``group.option``, would have no effect with a path, a dataset or a task."""
    idle = [
        name
        for name, value in options.items()
        if name in _SOURCES and source not in _SOURCES[name] and value not in (None, _DEFAULTS.get(name))
    ]
    if idle:
        what = source if source in ("path", "dataset") else f"task={source!r}"
        raise ValueError(
            f"{', '.join(idle)} would have no effect with {what}; {idle[0]} is for "
            f"{', '.join(sorted(_SOURCES[idle[0]]))}. Leave it out"
        )
    parts = [options[name] is not None for name in ("split.val_dataset", "split.test_dataset")]
    shares = [name for name in ("split.val_share", "split.test_share") if options[name] is not None]
    if parts[0] != parts[1]:
        raise ValueError("split.val_dataset and split.test_dataset go together, beside dataset; got one of them")
    if parts[0] and shares:
        raise ValueError(
            f"{', '.join(shares)} would have no effect beside split.val_dataset and split.test_dataset; leave it out"
        )


def require_choices(options: Mapping[str, Any]) -> None:
    """Raise a ValueError if an option, ``group.option``, is none of its choices."""
    for name, choices in (
        ("layout.level", (None, *get_args(Level))), ("layout.target_kind", (None, *get_args(TargetKind))),
        ("generated.family", get_args(Family)),
    ):  # fmt: skip
        if options[name] not in choices:
            raise ValueError(f"{name} must be one of {', '.join(filter(None, choices))}; got {options[name]!r}")


def require_sizes(global_batch_size: int | None, batches: GraphBatches) -> None:
    """Raise a ValueError if a size is out of range."""
    limits = {"batches.max_nodes": batches.max_nodes, "batches.max_edges": batches.max_edges}
    require_integers(1, **if_set(global_batch_size=global_batch_size, **limits))
    chosen = batches.num_neighbors
    if chosen is not None:
        if not chosen or any(most < 1 and most != -1 for most in chosen):
            raise ValueError(
                f"batches.num_neighbors must be numbers of 1 or more, or -1 for all, one for each step; got {chosen}"
            )
        if batches.max_nodes is not None or batches.max_edges is not None:
            raise ValueError(
                "batches.max_nodes and max_edges would have no effect with num_neighbors; set global_batch_size"
            )
