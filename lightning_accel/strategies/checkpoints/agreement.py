"""Agreement of processes that write one checkpoint together: they go on together, or all of them fail."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from lightning_accel.strategies.checkpoints.atomic import NotWrittenError


class Agreement:
    """Let processes do parts of a job together, each of which ends on all of them, or fails on all of them.

    A barrier leaves the others waiting for a process that has failed.

    Args:
        group: the processes; None for all.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    @contextmanager
    def part(self) -> Iterator[None]:
        """Run the body, and wait until all processes have run theirs.

        Raises:
            NotWrittenError: if the body of another process failed, with its rank and error.
        """
        try:
            yield
        except Exception as error:
            self._tell(f"{type(error).__name__}: {error}")
            raise
        failures = {rank: failure for rank, failure in enumerate(self._tell(None)) if failure is not None}
        if failures:
            rank, failure = next(iter(failures.items()))
            raise NotWrittenError(f"process {rank} could not write its part of the checkpoint: {failure}")

    def _tell(self, failure: str | None) -> list[str | None]:
        failures: list[str | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(failures, failure, group=self.group)
        return failures
