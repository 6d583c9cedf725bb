"""Recurrent networks over trees. Shapes: N nodes of all trees, R roots, I features in, H hidden, n nodes of a level."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_accel.nn.features import require_floating, require_width


class TreeLevels(NamedTuple):
    """Hold the levels of a forest in the order in which :class:`TreeRNN` visits them, farthest from the roots first."""

    order: Tensor  # (N,) int64, the nodes by level, deepest first
    sizes: list[int]  # number of nodes of each level
    parents: tuple[Tensor, ...]  # per level except the roots, (n,) int64: position of each parent within the next level
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
    depth = _depths(parent)
    order = depth.argsort(descending=True, stable=True)
    sizes = depth.bincount().flip(0).tolist()
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order), device=order.device)
    first = order.new_tensor([0, *sizes]).cumsum(0)  # position of each level in ``order``
    inner = order[: len(order) - (sizes[-1] if sizes else 0)]
    level = len(sizes) - 1 - depth[inner]
    parents = position[parent[inner]] - first[level + 1]
    return TreeLevels(order, sizes, parents.split(sizes[:-1]) if sizes else (), (parent < 0).nonzero().squeeze(1))


def _depths(parent: Tensor) -> Tensor:
    """Compute the distance of each node from its root by pointer doubling; k rounds cover distances up to 2**k."""
    if parent.dtype != torch.int64:
        raise TypeError(f"parent must be int64; got {parent.dtype}. Call parent.long()")
    if parent.ndim != 1:
        raise ValueError(
            f"parent must be a vector (N,) for all trees together; got {tuple(parent.shape)}. "
            "Join several trees by join_parents"
        )
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


def join_parents(parents: Iterable[Tensor]) -> Tensor:
    """Concatenate the parent vectors of several forests, shifting the numbers of the nodes.

    >>> join_parents([torch.tensor([-1, 0]), torch.tensor([1, -1])])
    tensor([-1,  0,  3, -1])
    """
    joined, num_nodes = [torch.empty(0, dtype=torch.int64)], 0
    for parent in parents:
        joined.append(torch.where(parent < 0, parent, parent + num_nodes))
        num_nodes += len(parent)
    return torch.cat([part.to(joined[-1].device) for part in joined])


class Forest(NamedTuple):
    """Hold trees as a parent vector, with the items of their leaves."""

    parent: Tensor  # (N,) int64, -1 for roots; parents come before their children
    leaves: Tensor  # int64, the nodes that hold an item, from left to right
    items: list[Any]  # item of each leaf


def forest_from_nested(trees: Sequence[Any]) -> Forest:
    """Convert nested lists or tuples to trees: a list is a node with children, everything else the item of a leaf.

    >>> forest = forest_from_nested([["a", "b"], ["c", ["d", "e"]]])  # two trees
    >>> forest.parent
    tensor([-1,  0,  0, -1,  3,  3,  5,  5])
    >>> forest.leaves, forest.items
    (tensor([1, 2, 4, 6, 7]), ['a', 'b', 'c', 'd', 'e'])
    """
    parent: list[int] = []
    leaves: list[int] = []
    items: list[Any] = []
    ahead = [(tree, -1) for tree in reversed(trees)]  # no recursion: trees may be deeper than Python's stack
    while ahead:
        tree, above = ahead.pop()
        if isinstance(tree, list | tuple):
            ahead += [(child, len(parent)) for child in reversed(tree)]
        else:
            leaves.append(len(parent))
            items.append(tree)
        parent.append(above)
    return Forest(torch.tensor(parent, dtype=torch.int64), torch.tensor(leaves, dtype=torch.int64), items)


class TreeRNN(nn.Module):
    """Run a recurrent network from the leaves of trees to their roots, computing a node's state from its children's.

    All nodes of a level are computed in one call, whatever the shapes of the trees. Nodes have any number of children,
    whose order is ignored. On a chain it is equal to ``nn.LSTM`` or ``nn.GRU`` without the bias of hidden states.

    ``lstm`` is the child-sum Tree-LSTM of Tai et al. 2015, https://arxiv.org/abs/1503.00075, eq. 2-8. ``gru`` is
    analogous, with a reset gate for each child k: ``r_k = sigmoid(W_r x + U_r h_k)``,
    ``z = sigmoid(W_z x + sum_k U_z h_k)``, ``n = tanh(W_n x + sum_k r_k * U_n h_k)``,
    ``h = (1 - z) * n + z * sum_k h_k``.

    >>> tree = TreeRNN(2, 3)
    >>> states, roots = tree(torch.ones(4, 2), torch.tensor([-1, 0, 0, 2]))
    >>> states.shape, roots.shape
    (torch.Size([4, 3]), torch.Size([1, 3]))
    """

    def __init__(self, input_size: int, hidden_size: int, cell: Literal["gru", "lstm"] = "lstm") -> None:
        super().__init__()
        if cell not in ("gru", "lstm"):
            raise ValueError(f"cell must be gru or lstm; got {cell!r}")
        if min(input_size, hidden_size) < 1:
            raise ValueError(f"input_size and hidden_size must be at least 1; got {input_size} and {hidden_size}")
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.cell = cell
        num_gates = 4 if cell == "lstm" else 3  # the last gate is computed per child
        self.of_input = nn.Linear(input_size, num_gates * hidden_size)
        self.of_child = nn.Linear(hidden_size, num_gates * hidden_size, bias=False)

    def forward(self, x: Tensor, parent: Tensor | TreeLevels) -> tuple[Tensor, Tensor]:
        """Compute the states of all nodes (N, H), and of the roots (R, H), in the order of the nodes.

        Args:
            x: (N, I), e.g. 0 for inner nodes.
            parent: (N,) int64, -1 for roots; or the result of :func:`plan_levels`, to compute it once for several
                calls.

        Raises:
            TypeError: if ``parent`` is not int64, ``x`` is not floating, or its dtype differs from that of the weights.
            ValueError: if ``x`` does not have one row per node, or ``parent`` is not a forest.
        """
        require_width(self, x, "input_size", self.input_size, "x (N, {})", ndim=2)
        levels = plan_levels(parent) if isinstance(parent, Tensor) else parent
        if len(x) != len(levels.order):
            raise ValueError(
                f"x must be (N, I), here {(len(levels.order), self.input_size)}, a row for each parent; "
                f"got {tuple(x.shape)}. Give inner nodes without features rows of zeros"
            )
        require_floating(self, x, "x", self.of_input.parameters(recurse=False))
        gates = self.of_input(x.index_select(0, levels.order))
        step = self._lstm if self.cell == "lstm" else self._gru
        states, below = [], None
        for level_gates, slots in zip(gates.split(levels.sizes), (None, *levels.parents), strict=False):
            below = step(level_gates, below, slots)
            states.append(below[0])
        if not states:
            return gates[:, : self.hidden_size], gates[:, : self.hidden_size]
        place = torch.empty_like(levels.order)
        place[levels.order] = torch.arange(len(place), device=place.device)
        every = torch.cat(states).index_select(0, place)
        return every, every.index_select(0, levels.roots)

    def _lstm(self, gates: Tensor, below: tuple[Tensor, ...] | None, slots: Tensor | None) -> tuple[Tensor, Tensor]:
        rest, forget = gates.split((3 * self.hidden_size, self.hidden_size), 1)
        carried = None
        if below is not None and slots is not None:
            h, c = below
            of_rest, of_forget = self.of_child(h).split((3 * self.hidden_size, self.hidden_size), 1)
            rest = rest.index_add(0, slots, of_rest)  # eq. 2: the sum of states, each through U
            kept = (forget.index_select(0, slots) + of_forget).sigmoid() * c  # eq. 4
            carried = kept.new_zeros(len(gates), self.hidden_size).index_add(0, slots, kept)
        i, o, u = rest.chunk(3, 1)
        c = i.sigmoid() * u.tanh()  # eq. 3, 6
        c = c if carried is None else c + carried  # eq. 7
        return o.sigmoid() * c.tanh(), c  # eq. 5, 8

    def _gru(self, gates: Tensor, below: tuple[Tensor, ...] | None, slots: Tensor | None) -> tuple[Tensor]:
        x_z, x_n, x_r = gates.chunk(3, 1)
        if below is None or slots is None:
            return ((1 - x_z.sigmoid()) * x_n.tanh(),)
        (h,) = below
        h_z, h_n, h_r = self.of_child(h).chunk(3, 1)
        reset = (x_r.index_select(0, slots) + h_r).sigmoid()
        sums = torch.cat((h_z, reset * h_n, h.to(h_z.dtype)), 1)
        z, n, h = sums.new_zeros(len(gates), sums.shape[1]).index_add(0, slots, sums).chunk(3, 1)
        z = (x_z + z).sigmoid()
        return ((1 - z) * (x_n + n).tanh() + z * h,)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, cell={self.cell!r}"
