"""Updates of modules that split some of their weights, as tensor parallelism does, and hold the others whole."""

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

_AT_ONCE = ("foreach", "fused")
_changed: WeakSet[Optimizer] = WeakSet()


def update_mixed_groups_one_by_one(optimizers: Iterable[Any]) -> None:
    """Let optimizers update parameters one after another in groups that have both DTensors and plain tensors.

    On CUDA they would by default update all of a group at once, or fused where they are told so, which PyTorch refuses
    where only some are DTensors. The options are changed for each step alone, since checkpoints hold them.
    """
    for optimizer in optimizers:
        is_new = isinstance(optimizer, Optimizer) and optimizer not in _changed
        if is_new and any(map(_is_mixed, optimizer.param_groups)):
            _changed.add(optimizer)
            _change_steps(optimizer)


def _is_mixed(group: dict[str, Any]) -> bool:
    return len({isinstance(one, DTensor) for one in group["params"]}) == 2


def _change_steps(optimizer: Optimizer) -> None:
    changed: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def restore(*_: Any) -> None:
        for group, options in changed:
            group.update(options)
        changed.clear()

    def change(optimizer: Any, *_: Any) -> None:
        restore()  # after a step that raised an error
        for group in filter(_is_mixed, optimizer.param_groups):
            changed.append((group, {name: group[name] for name in _AT_ONCE if name in group}))
            group.update(dict.fromkeys(changed[-1][1], False))

    optimizer.register_step_pre_hook(change)
    optimizer.register_step_post_hook(restore)
