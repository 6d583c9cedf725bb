"""Relational pooling: a GNN on graphs with marked nodes, averaged over the marked tuples.

Shapes: N nodes, F features, M arcs, B graphs, k marks, T copies, R nodes of all copies, H features of the base GNN,
D output features; O groups of tuples, one per graph or node.
"""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import (
    GraphNorm,
    GraphSizeNorm,
    InstanceNorm,
    LayerNorm,
    MeanSubtractionNorm,
    MessagePassing,
    PairNorm,
)
from torch_geometric.nn.inits import reset

from lightning_accel._private.torch import compiled_original, is_traced
from lightning_accel.nn.features import check_edge_attr, check_edge_index, require_floating
from lightning_accel.nn.relational.copies import (
    Copies,
    GraphLayout,
    chunk_bounds,
    copy_graphs,
    plan_tuples,
    sort_by_graph,
)
from lightning_accel.nn.relational.invariance import change_beside_others
from lightning_accel.nn.relational.marked_tuples import TupleKind, find_tuples, resolve_marks
from lightning_accel.ops.bounds import if_set, require_integers
from lightning_accel.ops.extras import import_on_use
from lightning_accel.ops.float32 import at_least_float32, without_autocast

stats = import_on_use("scipy.stats")

# parts of the messages of torch for a linear layer or a sum
_MISMATCH_MESSAGES = "shapes cannot be multiplied", "same dtype", "scalar type"
_LARGEST_CHANGE = 1e-4  # in float64, where a layer may round to float32
_NORMS_OF_GRAPHS = GraphNorm, GraphSizeNorm, InstanceNorm, LayerNorm, MeanSubtractionNorm, PairNorm
_MIXED_COPIES = (
    "would normalise all copies of all graphs together: leave it out there, and normalise after each convolution, with "
    "batch. PyTorch Geometric's models do so with norm=GraphNorm(hidden_channels), a module; by the name "
    "norm='graph_norm' GIN has it in its convolutions, too"
)


class Estimate(NamedTuple):
    """Hold a value that was estimated by sampling, and its standard error."""

    mean: Tensor
    standard_error: Tensor  # standard error of the mean, in its shape; zero where nothing was sampled
    num_samples: Tensor  # (rows, 1) int64, number of tuples of which it is the mean

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the ends of the confidence interval of the exact mean by Student's t, in its shape.

        With two samples its half is 12.7 standard errors at a level of .95, with ten 2.3.

        Args:
            level: probability with which the interval covers the exact mean, if samples are normally distributed.
        """
        if not 0 < level < 1:
            raise ValueError(f"level must lie in (0, 1); got {level}")
        freedom = (self.num_samples - 1).clamp(min=1).cpu()
        quantile = torch.from_numpy(stats.t.ppf((1 + level) / 2, freedom.numpy())).to(self.mean)
        half = quantile * self.standard_error
        return self.mean - half, self.mean + half


class RelationalPooling(nn.Module):
    """Average the output of a GNN on a graph with marked nodes over ordered tuples of marked nodes.

    The output is f(G) = mean over tuples t of head([sum_v h_v, h_t1 .. h_tk]), with
    h = base_gnn([x, one-hot marks of t], edge_index).

    With ``tuples="edges"`` it distinguishes graphs that message passing and order-3 subsets cannot (Rook 4x4 and
    Shrikhande), as it does with ``"nodes"`` and a base of :class:`~lightning_accel.RO3Conv`; with ``"nodes"`` and
    enough layers, circulant graphs; with two marks and ``"all"``, most of the distance-regular graphs of the benchmark
    BREC; with ``marks="full"`` all graphs, if the base is expressive enough. What it cannot distinguish is found by
    :func:`~lightning_accel.nn.refinement_hash`.

    The head is applied before the mean, as a mean of linear functions of h is less expressive.

    In training, ``train_samples`` random tuples are drawn per graph, by default one (pi-SGD): a convex loss is then on
    average an upper bound of the loss of the mean. In evaluation all tuples are averaged, or ``samples`` of each graph,
    drawn without replacement (with replacement from more than 2**52), or all tuples if there are fewer. Random numbers
    come from ``generator``, or torch's global one, independently for each graph.

    Tuples refer to the undirected simple graph: an arc in either direction joins two nodes, self-loops and duplicates
    are ignored (the base GNN gets all arcs unchanged). A graph without tuples is processed once without marks, and its
    marked embeddings are 0. With ``"all"`` and fewer nodes than marks, all nodes are marked, in every order.

    Args:
        base_gnn: called as ``base_gnn(x, edge_index)``, and with ``edge_attr`` and ``batch`` by name if its ``forward``
            has them; maps F + k features to (R, H). ``batch`` numbers the copies. It should not mix the graphs of a
            batch, as batch normalisation does in training. Let it normalise each graph after each layer, as PyTorch
            Geometric's ``GIN(..., norm=GraphNorm(16))`` with 16 hidden channels does: else the sums over neighbours
            grow with each layer and hide the few marked nodes, and training stays at the most frequent class. With
            ``norm="graph_norm"`` GIN normalises also within its convolutions, over all copies at once, which is an
            error.
        marks: k; by default that of ``tuples``, or 1. With ``"full"`` every node is marked with its position in an
            order.
        tuples: ``"nodes"`` (k = 1), ``"edges"`` (k = 2, both directions), ``"two_paths"`` (k = 3: end, centre, end) or
            ``"all"``, k different nodes, connected or not; by default connected tuples of k nodes.
        max_nodes: number of marks for ``marks="full"``; larger graphs are an error.
        level: ``"graph"`` for (B, D), or ``"node"`` for the mean of head(h_v) over tuples, (N, D).
        head: maps (T, (1 + k) H) for graphs, (R, H) for nodes; the identity by default.
        samples: number of tuples in evaluation, at least 2; all by default.
        train_samples: number of tuples in training; None for all.
        chunk_size: number of nodes plus arcs of copies in memory at a time, at least one copy; with gradients, chunks
            are computed again in the backward pass.

    Source: Murphy et al. 2019, Relational Pooling for Graph Representations, https://arxiv.org/abs/1903.02541, eq. 1,
    k-ary pooling and pi-SGD; the paper uses all permutations, this class also connected tuples.

    >>> from torch_geometric.nn import GIN, GraphNorm
    >>> base = GIN(1 + 2, 8, num_layers=3, norm=GraphNorm(8))
    >>> pooling = RelationalPooling(base, tuples="edges", head=nn.Linear(3 * 8, 5)).eval()
    >>> pooling(torch.ones(3, 1), torch.tensor([[0, 1], [1, 2]])).shape
    torch.Size([1, 5])
    """

    def __init__(
        self,
        base_gnn: nn.Module,
        marks: int | Literal["full"] | None = None,
        tuples: TupleKind | None = None,
        max_nodes: int | None = None,
        level: Literal["graph", "node"] = "graph",
        head: nn.Module | None = None,
        samples: int | None = None,
        train_samples: int | None = 1,
        chunk_size: int = 2**19,
    ) -> None:
        super().__init__()
        require_integers(1, **if_set(marks=None if marks == "full" else marks, max_nodes=max_nodes))
        self.marks, self.tuples = resolve_marks(marks, tuples, max_nodes)
        self.full = marks == "full"
        if level not in ("graph", "node"):
            raise ValueError(f"level must be 'graph' or 'node', got {level!r}")
        require_integers(2, **if_set(samples=samples))  # for a standard error
        require_integers(1, chunk_size=chunk_size, **if_set(train_samples=train_samples))
        for name, part in {"base_gnn": base_gnn, "head": head}.items():
            if not (isinstance(part, nn.Module) or (part is None and name == "head")):
                raise TypeError(f"{name} must be a module (torch.nn.Module); got {part!r}")
        self.base_gnn = base_gnn
        self.head = nn.Identity() if head is None else head
        self.level, self.samples, self.train_samples, self.chunk_size = level, samples, train_samples, chunk_size
        self._takes = _optional_inputs(base_gnn)
        _require_norms_with_batch(base_gnn, "base_gnn", takes_batch="batch" in self._takes)
        _require_norms_with_batch(self.head, "head", takes_batch=False)
        self._first_call = True
        self._is_checked = False

    def reset_parameters(self) -> None:
        reset(self.base_gnn)
        reset(self.head)

    if TYPE_CHECKING:  # Any, as torch declares it

        def __call__(
            self,
            x: Tensor,
            edge_index: Tensor,
            edge_attr: Tensor | None = None,
            batch: Tensor | None = None,
            size: int | None = None,
            generator: Generator | None = None,
        ) -> Tensor: ...

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        batch: Tensor | None = None,
        size: int | None = None,
        generator: Generator | None = None,
    ) -> Tensor:
        """Compute the mean of :meth:`estimate`, with the number of tuples of training or evaluation."""
        samples = self.train_samples if self.training else self.samples
        whole = self.training and samples is not None
        return self._estimate(x, edge_index, edge_attr, batch, size, samples, generator, in_one_pass=whole).mean

    def estimate(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        batch: Tensor | None = None,
        size: int | None = None,
        samples: int | None = None,
        generator: Generator | None = None,
    ) -> Estimate:
        """Compute the mean over all tuples or over samples, and its standard error, in the current training mode.

        Args:
            x: (N, F), floating.
            edge_index: (2, M).
            edge_attr: (M, ...), if the base GNN accepts it.
            batch: (N,), the graph of each node, in any order; by default there is one graph.
            size: B; needed if the last graphs have no nodes.
            samples: number of tuples; by default that of evaluation.
            generator: random number generator, on any device.

        Returns:
            Mean and error, (B, D) each, or (N, D) for nodes, float32, or float64 like ``x``; and the number of samples.
            Only the mean has a gradient. The error includes the factor sqrt(1 - samples / tuples) for finitely many
            tuples.

        Raises:
            ValueError: if inputs are invalid, or there are more than 2**23 tuples and ``samples`` is None.
        """
        samples = self.samples if samples is None else samples
        if samples is not None and samples < 2:
            raise ValueError(f"samples must be at least 2, for a standard error, got {samples}")
        return self._estimate(x, edge_index, edge_attr, batch, size, samples, generator, errors=True)

    def _estimate(
        self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None, batch: Tensor | None, size: int | None,
        samples: int | None, generator: Generator | None, in_one_pass: bool = False, errors: bool = False,
    ) -> Estimate:  # fmt: skip
        layout = self._lay_out(x, edge_index, edge_attr, batch, size)
        space = find_tuples(self.tuples, self.marks, layout.ptr, *layout.ends)
        chunks = list(
            chunk_bounds(
                layout, plan := plan_tuples(space, samples, generator), None if in_one_pass else self.chunk_size
            )
        )
        recompute = len(chunks) > 1 and torch.is_grad_enabled()
        owners = len(layout.ptr) - 1 if self.level == "graph" else len(x)
        moments = _RunningMoments(owners, x.device)
        for begin, end in chunks:
            inputs = (x, edge_attr, layout, *plan.part(space, begin, end))
            if recompute:
                owner, value = checkpoint(self._run, *inputs, use_reentrant=False)
            else:
                owner, value = self._run(*inputs)
            moments.add(owner, value, errors and samples is not None)
        count = space.total if self.level == "graph" else space.total[layout.graph[layout.place]]
        return moments.estimate(count)

    def _run(
        self, x: Tensor, edge_attr: Tensor | None, layout: GraphLayout, graph: Tensor, tuples: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the values to average for ``tuples`` (T, k), and the graph or node of each."""
        copies = copy_graphs(layout, graph, tuples)
        optional = {}
        if "edge_attr" in self._takes and edge_attr is not None:
            optional["edge_attr"] = edge_attr[copies.arc]
        if "batch" in self._takes:
            optional["batch"] = copies.copy
        marked = _mark_nodes(x, copies)
        h = self._embed(marked, copies.edge_index, optional)
        if not isinstance(h, Tensor) or h.dim() != 2 or len(h) != len(copies.node):
            found = tuple(h.shape) if isinstance(h, Tensor) else type(h).__name__
            raise ValueError(f"base_gnn must give one row for each of {len(copies.node)} nodes, got {found}")
        if not self._is_checked and not is_traced() and len(copies.marked) > 1 and len(copies.node):
            self._require_separate(marked, copies, optional)
        with without_autocast(h):
            readout = at_least_float32(h) if self.level == "node" else _read_out(at_least_float32(h), copies)
        weight = next(self.head.parameters(), None)
        value = self._score(readout if weight is None else readout.to(weight.dtype), h.shape[1])
        return copies.node if self.level == "node" else graph, at_least_float32(value)

    def _score(self, readout: Tensor, width: int) -> Tensor:
        """Call the head; explain errors of width."""
        try:
            return self.head(readout)
        except RuntimeError as error:
            if _MISMATCH_MESSAGES[0] not in str(error):
                raise
            of_graph = f": {width} of the sum over nodes and of each of {self.marks} marked nodes"
            raise ValueError(
                f"RelationalPooling calls its head with rows of {readout.shape[1]} features"
                f"{of_graph if self.level == 'graph' else ''}; {type(self.head).__name__} does not take them: {error}"
            ) from error

    def _embed(self, x: Tensor, edge_index: Tensor, optional: dict[str, Tensor]) -> Any:
        """Call the base GNN; explain errors of width or dtype, since torch's messages do not mention the marks."""
        try:
            if not self._first_call or torch.compiler.is_compiling():
                return self.base_gnn(x, edge_index, **optional)
            with _norms_get_batch(self.base_gnn):
                h = self.base_gnn(x, edge_index, **optional)
            self._first_call = False
            return h
        except RuntimeError as error:
            if not any(words in str(error) for words in _MISMATCH_MESSAGES):
                raise
            weight = next(self.base_gnn.parameters(), None)
            if weight is not None and weight.dtype != x.dtype:
                require_floating(self, x, "x", self.base_gnn.parameters())
            width = x.shape[1] - self.marks
            raise ValueError(
                f"RelationalPooling calls its base_gnn with rows of {x.shape[1]} features, {width} of a node and "
                f"{self.marks} marks; {type(self.base_gnn).__name__} does not take them: {error}"
            ) from error

    def _require_separate(self, x: Tensor, copies: Copies, optional: dict[str, Tensor]) -> None:
        """Reject a base GNN whose rows of a copy depend on other copies, at the first call with several."""
        base = compiled_original(self.base_gnn) or self.base_gnn
        change = change_beside_others(base, x, copies.edge_index, copies.copy, optional)
        if change > _LARGEST_CHANGE:
            raise ValueError(
                f"{type(base).__name__}, the base_gnn, mixes the copies of graphs: beside another copy, the output for "
                f"one changes by {change:.2g} of its largest value. What looks at all nodes at once needs batch, as "
                "attention (GPSConv), sums and means over nodes do: give forward a parameter batch, and pass it on. "
                "BatchNorm needs track_running_stats=True"
            )
        self._is_checked = True

    def _lay_out(
        self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None, batch: Tensor | None, size: int | None
    ) -> GraphLayout:
        if not isinstance(x, Tensor):
            raise TypeError(f"x must be a tensor (nodes, features), got a {type(x).__name__}")
        if x.dim() != 2 or not x.is_floating_point():
            raise ValueError(f"x must be floating, (nodes, features), got {x.dtype}, {tuple(x.shape)}")
        check_edge_index(type(self).__name__, edge_index)
        instead = "If it is batch, pass it by name: batch=batch"
        check_edge_attr(type(self).__name__, edge_attr, len(x), edge_index.shape[1], instead)
        if edge_attr is not None and "edge_attr" not in self._takes:
            raise ValueError(
                f"edge_attr was given, and {type(compiled_original(self.base_gnn) or self.base_gnn).__name__} takes "
                "none: leave it out, or take a base_gnn whose forward has edge_attr. Of the models of PyTorch "
                "Geometric GAT and PNA take it, made with edge_dim"
            )
        if batch is None:
            batch = edge_index.new_zeros(len(x))
            size = 1 if size is None else size
        if len(batch) != len(x):
            raise ValueError(f"batch must have one number for each of {len(x)} nodes, got {len(batch)}")
        if size is None:
            size = int(batch.max()) + 1 if len(batch) else 0
        layout = sort_by_graph(edge_index, batch, size)
        if self.full and len(batch) and (largest := int(layout.ptr.diff().max())) > self.marks:
            raise ValueError(f"max_nodes is {self.marks}, and a graph has {largest} nodes")
        return layout

    def extra_repr(self) -> str:
        marks = f"marks='full', max_nodes={self.marks}" if self.full else f"marks={self.marks}"
        return f"{marks}, tuples={self.tuples!r}, level={self.level!r}, samples={self.samples}"


def _read_out(h: Tensor, copies: Copies) -> Tensor:
    """Concatenate the sum over nodes and the embedding of each marked node, to (T, (1 + k) H)."""
    num_copies, marks = copies.marked.shape
    total = h.new_zeros(num_copies, h.shape[1]).index_add(0, copies.copy, h)
    at = (copies.marked >= 0).nonzero(as_tuple=True)
    marked = h.new_zeros(num_copies, marks, h.shape[1]).index_put(at, h[copies.marked[at]])
    return torch.cat([total, marked.flatten(1)], dim=1)


def _optional_inputs(base_gnn: nn.Module) -> frozenset[str]:
    """Return which of ``edge_attr`` and ``batch`` are parameters of the base GNN's ``forward``.

    Raises:
        TypeError: if ``forward`` requires other arguments.
    """
    inner = compiled_original(base_gnn) or base_gnn  # torch.compile hides the signature
    if (names := getattr(getattr(inner, "signature", None), "param_dict", None)) is not None:
        parameters = [(name, True) for name in names]  # torch_geometric.nn.Sequential
    else:
        parameters = [
            (name, parameter.default is parameter.empty)
            for name, parameter in inspect.signature(inner.forward).parameters.items()
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
    names = [name for name, _ in parameters]
    unknown = [name for name, needed in parameters[2:] if needed and name not in ("edge_attr", "batch")]
    if len(parameters) < 2 or unknown:
        raise TypeError(
            f"base_gnn is called with x, edge_index, and edge_attr and batch where it has them; "
            f"{type(inner).__name__}.forward has {', '.join(names) or 'no named parameters'}"
        )
    takes = frozenset(names[2:]) & {"edge_attr", "batch"}
    # PyG's GIN, GCN and GraphSAGE have edge_attr in their signature, and drop it
    return takes if getattr(inner, "supports_edge_attr", True) else takes - {"edge_attr"}


def _require_norms_with_batch(network: nn.Module, role: str, takes_batch: bool) -> None:
    """Reject norms of graphs in modules that are called without ``batch``, since they would mix all copies.

    A convolution calls its inner network without it.
    """
    for module in network.modules():
        if module is network and not takes_batch:
            place = f"{type(module).__name__}, the {role}, is called without batch"
        elif isinstance(module, MessagePassing) and "batch" not in inspect.signature(module.forward).parameters:
            place = f"{type(module).__name__} of the {role} calls its inner modules without batch"
        else:
            continue
        for norm in _norms_of_graphs(module):
            raise ValueError(f"{place}, and {type(norm).__name__} within {_MIXED_COPIES}")


def _norms_of_graphs(network: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that normalise the nodes of a graph together."""
    for norm in network.modules():
        if isinstance(norm, _NORMS_OF_GRAPHS) and getattr(norm, "mode", "graph") == "graph":
            yield norm


@contextmanager
def _norms_get_batch(network: nn.Module) -> Iterator[None]:
    """Reject calls of norms of graphs without ``batch``, by whichever code of the network calls them."""

    def check(norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("batch", args[1] if len(args) > 1 else None) is None:
            raise ValueError(
                f"{type(norm).__name__} of {type(network).__name__}, the base_gnn, is called without batch and "
                f"{_MIXED_COPIES}. In PyTorch Geometric's Sequential its arguments are 'x, batch -> x'"
            )

    with ExitStack() as hooks:
        for norm in _norms_of_graphs(network):
            hooks.callback(norm.register_forward_pre_hook(check, with_kwargs=True).remove)
        yield


def _mark_nodes(x: Tensor, copies: Copies) -> Tensor:
    """Concatenate the features ``x`` (N, F) of all copied nodes and one-hot marks, to (R, F + k)."""
    rows, marks = len(copies.node), copies.marked.shape[1]
    which = torch.where(copies.marked < 0, rows, copies.marked)  # missing marks are written to an extra row
    one_hot = x.new_zeros(rows + 1, marks).scatter(0, which, 1.0)
    return torch.cat([x[copies.node], one_hot[:rows]], dim=1)


class _RunningMoments:
    """Accumulate mean and variance of values per group of tuples, chunk by chunk (Chan et al. 1983), in float64."""

    def __init__(self, owners: int, device: torch.device) -> None:
        self.count = torch.zeros(owners, 1, dtype=torch.float64, device=device)
        self.sum: Tensor | None = None
        self.squares: Tensor | None = None
        self.dtype = torch.float32

    def add(self, owner: Tensor, value: Tensor, errors: bool) -> None:
        self.dtype = value.dtype
        value = value.double()
        none = value.new_zeros(len(self.count), value.shape[1])
        count = torch.bincount(owner, minlength=len(self.count)).double()[:, None]
        total = none.index_add(0, owner, value)
        before = none if self.sum is None else self.sum
        if errors:
            with torch.no_grad():
                mean = total / count.clamp(min=1)
                squares = none.index_add(0, owner, (value - mean[owner]).square())
                shift = mean - before / self.count.clamp(min=1)
                squares += shift.square() * count * self.count / (count + self.count).clamp(min=1)
                self.squares = squares if self.squares is None else self.squares + squares
        self.sum = before + total
        self.count = self.count + count

    def estimate(self, tuples: Tensor) -> Estimate:
        """Return mean and standard error per group, given the size ``tuples`` of the population of each group."""
        assert self.sum is not None
        mean = self.sum / self.count.clamp(min=1)
        if self.squares is None:
            return Estimate(mean.to(self.dtype), torch.zeros_like(mean, dtype=self.dtype), self.count.long())
        left = (1 - self.count / tuples[:, None]).clamp(min=0)
        variance = self.squares / (self.count - 1).clamp(min=1) / self.count.clamp(min=1)
        return Estimate(mean.to(self.dtype), (variance * left).sqrt().to(self.dtype), self.count.long())
