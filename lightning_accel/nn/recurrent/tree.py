"""Recurrent networks over trees. Shapes: N nodes of all trees, R roots, I features in, H hidden."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_accel._private.torch import has_call_hooks, own_parameters
from lightning_accel.nn.features import require_floating, require_width
from lightning_accel.ops.tree_levels import TreeLevels, plan_levels
from lightning_accel.ops.tree_steps import has_tree_steps, run_levels, tree_steps


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

    All nodes of a level are computed in one call, whatever the shapes of the trees; on a CPU in float32 and float64 all
    levels are one operation. Nodes have any number of children, whose order is ignored. On a chain it is equal to
    ``nn.LSTM`` or ``nn.GRU`` without the bias of hidden states.

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

    if TYPE_CHECKING:  # Any, as torch declares it

        def __call__(self, x: Tensor, parent: Tensor | TreeLevels) -> tuple[Tensor, Tensor]: ...

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
        require_floating(self, x, "x", iter(own_parameters(self.of_input).values()))
        of_child = self.of_child
        is_plain = type(of_child) is nn.Linear and of_child.bias is None and not has_call_hooks(of_child)
        if is_plain and "forward" not in vars(of_child) and has_tree_steps(x, of_child.weight, levels):
            return tree_steps(self.cell, self.of_input(x), of_child.weight, levels)
        return run_levels(self.cell, self.of_input(x.index_select(0, levels.order)), of_child, levels)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, cell={self.cell!r}"
