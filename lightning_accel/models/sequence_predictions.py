"""Predictions from the scores of a sequence model. Shapes: B samples, T steps, F features, C classes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def name_labels(scores: Tensor, lengths: Tensor, names: Sequence[str] | None) -> dict[str, Any]:
    """Return the most probable class of each valid step of ``scores`` (B, T, C), a list for each sample."""
    labels = scores.argmax(dim=-1).tolist()
    rows = [row[:length] for row, length in zip(labels, lengths.tolist(), strict=True)]
    return {"labels": rows if names is None else [[names[i] for i in row] for row in rows]}


def name_steps(steps: Tensor) -> dict[str, Tensor]:
    """Name the columns of forecasts: tokens (B, steps) int64, or values (B, steps, F)."""
    if not steps.is_floating_point():
        return {"token": steps}
    if steps.shape[-1] == 1:
        return {"value": steps.squeeze(dim=-1)}
    return {f"value_{number}": feature for number, feature in enumerate(steps.unbind(dim=-1))}


@torch.no_grad()
def forecast(model: Callable[..., tuple[Tensor, Any]], x: Tensor, lengths: Tensor, horizon: int) -> Tensor:
    """Forecast ``horizon`` steps after each sample of ``x``, feeding back the model's predictions.

    Args:
        model: called with sequences, lengths and a state; returns scores of each step, and states.
        x: (B, T) int64 tokens, or (B, T, F) floating.
        lengths: (B,).
        horizon: number of steps.

    Returns:
        (B, horizon) int64, the most probable tokens, or (B, horizon, F).
    """
    scores, states = model(x, lengths)
    last = (lengths - 1).clamp(min=0).to(x.device)
    scores = scores[torch.arange(len(x), device=x.device), last]
    steps: list[Tensor] = []
    for _ in range(horizon):
        if steps:  # not by step(): strategies that shard parameters gather them in forward
            scores, states = model(steps[-1][:, None], None, states)
            scores = scores[:, 0]
        steps.append(scores.to(x.dtype) if x.is_floating_point() else scores.argmax(dim=-1))
    return torch.stack(steps, dim=1)
