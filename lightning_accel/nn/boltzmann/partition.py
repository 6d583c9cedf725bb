"""Partition functions and likelihoods of restricted Boltzmann machines.

Shapes: B batch size, C chains, V visible units, H hidden units.
"""

import copy
import math
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from lightning_accel.nn.boltzmann.units import enumerate_bits
from lightning_accel.ops.float32 import at_least_float32, without_autocast
from lightning_accel.ops.gibbs import sample_bernoulli

if TYPE_CHECKING:
    from lightning_accel.nn.boltzmann.rbm import RBM

Method: TypeAlias = Literal["exact", "ais", "reverse_ais"]

_MAX_STATES = 2**25  # largest number of states that method="exact" enumerates
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
        ValueError: if both sides have too many states.
    """
    side, count = smaller_side(rbm)
    if count > _MAX_STATES:
        raise ValueError(
            f"log_z(method='exact') enumerates the states of one side, at most 2**25; the {rbm.num_visible} visible "
            f"units have {_count_text(rbm.visible_units.count_states())}, the {rbm.num_hidden} hidden ones "
            f"{_count_text(2**rbm.num_hidden)}. Take method='ais', and 'reverse_ais' for a bound from the other side"
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


def smaller_side(rbm: "RBM") -> tuple[str, int]:
    """Return which units have fewer states, ``visible`` or ``hidden``, and how many."""
    visible, hidden = rbm.visible_units.count_states(), 2**rbm.num_hidden
    return ("hidden", hidden) if visible is None or hidden <= visible else ("visible", visible)


def _count_text(count: int | None) -> str:
    return "real states" if count is None else f"2**{math.log2(count):.4g}"


@torch.no_grad()
def annealed_log_z(
    rbm: "RBM",
    reverse: bool,
    num_chains: int,
    num_temperatures: int,
    base_mean: Tensor | None,
    reverse_from: Tensor | None,
    generator: Generator | None,
) -> LogZ:
    """Estimate log Z by annealing from independent units to the model, or in ``reverse``; see :meth:`RBM.log_z`.

    Samples of the model are drawn from ``reverse_from``, or else are the end states of forward annealing, resampled by
    their weights; both take as many Gibbs steps as there are temperatures before they are annealed.
    """
    path = _AnnealingPath(rbm, num_chains, num_temperatures, base_mean, generator)
    if not reverse:
        return _summarise(path.ascend()[0], path.log_base)
    if reverse_from is None:
        log_weight, visible = path.ascend()
        drawn = (log_weight - log_weight.max()).exp().multinomial(num_chains, replacement=True, generator=generator)
    else:
        rbm.require_support(reverse_from, all_rows=False)
        visible = at_least_float32(reverse_from.to(rbm.weight))
        drawn = torch.randint(len(visible), (num_chains,), generator=generator, device=visible.device)
    log_z = _summarise(path.descend(visible[drawn]), -path.log_base)
    return LogZ(-log_z.estimate, -log_z.upper, -log_z.lower, log_z.effective_sample_size)


class _AnnealingPath:
    """Anneal chains through distributions between independent units, at beta = 0, and the model, at beta = 1.

    The distribution at ``beta`` has weights and hidden biases times beta, and a visible bias interpolated between
    that of the independent units and the model's.
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
        at_rest = rbm.num_hidden * math.log(2)
        self.log_base = rbm.visible_units.log_partition(bias.double(), bias.double()) + at_rest

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
        units = self.rbm.visible_units
        hidden = F.softplus(self.betas[low + 1] * activation) - F.softplus(self.betas[low] * activation)
        own = units.energy(visible, self.biases[low]) - units.energy(visible, self.biases[low + 1])
        return hidden.sum(dim=-1, dtype=torch.float64) + own

    def _step(self, activation: Tensor, at: int) -> Tensor:
        """Run a Gibbs step at beta number ``at``, given the hidden units' activation (C, H) at beta = 1."""
        beta, rbm = self.betas[at], self.rbm
        hidden = sample_bernoulli(beta * activation, self.generator)
        return rbm.visible_units.sample(torch.addmm(self.biases[at], hidden, rbm.weight, alpha=beta), self.generator)


_SAMPLES_OF_MEAN = 1000  # number of samples that base_mean counts as, which limits the bias for means of 0 and 1


@torch.no_grad()
def require_finite(rbm: "RBM") -> None:
    """Require that the parameters of an RBM are finite.

    Raises:
        ValueError: if training has diverged.
    """
    for name, parameter in rbm.named_parameters():
        if not parameter.isfinite().all():
            raise ValueError(
                f"{name} holds NaN or infinities, so there is no partition function: training has diverged. Train "
                "with a smaller learning rate"
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
