"""Likelihoods of deep belief networks. Shapes: B batch size, V visible units, H_l units in layer l."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Generator, Tensor

from lightning_accel.nn.rbm import RBM
from lightning_accel.nn.rbm_units import BernoulliHidden, HiddenUnits
from lightning_accel.ops.float32 import at_least_float32, without_autocast

if TYPE_CHECKING:
    from lightning_accel.nn.dbn import RBMStack

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


@torch.no_grad()
def log_prob_bound(
    stack: RBMStack,
    visible: Tensor,
    log_z: LogZLike,
    labels: Tensor | None,
    num_samples: int,
    generator: Generator | None,
) -> LogProbBound:
    """Compute :meth:`RBMStack.log_prob_bound`."""
    if len(stack.layers) == 1:
        num_samples = 1
    drawn = torch.stack([_log_weight(stack, visible, labels, generator) for _ in range(num_samples)])  # (S, B)
    mean = drawn.mean(dim=0)
    error = drawn.std(dim=0) / num_samples**0.5 if num_samples > 1 else torch.full_like(mean, torch.nan)
    if len(stack.layers) == 1:
        error = torch.zeros_like(mean)
    return LogProbBound(mean - log_z.estimate, mean - log_z.upper, mean - log_z.lower, error)


def _log_weight(stack: RBMStack, visible: Tensor, labels: Tensor | None, generator: Generator | None) -> Tensor:
    """Draw states upward; return log p*(visible, states) - log q(states), (B,) float64."""
    states, total = visible, visible.new_zeros(len(visible), dtype=torch.float64)
    for layer in range(len(stack.layers) - 1):
        rbm = stack.layers[layer]
        activation = stack.activation(layer, states)
        above = rbm.hidden_units.sample(activation, generator)
        total += log_prob_of_visible(rbm, states, above)
        total -= log_prob_of_hidden(rbm.hidden_units, above, activation)
        states = above
    return total + _top_score(stack, states, labels)


def _top_score(stack: RBMStack, states: Tensor, labels: Tensor | None) -> Tensor:
    """Compute the top RBM's log unnormalised probability (B,) of ``states`` and ``labels``."""
    if labels is not None:
        return -stack.top.free_energy(stack.join_labels(states, labels))
    return stack.label_scores(states).logsumexp(dim=1) if stack.num_labels else -stack.top.free_energy(states)


def log_prob(stack: RBMStack, visible: Tensor) -> Tensor:
    """Compute :meth:`RBMStack.log_prob`."""
    _require_few_states(stack)
    top = stack.top
    if len(stack.layers) == 1:
        states = _all_states(top.num_hidden, top.weight)
        return _top_score(stack, visible, None) - (-top.hidden_free_energy(states)).logsumexp(dim=0)
    upper = _all_states(top.num_visible - top.num_labels, top.weight)
    weight = _top_score(stack, upper, None).log_softmax(dim=0)  # for each state of the top's visible units
    for layer in reversed(range(1, len(stack.layers) - 1)):
        rbm = stack.layers[layer]
        lower = _all_states(rbm.num_visible, rbm.weight)
        upper, weight = lower, _mixture(rbm, lower, upper, weight)
    return _mixture(stack.layers[0], visible, upper, weight)


def _mixture(rbm: RBM, lower: Tensor, upper: Tensor, weight: Tensor) -> Tensor:
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


def _all_states(num_units: int, like: Tensor) -> Tensor:
    """Return all states (2**U, U) of U binary units."""
    numbers = torch.arange(2**num_units, device=like.device)
    return (numbers[:, None] >> torch.arange(num_units, device=like.device) & 1).to(like.dtype)


def _require_few_states(stack: RBMStack) -> None:
    below = stack.layers[:-1] if len(stack.layers) > 1 else stack.layers
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
