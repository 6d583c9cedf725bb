"""Masks that split the nodes of a data set's only graph for training and tests. Shapes: n nodes, S splits."""

from collections.abc import Sequence

import numpy as np
from torch_geometric.data import Data

from lightning_accel.data.graph_dataset import has_target

MASKS = ("train_mask", "val_mask", "test_mask")


def masks_of(graphs: Sequence[Data], split_by_nodes: bool, where: str) -> list[str]:
    """Return the names of the masks that split the nodes of the only graph: three, two (train and test) or none.

    Args:
        graphs: all graphs of the data set.
        split_by_nodes: whether there is only one graph, whose nodes are to be split.
        where: the data set, for messages.

    Raises:
        ValueError: if there are masks that cannot be applied.
    """
    found = [name for name in MASKS if any(name in graph for graph in graphs)]
    remedy = "drop them with a transform for a split at random"
    if found and not split_by_nodes:
        raise ValueError(
            f"graphs of {where} have {', '.join(found)}, which would have no effect: masks split the nodes of one "
            f"graph, given as dataset alone; others are split as whole graphs. Give val_dataset and test_dataset "
            f"without masks, or {remedy}"
        )
    if found and not {"train_mask", "test_mask"} <= {*found}:
        lacking = [name for name in MASKS if name not in found]
        raise ValueError(
            f"the graph of {where} has {', '.join(found)} and no {', '.join(lacking)}: train_mask and test_mask are "
            f"needed at least, and of them val_share validates where there is no val_mask. Add {lacking[-1]}, as "
            f"RandomNodeSplit does, or {remedy}"
        )
    return found


def require_effect_with_masks(
    masks: Sequence[str], graph: Data, fold: int, named_shares: Sequence[str], where: str
) -> None:
    """Raise a ValueError if ``fold``, or a share that was passed, would have no effect with these masks."""
    if fold != 0 and not any(graph[name].ndim == 2 for name in masks):
        has = "whose masks are one split, (n,)" if masks else "which has no masks that split its nodes"
        raise ValueError(
            f"fold={fold} would have no effect with {where}, {has}; it chooses a column of masks (n, S). Leave it out; "
            "for another split at random give another seed"
        )
    idle = [name for name in named_shares if name.replace("share", "mask") in masks]
    if idle:
        raise ValueError(
            f"{', '.join(idle)} would have no effect beside {', '.join(masks)} of {where}; leave it out, or drop the "
            "masks with a transform"
        )


def masked_nodes(graph: Data, name: str, fold: int, where: str) -> np.ndarray:
    """Return the nodes with a target in the mask ``graph[name]``, (n,), or in its column ``fold``, (n, S)."""
    mask = graph[name]
    if mask.ndim == 2:
        if not 0 <= fold < mask.shape[1]:
            raise ValueError(f"{name} of {where} holds {mask.shape[1]} splits; got fold={fold}")
        mask = mask[:, fold]
    return np.flatnonzero((mask & has_target(graph.y)).numpy())
