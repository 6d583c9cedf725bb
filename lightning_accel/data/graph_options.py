"""Checks of the options for graphs, before any data are read."""

from collections.abc import Mapping, Sequence
from typing import Any

_GENERATED = {"strongly_regular", "regular", "cfi", "substructures"}
_SOURCES: dict[str, set[str]] = {  # the sources (path, dataset, or a task) for which an option has an effect
    "val_dataset": {"dataset"},
    "test_dataset": {"dataset"},
    "level": {"path", "dataset", "substructures"},
    "target_kind": {"path", "dataset"},
    "target": {"path", "substructures"},
    "nodes_path": {"path"},
    "graphs_path": {"path"},
    "undirected": {"path"},
    "separator": {"path"},
    "decimal": {"path"},
    "fold": {"csl", "dataset"},
    "family": {"substructures"},
    "num_graphs": _GENERATED,
    "num_neighbors": {"path", "dataset", "karate"},
    "val_share": {"path", "dataset", "karate", *_GENERATED},
    "test_share": {"path", "dataset", "karate", *_GENERATED},
    "predict_path": {"path"},
    "predict_nodes_path": {"path"},
    "max_bytes": {"path"},
}
_DEFAULTS: dict[str, Any] = {"undirected": True, "separator": ",", "decimal": ".", "fold": 0, "family": "erdos_renyi"}


def require_effect(source: str, options: Mapping[str, Any]) -> None:
    """Raise a ValueError if an option would have no effect with a ``path``, a ``dataset`` or a task."""
    idle = [
        name
        for name, value in options.items()
        if source not in _SOURCES[name] and value is not None and value != _DEFAULTS.get(name)
    ]
    if idle:
        what = source if source in ("path", "dataset") else f"task={source!r}"
        raise ValueError(
            f"{', '.join(idle)} would have no effect with {what}; {idle[0]} is for "
            f"{', '.join(sorted(_SOURCES[idle[0]]))}. Leave it out"
        )
    parts = [options[name] is not None for name in ("val_dataset", "test_dataset")]
    shares = [name for name in ("val_share", "test_share") if options[name] is not None]
    if parts[0] != parts[1]:
        raise ValueError("val_dataset and test_dataset go together, beside dataset; got one of them")
    if parts[0] and shares:
        raise ValueError(f"{', '.join(shares)} would have no effect beside val_dataset and test_dataset; leave it out")
    if options["predict_nodes_path"] is not None and options["predict_path"] is None:
        raise ValueError("predict_nodes_path goes with predict_path, the edges; got none")


def require_sizes(
    batch_size: int | None, max_nodes: int | None, max_edges: int | None, num_neighbors: Sequence[int] | None
) -> None:
    """Raise a ValueError if a size is out of range."""
    for name, value in (("batch_size", batch_size), ("max_nodes", max_nodes), ("max_edges", max_edges)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be 1 or more; got {value}")
    if num_neighbors is not None:
        if not num_neighbors or any(most < 1 and most != -1 for most in num_neighbors):
            raise ValueError(
                f"num_neighbors must be numbers of 1 or more, or -1 for all, one for each step; got {num_neighbors}"
            )
        if max_nodes is not None or max_edges is not None:
            raise ValueError("max_nodes and max_edges would have no effect with num_neighbors; set batch_size")
