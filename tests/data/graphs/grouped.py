"""Options of GraphDataModule by their own names, for tests that vary one of them."""

from typing import Any

from lightning_accel.data import GeneratedGraphs, GraphBatches, GraphLayout, GraphSplitOptions

GROUPS = {"layout": GraphLayout, "generated": GeneratedGraphs, "split": GraphSplitOptions, "batches": GraphBatches}


def grouped(options: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of GraphDataModule, with the options of each group in its dataclass."""
    options = dict(options)
    made = {}
    for group, kind in GROUPS.items():
        named = {name: options.pop(name) for name in vars(kind()) if name in options}
        made |= {group: kind(**named)} if named else {}
    return options | made
