"""A test of the permutation invariance of graph layers. Shapes: N nodes, M entries of edge_index, B graphs."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn

_TOLERANCES = {torch.float64: (1e-7, 1e-9), torch.float32: (1e-4, 1e-5)}  # relative to the largest value; absolute


def assert_permutation_invariant(
    module: Callable[..., Any],
    x: Tensor,
    edge_index: Tensor,
    edge_attr: Tensor | None = None,
    batch: Tensor | None = None,
    level: Literal["graph", "node"] = "graph",
    trials: int = 5,
    seed: int = 0,
) -> None:
    """Check that the output of a graph layer does not depend on the order of nodes, edges and graphs.

    Each trial permutes the nodes within their graphs, then the entries of ``edge_index``, then the graphs of the batch.
    Graph outputs must stay unchanged, node outputs must be permuted like the nodes. The layer is called with ``x`` and
    ``edge_index``, and by name with ``edge_attr`` and ``batch`` if they are given. A module is copied and tested in
    float64 and evaluation mode; a plain function is called unchanged, in float64 if ``x`` is.

    Graphs whose nodes are indistinguishable, such as a cycle with constant features, reveal ties that are broken by the
    order of nodes.

    Args:
        module: layer or function that returns a tensor, (B, ...) or (N, ...) depending on ``level``.
        x: (N, F) features of the nodes.
        edge_index: (2, M) int64.
        edge_attr: (M, D) or (M,).
        batch: (N,) int64, ascending.
        level: whether rows of the output are graphs or nodes.
        trials: number of random permutations to try.
        seed: seed of the permutations.

    Raises:
        AssertionError: if the output depends on an order, or has not one row for each graph or node.
        ValueError: if the output is NaN, or differs from call to call.

    >>> assert_permutation_invariant(lambda x, _: x.sum(0, keepdim=True), torch.eye(3), torch.tensor([[0, 1], [1, 2]]))
    """
    name = getattr(module, "__name__", type(module).__name__)
    generator = Generator("cpu").manual_seed(seed)
    with torch.no_grad(), torch.random.fork_rng():  # copying PyG's layers draws random numbers
        if isinstance(module, nn.Module):
            module, x = deepcopy(module).double().eval(), x.double()
            edge_attr = edge_attr.double() if edge_attr is not None and edge_attr.is_floating_point() else edge_attr
        graph = x, edge_index, edge_attr, batch
        output = _call(module, *graph)
        try:
            _compare(_call(module, *graph), output, name)
        except AssertionError as error:
            raise ValueError(
                f"{name} gives another output, or NaN, when it is called again with the same graph"
            ) from error
        num_graphs = 1 if batch is None or not len(batch) else int(batch.max()) + 1
        for trial in range(trials):
            for what, (nodes, edges, graphs) in _draw_orders(x, edge_index, batch, num_graphs, generator).items():
                found = _call(module, *_reorder(*graph, nodes, edges, graphs))
                rows = nodes if level == "node" else graphs
                if (level == "node" or num_graphs > 1) and output.shape[:1] != rows.shape:
                    shape = tuple(output.shape)
                    raise AssertionError(f"{name} must return {len(rows)} rows, one a {level}; got {shape}")
                expected = output[rows] if level == "node" or num_graphs > 1 else output
                _compare(found, expected, f"{name} depends on the order of {what} (trial {trial}, seed {seed})")


@torch.no_grad()  # all of it: a checkpointed call may save no tensors that its recomputation does not save
def change_beside_others(
    module: nn.Module, x: Tensor, edge_index: Tensor, graph: Tensor, optional: dict[str, Tensor]
) -> float:
    """Return how much the rows of the last graph change where the first is computed with them.

    A copy of the module computes both in float64 and evaluation mode. The change is relative to the largest value; it
    is 0 where there is one graph alone, or where the module cannot be copied, draws random numbers or keeps float32.

    Args:
        module: called with ``x`` and ``edge_index``, and with ``optional`` by name; returns (N, D).
        x: (N, F) features of the nodes, sorted by graph.
        edge_index: (2, M) int64.
        graph: (N,) int64, the graph of each node.
        optional: ``edge_attr`` (M, ...) and ``batch`` (N,), if the module takes them.
    """
    is_last = graph == graph[-1]
    is_shown = is_last | (graph == graph[0])
    x = torch.where(is_last[:, None], x, x[:1])  # the same mean of nodes in both would hide that it is taken of both
    if is_last.all() or any(type(parameter) is not nn.Parameter for parameter in module.parameters()):
        return 0.0

    def rows(shown: Tensor) -> Tensor:
        arcs = shown[edge_index[0]]
        given = {"edge_attr": arcs, "batch": shown}
        named = {name: as_double(value[given[name]]) for name, value in optional.items()}
        if "batch" in named:
            named["batch"] = named["batch"].unique(return_inverse=True)[1]
        output: Tensor = copied(as_double(x[shown]), (shown.cumsum(0) - 1)[edge_index[:, arcs]], **named)
        return output[-int(is_last.sum()) :]

    def as_double(values: Tensor) -> Tensor:
        return values.double() if values.is_floating_point() else values

    devices = [x.device] if x.is_cuda else []  # of all devices, torch would warn
    try:
        with torch.random.fork_rng(devices), torch.autocast(x.device.type, enabled=False):
            copied = deepcopy(module).double().eval()
            together, again, alone = rows(is_shown), rows(is_shown), rows(is_last)
    except (RuntimeError, TypeError):  # of views, or of dtypes that the module sets itself
        return 0.0
    if not together.equal(again) or not len(alone):
        return 0.0
    return float((together - alone).abs().max() / alone.abs().max().clamp(min=1e-300))


def _call(module: Callable[..., Any], x: Tensor, edge_index: Tensor, *others: Tensor | None) -> Tensor:
    named = zip(("edge_attr", "batch"), others, strict=True)
    output: Tensor = module(x, edge_index, **{name: value for name, value in named if value is not None})
    return output


def _draw_orders(
    x: Tensor, edge_index: Tensor, batch: Tensor | None, num_graphs: int, generator: Generator
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Draw new orders; return the old numbers of nodes, edges and graphs, for each kind of order."""
    sizes = len(x), edge_index.shape[1], num_graphs
    nodes, edges, graphs = (torch.randperm(size, generator=generator, device="cpu").to(x.device) for size in sizes)
    same_nodes, same_edges, same_graphs = (torch.arange(size, device=x.device) for size in sizes)
    owner = torch.zeros_like(nodes) if batch is None else batch
    within_graphs = nodes[owner[nodes].argsort(stable=True)]
    return {
        "nodes": (within_graphs, same_edges, same_graphs),
        "edges": (same_nodes, edges, same_graphs),
        "graphs": (graphs.argsort()[owner].argsort(stable=True), same_edges, graphs),
    }


def _reorder(
    x: Tensor,
    edge_index: Tensor,
    edge_attr: Tensor | None,
    batch: Tensor | None,
    nodes: Tensor,
    edges: Tensor,
    graphs: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    return (
        x[nodes],
        nodes.argsort()[edge_index][:, edges],
        None if edge_attr is None else edge_attr[edges],
        None if batch is None else graphs.argsort()[batch[nodes]],
    )


def _compare(found: Tensor, expected: Tensor, what: str) -> None:
    relative, absolute = _TOLERANCES.get(expected.dtype, (1e-2, 1e-2))
    finite = expected[expected.isfinite()]
    allowed = absolute + relative * float(finite.abs().max()) if finite.numel() else absolute
    torch.testing.assert_close(found, expected, rtol=0, atol=allowed, msg=lambda text: f"the output of {what}: {text}")
