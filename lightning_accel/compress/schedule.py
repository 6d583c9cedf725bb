"""Schedules of sparsity and regrowth over a run."""

import math
from typing import Literal, TypeAlias, get_args

ScheduleName: TypeAlias = Literal["cubic", "linear", "geometric", "one_shot", "constant"]
SCHEDULES: tuple[str, ...] = get_args(ScheduleName)


def sparsity_at(step: int, begin: int, end: int, target: float, schedule: ScheduleName = "cubic") -> float:
    """Return the sparsity after ``step``, a share of all weights: 0 before ``begin``, ``target`` from ``end`` on.

    ``cubic`` is eq. 1 of Zhu and Gupta 2017, https://arxiv.org/abs/1710.01878, from 0; ``geometric`` prunes the same
    share of the remaining weights in each step; ``one_shot`` and ``constant`` reach the target at ``begin``.

    >>> [round(sparsity_at(step, 0, 4, 0.8), 3) for step in range(6)]
    [0.0, 0.463, 0.7, 0.788, 0.8, 0.8]
    """
    if step < begin:
        return 0.0
    if schedule in ("one_shot", "constant") or step >= end:
        return target
    progress = (step - begin) / (end - begin)
    if schedule == "cubic":
        return target * (1 - (1 - progress) ** 3)
    return target * progress if schedule == "linear" else 1 - (1 - target) ** progress


def drop_fraction_at(step: int, begin: int, end: int, first: float) -> float:
    """Return the share of weights to prune and regrow at ``step``, which decays from ``first`` to 0 as half a cosine.

    Source: Evci et al. 2020, Rigging the Lottery, https://arxiv.org/abs/1911.11134, section 3.

    >>> [round(drop_fraction_at(step, 0, 4, 0.3), 3) for step in range(5)]
    [0.3, 0.256, 0.15, 0.044, 0.0]
    """
    progress = min(max((step - begin) / max(end - begin, 1), 0.0), 1.0)
    return first / 2 * (1 + math.cos(math.pi * progress))
