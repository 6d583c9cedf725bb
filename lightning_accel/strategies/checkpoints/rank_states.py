"""Gathering of the states of all processes for a checkpoint."""

from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerStatus


class RankStates:
    """Gather the state of every process once a step, for all checkpoints of that step."""

    def __init__(self) -> None:
        self._gathered: tuple[int, list[Any]] = -1, []

    def gather(self, mine: Any, trainer: L.Trainer) -> list[Any]:
        """Return the states of all processes by rank; all processes must call it.

        In an interrupted run, where one process may have failed alone and must not wait for others, return what was
        gathered at this step before, or an empty list if nothing was.
        """
        if trainer.world_size == 1:
            return [mine]
        step = trainer.fit_loop.total_batch_idx
        if trainer.state.status == TrainerStatus.INTERRUPTED:
            return self._gathered[1] if self._gathered[0] == step else []
        everyone = [mine] * trainer.world_size
        dist.all_gather_object(everyone, mine)
        self._gathered = step, everyone
        return everyone
