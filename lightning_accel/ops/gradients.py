"""Gradients of fused operations that can be differentiated again."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def gradients_of_formula(
    formula: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
    gradients: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of an operation by running its formula again, in its backward pass.

    Under ``create_graph=True`` they can be differentiated again. They serve for gradients that vmap batches, too.

    Args:
        formula: computes the outputs from ``inputs``.
        inputs: those of the forward pass that are floating.
        needed: of each argument of the operation, the first of which are ``inputs``: ``ctx.needs_input_grad``.
        gradients: of each output, None where there is none; further ones are ignored.

    Returns:
        A gradient for each element of ``needed``.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        # aliases: what reaches one input through another is the affair of the nodes in between, as are hooks
        own = [None if one is None else one.view_as(one) for one in inputs]
        outputs = formula(*own)
    used = [pair for pair in zip(outputs, gradients, strict=False) if pair[1] is not None and pair[0].requires_grad]
    wanted = [one for one, is_needed in zip(own, needed, strict=False) if is_needed and one is not None]
    values, factors = zip(*used, strict=True)
    found = iter(torch.autograd.grad(values, wanted, factors, create_graph=create_graph, allow_unused=True))
    return tuple(next(found) if is_needed else None for is_needed in needed)
