"""Relational pooling: a GNN on graphs with marked nodes, averaged over the marked tuples.

Shapes: N nodes, F features, M arcs, B graphs, k marks, T copies, R nodes of all copies, H features of the base GNN,
D output features; O groups of tuples, one per graph or node.
"""

import inspect
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn.inits import reset

from lightning_accel._private.torch import compiled_original
from lightning_accel.nn.features import check_edge_index, require_floating
from lightning_accel.nn.relational.marked_tuples import MARKS, TupleKind, Tuples, find_tuples
from lightning_accel.ops.float32 import at_least_float32, without_autocast

# parts of the messages of torch for a linear layer or a sum
_MISMATCH_MESSAGES = "shapes cannot be multiplied", "same dtype", "scalar type"
_MAX_COPIES = 2**23


class Estimate(NamedTuple):
    """Hold a value that was estimated by sampling, and its standard error."""

    mean: Tensor
    standard_error: Tensor  # standard error of the mean, in its shape; zero where nothing was sampled


class _GraphLayout(NamedTuple):
    """Hold the nodes and arcs of a batch sorted by graph, in their given order within each graph."""

    node: Tensor
    """(N,): nodes sorted by graph; a place is a position in this tensor."""
    graph: Tensor
    """(N,): the graph of each place."""
    place: Tensor
    """(N,): the place of each node."""
    ptr: Tensor
    """(B + 1,): the first place of each graph."""
    arc: Tensor
    """(M,): columns of ``edge_index``, sorted by graph."""
    arc_ptr: Tensor
    """(B + 1,): the first arc of each graph."""
    ends: Tensor
    """(2, M): places of the ends of each arc."""


class _Copies(NamedTuple):
    """Hold a batch of T copies of graphs."""

    node: Tensor
    """(R,): the original of each node."""
    edge_index: Tensor
    arc: Tensor
    """The original arc of each column of ``edge_index``."""
    copy: Tensor
    """(R,): the copy of each node, from 0 to T - 1."""
    marked: Tensor
    """(T, k): the node of the copies under each mark, -1 for none."""


class RelationalPooling(nn.Module):
    """Average the output of a GNN on a graph with marked nodes over ordered tuples of marked nodes.

    The output is f(G) = mean over tuples t of head([sum_v h_v, h_t1 .. h_tk]), with
    h = base_gnn([x, one-hot marks of t], edge_index).

    With ``tuples="edges"`` it distinguishes graphs that message passing and order-3 subsets cannot (Rook 4x4 and
    Shrikhande); with ``"nodes"`` and enough layers, circulant graphs; with ``marks="full"`` all graphs, if the base is
    expressive enough. The head is applied before the mean, as a mean of linear functions of h is less expressive.

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
            batch, as batch normalisation does in training.
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

    >>> from torch_geometric.nn import GIN
    >>> pooling = RelationalPooling(GIN(1 + 2, 8, num_layers=3), tuples="edges", head=nn.Linear(3 * 8, 5)).eval()
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
        self.marks, self.tuples = _resolve_marks(marks, tuples, max_nodes)
        self.full = marks == "full"
        if level not in ("graph", "node"):
            raise ValueError(f"level must be 'graph' or 'node', got {level!r}")
        if samples is not None and samples < 2:
            raise ValueError(f"samples must be at least 2, for a standard error, or None for all tuples, got {samples}")
        if train_samples is not None and train_samples < 1:
            raise ValueError(f"train_samples must be at least 1, or None for all tuples, got {train_samples}")
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be positive, got {chunk_size}")
        self.base_gnn = base_gnn
        self.head = nn.Identity() if head is None else head
        self.level, self.samples, self.train_samples, self.chunk_size = level, samples, train_samples, chunk_size
        self._takes = _optional_inputs(base_gnn)

    def reset_parameters(self) -> None:
        reset(self.base_gnn)
        reset(self.head)

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
            Mean and error, (B, D) each, or (N, D) for nodes; float32, or float64 like ``x``. Only the mean has a
            gradient. The error includes the factor sqrt(1 - samples / tuples) for finitely many tuples.

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
            _chunk_bounds(layout, plan := _plan(space, samples, generator), None if in_one_pass else self.chunk_size)
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
        self, x: Tensor, edge_attr: Tensor | None, layout: _GraphLayout, graph: Tensor, tuples: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the values to average for ``tuples`` (T, k), and the graph or node of each."""
        copies = _copy_graphs(layout, graph, tuples)
        optional = {}
        if "edge_attr" in self._takes and edge_attr is not None:
            optional["edge_attr"] = edge_attr[copies.arc]
        if "batch" in self._takes:
            optional["batch"] = copies.copy
        h = self._embed(_mark_nodes(x, copies), copies.edge_index, optional)
        if not isinstance(h, Tensor) or h.dim() != 2 or len(h) != len(copies.node):
            found = tuple(h.shape) if isinstance(h, Tensor) else type(h).__name__
            raise ValueError(f"base_gnn must give one row for each of {len(copies.node)} nodes, got {found}")
        with without_autocast(h):
            readout = at_least_float32(h) if self.level == "node" else _read_out(at_least_float32(h), copies)
        weight = next(self.head.parameters(), None)
        value = self.head(readout if weight is None else readout.to(weight.dtype))
        return copies.node if self.level == "node" else graph, at_least_float32(value)

    def _embed(self, x: Tensor, edge_index: Tensor, optional: dict[str, Tensor]) -> Any:
        """Call the base GNN; explain errors of width or dtype, since torch's messages do not mention the marks."""
        try:
            return self.base_gnn(x, edge_index, **optional)
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

    def _lay_out(
        self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None, batch: Tensor | None, size: int | None
    ) -> _GraphLayout:
        if not isinstance(x, Tensor):
            raise TypeError(f"x must be a tensor (nodes, features), got a {type(x).__name__}")
        if x.dim() != 2 or not x.is_floating_point():
            raise ValueError(f"x must be floating, (nodes, features), got {x.dtype}, {tuple(x.shape)}")
        if edge_attr is not None and "edge_attr" not in self._takes:
            raise ValueError(f"edge_attr was given, and {type(self.base_gnn).__name__}.forward has none: leave it out")
        check_edge_index(type(self).__name__, edge_index)
        if batch is None:
            batch = edge_index.new_zeros(len(x))
            size = 1 if size is None else size
        if len(batch) != len(x):
            raise ValueError(f"batch must have one number for each of {len(x)} nodes, got {len(batch)}")
        if size is None:
            size = int(batch.max()) + 1 if len(batch) else 0
        layout = _sort_by_graph(edge_index, batch, size)
        if self.full and len(batch) and (largest := int(layout.ptr.diff().max())) > self.marks:
            raise ValueError(f"max_nodes is {self.marks}, and a graph has {largest} nodes")
        return layout

    def extra_repr(self) -> str:
        marks = f"marks='full', max_nodes={self.marks}" if self.full else f"marks={self.marks}"
        return f"{marks}, tuples={self.tuples!r}, level={self.level!r}, samples={self.samples}"


class _Plan(NamedTuple):
    """Hold the tuples of all copies, as numbers or as drawn tuples."""

    graph: Tensor
    """(T,), sorted."""
    number: Tensor | None
    tuples: Tensor | None

    def part(self, space: Tuples, begin: int, end: int) -> tuple[Tensor, Tensor]:
        graph = self.graph[begin:end]
        if self.tuples is not None:
            return graph, self.tuples[begin:end]
        assert self.number is not None
        return graph, space.at(graph, self.number[begin:end])


def _plan(space: Tuples, samples: int | None, generator: Generator | None) -> _Plan:
    if samples is not None:
        graph, tuples = space.draw(samples, generator)
        return _Plan(graph, None, tuples)
    if (total := float(space.total.sum())) > _MAX_COPIES:
        raise ValueError(f"a mean over all {total:.3g} tuples takes too long: give samples, or fewer marks or graphs")
    count = space.total.long()
    graph = torch.repeat_interleave(count)
    return _Plan(graph, torch.arange(len(graph), device=graph.device) - (count.cumsum(0) - count)[graph], None)


def _chunk_bounds(layout: _GraphLayout, plan: _Plan, chunk_size: int | None) -> Iterator[tuple[int, int]]:
    """Yield first and last copy of each chunk; there is at least one chunk, for the output width of the base GNN."""
    copies = len(plan.graph)
    if chunk_size is None or copies == 0:
        yield 0, copies
        return
    total = (layout.ptr.diff() + layout.arc_ptr.diff())[plan.graph].cumsum(0)
    begin = 0
    while begin < copies:
        limit = chunk_size + (total[begin - 1] if begin else 0)
        end = max(int(torch.searchsorted(total, limit, right=True)), begin + 1)
        yield begin, end
        begin = end


def _read_out(h: Tensor, copies: _Copies) -> Tensor:
    """Concatenate the sum over nodes and the embedding of each marked node, to (T, (1 + k) H)."""
    num_copies, marks = copies.marked.shape
    total = h.new_zeros(num_copies, h.shape[1]).index_add(0, copies.copy, h)
    at = (copies.marked >= 0).nonzero(as_tuple=True)
    marked = h.new_zeros(num_copies, marks, h.shape[1]).index_put(at, h[copies.marked[at]])
    return torch.cat([total, marked.flatten(1)], dim=1)


def _resolve_marks(
    marks: int | Literal["full"] | None, tuples: TupleKind | None, max_nodes: int | None
) -> tuple[int, TupleKind]:
    """Return the number of marks and the kind of tuples."""
    if marks == "full":
        if tuples not in (None, "all") or max_nodes is None or max_nodes < 1:
            raise ValueError(f"marks='full' needs max_nodes, and tuples='all', got {max_nodes} and {tuples!r}")
        return max_nodes, "all"
    if max_nodes is not None:
        raise ValueError("max_nodes is the width of marks='full': leave it out")
    if tuples is None:
        marks = 1 if marks is None else marks
        tuples = next((kind for kind, size in MARKS.items() if size == marks), None)
        if tuples is None:
            raise ValueError(f"connected tuples have 1, 2 or 3 marks, got {marks}: for others set tuples='all'")
    if tuples not in (*MARKS, "all"):
        raise ValueError(f"tuples must be one of {[*MARKS, 'all']}, got {tuples!r}")
    if tuples == "all":
        if marks is None or marks < 1:
            raise ValueError(f"tuples='all' needs marks, at least 1, or 'full', got {marks}")
        return marks, tuples
    if marks not in (None, MARKS[tuples]):
        raise ValueError(f"tuples={tuples!r} have {MARKS[tuples]} marks, got {marks}")
    return MARKS[tuples], tuples


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
    return frozenset(names[2:]) & {"edge_attr", "batch"}


def _sort_by_graph(edge_index: Tensor, batch: Tensor, num_graphs: int) -> _GraphLayout:
    """Sort nodes and arcs by graph.

    Raises:
        ValueError: if an arc joins two graphs or refers to a missing node, or ``batch`` has numbers outside of 0 to
            ``num_graphs - 1``.
    """
    _check_ranges(edge_index, batch, num_graphs)
    if not torch.equal(batch[edge_index[0]], batch[edge_index[1]]):
        raise ValueError("every edge must join nodes of one graph: edge_index and batch do not belong together")
    graph, node = batch.sort(stable=True)
    arc_graph, arc = batch[edge_index[0]].sort(stable=True)
    place = torch.empty_like(node)
    place[node] = torch.arange(len(node), device=node.device)
    bounds = torch.arange(num_graphs + 1, device=node.device)
    return _GraphLayout(
        node, graph, place, torch.searchsorted(graph, bounds), arc, torch.searchsorted(arc_graph, bounds),
        place[edge_index[:, arc]],
    )  # fmt: skip


def _check_ranges(edge_index: Tensor, batch: Tensor, num_graphs: int) -> None:
    ranges = [torch.stack(values.aminmax()) for values in (edge_index, batch) if values.numel()]
    found = torch.stack(ranges).tolist() if ranges else []  # on CUDA, waits for the device once
    if edge_index.numel():
        low, high = found[0]
        if low < 0 or high >= len(batch):
            raise ValueError(f"edge_index must hold nodes from 0 to {len(batch) - 1}; found {low} to {high}")
    if batch.numel():
        low, high = found[-1]
        if low < 0 or high >= num_graphs:
            raise ValueError(f"batch must number {num_graphs} graphs from 0, got {low} to {high}")


def _copy_graphs(layout: _GraphLayout, graph: Tensor, tuples: Tensor) -> _Copies:
    """Copy the graphs ``graph`` (T,), sorted, with marks on the places ``tuples`` (T, k)."""
    copy, place, first = _expand(layout.ptr, graph)
    shift = first - layout.ptr[graph]
    if len(graph) and graph[0] == graph[-1]:  # chunks of large graphs: many times as fast as indexing each arc
        begin, end = layout.arc_ptr[graph[0]], layout.arc_ptr[graph[0] + 1]
        edge_index = (layout.ends[:, None, begin:end] + shift[:, None]).flatten(1)
        arc = layout.arc[begin:end].expand(len(graph), -1).flatten()
    else:
        arc_copy, arc, _ = _expand(layout.arc_ptr, graph)
        edge_index, arc = layout.ends[:, arc] + shift[arc_copy], layout.arc[arc]
    marked = torch.where(tuples < 0, -1, tuples + shift[:, None])
    return _Copies(layout.node[place], edge_index, arc, copy, marked)


def _mark_nodes(x: Tensor, copies: _Copies) -> Tensor:
    """Concatenate the features ``x`` (N, F) of all copied nodes and one-hot marks, to (R, F + k)."""
    rows, marks = len(copies.node), copies.marked.shape[1]
    which = torch.where(copies.marked < 0, rows, copies.marked)  # missing marks are written to an extra row
    one_hot = x.new_zeros(rows + 1, marks).scatter(0, which, 1.0)
    return torch.cat([x[copies.node], one_hot[:rows]], dim=1)


def _expand(ptr: Tensor, graph: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for the elements of all copies, the copy and the original; and the first element of each copy (T,)."""
    count = ptr.diff()[graph]
    first = count.cumsum(0) - count
    copy = torch.repeat_interleave(count)
    return copy, torch.arange(len(copy), device=graph.device) + (ptr[graph] - first)[copy], first


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
            return Estimate(mean.to(self.dtype), torch.zeros_like(mean, dtype=self.dtype))
        left = (1 - self.count / tuples[:, None]).clamp(min=0)
        variance = self.squares / (self.count - 1).clamp(min=1) / self.count.clamp(min=1)
        return Estimate(mean.to(self.dtype), (variance * left).sqrt().to(self.dtype))
