"""Partition functions and likelihoods of restricted Boltzmann machines.

Shapes: B batch size, C chains, V visible units, H hidden units, G groups of K visible units of which one is on.
"""

import copy
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch
from torch import Generator, Tensor

from lightning_accel.nn.rbm_units import (
    BernoulliHidden,
    BernoulliVisible,
    CategoricalVisible,
    GaussianVisible,
    JoinedVisible,
    RectifiedHidden,
    VisibleUnits,
    enumerate_bits,
)
from lightning_accel.ops.float32 import without_autocast

if TYPE_CHECKING:
    from lightning_accel.nn.rbm import RBM

Method: TypeAlias = Literal["exact", "ais", "reverse_ais"]

_MAX_STATES = 2**25  # largest number of states that method="exact" enumerates
_MAX_DEFAULT_STATES = 2**20  # up to this number of states log_prob takes method="exact" by default
_CHUNK = 2**22  # numbers in memory at a time


class LogZ(NamedTuple):
    """Hold a log partition function in nats, its 3 sigma interval and the effective sample size, () float64 each."""

    estimate: Tensor
    lower: Tensor
    upper: Tensor
    effective_sample_size: Tensor


@torch.no_grad()
def exact_log_z(rbm: "RBM") -> LogZ:
    """Compute log Z by enumerating the states of the visible or hidden units, whichever are fewer, in float64.

    Raises:
        ValueError: if neither visible nor hidden units are discrete, or both have too many states.
    """
    side, count = _smaller_side(rbm)
    if count is None or count > _MAX_STATES:
        raise ValueError(
            f"log_z(method='exact') enumerates the states of one side, at most 2**25; the {rbm.num_visible} visible "
            f"units have {_count_text(rbm.visible_units.count_states())}, the {rbm.num_hidden} hidden ones "
            f"{_count_text(_count_hidden(rbm))}. Take method='ais', and 'reverse_ais' for a bound from the other side"
        )
    wide = copy.deepcopy(rbm).double()
    total = torch.tensor(-math.inf, dtype=torch.float64, device=rbm.weight.device)
    rows = max(1, _CHUNK // max(rbm.num_visible, rbm.num_hidden))
    for start in range(0, count, rows):
        numbers = torch.arange(start, min(start + rows, count), device=rbm.weight.device)
        if side == "hidden":
            energy = wide.hidden_free_energy(enumerate_bits(numbers, rbm.num_hidden))
        else:
            energy = wide.free_energy(rbm.visible_units.enumerate_states(numbers))
        total = torch.logaddexp(total, (-energy).logsumexp(dim=0))
    return LogZ(total, total, total, torch.full_like(total, math.inf))


def _smaller_side(rbm: "RBM") -> tuple[str, int | None]:
    visible, hidden = rbm.visible_units.count_states(), _count_hidden(rbm)
    if visible is None or (hidden is not None and hidden <= visible):
        return "hidden", hidden
    return "visible", visible


def _count_hidden(rbm: "RBM") -> int | None:
    return 2**rbm.num_hidden if isinstance(rbm.hidden_units, BernoulliHidden) else None


def _count_text(count: int | None) -> str:
    return "real states" if count is None else f"2**{math.log2(count):.4g}"


@torch.no_grad()
def forward_log_z(
    rbm: "RBM", num_chains: int, num_temperatures: int, base_mean: Tensor | None, generator: Generator | None
) -> LogZ:
    """Estimate log Z by annealed importance sampling from independent units to the model; see :meth:`RBM.log_z`."""
    path = _AnnealingPath(rbm, num_chains, num_temperatures, base_mean, generator)
    log_weight, _ = path.ascend()
    return _summarise(log_weight, path.log_base)


@torch.no_grad()
def reverse_log_z(
    rbm: "RBM", num_chains: int, num_temperatures: int, base_mean: Tensor | None, generator: Generator | None
) -> LogZ:
    """Estimate log Z by annealing from the model to independent units; see :meth:`RBM.log_z`.

    Samples of the model are the end states of forward annealing, resampled by their weights, after the same number of
    further Gibbs steps.
    """
    path = _AnnealingPath(rbm, num_chains, num_temperatures, base_mean, generator)
    log_weight, visible = path.ascend()
    drawn = (log_weight - log_weight.max()).exp().multinomial(num_chains, replacement=True, generator=generator)
    log_z = _summarise(path.descend(visible[drawn]), -path.log_base)
    return LogZ(-log_z.estimate, -log_z.upper, -log_z.lower, log_z.effective_sample_size)


class _AnnealingPath:
    """Anneal chains through distributions between independent units, at beta = 0, and the model, at beta = 1.

    The distribution at ``beta`` has weights and hidden biases times beta, as in tempering, and a visible bias
    interpolated between that of the independent units and the model's.
    """

    def __init__(
        self,
        rbm: "RBM",
        num_chains: int,
        num_temperatures: int,
        base_mean: Tensor | None,
        generator: Generator | None,
    ) -> None:
        if num_chains < 2 or num_temperatures < 2:
            raise ValueError(
                "num_chains and num_temperatures must be at least 2; got "
                f"num_chains={num_chains}, num_temperatures={num_temperatures}"
            )
        bias: Tensor = rbm.visible_bias
        if base_mean is not None:
            rbm.require_support(base_mean[None], all_rows=False)
            bias = rbm.visible_units.bias_for(base_mean.to(rbm.visible_bias), _SAMPLES_OF_MEAN)
        self.rbm = rbm
        self.generator = generator
        self.start = bias.expand(num_chains, -1)
        self.betas = torch.linspace(0, 1, num_temperatures, dtype=torch.float64, device="cpu").tolist()
        self.biases = bias + torch.linspace(0, 1, num_temperatures, device="cpu").to(bias)[:, None] * (
            rbm.visible_bias - bias
        )
        at_rest = rbm.hidden_units.log_partition(torch.zeros_like(rbm.hidden_bias, dtype=torch.float64))
        self.log_base = rbm.visible_units.log_partition(bias.double(), bias.double()) + at_rest.sum()

    def ascend(self) -> tuple[Tensor, Tensor]:
        """Return the log importance weights (C,) of the chains, without the base's log Z, and their states (C, V)."""
        visible = self.rbm.visible_units.sample(self.start, self.generator)
        log_weight = visible.new_zeros(len(visible), dtype=torch.float64)
        with without_autocast(visible):
            for low in range(len(self.betas) - 1):
                activation = self.rbm.hidden_activation(visible)
                log_weight += self._log_ratio(visible, activation, low)
                visible = self._step(activation, low + 1)
        return log_weight, visible

    def descend(self, visible: Tensor) -> Tensor:
        """Return the log importance weights (C,) of chains that start at samples (C, V) of the model."""
        log_weight = visible.new_zeros(len(visible), dtype=torch.float64)
        last = len(self.betas) - 1
        with without_autocast(visible):
            for _ in range(last):
                visible = self._step(self.rbm.hidden_activation(visible), last)
            for low in range(last - 1, -1, -1):
                activation = self.rbm.hidden_activation(visible)
                log_weight -= self._log_ratio(visible, activation, low)
                visible = self._step(activation, low)
        return log_weight

    def _log_ratio(self, visible: Tensor, activation: Tensor, low: int) -> Tensor:
        """Return the log ratio (C,) of the states' unnormalised probabilities at the next beta and at index ``low``."""
        units, log_partition = self.rbm.visible_units, self.rbm.hidden_units.log_partition
        hidden = log_partition(self.betas[low + 1] * activation) - log_partition(self.betas[low] * activation)
        own = units.energy(visible, self.biases[low]) - units.energy(visible, self.biases[low + 1])
        return hidden.sum(dim=-1, dtype=torch.float64) + own

    def _step(self, activation: Tensor, at: int) -> Tensor:
        """Run a Gibbs step at beta number ``at``, given the hidden units' activation (C, H) at beta = 1."""
        beta, rbm = self.betas[at], self.rbm
        hidden = rbm.hidden_units.sample(beta * activation, self.generator)
        return rbm.visible_units.sample(torch.addmm(self.biases[at], hidden, rbm.weight, alpha=beta), self.generator)


_SAMPLES_OF_MEAN = 1000  # number of samples that base_mean counts as, which limits the bias for means of 0 and 1


@torch.no_grad()
def require_finite(rbm: "RBM") -> None:
    """Require that the partition function of an RBM is finite.

    Gaussian and rectified units excite each other; if the weights are too large, energies have no lower bound.

    Raises:
        ValueError: if parameters are not finite, or the weights are too large.
    """
    for name, parameter in rbm.named_parameters():
        if not parameter.isfinite().all():
            raise ValueError(
                f"{name} holds NaN or infinities, so there is no partition function: training has diverged. Train "
                "with a smaller learning rate"
            )
    if not isinstance(rbm.hidden_units, RectifiedHidden):
        return
    columns = [
        rbm.weight.detach()[:, place] * (-0.5 * part.log_variance.detach()).exp()
        for part, place in _units_by_type(rbm.visible_units)
        if isinstance(part, GaussianVisible)
    ]
    if columns and (norm := float(torch.linalg.matrix_norm(torch.cat(columns, dim=1).double(), 2))) >= 1:
        raise ValueError(
            "with Gaussian visible and rectified hidden units the partition function is finite if the spectral norm of "
            f"the weights, divided by the visible units' deviations, is below 1; found {norm:.6g}, with which it may "
            "be infinite. Train with weight decay, or take hidden='bernoulli'"
        )


def _summarise(log_weight: Tensor, log_base: Tensor) -> LogZ:
    """Compute the log of the mean weight and its 3 sigma interval.

    Sigma is the larger of two deviations: by the delta method, which is at most 1 if few weights dominate, and for the
    mean of a log-normal distribution (Zhou and Gao 1997, Confidence Intervals for the Log-normal Mean, Cox's method).
    """
    weight = (log_weight - log_weight.max()).exp()
    mean = weight.mean()
    estimate = log_weight.max() + mean.log() + log_base
    variance = log_weight.var()
    log_normal = variance / len(weight) + variance.square() / (2 * (len(weight) - 1))
    deviation = torch.maximum((weight / mean).var() / len(weight), log_normal).sqrt()
    effective = weight.sum().square() / weight.square().sum()
    return LogZ(estimate, estimate - 3 * deviation, estimate + 3 * deviation, effective)


@torch.no_grad()
def log_probability(rbm: "RBM", visible: Tensor, log_z: LogZ | None) -> Tensor:
    """Compute :meth:`RBM.log_prob`."""
    rbm.require_support(visible, all_rows=False)
    if log_z is None:
        count = _smaller_side(rbm)[1]
        log_z = rbm.log_z("exact" if count is not None and count <= _MAX_DEFAULT_STATES else "ais")
    return -rbm.free_energy(visible).double() - log_z.estimate


class _Groups(NamedTuple):
    """Hold G groups of K visible units of which one is on; Bernoulli units form pairs with a unit without weights."""

    state: Tensor  # (B, G, K)
    weight: Tensor  # (G, K, H)
    bias: Tensor  # (G, K)


@torch.no_grad()
def pseudo_likelihood(rbm: "RBM", visible: Tensor, exact: bool, generator: Generator | None) -> Tensor:
    """Compute :meth:`RBM.pseudo_likelihood`."""
    rbm.require_support(visible, all_rows=False)
    with without_autocast(visible):
        visible = visible if visible.dtype == torch.float64 else visible.float()
        parts = [_groups_of(rbm, part, place, visible[:, place]) for part, place in _units_by_type(rbm.visible_units)]
        activation = rbm.hidden_activation(visible)
        num_groups = sum(len(part.weight) for part in parts)
        if exact:
            chosen = None
            per_row = sum(part.bias.numel() for part in parts)
        else:
            chosen = torch.randint(num_groups, (len(visible),), generator=generator, device=visible.device)
            per_row = max(part.bias.shape[1] for part in parts)
        rows = max(1, _CHUNK // (per_row * rbm.num_hidden))
        results = [
            _pseudo_rows(
                rbm, parts, activation, torch.arange(start, min(start + rows, len(visible)), device="cpu"), chosen
            )
            for start in range(0, len(visible), rows)
        ]
        return torch.cat(results) if exact else num_groups * torch.cat(results)


def _groups_of(rbm: "RBM", part: VisibleUnits, place: slice, state: Tensor) -> _Groups:
    weight, bias = rbm.weight[:, place].T, rbm.visible_bias[place]
    if isinstance(part, CategoricalVisible):
        sizes = -1, part.num_classes
        return _Groups(state.unflatten(-1, sizes), weight.unflatten(0, sizes), bias.unflatten(0, sizes))
    if isinstance(part, BernoulliVisible):
        return _Groups(
            torch.stack([1 - state, state], dim=-1),
            torch.stack([torch.zeros_like(weight), weight], dim=1),
            torch.stack([torch.zeros_like(bias), bias], dim=-1),
        )
    raise ValueError(
        "pseudo_likelihood needs Bernoulli or categorical visible units; of Gaussian ones the density given the others "
        "has no closed form. Take log_prob, or the distance from reconstruct"
    )


def _pseudo_rows(rbm: "RBM", parts: list[_Groups], activation: Tensor, rows: Tensor, chosen: Tensor | None) -> Tensor:
    """Sum the log-probabilities over all groups, or take the ``chosen`` (B,) group, for each of ``rows`` (R,)."""
    total = activation.new_zeros(len(rows))
    rows = rows.to(activation.device)
    first = 0
    for state, weight, bias in parts:
        if chosen is None:
            total += _group_log_prob(rbm, activation[rows], state[rows], weight, bias).sum(dim=-1)
        else:
            group = chosen[rows] - first
            here = ((group >= 0) & (group < len(weight))).nonzero().flatten()
            row, group = rows[here], group[here]
            own = state[row, group][:, None], weight[group][:, None], bias[group][:, None]
            total[here] = _group_log_prob(rbm, activation[row], *own)[:, 0]
        first += len(weight)
    return total


def _group_log_prob(rbm: "RBM", activation: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute the log-probability (R, G) of each group's state (R, G, K) given all others; activation is (R, H)."""
    own = torch.einsum("rgk,gkh->rgh" if weight.ndim == 3 else "rgk,rgkh->rgh", state, weight)
    without = activation[:, None] - own
    log_partition = rbm.hidden_units.log_partition(without[:, :, None] + weight)  # (R, G, K, H)
    return (state * (bias + log_partition.sum(dim=-1)).log_softmax(dim=-1)).sum(dim=-1)


def _units_by_type(units: VisibleUnits) -> Iterator[tuple[VisibleUnits, slice]]:
    """Yield the units of each type and their slice of the visible units."""
    start = 0
    for part in units.members() if isinstance(units, JoinedVisible) else [units]:
        yield part, slice(start, start + part.num_visible)
        start += part.num_visible
