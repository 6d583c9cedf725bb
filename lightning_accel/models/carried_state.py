"""Recurrent states carried from batch to batch in truncated back-propagation through time. Shapes: B samples."""

from typing import Any, TypeAlias

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_accel.strategies.rank_states import RankStates

States: TypeAlias = Any  # tensors (layers, B, H) in any nesting
_KEY = "carried_state"  # key in checkpoints


class CarriedState:
    """Hold the states after the last batch, of training and of each kind of evaluation, in this process.

    A checkpoint contains the training states of every process; a run on another number of processes starts from zeros,
    with a warning.
    """

    def __init__(self) -> None:
        self._states: dict[str, States] = {}
        self._ranks = RankStates()

    def take(self, stage: str, carried: Tensor) -> States | None:
        """Return states for a batch whose sample i continues sample ``carried[i]`` of the batch before; zeros for -1.

        Raises:
            ValueError: if the batch before had no such sample.
        """
        states = self._states.get(stage)
        if states is None:
            return None
        rows = tree_leaves(states)[0].shape[1]
        if carried.numel() and int(carried.max()) >= rows:
            raise ValueError(
                f"SequenceBatch.carried names row {int(carried.max())} of the batch before, which had {rows} rows. "
                "Number the rows of that batch from 0, and use -1 for those that begin"
            )
        device = tree_leaves(states)[0].device
        carried = carried.to(device)
        goes_on = (carried >= 0)[:, None]
        return tree_map(lambda state: torch.where(goes_on, state[:, carried.clamp(min=0)], 0), states)

    def keep(self, stage: str, states: States) -> None:
        """Store ``states``, detached from the graph."""
        self._states[stage] = tree_map(torch.detach, states)

    def forget(self, stage: str) -> None:
        self._states.pop(stage, None)

    def save(self, checkpoint: dict[str, Any], trainer: L.Trainer) -> None:
        """Add the training states of all processes to ``checkpoint``; all processes must call it."""
        if "train" in self._states:
            mine = tree_map(Tensor.cpu, self._states["train"])
            checkpoint[_KEY] = self._ranks.gather(mine, trainer)

    def load(self, checkpoint: dict[str, Any], trainer: L.Trainer, device: torch.device) -> None:
        """Load the states that :meth:`save` added."""
        saved = checkpoint.get(_KEY)
        if saved is None:
            return
        if len(saved) != trainer.world_size:
            rank_zero_warn(
                f"the checkpoint holds states of sequences in {len(saved)} processes, this run has "
                f"{trainer.world_size}: sequences that were cut go on from a state of zeros"
            )
            self.forget("train")
            return
        self._states["train"] = tree_map(lambda state: state.to(device), saved[trainer.global_rank])
