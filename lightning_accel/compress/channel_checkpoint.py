"""Loading of channel-pruned modules from checkpoints, without pickle."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from lightning_accel.compress.channel_plan import ChannelPlan, apply_plan_
from lightning_accel.compress.prunable import clean_name
from lightning_accel.compress.uncompiled import uncompiled
from lightning_accel.strategies.checkpoint_reading import read_checkpoint

CHANNEL_PLAN = "channel_plan"  # key of a plan in a checkpoint, at any depth

Module = TypeVar("Module", bound=nn.Module)


def load_pruned(module: Module, checkpoint: str | Path | Mapping[str, Any]) -> Module:
    """Load a checkpoint of a channel-pruned model into ``module``, which is not pruned yet, in place.

    Args:
        module: module of the same sizes as before training.
        checkpoint: a file or its content, of a Trainer with :class:`~lightning_accel.callbacks.Pruning`, or
            ``{"channel_plan": plan.state_dict(), "state_dict": module.state_dict()}``. Without a plan, only the weights
            are loaded.

    Returns:
        ``module``.

    Raises:
        ValueError: if the checkpoint has no weights, or the module has not the shapes from before the pruning.
    """
    found = checkpoint if isinstance(checkpoint, Mapping) else read_checkpoint(checkpoint)
    if "state_dict" not in found:
        raise ValueError(f"the checkpoint holds {', '.join(map(str, found))}; its weights must be in 'state_dict'")
    plan = find_plan(found)
    if plan is not None:
        apply_plan_(module, plan)
    weights = found["state_dict"]
    with uncompiled(module) as plain:  # the run may have been compiled or not
        plain.load_state_dict({clean_name(name): value for name, value in weights.items()})
    return module


def find_plan(state: Any) -> ChannelPlan | None:
    """Find the plan in ``state``, at any depth of mappings and lists; return None if there is none."""
    if isinstance(state, Mapping):
        if state.get(CHANNEL_PLAN):
            return ChannelPlan.of_state(state[CHANNEL_PLAN])
        state = [value for key, value in state.items() if key not in ("state_dict", "optimizer_states")]
    if isinstance(state, (list, tuple)):
        return next((plan for plan in map(find_plan, state) if plan is not None), None)
    return None
