"""A recurrent network from the leaves of trees to their roots. Shapes: N nodes, R roots, H hidden, G gates.

G is 4 of the child-sum Tree-LSTM (input, output, new, forget), and 3 of its analogue of a GRU (update, new, reset). The
last gate is computed for each child. ``TreeRNN`` has the formulas and their sources.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lightning_accel._private.torch import is_batched
from lightning_accel.ops.gradients import gradients_of_formula
from lightning_accel.ops.native import KERNELS, runs_kernel
from lightning_accel.ops.tree_levels import TreeLevels


def tree_steps(cell: str, gates: Tensor, weight: Tensor, levels: TreeLevels) -> tuple[Tensor, Tensor]:
    """Run over all levels of trees as one operation, with one more for the backward pass.

    Where :func:`has_tree_steps` is False it runs :func:`run_levels`, which second derivatives, of
    ``create_graph=True``, come from in any case.

    Args:
        cell: ``lstm`` or ``gru``.
        gates: (N, G * H), what the gates of each node get from its input.
        weight: (G * H, H), multiplies the states of children.
        levels: levels of the trees.

    Returns:
        The states of all nodes (N, H), and of the roots (R, H), in the order of the nodes.

    Raises:
        RuntimeError: if shapes disagree.

    >>> levels = TreeLevels(torch.tensor([1, 0]), [1, 1], torch.tensor([0]), torch.tensor([0]))
    >>> tree_steps("gru", torch.ones(2, 3), torch.zeros(3, 1), levels)[0].flatten()
    tensor([0.3546, 0.2048])
    """
    if has_tree_steps(gates, weight, levels):
        states, roots = _Tree.apply(cell, gates, weight, levels)
        return states, roots
    return _run_formula(cell, gates, weight, levels)


def has_tree_steps(x: Tensor, weight: Tensor, levels: TreeLevels) -> bool:
    """Return whether the kernel of :func:`tree_steps` serves tensors like ``x``, and nothing traces it."""
    has_dtype = x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64)
    return has_dtype and not torch.is_autocast_enabled("cpu") and runs_kernel(x, weight, levels.order)


def run_levels(
    cell: str, gates: Tensor, of_child: Callable[[Tensor], Tensor], levels: TreeLevels
) -> tuple[Tensor, Tensor]:
    """Run over trees, a level at a time.

    Args:
        cell: ``lstm`` or ``gru``.
        gates: (N, G * H) in the order of ``levels``, what the gates of each node get from its input.
        of_child: maps the states h of children (n, H) to what gates get from them (n, G * H).
        levels: levels of the trees.

    Returns:
        The states of all nodes (N, H), and of the roots (R, H), in the order of the nodes.
    """
    step = _lstm if cell == "lstm" else _gru
    parents = levels.parents.split(levels.sizes[:-1]) if levels.sizes else ()
    states, below = [], None
    for level_gates, slots in zip(gates.split(levels.sizes), (None, *parents), strict=False):
        below = step(level_gates, below, slots, of_child)
        states.append(below[0])
    if not states:
        none = gates[:, : gates.shape[1] // (4 if cell == "lstm" else 3)]
        return none, none
    place = torch.empty_like(levels.order)
    place[levels.order] = torch.arange(len(place), device=place.device)
    every = torch.cat(states).index_select(0, place)
    return every, every.index_select(0, levels.roots)


def _run_formula(cell: str, gates: Tensor, weight: Tensor, levels: TreeLevels) -> tuple[Tensor, Tensor]:
    return run_levels(cell, gates.index_select(0, levels.order), partial(F.linear, weight=weight), levels)


def _lstm(
    gates: Tensor, below: tuple[Tensor, ...] | None, slots: Tensor | None, of_child: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return h and c of a level (n, H); the equations are those of Tai et al. 2015."""
    hidden_size = gates.shape[1] // 4
    rest, forget = gates.split((3 * hidden_size, hidden_size), 1)
    carried = None
    if below is not None and slots is not None:
        h, c = below
        of_rest, of_forget = of_child(h).split((3 * hidden_size, hidden_size), 1)
        rest = rest.index_add(0, slots, of_rest)  # eq. 2: the sum of states, each through U
        kept = (forget.index_select(0, slots) + of_forget).sigmoid() * c  # eq. 4
        carried = kept.new_zeros(len(gates), hidden_size).index_add(0, slots, kept)
    i, o, u = rest.chunk(3, 1)
    c = i.sigmoid() * u.tanh()  # eq. 3, 6
    c = c if carried is None else c + carried  # eq. 7
    return o.sigmoid() * c.tanh(), c  # eq. 5, 8


def _gru(
    gates: Tensor, below: tuple[Tensor, ...] | None, slots: Tensor | None, of_child: Callable[[Tensor], Tensor]
) -> tuple[Tensor]:
    """Return h of a level (n, H)."""
    x_z, x_n, x_r = gates.chunk(3, 1)
    if below is None or slots is None:
        return ((1 - x_z.sigmoid()) * x_n.tanh(),)
    (h,) = below
    h_z, h_n, h_r = of_child(h).chunk(3, 1)
    reset = (x_r.index_select(0, slots) + h_r).sigmoid()
    sums = torch.cat((h_z, reset * h_n, h.to(h_z.dtype)), 1)
    z, n, h = sums.new_zeros(len(gates), sums.shape[1]).index_add(0, slots, sums).chunk(3, 1)
    z = (x_z + z).sigmoid()
    return ((1 - z) * (x_n + n).tanh() + z * h,)


class _Tree(torch.autograd.Function):
    """Save, by level, the states, the values of the gates (N, G * H), and c (N, H) or two terms of a GRU (N, 2 * H)."""

    @staticmethod
    def forward(ctx: Any, cell: str, gates: Tensor, weight: Tensor, levels: TreeLevels) -> tuple[Tensor, Tensor]:
        run = torch.ops.lightning_accel_native.tree_steps.default
        states, roots, *kept = run(gates, weight, levels.order, levels.sizes, levels.parents)
        ctx.save_for_backward(gates, weight, *kept)
        ctx.cell, ctx.levels = cell, levels
        ctx.set_materialize_grads(False)
        return states, roots

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        gates, weight, *kept = ctx.saved_tensors
        levels = ctx.levels
        if torch.is_grad_enabled() or any(is_batched(one) for one in gradients if one is not None):
            formula = partial(_run_formula, ctx.cell, levels=levels)
            return None, *gradients_of_formula(formula, (gates, weight), ctx.needs_input_grad[1:], gradients)
        run = torch.ops.lightning_accel_native.tree_steps_backward.default
        return None, *run(*gradients, *kept, weight, levels.order, levels.sizes, levels.parents), None


def _flops(gates: Sequence[int], weight: Sequence[int], order: Any, sizes: Any, *rest: Any, **options: Any) -> int:
    return 2 * (gates[0] - sum(sizes[-1:])) * weight[0] * weight[1]


def _flops_of_backward(
    grad: Any, roots: Any, h: Any, values: Any, extra: Any, weight: Any, order: Any, sizes: Any, *rest: Any, **_: Any
) -> int:
    return 2 * _flops(values, weight, order, sizes)


@KERNELS.on_load
def _count_flops() -> None:
    register_flop_formula(torch.ops.lightning_accel_native.tree_steps)(_flops)
    register_flop_formula(torch.ops.lightning_accel_native.tree_steps_backward)(_flops_of_backward)
