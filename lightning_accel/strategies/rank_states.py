"""What each process holds, in one list for a checkpoint."""

from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerStatus


class RankStates:
    """Gathers a state of every process, once a step: several checkpoints of one step share it."""

    def __init__(self) -> None:
        self._gathered: tuple[int, list[Any]] = -1, []

    def gather(self, mine: Any, trainer: L.Trainer) -> list[Any]:
        """States by rank; all processes must call it.

        In a run that was interrupted, where one process may have failed alone and must not wait for others, it is what
        was gathered at this step before; if nothing was, an empty list.
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
