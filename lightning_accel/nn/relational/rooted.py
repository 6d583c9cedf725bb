"""What a node knows of the triples that contain it, computed in one pass over its neighbours and triangles.

Shapes: N nodes, E edges, F features, R channels.
"""

from typing import Any

import torch
from torch import Tensor

from lightning_accel._private.torch import is_batched
from lightning_accel.nn.relational.sums import nearly_cancels, rooted_sums, weighted_neighbour_sum
from lightning_accel.ops.gradients import gradients_of_formula
from lightning_accel.ops.native import runs_kernel
from lightning_accel.ops.triples.find import Triples

_DTYPES = (torch.float32, torch.float64)


def rooted_features(x: Tensor, maps: Tensor, weight: Tensor | None, triples: Triples) -> Tensor:
    """Compute the features of nodes, those of their neighbours and the sums over their triples, side by side.

    On the CPU a C++ kernel computes them and their gradients; second derivatives, other devices and transformed code
    take the formulas in torch.

    Args:
        x: (N, F) float32 or float64.
        maps: (N, 2 R) of the same dtype, the maps b and c of x.
        weight: (E, R) of the same dtype, the weights of edges; None for 1.
        triples: edges and triangles of the graph.

    Returns:
        (N, F + 4 R), the sum of ``x`` over a node and its neighbours, b, and :func:`rooted_sums`; with weights
        (N, F + 5 R), with the sum of ``w_ij b_j`` over the neighbours at the end.
    """
    given = [x, maps] if weight is None else [x, maps, weight]
    if not _serves(given):
        return _formula(x, maps, weight, triples)
    wide = maps.dtype == torch.float32 and nearly_cancels(triples)
    out: Tensor = _RootedFeatures.apply(x.contiguous(), maps.contiguous(), weight, wide, triples)
    return out


def _serves(tensors: list[Tensor]) -> bool:
    dtype = tensors[0].dtype
    return dtype in _DTYPES and all(one.dtype == dtype for one in tensors) and runs_kernel(*tensors)


def _formula(x: Tensor, maps: Tensor, weight: Tensor | None, triples: Triples) -> Tensor:
    b = maps[:, : maps.shape[1] // 2]
    sums = list(rooted_sums(maps, weight, triples))
    if weight is not None:
        sums.append(weighted_neighbour_sum(b, weight, triples))
    return torch.cat([x + weighted_neighbour_sum(x, None, triples), b, *sums], dim=1)


class _RootedFeatures(torch.autograd.Function):
    """Compute :func:`rooted_features` by the kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, maps: Tensor, weight: Tensor | None, wide: bool, triples: Triples) -> Tensor:
        weight = None if weight is None else weight.contiguous()
        out, saved = torch.ops.lightning_accel_native.rooted_triples.default(x, maps, weight, wide, *_graph(triples))
        ctx.wide, ctx.triples = wide, triples
        ctx.save_for_backward(x, maps, weight, saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, maps, weight, saved = ctx.saved_tensors
        if torch.is_grad_enabled() or is_batched(grad):

            def formula(x: Tensor, maps: Tensor, weight: Tensor | None) -> list[Tensor]:
                return [_formula(x, maps, weight, ctx.triples)]

            return gradients_of_formula(formula, (x, maps, weight), ctx.needs_input_grad, [grad])
        run = torch.ops.lightning_accel_native.rooted_triples_backward.default
        d_x, d_maps, d_weight = run(grad.contiguous(), x, maps, weight, ctx.wide, saved, *_graph(ctx.triples))
        return d_x, d_maps, None if weight is None else d_weight, None, None


def _graph(triples: Triples) -> tuple[Tensor, ...]:
    return triples.rowptr, triples.col, triples.edge_of, triples.edge, triples.triangle, triples.side
