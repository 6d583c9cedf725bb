"""Levels of trees. Shapes: N nodes of all trees, R roots."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_accel.ops.native import runs_kernel


class TreeLevels(NamedTuple):
    """Hold the levels of a forest in the order in which :class:`~lightning_accel.nn.TreeRNN` visits them.

    The farthest from the roots come first.
    """

    order: Tensor  # (N,) int64, the nodes by level, deepest first
    sizes: list[int]  # number of nodes of each level
    parents: Tensor  # (N - R,) int64, in this order: position of each node's parent within the next level
    roots: Tensor  # (R,) int64, ascending


def plan_levels(parent: Tensor) -> TreeLevels:
    """Group the nodes of a forest by their distance from the root.

    The children of all nodes of a level are then exactly the next deeper level, and there are no more levels than with
    grouping by height.

    Args:
        parent: (N,) int64, each node's parent, -1 for roots; nodes in any order.

    Raises:
        TypeError: if ``parent`` is not int64.
        ValueError: if ``parent`` is not a vector, refers to a missing node, or has a cycle.

    >>> plan_levels(torch.tensor([-1, 0, 0, 2])).sizes
    [1, 2, 1]
    """
    if parent.dtype != torch.int64:
        raise TypeError(f"parent must be int64; got {parent.dtype}. Call parent.long()")
    if parent.ndim != 1:
        raise ValueError(
            f"parent must be a vector (N,) for all trees together; got {tuple(parent.shape)}. "
            "Join several trees by join_parents"
        )
    if runs_kernel(parent):
        levels = TreeLevels(*torch.ops.lightning_accel_native.tree_levels.default(parent))
        if len(levels.order) == len(parent):  # otherwise, a node leads to no root
            return levels
    depth = _depths(parent)
    order = depth.argsort(descending=True, stable=True)
    sizes = depth.bincount().flip(0).tolist()
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order), device=order.device)
    first = order.new_tensor([0, *sizes]).cumsum(0)  # position of each level in ``order``
    inner = order[: len(order) - (sizes[-1] if sizes else 0)]
    level = len(sizes) - 1 - depth[inner]
    return TreeLevels(order, sizes, position[parent[inner]] - first[level + 1], order[len(inner) :])


def _depths(parent: Tensor) -> Tensor:
    """Compute the distance of each node from its root by pointer doubling; k rounds cover distances up to 2**k."""
    num_nodes = len(parent)
    wrong = ((parent < -1) | (parent >= num_nodes)).nonzero().squeeze(1)
    if len(wrong):
        node = int(wrong[0])
        raise ValueError(
            f"parents must lie in [0, {num_nodes}), or be -1 for roots; node {node} has {int(parent[node])}. "
            "Count from 0 and shift each tree by the nodes before it, as join_parents does"
        )
    above = torch.where(parent < 0, num_nodes, parent)
    above = torch.cat((above, above.new_tensor([num_nodes])))  # the last entry is a sentinel above the roots
    depth = (above < num_nodes).long()
    for _ in range(num_nodes.bit_length()):
        depth, above = depth + depth[above], above[above]
    circular = (above < num_nodes).nonzero().squeeze(1)
    if len(circular):
        raise ValueError(
            f"every node must lead to a root; {len(circular)} nodes do not, node {int(circular[0])} among them: their "
            "parents form a cycle. Give one node of each tree the parent -1"
        )
    return depth[:num_nodes]
