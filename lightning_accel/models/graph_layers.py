"""Layers, convolutions and readouts of graph networks. Shapes: N nodes, M edges, F features, D width, B graphs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from inspect import Parameter, signature
from typing import Any, Literal, NamedTuple

import torch
import torch_geometric.nn
from torch import Tensor, nn
from torch_geometric.nn import GPSConv, GraphNorm
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.utils import degree, scatter

from lightning_accel.nn.graph_attention import run_gps
from lightning_accel.nn.relational.layers import RelationalOrder3Pooling, RO3Conv
from lightning_accel.ops.evaluation import evaluating
from lightning_accel.ops.float32 import at_least_float32, without_autocast
from lightning_accel.ops.triples.find import Triples

NormName = Literal["batch", "layer", "graph", "none"]


@dataclass(frozen=True)
class ConvolutionLayers:
    """Hold the options of a model's convolutions of graphs, and of their readout.

    Args:
        conv: ``RO3Conv``, a class of ``torch_geometric.nn``, or an import path. It is created with the width as
            ``in_channels`` and ``out_channels``, or with a perceptron as ``nn``, and with ``edge_dim`` or
            ``num_relations`` if it has these parameters.
        conv_options: further arguments of the convolution, by name.
        dim: width of all layers.
        num_layers: number of convolutions.
        norm: kind of norm after each convolution: of a ``batch``, a ``layer``, a ``graph`` (Cai et al. 2021,
            https://arxiv.org/abs/2009.03294) or ``none``. By default ``graph`` for models that mark nodes, and
            ``batch`` for others. Few nodes are marked, and in regular graphs all others are equal, so that the running
            statistics of a batch norm are too coarse in evaluation: it stays at the most frequent class. Without marks,
            graphs whose nodes are all equal need ``layer`` or ``none``.
        dropout: share of the features that is dropped after each convolution, in training.
        attention_heads: heads of an attention of all nodes of a graph to each other, beside each convolution; both, a
            perceptron after their sum, residuals and norms make a block of GPS (Rampášek et al. 2022,
            https://arxiv.org/abs/2205.12454). 0 for none. Nodes need features that tell where they are, such as
            ``torch_geometric.transforms.AddRandomWalkPE`` adds.
        triple_readout: add triangles and 2-paths to the readout of graphs, which is the sum over nodes.
        compress_sums: whether ``RO3Conv`` takes its sums over triples by their inverse hyperbolic sine. Without it they
            are exact, but grow with the square of degrees and features, so that single graphs may get predictions far
            outside all targets. Other convolutions have no such sums.

    Example:
        >>> from lightning_accel import RelationalGNN
        >>> model = RelationalGNN(layers=ConvolutionLayers("GINConv", dim=128, num_layers=5))
    """

    conv: str = "RO3Conv"
    conv_options: dict[str, Any] | None = None
    dim: int = 64
    num_layers: int = 4
    norm: NormName | None = None
    dropout: float = 0.0
    attention_heads: int = 0
    triple_readout: bool = False
    compress_sums: bool = True


_CONV_OF = {"GCN": "GCNConv", "GraphSAGE": "SAGEConv", "GIN": "GINConv", "GAT": "GATConv", "PNA": "PNAConv"}
_AS_GPS = ". For layers of GPS take the convolution beside the attention, such as GINEConv, and attention_heads=4"


class EdgeKind(NamedTuple):
    """Describe what edges carry: nothing, ``dim`` features, or one of ``num_relations`` types."""

    dim: int | None = None
    num_relations: int | None = None

    def example(self, num_edges: int) -> Tensor | None:
        if self.num_relations is not None:
            return torch.zeros(num_edges, dtype=torch.int64)
        return None if self.dim is None else torch.zeros(num_edges, self.dim)


class _GraphNorm(GraphNorm):  # type: ignore[misc]  # PyG's is untyped
    """Normalize each graph in float32, since in 16 bits nodes that differ by little become equal."""

    def forward(self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
        if not len(x):
            return x
        with without_autocast(x):
            out: Tensor = super().forward(at_least_float32(x), batch, batch_size)
            return out.to(x.dtype)


_NORMS: dict[NormName, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm1d,
    "layer": nn.LayerNorm,
    "graph": _GraphNorm,
    "none": nn.Identity,
}


class GraphBlock(nn.Module):
    """Apply a convolution, a norm, an activation and dropout."""

    def __init__(self, conv: nn.Module, dim: int, norm: NormName, dropout: float) -> None:
        super().__init__()
        self.conv = conv
        self.norm = _NORMS[norm](dim)
        self.dropout = nn.Dropout(dropout)
        self._takes_batch = "batch" in _parameter_names(conv)

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        triples: Triples | None = None,
        batch: Tensor | None = None,
    ) -> Tensor:
        """Map nodes ``x`` (N, D) of the graphs ``batch`` (N,), one graph by default, to (N, D)."""
        optional: dict[str, Any] = {"triples": triples} if isinstance(self.conv, RO3Conv) else {}
        if self._takes_batch:
            optional["batch"] = edge_index.new_zeros(len(x)) if batch is None else batch
        attributes = () if edge_attr is None else (edge_attr,)
        features: Tensor = self.conv(x, edge_index, *attributes, **optional)
        features = self.norm(features, batch) if isinstance(self.norm, GraphNorm) else self.norm(features)
        return self.dropout(features.relu())


class AttentionBlock(nn.Module):
    """Apply a convolution and an attention within each graph side by side, and a perceptron to their sum."""

    def __init__(self, conv: nn.Module, dim: int, heads: int, norm: NormName, dropout: float) -> None:
        super().__init__()
        kind = None if norm == "none" else f"{norm}_norm"
        options = {"mode": "node"} if norm == "layer" else None
        self.block = GPSConv(
            dim, conv, heads, dropout, norm=kind, norm_kwargs=options, attn_kwargs={"dropout": dropout}
        )
        if norm == "graph":
            self.block.norm1, self.block.norm2, self.block.norm3 = (_GraphNorm(dim) for _ in range(3))
        self._edge_name = _parameter_names(conv)[2:3]

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        triples: Triples | None = None,
        batch: Tensor | None = None,
    ) -> Tensor:
        """Map nodes ``x`` (N, D) of the graphs ``batch`` (N,), ascending, to (N, D)."""
        if not len(x):  # PyG's attention takes no batch without nodes
            return x
        optional: dict[str, Any] = {"triples": triples} if isinstance(self.block.conv, RO3Conv) else {}
        if edge_attr is not None:
            optional[self._edge_name[0]] = edge_attr
        return run_gps(self.block, x, edge_index, batch, **optional)


class GraphLayers(nn.Module):
    """Encode nodes and edges and apply a stack of blocks, such as :class:`GraphBlock`: nodes (N, F) to (N, D)."""

    def __init__(self, encoder: nn.Module, edge_encoder: nn.Module | None, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.encoder = encoder
        self.edge_encoder = edge_encoder
        self.blocks = nn.ModuleList(blocks)

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        triples: Triples | None = None,
        batch: Tensor | None = None,
    ) -> Tensor:
        if self.edge_encoder is not None:
            edge_attr = self.edge_encoder(edge_attr)
        x = self.encoder(x)
        for block in self.blocks:
            x = block(x, edge_index, edge_attr, triples, batch)
        return x


def make_layers(num_features: int, edges: EdgeKind, options: ConvolutionLayers) -> GraphLayers:
    """Build :class:`GraphLayers`; edge types are embedded for convolutions that only take edge features."""
    kind, dim, norm = find_conv(options.conv), options.dim, options.norm or "batch"
    edge_encoder = None
    if edges.num_relations is not None and "num_relations" not in signature(kind).parameters:
        edge_encoder = nn.Embedding(edges.num_relations, dim)
        edges = EdgeKind(dim=dim)
    blocks = list[nn.Module]()
    for _ in range(options.num_layers):
        of_kind = {"compress_sums": options.compress_sums} if kind is RO3Conv else {}
        layer = make_conv(kind, dim, edges, of_kind | (options.conv_options or {}))
        require_width(layer, dim, edges)
        if not options.attention_heads:
            blocks.append(GraphBlock(layer, dim, norm, options.dropout))
            continue
        if "batch" in _parameter_names(layer):
            raise ValueError(
                f"layers.attention_heads adds attention to a convolution over edges; {kind.__name__} takes batch, and "
                "mixes the nodes of a graph itself. Choose another conv, or leave attention_heads out"
            )
        blocks.append(AttentionBlock(layer, dim, options.attention_heads, norm, options.dropout))
    return GraphLayers(nn.Linear(num_features, dim), edge_encoder, blocks)


def find_conv(name: str) -> type[nn.Module]:
    """Find a convolution: ``RO3Conv``, a class of ``torch_geometric.nn``, or one by its import path.

    Raises:
        ValueError: if there is none.
    """
    if isinstance(name, type):
        raise TypeError(f"conv is the name of a class, such as 'GINConv'; got the class {name.__name__}: pass its name")
    if name == "RO3Conv":
        return RO3Conv
    module, _, short = name.rpartition(".")
    try:
        if not all(part.isidentifier() for part in name.split(".")):  # else any file that ends in .py could be meant
            raise ImportError("no import path")
        found = getattr(import_module(module or "torch_geometric.nn"), short)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            "conv must be RO3Conv, a convolution of torch_geometric.nn such as GINConv, or the import path of one; got "
            f"{name!r}: {error}{_nearest_conv(name)}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ValueError(f"conv must name a class of modules; {name!r} is {found!r}")
    if issubclass(found, BasicGNN):
        raise ValueError(
            f"conv must name one convolution, of which layers.num_layers are made; {name!r} is a whole network"
            + (f": take {_CONV_OF[found.__name__]}" if found.__name__ in _CONV_OF else "")
        )
    return found


def _nearest_conv(name: str) -> str:
    found = get_close_matches(name, ["RO3Conv", *torch_geometric.nn.conv.__all__], n=1)
    return f"; did you mean {found[0]!r}?" if found and found[0] != name else ""


def make_conv(kind: type[nn.Module], dim: int, edges: EdgeKind, options: Mapping[str, Any]) -> nn.Module:
    """Create a convolution from ``dim`` to ``dim`` features; a perceptron is created for convolutions that need one."""
    parameters = signature(kind).parameters
    given = dict(options)
    if edges.dim is not None and "edge_dim" in parameters:
        given.setdefault("edge_dim", edges.dim)
    if edges.num_relations is not None and "num_relations" in parameters:
        given.setdefault("num_relations", edges.num_relations)
    sizes = {} if "nn" in parameters else {"in_channels": dim, "out_channels": dim}
    if "nn" in parameters:
        wide = 2 * dim if kind.__name__ == "EdgeConv" else dim  # its input is both ends of an edge
        given.setdefault("nn", nn.Sequential(nn.Linear(wide, dim), nn.ReLU(), nn.Linear(dim, dim)))
    else:
        sizes = {name: size for name, size in sizes.items() if name in parameters}
    try:
        return kind(**sizes, **given)
    except TypeError as error:
        raise ValueError(
            f"conv={kind.__name__} cannot be built of {sorted({**sizes, **given})}: {error}"
            f"{_AS_GPS if kind is GPSConv else ''}"
        ) from error


def require_width(conv: nn.Module, dim: int, edges: EdgeKind) -> None:
    """Reject a convolution that does not map nodes (N, ``dim``) to (N, ``dim``), or ignores what edges carry.

    Raises:
        ValueError: describing what it does.
    """
    name, names = type(conv).__name__, _parameter_names(conv)
    if edges != EdgeKind() and names[2:3] not in (["edge_attr"], ["edge_type"]):
        raise ValueError(
            f"edges have {'types' if edges.dim is None else f'{edges.dim} features'}, which {name} does not take; "
            "choose conv=RO3Conv, GINEConv, GATv2Conv or another with edge_attr, or leave edge_attr out of the data"
        )
    if names[1:2] == ["batch"]:
        raise ValueError(f"{name} takes x and batch, and no edge_index; choose a convolution over edges")
    try:
        with torch.no_grad(), evaluating(conv):
            out = _apply_example(conv, dim, edges)
    except Exception as error:
        raise ValueError(
            f"{name} could not be called as conv(x, edge_index{', edge_attr' * (edges != EdgeKind())}): {error}. Set "
            "what it needs in conv_options"
        ) from error
    shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
    if shape != (2, dim):
        raise ValueError(
            f"{name} gave {shape} for two nodes of width {dim}; layers keep the width dim={dim}. Set conv_options so "
            "that it does, such as {heads: 4, concat: false}"
        )


def _apply_example(conv: nn.Module, dim: int, edges: EdgeKind) -> Any:
    """Apply ``conv`` to two unequal nodes that are joined."""
    attributes = edges.example(2)
    x = torch.arange(2)[:, None] + torch.arange(dim) / dim
    given = {"batch": torch.tensor([0, 0])} if "batch" in _parameter_names(conv) else {}
    return conv(x, torch.tensor([[0, 1], [1, 0]]), *(() if attributes is None else (attributes,)), **given)


def _parameter_names(conv: nn.Module) -> list[str]:
    """Return the parameters of ``conv.forward`` that may be passed by position."""
    kinds = Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD
    return [name for name, parameter in signature(conv.forward).parameters.items() if parameter.kind in kinds]


def has_equal_nodes(x: Tensor, edge_index: Tensor, batch: Tensor | None = None) -> bool:
    """Return whether all nodes of each graph have equal features and degrees.

    >>> has_equal_nodes(torch.ones(3, 1), torch.tensor([[0, 1, 2], [1, 2, 0]]))
    True
    """
    graph = edge_index.new_zeros(len(x)) if batch is None else batch
    seen = torch.cat([x, degree(edge_index[1], len(x), x.dtype)[:, None]], dim=1)
    least = scatter(seen, graph, dim=0, reduce="min")
    return torch.equal(least[graph], seen)


class GraphReadout(nn.Module):
    """Compute the sum over the nodes of each graph, and optionally sums over triangles and 2-paths."""

    def __init__(self, dim: int, triples: bool) -> None:
        super().__init__()
        self.triples = RelationalOrder3Pooling(dim, dim) if triples else None
        self.out_channels = 2 * dim if triples else dim

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        batch: Tensor | None = None,
        size: int | None = None,
        triples: Triples | None = None,
    ) -> Tensor:
        """Map nodes ``x`` (N, D) to graphs (B, out_channels); a graph without nodes to 0."""
        index = x.new_zeros(len(x), dtype=torch.int64) if batch is None else batch
        size = 1 if batch is None else size
        with without_autocast(x):
            pooled = scatter(at_least_float32(x), index, dim=0, dim_size=size, reduce="sum").to(x.dtype)
        if self.triples is None:
            return pooled
        return torch.cat([pooled, self.triples(x, edge_index, batch=batch, size=size, triples=triples)], dim=1)


class GraphHead(nn.Module):
    """Add a perceptron and a linear map; for counts of triples, which are sums, the linear map is sufficient."""

    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_channels, out_channels)
        self.hidden = nn.Linear(in_channels, hidden_channels)
        self.out = nn.Linear(hidden_channels, out_channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_channels) to (..., out_channels)."""
        scores: Tensor = self.linear(x) + self.out(self.hidden(x).relu())
        return scores
