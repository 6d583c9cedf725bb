"""A gradient scaler that is synchronised over all processes."""

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


class WorldGradScaler(torch.amp.GradScaler):
    """Scale the loss and skip steps like ``GradScaler``, with the same decision on all processes.

    Under expert or pipeline parallelism an overflow may occur on a single rank; with torch's scaler the other ranks
    would step, and the scales would diverge. Here one flag is reduced over all processes in :meth:`unscale_`. Gradients
    of one optimizer may be sharded over different meshes or not sharded: each rank checks its own shards.

    Args:
        device: device type of the scale, ``cpu`` or ``cuda``.
        init_scale: initial scale.
        growth_interval: number of steps without a skip after which the scale doubles.
    """

    def __init__(self, device: str, init_scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        super().__init__(device, init_scale=init_scale, growth_interval=growth_interval)
        self.across_ranks = False

    def start(self, device: torch.device, across_ranks: bool) -> None:
        """Create the scale on ``device``, also on pipeline ranks, which may never scale a loss."""
        self.across_ranks = across_ranks
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        assert self._scale is not None
        found: dict[torch.device, Tensor] = self._found_inf_per_device(optimizer)  # type: ignore[assignment]
        flags = [flag.to(self._scale.device, non_blocking=True) for flag in found.values()]
        # a rank without gradients takes part, too
        flag = torch.stack(flags).amax() if flags else torch.zeros((), device=self._scale.device)
        if self.across_ranks:
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        found.clear()
        found[self._scale.device] = flag

    def found_non_finite(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether :meth:`unscale_` found inf or NaN on any rank; waits for the device."""
        return any(bool(flag) for flag in self._found_inf_per_device(optimizer).values())

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # torch's version passes all gradients to one operator, which rejects DTensors of different meshes or with
        # tensors
        grads: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        grad = _values(parameter)
                        grads[grad.device, grad.dtype].append(grad)
            flags: dict[torch.device, Tensor] = {}
            for (device, dtype), values in grads.items():
                if dtype == torch.float16 and not allow_fp16:
                    raise ValueError("a GradScaler needs float32 parameters; got gradients in float16")
                flag = flags.setdefault(device, torch.zeros_like(found_inf, device=device))
                torch._amp_foreach_non_finite_check_and_unscale_(values, flag, inv_scale.to(device, non_blocking=True))
        return flags


def _values(parameter: Tensor) -> Tensor:
    """Return this rank's part of the gradient, to be changed in place."""
    grad = parameter.grad
    assert grad is not None
    if isinstance(grad, DTensor):
        return grad.to_local()
    if grad.is_sparse:
        parameter.grad = grad = grad.coalesce()
        return grad._values()
    return grad
