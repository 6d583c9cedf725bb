"""Losses and scores over the valid targets of a batch. Shapes: S scores."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_accel.data.sequence_batch import IGNORED


class MaskedLoss(NamedTuple):
    """Hold sums over the valid targets of a batch, and their number; () each."""

    loss: Tensor  # sum of cross entropies in nats, or of squared errors in units
    score: Tensor  # number of correct classes, or sum of squared errors
    valid: Tensor


def is_valid(target: Tensor) -> Tensor:
    """Return which targets are present, bool in the shape of ``target``."""
    return ~target.isnan() if target.is_floating_point() else target != IGNORED


def masked_loss(scores: Tensor, target: Tensor, unit: Tensor | None = None) -> MaskedLoss:
    """Compare ``scores`` (..., S) with classes (...), or with as many floating values.

    For the loss, errors of values are divided by ``unit`` (S,).

    Raises:
        ValueError: if their shapes do not match.

    >>> masked_loss(torch.tensor([[1.0], [5.0]]), torch.tensor([3.0, torch.nan]))
    MaskedLoss(loss=tensor(4.), score=tensor(4.), valid=tensor(1))
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
        return MaskedLoss(scaled.square().sum(), error.detach().square().sum(), valid.sum())
    loss = F.cross_entropy(scores.flatten(0, -2), target.flatten(), ignore_index=IGNORED, reduction="sum")
    return MaskedLoss(loss, (scores.argmax(dim=-1) == target).sum(), valid.sum())
