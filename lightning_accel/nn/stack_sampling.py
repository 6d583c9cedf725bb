"""Sampling from deep belief networks. Shapes: B batch size, V visible units, C labels, H_l units in layer l."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor

if TYPE_CHECKING:
    from lightning_accel.nn.dbn import RBMStack


@torch.no_grad()
def sample_stack(
    stack: RBMStack,
    num_samples: int,
    steps: int,
    clamp: Tensor | None,
    labels: Tensor | None,
    generator: Generator | None,
) -> Tensor:
    """Compute :meth:`RBMStack.sample`."""
    top, size = stack.top, stack.top.num_visible - stack.num_labels
    states = _sample_independent(stack, -1, num_samples, generator)  # (B, H_{L-1} + C)
    known = None if labels is None else stack.one_hot(labels, states)
    if clamp is not None:
        clamp = _expand_clamp(stack, clamp, num_samples)
        visible = _apply_clamp(stack.without_labels(0, _sample_independent(stack, 0, num_samples, generator)), clamp)
    for _ in range(steps):
        below = states[:, :size]
        if clamp is not None:
            below = stack.sample_hidden(visible, len(stack.layers) - 1, generator)
        states = torch.cat([below, states[:, size:] if known is None else known], dim=1)
        states = top.sample_visible(top.sample_hidden(states, generator), generator)
        if clamp is not None:
            visible = _apply_clamp(stack.down(states[:, :size], generator), clamp)
    return stack.down(states[:, :size], generator) if clamp is None else visible


def _sample_independent(stack: RBMStack, layer: int, num_samples: int, generator: Generator | None) -> Tensor:
    """Draw visible states of RBM ``layer`` as if it had no weights."""
    rbm = stack.layers[layer]
    return rbm.visible_units.sample(rbm.visible_bias.expand(num_samples, -1), generator)


def _apply_clamp(visible: Tensor, clamp: Tensor) -> Tensor:
    return torch.where(clamp.isnan(), visible, clamp)


def _expand_clamp(stack: RBMStack, clamp: Tensor, num_samples: int) -> Tensor:
    bottom = stack.layers[0]
    free_labels = clamp.new_full((*clamp.shape[:-1], bottom.num_labels), torch.nan)
    return stack.without_labels(0, bottom.held(torch.cat([clamp, free_labels], dim=-1), num_samples))
