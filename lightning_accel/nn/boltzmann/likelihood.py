"""Likelihoods of the layers of deep belief networks. Shapes: B batch size, V visible units, H_l units in layer l."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from lightning_accel.nn.boltzmann.rbm import RBM
from lightning_accel.ops.float32 import at_least_float32, without_autocast


class LogProbBound(NamedTuple):
    """Hold a lower bound of log-probabilities, (B,) each, float64, in nats."""

    estimate: Tensor
    lower: Tensor
    """The bound for the largest log Z in its interval."""
    upper: Tensor
    """The bound for the smallest log Z in its interval."""
    standard_error: Tensor
    """Standard error of ``estimate`` from the draws of intermediate layers; 0 for one layer, NaN for a single draw."""


def log_prob_of_visible(rbm: RBM, visible: Tensor, hidden: Tensor) -> Tensor:
    """Compute log p(visible | hidden), (B,) in nats, for (B, V) and (B, H)."""
    with without_autocast(visible):
        units, bias = rbm.visible_units, rbm.visible_bias
        visible = at_least_float32(visible)
        activation = rbm.visible_activation(at_least_float32(hidden))
        interaction = (units.input(visible) * (activation - bias)).sum(dim=-1)
        return interaction - units.energy(visible, bias) - units.log_partition(activation, bias)


def log_prob_of_hidden(hidden: Tensor, activation: Tensor) -> Tensor:
    """Compute log q(hidden), (B,) in nats, of independent units with ``activation`` (B, H)."""
    hidden, activation = at_least_float32(hidden), at_least_float32(activation)
    return (hidden * activation - F.softplus(activation)).sum(dim=-1)
