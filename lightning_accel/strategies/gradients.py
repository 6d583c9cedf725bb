"""Gradients that lie on several processes: clipping, and delivery and reduction in a pipeline."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from lightning_accel.ops.float32 import at_least_float32
from lightning_accel.strategies.pipeline.engine import Ranks

_BUCKET = 2**25  # bytes of gradients reduced in one message


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor], max_norm: float, counted: set[nn.Parameter] | None = None, group: Any = None
) -> Tensor:
    """Scale the gradients of ``parameters`` so that their 2-norm over all processes is ``max_norm`` at most.

    ``torch.nn.utils.clip_grad_norm_`` rejects gradients of several meshes, and sharded beside unsharded ones.

    Args:
        parameters: parameters of this process.
        max_norm: largest norm.
        counted: parameters that this process contributes to the norm, by default all; one process alone counts what
            several of ``group`` hold.
        group: processes that hold different parameters, such as stages of a pipeline.

    Returns:
        (): the norm before clipping.
    """
    parameters = list(parameters)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    by_layout: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        if (grad := parameter.grad) is not None and (counted is None or parameter in counted):
            key = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else grad.device
            by_layout.setdefault(key, []).append(grad)
    squared = torch.zeros((), device=parameters[0].device if parameters else None)
    for same in by_layout.values():
        norm = torch.nn.utils.get_total_norm(same)
        norm = at_least_float32(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        squared = squared + norm.to(squared.device).square()
    if group is not None:
        squared = squared.float()  # processes may hold gradients of other dtypes
        dist.all_reduce(squared, group=group)
    total = squared.sqrt()
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)  # the formula of torch.nn.utils.clip_grad_norm_
    for grad in grads:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        local.mul_(scale.to(local))
    return total


class PrecomputedGradients(torch.autograd.Function):
    """Return a loss whose gradients are computed already: its backward pass delivers them."""

    @staticmethod
    def forward(start: Tensor, loss: Tensor, deposit: Callable[[Tensor], None]) -> Tensor:
        return loss.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.deposit = inputs[2]

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[None, None, None]:
        ctx.deposit(factor)
        return None, None, None


def average_(parameters: list[nn.Parameter], group: Any, size: int) -> None:
    """Average gradients over ``group``, in buckets of some megabytes; parameters without a gradient count as zero."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    pending: list[Tensor] = []
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for grad, following in zip(grads, [*grads[1:], None], strict=True):
        pending.append(grad)
        full = sum(one.numel() * one.element_size() for one in pending) > _BUCKET
        if full or following is None or following.dtype != grad.dtype:
            flat = torch.cat([one.reshape(-1) for one in pending])
            dist.all_reduce(flat, group=group)
            flat /= size
            for one, part in zip(pending, flat.split([one.numel() for one in pending]), strict=True):
                one.copy_(part.view_as(one))
            pending = []


def sum_shared_(shared: list[nn.Parameter], ranks: Ranks) -> None:
    """Sum, over stages, the gradients of parameters that all stages hold; leave None where no stage used one."""
    used = torch.tensor([parameter.grad is not None for parameter in shared], dtype=torch.uint8)
    dist.all_reduce(used, dist.ReduceOp.MAX, group=ranks.objects)
    for parameter, is_used in zip(shared, used.tolist(), strict=True):
        if is_used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=ranks.group)


def broadcast_overflow_(parameters: list[nn.Parameter], device: torch.device, group: Any) -> None:
    """Let all stages skip an update whose gradients overflowed on one; each scaler sees only its own gradients."""
    grads = [one.grad for one in parameters if one.grad is not None and one.numel()]
    total = torch.zeros((), device=device)
    if grads:
        total = get_total_norm(grads, float("inf")).float() * 0  # 0, or nan
    dist.all_reduce(total, group=group)
    for grad in grads[:1]:
        grad[(0,) * grad.ndim] += total.to(grad.dtype)  # not by a view: the memory may be in another order
