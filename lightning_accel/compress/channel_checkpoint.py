"""A module without its removed channels, from a checkpoint, without pickle."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from lightning_accel.compress.channel_plan import ChannelPlan, apply_plan_
from lightning_accel.compress.prunable import clean_name
from lightning_accel.compress.uncompiled import uncompiled
from lightning_accel.strategies.checkpoint_reading import read_checkpoint

CHANNEL_PLAN = "channel_plan"  # under which a plan is in a checkpoint, however deep

Module = TypeVar("Module", bound=nn.Module)


def load_pruned(module: Module, checkpoint: str | Path | Mapping[str, Any]) -> Module:
    """Bring ``module``, made as before training, to the shapes and weights of ``checkpoint``.

    Args:
        module: whole; changed in place.
        checkpoint: a file, or what is in it: of a Trainer with :class:`~lightning_accel.callbacks.Pruning`, or
            ``{"channel_plan": plan.state_dict(), "state_dict": module.state_dict()}``. Without a plan the weights are
            loaded as they are.

    Returns:
        ``module``.

    Raises:
        ValueError: if the checkpoint has no weights, or the module is not as it was when channels were removed.
    """
    found = checkpoint if isinstance(checkpoint, Mapping) else read_checkpoint(checkpoint)
    if "state_dict" not in found:
        raise ValueError(f"the checkpoint holds {', '.join(map(str, found))}; its weights must be in 'state_dict'")
    plan = find_plan(found)
    if plan is not None:
        apply_plan_(module, plan)
    weights = found["state_dict"]
    with uncompiled(module) as plain:  # whether or not the run was compiled, too
        plain.load_state_dict({clean_name(name): value for name, value in weights.items()})
    return module


def find_plan(state: Any) -> ChannelPlan | None:
    """The plan that is somewhere in ``state``, of mappings and lists."""
    if isinstance(state, Mapping):
        if state.get(CHANNEL_PLAN):
            return ChannelPlan.of_state(state[CHANNEL_PLAN])
        state = [value for key, value in state.items() if key not in ("state_dict", "optimizer_states")]
    if isinstance(state, (list, tuple)):
        return next((plan for plan in map(find_plan, state) if plan is not None), None)
    return None
