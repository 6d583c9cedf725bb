"""Batches of one fit that run by turns with the threads that it has and with fewer."""

from collections.abc import Sequence
from itertools import groupby, pairwise
from statistics import fmean, median

import torch

from lightning_accel.measure import Step

BATCHES = 4  # of a turn: the first starts or ends threads and is not counted


class ThreadTurns:
    """Change the number of threads every few batches, so that other processes slow both numbers alike.

    Args:
        threads: the number that the fit has.
        fewer: the number to compare with.
    """

    def __init__(self, threads: int, fewer: int) -> None:
        self.threads, self.fewer = threads, fewer
        self._had_fewer: list[bool] = []  # for each batch

    def end_batch(self) -> None:
        """Note the threads of the batch that ends, and change them if it was the last of its turn."""
        had_fewer = torch.get_num_threads() == self.fewer
        self._had_fewer.append(had_fewer)
        if len(self._had_fewer) % BATCHES == 0:
            torch.set_num_threads(self.threads if had_fewer else self.fewer)

    def unchanged(self) -> list[bool]:
        """Return for each batch whether it counts and had the threads of the fit."""
        return [index % BATCHES > 0 and not had_fewer for index, had_fewer in enumerate(self._had_fewer)]

    def saved_ms(self, steps: Sequence[Step]) -> float | None:
        """Return how much shorter a step is with fewer threads, None if no two turns have been counted.

        Compared are the means of neighbouring turns, since a median step would hide the few that wait long.

        Args:
            steps: the steps of these batches; the last may be missing.
        """
        timed = list(enumerate(zip(steps, self._had_fewer, strict=False)))
        means: list[tuple[bool, float]] = []
        for _, turn in groupby(timed, key=lambda each: each[0] // BATCHES):
            (_, (_, had_fewer)), *others = turn
            times = [step.wall_ns / 1e6 for _, (step, _) in others if not step.parts_ns()["validation"]]
            if times:
                means.append((had_fewer, fmean(times)))
        pairs = [(one, other) for one, other in pairwise(means) if one[0] != other[0]]
        return median((one[1] - other[1]) * (-1 if one[0] else 1) for one, other in pairs) if pairs else None
