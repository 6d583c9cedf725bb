"""A test of layers over graphs. Shapes: N nodes, M entries of edge_index, B graphs."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from lightning_accel.nn.graph_call import call_with_graph

_TOLERANCES = {torch.float64: (1e-7, 1e-9), torch.float32: (1e-4, 1e-5)}  # relative to the largest value; absolute


class _Order(NamedTuple):
    what: str
    nodes: Tensor  # (N,) which old node each new one is
    edges: Tensor  # (M,)
    graphs: Tensor  # (B,)


def assert_permutation_invariant(
    module: Callable[..., Any],
    data: Any,
    edge_index: Tensor | None = None,
    edge_attr: Tensor | None = None,
    batch: Tensor | None = None,
    level: Literal["graph", "node"] = "graph",
    trials: int = 5,
    seed: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Check that what a layer makes of graphs does not depend on the order in which they are written down.

    In each trial, nodes are renumbered within their graphs, then the entries of ``edge_index`` reordered, then the
    graphs of the batch, each with all that belongs to it: attributes of nodes and edges, and those with "index" in
    their name. Graph outputs must stay as they are, node outputs must move with their nodes.

    A module is copied, in float64 and evaluation mode; a plain function is called as it is, with float64 as well if
    ``x`` is. An attribute is passed for each parameter of its name; a module whose one required parameter has the name
    of none gets the ``Data``.

    A graph whose nodes look alike, as a cycle with constant features, finds ties that depend on an order of nodes.

    Args:
        module: returns a tensor, (B, ...) or (N, ...) by ``level``.
        data: a ``Data`` or ``Batch``, or x (N, F), with what follows.
        edge_index: (2, M) int64.
        edge_attr: (M, D) or (M,).
        batch: (N,) int64, ascending.
        level: what the rows of the output are.
        trials: how often each kind of order is tried.
        seed: of the orders.
        rtol: allowed difference, relative to the largest value; 1e-7 in float64 and 1e-4 in float32.
        atol: allowed besides; 1e-9 and 1e-5.

    Raises:
        AssertionError: if the output depends on an order; tells which one and by how much.
        ValueError: if it has the wrong number of rows or NaN, or differs from call to call.

    >>> assert_permutation_invariant(lambda x: x.sum(0, keepdim=True), torch.eye(3), torch.tensor([[0, 1], [1, 2]]))
    """
    graph = _as_graph(data, edge_index, edge_attr, batch)
    name = getattr(module, "__name__", type(module).__name__)
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.no_grad(), torch.random.fork_rng():  # PyG's layers draw numbers when they are copied
        if isinstance(module, nn.Module):
            module = deepcopy(module).double().eval()
            graph = graph.apply(lambda value: value.double() if value.is_floating_point() else value)
        output = _output(module, graph, level, name)
        if output.isnan().any():
            raise ValueError(f"{name} returned NaN, which equals nothing: give it a graph with finite outputs")
        allowed = _allowed(output, rtol, atol)
        if _difference(_output(module, graph, level, name), output) > allowed:
            raise ValueError(
                f"{name} gives another output each time it is called with the same graph; fix its randomness"
            )
        for trial in range(trials):
            for order in _orders(graph, generator):
                found = _output(module, _reordered(graph, order), level, name)
                expected = output[order.graphs if level == "graph" else order.nodes] if output.ndim else output
                difference = _difference(found, expected)
                if not difference <= allowed:
                    raise AssertionError(_message(name, order, difference, allowed, level, trial, seed))


def _as_graph(data: Any, edge_index: Tensor | None, edge_attr: Tensor | None, batch: Tensor | None) -> Data:
    if isinstance(data, Tensor):
        given = {"x": data, "edge_index": edge_index, "edge_attr": edge_attr, "batch": batch}
    elif isinstance(data, Data) and edge_index is None:
        given = {key: data[key] for key in data.keys() if key != "ptr"}  # noqa: SIM118  # Data iterates over pairs
    else:
        raise TypeError(f"give a torch_geometric.data.Data, or x and edge_index; got a {type(data).__name__}")
    return Data(**{key: value for key, value in given.items() if value is not None})


def _num_graphs(graph: Data) -> int:
    return 1 if graph.batch is None else int(graph.batch.max()) + 1


def _output(module: Callable[..., Any], graph: Data, level: str, name: str) -> Tensor:
    output = call_with_graph(module, graph)
    if not isinstance(output, Tensor):
        raise ValueError(
            f"{name} must return a tensor; got a {type(output).__name__}. Wrap it in a function that picks one"
        )
    rows = _num_graphs(graph) if level == "graph" else graph.num_nodes
    if (level == "node" or rows > 1) and (not output.ndim or output.shape[0] != rows):
        raise ValueError(f"level={level!r} needs {rows} rows, one a {level}; {name} returned {tuple(output.shape)}")
    return output.reshape(1, -1) if level == "graph" and rows == 1 else output


def _orders(graph: Data, generator: torch.Generator) -> list[_Order]:
    same = [torch.arange(n, device="cpu") for n in (graph.num_nodes, graph.num_edges, _num_graphs(graph))]
    owner = torch.zeros(graph.num_nodes, dtype=torch.long, device="cpu") if graph.batch is None else graph.batch.cpu()
    nodes, edges, graphs = (torch.randperm(len(old), generator=generator, device="cpu") for old in same)
    place = torch.argsort(graphs)  # where each graph goes
    orders = [
        _Order("nodes", nodes[torch.argsort(owner[nodes], stable=True)], same[1], same[2]),
        _Order("edges", same[0], edges, same[2]),
        _Order("graphs", torch.argsort(place[owner], stable=True), same[1], graphs),
    ]
    return orders if len(graphs) > 1 else orders[:2]


def _reordered(graph: Data, order: _Order) -> Data:
    device = graph.edge_index.device
    nodes, edges, graphs = (index.to(device) for index in order[1:])
    number, place = torch.argsort(nodes), torch.argsort(graphs)
    moved = {}
    for key in graph.keys():  # noqa: SIM118  # Data iterates over pairs
        value = graph[key]
        if key == "batch":
            moved[key] = place[value[nodes]]
        elif key == "edge_index":
            moved[key] = number[value][:, edges]
        elif "index" in key and isinstance(value, Tensor):
            moved[key] = number[value]
        elif graph.is_node_attr(key):
            moved[key] = value[nodes]
        elif graph.is_edge_attr(key):
            moved[key] = value[edges]
        else:
            by_graph = isinstance(value, Tensor) and value.ndim and len(value) == len(graphs)
            moved[key] = value[graphs] if by_graph else value
    return Data(**moved)


def _allowed(output: Tensor, rtol: float | None, atol: float | None) -> float:
    relative, absolute = _TOLERANCES.get(output.dtype, (1e-2, 1e-2))
    finite = output[output.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return (absolute if atol is None else atol) + (relative if rtol is None else rtol) * largest


def _difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference; infinite between shapes, and where one is not finite and the other is not the same."""
    if found.shape != expected.shape:
        return float("inf")
    difference = (found.double() - expected.double()).abs()
    difference = torch.where(found == expected, 0, difference)
    return float(difference.nan_to_num(nan=float("inf"), posinf=float("inf")).max()) if difference.numel() else 0.0


def _message(name: str, order: _Order, difference: float, allowed: float, level: str, trial: int, seed: int) -> str:
    permutation = getattr(order, order.what).tolist()
    shown = str(permutation) if len(permutation) <= 20 else f"[{', '.join(map(str, permutation[:20]))}, ...]"
    rule = "stay as it was" if level == "graph" and order.what != "graphs" else f"move with its {level}s"
    return (
        f"the output of {name} depends on the order of {order.what}: it has to {rule}, and is off by {difference:.3g} "
        f"where {allowed:.3g} is allowed, with {order.what} taken in the order {shown} (trial {trial}, seed {seed})"
    )
