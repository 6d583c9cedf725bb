"""What sequences are compared with, and how. Shapes: B rows, T steps, F features, K values, S scores."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_accel.data.sequence_batch import IGNORED, SequenceBatch


class Measured(NamedTuple):
    """Sums over the valid targets of a batch, and how many those are; () each."""

    loss: Tensor  # of cross entropies in nats, or of squared errors in units
    score: Tensor  # how many classes were right, or of squared errors
    valid: Tensor


def within(lengths: Tensor, num_steps: int, device: torch.device) -> Tensor:
    """Which steps are before each row's end, (B, T) bool.

    >>> within(torch.tensor([1, 0]), 2, torch.device("cpu")).tolist()
    [[True, False], [False, False]]
    """
    return torch.arange(num_steps, device=device) < lengths.to(device, non_blocking=True)[:, None]


def next_steps(x: Tensor, lengths: Tensor) -> Tensor:
    """What follows each step of ``x`` (B, T) or (B, T, F), in its shape; IGNORED, or NaN, from a row's last step on."""
    there = within(lengths - 1, x.shape[1], x.device)
    there = there if x.ndim == 2 else there[..., None]
    return torch.where(there, x.roll(-1, dims=1), torch.nan if x.is_floating_point() else IGNORED)


def target_of(batch: SequenceBatch, kind: str) -> Tensor:
    """The target of ``batch``, on the device of its sequences.

    Raises:
        ValueError: if it has none.
    """
    if batch.target is not None:
        return _like_floating(batch.target) if kind == "regression" else batch.target
    if kind != "forecasting":
        raise ValueError(f"target_kind={kind!r} needs a target in each batch; got SequenceBatch.target=None")
    return next_steps(batch.x, batch.lengths)


def _like_floating(target: Tensor) -> Tensor:
    return target if target.is_floating_point() else target.float()


def is_valid(target: Tensor) -> Tensor:
    """Which targets there are, bool in the shape of ``target``."""
    return ~target.isnan() if target.is_floating_point() else target != IGNORED


def measure(scores: Tensor, target: Tensor, unit: Tensor | None = None) -> Measured:
    """Compare ``scores`` (..., S) with classes (...), or with values of as many numbers.

    ``unit`` (S,) is what errors of values are divided by for the loss.

    Raises:
        ValueError: if their shapes do not fit.

    >>> measure(torch.tensor([[1.0], [5.0]]), torch.tensor([3.0, torch.nan]))
    Measured(loss=tensor(4.), score=tensor(4.), valid=tensor(1))
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    valid = is_valid(target)
    expected = tuple(scores.shape) if target.is_floating_point() else tuple(scores.shape[:-1])
    if tuple(target.shape) != expected and expected != (*target.shape, 1):
        raise ValueError(f"the model's scores need a target of shape {expected}; got {tuple(target.shape)}")
    if target.is_floating_point():
        target, there = target.view_as(scores), valid.view_as(scores)
        error = torch.where(there, scores - target.nan_to_num(), 0)
        scaled = error if unit is None else error / unit
        return Measured(scaled.square().sum(), error.detach().square().sum(), valid.sum())
    loss = F.cross_entropy(scores.flatten(0, -2), target.flatten(), ignore_index=IGNORED, reduction="sum")
    return Measured(loss, (scores.argmax(dim=-1) == target).sum(), valid.sum())
