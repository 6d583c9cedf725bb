"""Which nodes of graphs are marked: how many are needed to tell the graphs of a data set apart."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch_geometric.data import Batch, Data

from lightning_accel.data.sequences.batch import IGNORED
from lightning_accel.models.graph_layers import ConvolutionLayers
from lightning_accel.nn.relational.marked_tuples import MARKS, TupleKind, find_tuples
from lightning_accel.nn.relational.refinement import refinement_hash

_CANDIDATES: tuple[tuple[int, TupleKind], ...] = (*((marks, kind) for kind, marks in MARKS.items()), (2, "all"))
_MOST_NODES = 2**26  # of the copies that are compared: about ten seconds with four layers
_AT_ONCE = 256


@dataclass(frozen=True)
class Marking:
    """Hold which nodes of a graph are marked, see :class:`lightning_accel.nn.RelationalPooling`.

    Args:
        num_nodes: number of nodes that are marked together: 0, 1, 2, 3; more with ``tuples="all"``. With ``"auto"``,
            the cheapest marks that tell the training graphs apart, see :func:`choose_marking`.
        tuples: which nodes are marked: by default ``nodes`` for one, ``edges`` for two, ``two_paths`` for three.
        samples: number of random tuples of each graph in evaluation; None for all.
        train_samples: likewise in training. With one, the loss of each tuple is minimized, which bounds that of their
            mean and makes each predict the target alone; with more, that of the mean over the drawn tuples.

    Example:
        >>> from lightning_accel import RelationalGNN
        >>> model = RelationalGNN(marking=Marking(num_nodes=1, samples=8))
    """

    num_nodes: int | Literal["auto"] = 0
    tuples: TupleKind | None = None
    samples: int | None = None
    train_samples: int | None = 1


class Separation(NamedTuple):
    """Hold how well graph networks with some marks can tell graphs of different targets apart."""

    marking: Marking
    alike: int  # graphs that no such network tells apart from one with another target
    copies: float  # copies of a graph, one for each tuple of marked nodes, on average over all graphs


def compare_markings(graphs: Sequence[Data], layers: ConvolutionLayers = ConvolutionLayers()) -> list[Separation]:
    """Count, for several markings, the graphs that no network tells apart from a graph with another target.

    The first is without marks. The others follow in ascending order of their cost, which is proportional to the number
    of tuples of marked nodes: one node, both ends of an edge, paths of two edges, and any two nodes. The list
    ends with the first that tells all apart, and leaves out what would take more than 2**26 nodes of copies. What no
    network tells apart is found by :func:`lightning_accel.nn.refinement_hash`, without training.

    Args:
        graphs: graphs with ``edge_index``, and ``y`` for the whole graph: a class or one or several values; missing
            ones (-100, NaN) are equal to any. Features ``x`` and ``edge_attr`` are compared, where there are any.
        layers: the options of the convolutions: ``num_layers``, and ``conv``, which sees triangles and paths if it is
            ``RO3Conv``, and else is taken for message passing.

    Raises:
        ValueError: if there are no graphs, or one has no target for the whole of it; for ``layers.triple_readout``,
            which excludes marks.

    Example:
        >>> from torch_geometric.data import Data
        >>> edges = [[0, 1, 2, 3, 4, 5], [1, 2, 0, 4, 5, 3]], [[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]]
        >>> graphs = [Data(edge_index=torch.tensor(e), num_nodes=6, y=torch.tensor([y])) for y, e in enumerate(edges)]
        >>> [found.alike for found in compare_markings(graphs, ConvolutionLayers("GINConv"))]
        [2, 0]
    """
    if not isinstance(layers, ConvolutionLayers):
        raise TypeError(f"layers must be ConvolutionLayers(conv=...), the options of a model; got {layers!r}")
    if not graphs or layers.triple_readout:
        found = "layers.triple_readout=True, which excludes marks" if graphs else "no graphs"
        raise ValueError(f"markings are compared on graphs, for layers without a readout of triples; got {found}")
    hard = _alike(graphs, layers, Marking())
    compared = [Separation(Marking(), len(hard), 1.0)]
    if not hard:
        return compared
    priced = [(_count_tuples(graphs, marks, kind), marks, kind) for marks, kind in _CANDIDATES]
    for copies, marks, kind in sorted(priced, key=lambda one: float(one[0].sum())):
        nodes = sum(float(copies[i]) * (graphs[i].num_nodes or 0) for i in hard)
        if nodes > _MOST_NODES:
            continue
        marking = Marking(marks, None if MARKS.get(kind) == marks else kind)
        left = len(_alike([graphs[i] for i in hard], layers, marking))
        compared.append(Separation(marking, left, float(copies.mean())))
        if not left:
            break
    return compared


def choose_marking(
    graphs: Sequence[Data], layers: ConvolutionLayers = ConvolutionLayers(), marking: Marking = Marking("auto")
) -> Marking:
    """Return the cheapest marking with which as few graphs as possible look like one with another target.

    What was compared is logged at the level INFO.

    Args:
        graphs: training graphs, as for :func:`compare_markings`.
        layers: the options of the convolutions.
        marking: the numbers of samples to return, if nodes are marked.
    """
    found = compare_markings(graphs, layers)
    best = min(found, key=lambda one: one.alike)  # the first, so the cheapest, of equals
    lines = [
        f"marking.num_nodes='auto' takes {_describe(best)}. Of {len(graphs)} training graphs, {layers.num_layers} "
        f"layers of {layers.conv} cannot distinguish from a graph with another target",
        *(f"  {one.alike} with {_describe(one)}" for one in found),
    ]
    if best.marking.num_nodes and layers.conv != "RO3Conv":
        alike = _alike(graphs, replace(layers, conv="RO3Conv"), Marking())
        if len(alike) <= best.alike:
            lines.append(f"layers.conv=RO3Conv needs no marks: {len(alike)} with none")
    rank_zero_info("\n".join(lines))
    if not best.marking.num_nodes:
        return Marking()
    return replace(marking, num_nodes=best.marking.num_nodes, tuples=best.marking.tuples)


def _describe(found: Separation) -> str:
    marks, kind = found.marking.num_nodes, found.marking.tuples
    if not marks:
        return "no marks"
    return f"num_nodes={marks}{f', tuples={kind}' if kind else ''} ({found.copies:.3g} copies of a graph)"


def _alike(graphs: Sequence[Data], layers: ConvolutionLayers, marking: Marking) -> list[int]:
    """Return the graphs that share all that a network sees with one of another target."""
    assert isinstance(marking.num_nodes, int)
    hashes = []
    for start in range(0, len(graphs), _AT_ONCE):
        batch = Batch.from_data_list([_without_target(graph) for graph in graphs[start : start + _AT_ONCE]])
        hashes.append(
            refinement_hash(
                torch.ones(batch.num_nodes, 1) if batch.x is None else batch.x,
                batch.edge_index,
                batch.edge_attr,
                batch.batch,
                batch.num_graphs,
                num_layers=layers.num_layers,
                triples=layers.conv == "RO3Conv",
                marks=marking.num_nodes,
                tuples=marking.tuples,
            )
        )
    group = torch.cat(hashes).unique(return_inverse=True)[1]
    return _disagrees(group, _targets(graphs))[group].nonzero().flatten().tolist()


def _disagrees(group: Tensor, target: Tensor) -> Tensor:
    """Return which groups have different targets (n, K) in a column, missing ones aside."""
    index, shape = group[:, None].expand_as(target), (int(group.max()) + 1, target.shape[1])
    ends = []
    for reduce, fill in (("amin", torch.inf), ("amax", -torch.inf)):
        known = torch.where(target.isnan(), fill, target)
        ends.append(known.new_full(shape, fill).scatter_reduce(0, index, known, reduce))
    return (ends[0] < ends[1]).any(dim=1)


def _targets(graphs: Sequence[Data]) -> Tensor:
    """Return the targets (n, K) in float64, NaN for missing ones."""
    rows = []
    for i, graph in enumerate(graphs):
        if not isinstance(graph.y, Tensor) or (graph.y.ndim and len(graph.y) != 1):
            found = tuple(graph.y.shape) if isinstance(graph.y, Tensor) else graph.y
            raise ValueError(
                f"markings are compared by the targets of whole graphs, y of shape (1,) or (1, K); graph {i} has "
                f"y={found}. Give marking.num_nodes"
            )
        row = graph.y.flatten().double()
        rows.append(row if graph.y.is_floating_point() else torch.where(row == IGNORED, torch.nan, row))
    return torch.stack(rows)


def _without_target(graph: Data) -> Data:
    """Return what a network sees of a graph."""
    return Data(graph.x, graph.edge_index, graph.edge_attr, num_nodes=graph.num_nodes)


def _count_tuples(graphs: Sequence[Data], marks: int, kind: TupleKind) -> Tensor:
    batch = Batch.from_data_list([Data(edge_index=graph.edge_index, num_nodes=graph.num_nodes) for graph in graphs])
    return find_tuples(kind, marks, batch.ptr, *batch.edge_index).total
