"""Coordination of several ``Pruning`` callbacks in one Trainer: their states, and weights that two would prune."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import lightning as L
from torch import nn

OneT = TypeVar("OneT", bound=L.Callback)


def callbacks_of_type(trainer: L.Trainer, callback: OneT) -> list[OneT]:
    """Return all callbacks of the class of ``callback``, in their order."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return [one for one in callbacks if isinstance(one, type(callback))]


def exclusion_names(exclude: Sequence[str | type[nn.Module]]) -> list[str]:
    """Return the excluded names, sorted, to tell callbacks apart that prune different parts of a module."""
    return sorted(one.__name__ if isinstance(one, type) else one for one in exclude)


def require_one_kind(trainer: L.Trainer, callback: L.Callback) -> None:
    """Reject masks beside the removal of channels, which replaces the masked weights.

    Raises:
        ValueError: if both are in one Trainer; the message says what to do instead.
    """
    if len({getattr(one, "structure", None) == "channel" for one in callbacks_of_type(trainer, callback)}) > 1:
        raise ValueError(
            "Pruning(structure='channel') replaces weights, which another Pruning of this Trainer holds masks of. "
            "Remove channels in one fit, and prune what is left in the next"
        )


def require_disjoint_weights(weights: Mapping[str, Sequence[str]]) -> None:
    """Reject weights that two callbacks prune.

    Args:
        weights: names of the weights that each callback prunes, by a description of the callback.

    Raises:
        ValueError: if two callbacks prune a weight; the message names it.
    """
    owners: dict[str, str] = {}
    for shown, names in weights.items():
        shared = [name for name in names if name in owners]
        if shared:
            raise ValueError(
                f"{owners[shared[0]]} and {shown} both prune {', '.join(shared)}, so that neither would have its "
                "target: let each leave out with exclude what the other prunes, or take one of them"
            )
        owners |= dict.fromkeys(names, shown)


def adopt_state(trainer: L.Trainer, callback: L.Callback, prefix: str, states: dict[str, Any]) -> None:
    """Give ``callback`` the only unclaimed state in a checkpoint, if there is none of its own.

    It may be the state of a run with another ``exclude``; masks of weights that are not pruned now are rejected
    later.
    """
    claimed = {one.state_key for one in callbacks_of_type(trainer, callback)}
    left = [key for key in states if key.startswith(prefix) and key not in claimed]
    if callback.state_key not in states and len(left) == 1:
        states[callback.state_key] = states.pop(left[0])
