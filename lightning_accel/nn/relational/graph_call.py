"""Calls of layers with the attributes of a graph."""

import inspect
from collections.abc import Callable
from typing import Any

from torch_geometric.data import Batch, Data


def call_with_graph(module: Callable[..., Any], data: Data) -> Any:
    """Call ``module`` with the attributes of ``data`` that have the names of its parameters.

    A module with a single required parameter that is not an attribute of ``data`` is called with ``data`` itself. If
    there is a ``batch``, ``size`` is the number of graphs; in convolutions, which have no ``batch``, it is not passed.

    Raises:
        TypeError: if a required parameter is not an attribute of ``data``.
    """
    parameters = inspect.signature(getattr(module, "forward", module)).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [p.name for p in named if p.default is p.empty]
    given = {p.name: data[p.name] for p in named if p.name in data}
    if "batch" in given and "size" in {p.name for p in named} - set(given):
        given["size"] = data.num_graphs if isinstance(data, Batch) else int(data.batch.max()) + 1
    missing = [name for name in required if name not in given]
    if missing and len(required) == 1:
        return module(data)
    if missing:
        name = getattr(module, "__name__", type(module).__name__)
        raise TypeError(f"{name} needs {missing}, which the graph has not; it has {list(data.keys())}")
    return module(**given)
