"""Clipping of gradients that lie on several device meshes."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients of ``parameters`` so that their 2-norm over all processes is ``max_norm`` at most.

    ``torch.nn.utils.clip_grad_norm_`` rejects gradients of several meshes, and sharded beside unsharded ones.

    Returns:
        (): the norm before clipping.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    by_layout: dict[object, list[Tensor]] = {}
    for grad in grads:
        key = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else grad.device
        by_layout.setdefault(key, []).append(grad)
    norms = []
    for group in by_layout.values():
        norm = torch.nn.utils.get_total_norm(group)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not norms:
        return torch.tensor(0.0)
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)  # the formula of torch.nn.utils.clip_grad_norm_
    for grad in grads:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        local.mul_(scale.to(local))
    return total
