"""A gradient scaler on which all processes agree."""

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


class WorldGradScaler(torch.amp.GradScaler):
    """A ``GradScaler`` whose processes skip a step together, whatever part of the gradients each of them holds.

    Under expert or pipeline parallelism an overflow shows on one rank alone; torch's scaler would let the others step,
    and the scales drift apart. Here one number is reduced over the world in :meth:`unscale_`. Gradients may be sharded
    over any meshes, or over none, in one optimizer: each rank looks at its own part.

    Args:
        device: type of the device that the scale is kept on, ``cpu`` or ``cuda``.
        init_scale: the first scale.
        growth_interval: steps without a skip until the scale doubles.
    """

    def __init__(self, device: str, init_scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        super().__init__(device, init_scale=init_scale, growth_interval=growth_interval)
        self.across_ranks = False

    def start(self, device: torch.device, across_ranks: bool) -> None:
        """Put the scale on ``device``: a rank that computes no loss, in a pipeline, has no other occasion."""
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
        """Whether :meth:`unscale_` met inf or NaN, on any rank; waits for the device."""
        return any(bool(flag) for flag in self._found_inf_per_device(optimizer).values())

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # torch's own passes all gradients to one operator, which refuses DTensors of several meshes, or beside tensors
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
    """What this rank holds of the gradient, to be changed in place."""
    grad = parameter.grad
    assert grad is not None
    if isinstance(grad, DTensor):
        return grad.to_local()
    if grad.is_sparse:
        parameter.grad = grad = grad.coalesce()
        return grad._values()
    return grad
