"""Checks for gradients with inf or NaN over all processes."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_MAX_NAMES = 8


def all_finite(parameters: Iterable[Tensor], across_ranks: bool) -> bool:
    """Return whether all gradients are finite on all ranks; waits for the device."""
    grads = [_local_values(parameter.grad) for parameter in parameters if parameter.grad is not None]
    # the largest magnitude is finite if and only if all are; without gradients it is 0
    finite = torch.nn.utils.get_total_norm([grad for grad in grads if grad.numel()], math.inf).isfinite().int()
    if grads:  # move it, as an NCCL group cannot reduce tensors on CPU
        finite = finite.to(grads[0].device)
    if across_ranks:
        dist.all_reduce(finite, dist.ReduceOp.MIN)
    return bool(finite)


def describe_non_finite(module: nn.Module, loss: Tensor | None, across_ranks: bool) -> str:
    """Return a message with the parameters of ``module`` whose gradients are not finite on any rank, and the loss.

    All ranks must call this if ``across_ranks``.
    """
    own = [name for name, parameter in module.named_parameters() if not _is_finite(parameter.grad)]
    value = None if loss is None else float(_local_values(loss).float().mean())
    found: list[tuple[list[str], float | None]] = [(own, value)]
    if across_ranks:
        found = [([], None)] * dist.get_world_size()
        dist.all_gather_object(found, (own, value))
    names = list(dict.fromkeys(name for part, _ in found for name in part))
    shown = ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")
    return f"Not finite are the gradients of {shown or 'no named parameter'}. {_describe_loss([v for _, v in found])}"


def _describe_loss(values: list[float | None]) -> str:
    losses = [value for value in values if value is not None]
    if broken := [value for value in losses if not math.isfinite(value)]:
        return f"The loss itself is {broken[0]}: look in the forward pass, or at the data."
    return f"The loss is finite ({', '.join(f'{value:.4g}' for value in losses)}): look in the backward pass."


def _is_finite(grad: Tensor | None) -> bool:
    return grad is None or bool(_local_values(grad).isfinite().all())


def _local_values(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.coalesce()._values() if tensor.is_sparse else tensor
