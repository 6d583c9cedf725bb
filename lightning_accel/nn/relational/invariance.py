"""A test of the permutation invariance of graph layers. Shapes: N nodes, M entries of edge_index, B graphs."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from lightning_accel.nn.relational.graph_call import call_with_graph

_TOLERANCES = {torch.float64: (1e-7, 1e-9), torch.float32: (1e-4, 1e-5)}  # relative to the largest value; absolute


class _Order(NamedTuple):
    what: str
    nodes: Tensor  # (N,) the old number of each new node
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
    """Check that the output of a graph layer does not depend on the order of nodes, edges and graphs.

    Each trial permutes the nodes within their graphs, then the entries of ``edge_index``, then the graphs of the batch,
    with all attributes of nodes and edges, and attributes with "index" in their name. Graph outputs must stay
    unchanged, node outputs must be permuted like the nodes.

    A module is copied and tested in float64 and evaluation mode; a plain function is called unchanged, in float64 if
    ``x`` is. Attributes are passed to the parameters of the same name; a module with a single required parameter of
    another name is called with the ``Data`` object.

    Graphs whose nodes are indistinguishable, such as a cycle with constant features, reveal ties that are broken by the
    order of nodes.

    Args:
        module: layer or function that returns a tensor, (B, ...) or (N, ...) depending on ``level``.
        data: a ``Data`` or ``Batch``, or x (N, F) together with the next arguments.
        edge_index: (2, M) int64.
        edge_attr: (M, D) or (M,).
        batch: (N,) int64, ascending.
        level: whether rows of the output are graphs or nodes.
        trials: number of trials.
        seed: seed of the permutations.
        rtol: allowed difference relative to the largest value; by default 1e-7 in float64 and 1e-4 in float32.
        atol: allowed absolute difference in addition; by default 1e-9 and 1e-5.

    Raises:
        AssertionError: if the output depends on an order; the message has the order and the difference.
        ValueError: if the output has the wrong number of rows or NaN, or differs from call to call.

    >>> assert_permutation_invariant(lambda x: x.sum(0, keepdim=True), torch.eye(3), torch.tensor([[0, 1], [1, 2]]))
    """
    graph = _as_graph(data, edge_index, edge_attr, batch)
    name = getattr(module, "__name__", type(module).__name__)
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.no_grad(), torch.random.fork_rng():  # copying PyG's layers draws random numbers
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
    """Return the largest difference; infinite if shapes differ, or where values are not finite and not equal."""
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
