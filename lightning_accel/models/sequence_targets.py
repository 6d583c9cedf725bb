"""Targets of sequence models. Shapes: B samples, T steps, F features, K values."""

import torch
from torch import Tensor

from lightning_accel.data.sequence_batch import IGNORED, SequenceBatch


def valid_steps(lengths: Tensor, num_steps: int, device: torch.device) -> Tensor:
    """Return which steps are before each sample's end, (B, T) bool.

    >>> valid_steps(torch.tensor([1, 0]), 2, torch.device("cpu")).tolist()
    [[True, False], [False, False]]
    """
    return torch.arange(num_steps, device=device) < lengths.to(device, non_blocking=True)[:, None]


def next_steps(x: Tensor, lengths: Tensor) -> Tensor:
    """Return the step after each step of ``x`` (B, T) or (B, T, F); IGNORED, or NaN, from a sample's last step on."""
    there = valid_steps(lengths - 1, x.shape[1], x.device)
    there = there if x.ndim == 2 else there[..., None]
    return torch.where(there, x.roll(-1, dims=1), torch.nan if x.is_floating_point() else IGNORED)


def target_of(batch: SequenceBatch, kind: str) -> Tensor:
    """Return the target of ``batch``, on the device of its sequences.

    Raises:
        ValueError: if it has none.
    """
    if batch.target is not None:
        return _to_floating(batch.target) if kind == "regression" else batch.target
    if kind != "forecasting":
        raise ValueError(f"target_kind={kind!r} needs a target in each batch; got SequenceBatch.target=None")
    return next_steps(batch.x, batch.lengths)


def _to_floating(target: Tensor) -> Tensor:
    return target if target.is_floating_point() else target.float()
