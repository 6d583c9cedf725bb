"""Likelihoods of the layers of deep belief networks. Shapes: B batch size, V visible units, H_l units in layer l."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_accel.nn.rbm import RBM
from lightning_accel.nn.rbm_units import BernoulliHidden, HiddenUnits
from lightning_accel.ops.float32 import at_least_float32, without_autocast

_MAX_UNITS = 20  # largest number of units in a layer whose states are enumerated
_MAX_PAIR_UNITS = 28  # units of two neighbouring layers, for all pairs of states: 2**28 take some seconds
_CHUNK = 2**22  # numbers in memory at a time


class LogZLike(Protocol):
    """Describe the log partition function of an RBM, with an interval."""

    @property
    def estimate(self) -> Tensor: ...
    @property
    def lower(self) -> Tensor: ...
    @property
    def upper(self) -> Tensor: ...


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


def log_prob_of_hidden(units: HiddenUnits, hidden: Tensor, activation: Tensor) -> Tensor:
    """Compute log q(hidden), (B,) in nats, of independent units with ``activation`` (B, H)."""
    hidden, activation = at_least_float32(hidden), at_least_float32(activation)
    return (hidden * activation - units.log_partition(activation)).sum(dim=-1) - units.base(hidden)


def mixture(rbm: RBM, lower: Tensor, upper: Tensor, weight: Tensor) -> Tensor:
    """Compute the mixture log sum_j exp(weight_j) p(lower_i | upper_j), (B,), from (B, V), (J, H) and (J,)."""
    units, bias = rbm.visible_units, rbm.visible_bias
    inputs, own = units.input(lower), units.energy(lower, bias)
    parts = []
    rows = max(1, _CHUNK // len(lower))
    for states, share in zip(upper.split(rows), weight.split(rows), strict=True):
        activation = rbm.visible_activation(states)
        scores = inputs @ (activation - bias).T + (share - units.log_partition(activation, bias))
        parts.append(scores.logsumexp(dim=1))
    return torch.stack(parts).logsumexp(dim=0) - own


def all_states(num_units: int, like: Tensor) -> Tensor:
    """Return all states (2**U, U) of U binary units."""
    numbers = torch.arange(2**num_units, device=like.device)
    return (numbers[:, None] >> torch.arange(num_units, device=like.device) & 1).to(like.dtype)


def require_few_states(layers: Sequence[RBM]) -> None:
    """Require that the states of all layers of a stack, but for one at the top, can be enumerated."""
    below = layers[:-1] if len(layers) > 1 else layers
    if not all(isinstance(rbm.hidden_units, BernoulliHidden) for rbm in below):
        raise ValueError(
            "exact log-probabilities need hidden units with states to list: 'bernoulli' ones below the top. Take "
            "log_prob_bound"
        )
    listed = [rbm.num_hidden for rbm in below]
    pairs = [one + other for one, other in pairwise(listed)]
    if max(listed) > _MAX_UNITS or max(pairs, default=0) > _MAX_PAIR_UNITS:
        raise ValueError(
            f"exact log-probabilities list all states of up to {_MAX_UNITS} units in a layer and {_MAX_PAIR_UNITS} in "
            f"neighbours; the stack has layers of {listed} to list. Take log_prob_bound"
        )
