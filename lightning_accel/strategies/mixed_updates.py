"""Updates of modules that split some of their weights, as tensor parallelism does, and hold the others whole."""

from collections.abc import Iterable
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def update_mixed_groups_one_by_one(optimizers: Iterable[Optimizer]) -> None:
    """Let optimizers update parameters one after another in groups that have both DTensors and plain tensors.

    On CUDA they would by default update all of a group at once, which PyTorch refuses where only some are DTensors. The
    option is changed for each step alone, since checkpoints hold it.
    """

    def change(optimizer: Any, before: bool | None, after: bool | None) -> None:
        for group in optimizer.param_groups:
            is_mixed = len({isinstance(one, DTensor) for one in group["params"]}) == 2
            if is_mixed and "foreach" in group and group["foreach"] is before and not group.get("fused"):
                group["foreach"] = after

    for optimizer in optimizers:
        optimizer.register_step_pre_hook(lambda one, *_: change(one, None, False))
        optimizer.register_step_post_hook(lambda one, *_: change(one, False, None))
