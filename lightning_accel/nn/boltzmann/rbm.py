"""Restricted Boltzmann machines. Shapes: B batch size, V visible units, H hidden units."""

from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lightning_accel.nn.boltzmann.partition import (
    LogZ,
    Method,
    annealed_log_z,
    exact_log_z,
    require_finite,
    smaller_side,
)
from lightning_accel.nn.boltzmann.units import (
    BernoulliVisible,
    GaussianVisible,
    JoinedVisible,
    LabelVisible,
    VisibleUnits,
)
from lightning_accel.nn.features import require_width
from lightning_accel.ops.float32 import at_least_float32, without_autocast
from lightning_accel.ops.gibbs import sample_bernoulli

Visible: TypeAlias = Literal["bernoulli", "gaussian"]

_MAX_DEFAULT_STATES = 2**20  # up to this number of states log_prob takes method="exact" by default


class RBM(nn.Module):
    """Model visible and hidden units by a restricted Boltzmann machine: p(v, h) proportional to exp(-energy(v, h)).

    The energy is energy(v, h) = e(v) - h . (W x + c), with hidden units that are 0 or 1. For Bernoulli
    visible units, x = v and e(v) = -b . v; for Gaussian ones, x = v / variance and
    ``e(v) = |v - b|**2 / (2 variance)``.
    Free energies are computed in float32 also under autocast; other products with W use its dtype.

    Train it with :class:`lightning_accel.nn.ContrastiveDivergence`.

    Args:
        num_visible: V, not counting labels.
        num_hidden: H, the number of hidden units.
        visible: ``bernoulli`` (0, 1, or probabilities), or ``gaussian`` (real, standardised).
        num_labels: number of one-hot units appended to the visible ones for the sample's class.
        learn_variance: whether to learn the variances of Gaussian units; else they are 1.
        initial_std: standard deviation of the initial weights. For Bernoulli units sqrt(8 / (V + H)) learns better
            densities (see ``benchmarks/results``), small weights learn better features.

    Raises:
        ValueError: if a number is out of range, or an option does not apply to the type of units.

    Source: Hinton 2012, A Practical Guide to Training Restricted Boltzmann Machines

    >>> rbm = RBM(6, 4)
    >>> rbm(torch.ones(3, 6)).shape, rbm.free_energy(torch.ones(3, 6)).shape
    (torch.Size([3, 4]), torch.Size([3]))
    """

    def __init__(
        self,
        num_visible: int,
        num_hidden: int,
        *,
        visible: Visible = "bernoulli",
        num_labels: int = 0,
        learn_variance: bool = False,
        initial_std: float = 0.01,
    ) -> None:
        super().__init__()
        if initial_std <= 0:
            raise ValueError(f"initial_std must be above 0, else all hidden units learn the same; got {initial_std}")
        if min(num_visible, num_hidden) < 1 or num_labels < 0:
            raise ValueError(
                "num_visible and num_hidden must be at least 1 and num_labels at least 0; got "
                f"num_visible={num_visible}, num_hidden={num_hidden}, num_labels={num_labels}"
            )
        self.num_visible = num_visible + num_labels
        self.num_hidden = num_hidden
        self.num_labels = num_labels
        self.initial_std = initial_std
        units = _visible_units(num_visible, visible, learn_variance)
        if num_labels:
            units = JoinedVisible([units, LabelVisible(num_labels)])
        self.visible_units = units
        self.weight = nn.Parameter(torch.empty(num_hidden, self.num_visible))
        self.visible_bias = nn.Parameter(torch.empty(self.num_visible))
        self.hidden_bias = nn.Parameter(torch.empty(num_hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw random weights and set biases to 0 (Hinton 2012, section 8)."""
        nn.init.normal_(self.weight, std=self.initial_std)
        nn.init.zeros_(self.visible_bias)
        nn.init.zeros_(self.hidden_bias)

    def extra_repr(self) -> str:
        return f"num_visible={self.num_visible}, num_hidden={self.num_hidden}, num_labels={self.num_labels}"

    @torch.no_grad()
    def start_at_(self, mean: Tensor, num_rows: int) -> None:
        """Set the visible bias to that of independent units with the ``mean`` (V,) of ``num_rows`` data samples."""
        self.visible_bias.copy_(self.visible_units.bias_for(mean.to(self.visible_bias), num_rows))

    def require_support(self, visible: Tensor, *, all_rows: bool = True) -> None:
        """Require that the visible units support the data; waits for the device.

        Args:
            visible: (B, V) states of the visible units.
            all_rows: whether ``visible`` is the whole data set. Constant columns are an error for Gaussian units then;
                in a batch, columns may be constant by chance.

        Raises:
            ValueError: if ``visible`` is not (B, V), has no rows, holds NaN or infinities, values outside the units'
                support, or constant columns.
        """
        if visible.ndim != 2 or visible.shape[1] != self.num_visible:
            raise ValueError(
                f"the RBM has {self.num_visible} visible units and takes rows (B, {self.num_visible}); got "
                f"{tuple(visible.shape)}"
            )
        if not len(visible):
            raise ValueError("found no rows; the RBM takes at least one")
        if not visible.isfinite().all():
            rows, columns = (~visible.isfinite()).nonzero(as_tuple=True)
            raise ValueError(
                f"visible units take finite values; found {visible[rows[0], columns[0]].item()} in row {int(rows[0])}, "
                f"column {int(columns[0])}, and {len(rows) - 1} more. Fill them in, or drop those rows"
            )
        if fault := self.visible_units.find_fault(visible, all_rows):
            raise ValueError(fault)

    def hidden_activation(self, visible: Tensor) -> Tensor:
        """Compute the hidden units' activation W x + c from ``visible`` (B, V): (B, H), float32 or wider."""
        self._require_visible(visible)
        return (
            at_least_float32(F.linear(self.visible_units.input(visible).to(self.weight.dtype), self.weight))
            + self.hidden_bias
        )

    def visible_activation(self, hidden: Tensor) -> Tensor:
        """Compute the visible units' activation h W + b from ``hidden`` (B, H): (B, V), float32 or wider."""
        self._require_hidden(hidden)
        return at_least_float32(hidden.to(self.weight.dtype) @ self.weight) + self.visible_bias

    if TYPE_CHECKING:  # Any, as torch declares it

        def __call__(self, visible: Tensor) -> Tensor: ...

    def forward(self, visible: Tensor) -> Tensor:
        """Compute the means (B, H) of the hidden units given ``visible`` (B, V)."""
        return self.hidden_activation(visible).sigmoid()

    transform = forward

    def sample_hidden(self, visible: Tensor, generator: Generator | None = None) -> Tensor:
        """Draw the hidden units (B, H) given ``visible`` (B, V)."""
        return sample_bernoulli(self.hidden_activation(visible), generator)

    def sample_visible(self, hidden: Tensor, generator: Generator | None = None) -> Tensor:
        """Draw the visible units (B, V) given ``hidden`` (B, H)."""
        return self.visible_units.sample(self.visible_activation(hidden), generator)

    def reconstruct(self, visible: Tensor) -> Tensor:
        """Compute the means (B, V) of the visible units given the hidden means that follow from ``visible`` (B, V)."""
        return self.visible_units.mean(self.visible_activation(self(visible)))

    def energy(self, visible: Tensor, hidden: Tensor) -> Tensor:
        """Compute the energy (B,) of ``visible`` (B, V) and ``hidden`` (B, H), in nats."""
        self._require_visible(visible)
        self._require_hidden(hidden)
        with without_autocast(visible):
            hidden = at_least_float32(hidden)
            interaction = (hidden * self.hidden_activation(at_least_float32(visible))).sum(dim=-1)
            return self._visible_energy(at_least_float32(visible)) - interaction

    def free_energy(self, visible: Tensor) -> Tensor:
        """Compute the negative log unnormalised probability (B,) of ``visible`` (B, V), in nats; lower is likelier."""
        self._require_visible(visible)
        with without_autocast(visible):
            visible = at_least_float32(visible)
            return self._visible_energy(visible) - F.softplus(self.hidden_activation(visible)).sum(dim=-1)

    def hidden_free_energy(self, hidden: Tensor) -> Tensor:
        """Compute the negative log unnormalised probability (B,) of ``hidden`` (B, H), in nats."""
        self._require_hidden(hidden)
        with without_autocast(hidden):
            hidden = at_least_float32(hidden)
            log_partition = self.visible_units.log_partition(self.visible_activation(hidden), self.visible_bias)
            return -(hidden @ self.hidden_bias) - log_partition

    def log_z(
        self,
        method: Method = "ais",
        *,
        num_chains: int = 200,
        num_temperatures: int = 1000,
        base_mean: Tensor | None = None,
        reverse_from: Tensor | None = None,
        generator: Generator | None = None,
    ) -> LogZ:
        """Compute or estimate the log partition function, the log of the sum of exp(-energy) over all states, in nats.

        ``exact`` enumerates the visible or hidden states, whichever are discrete and fewer, up to 2**25 states. ``ais``
        anneals from independent units to the model; its weights are unbiased, so the estimate of the logarithm is too
        low on average. ``reverse_ais`` anneals samples of the model to independent units and is too high on average; if
        both agree, the estimates are reliable, but for modes that chains of neither visit. By default ``reverse_ais``
        starts where annealing upwards has ended, so it visits no other modes; given the data in ``reverse_from``, it is
        much higher than ``ais`` where that has missed a mode of the data.

        Args:
            method: ``exact``, ``ais`` or ``reverse_ais``.
            num_chains: number of annealed chains. With few of them, or a small effective sample size, the interval is
                wide.
            num_temperatures: number of evenly spaced temperatures from 0 to 1; twice as many halve the variance of the
                log weights.
            base_mean: (V,), mean of the independent units; pass the mean of the data. By default it follows from the
                visible bias, which in most trained models is far from the data.
            reverse_from: (N, V), samples that approximate the model's, such as the training data; ``reverse_ais`` draws
                the first states of its chains from them.
            generator: random number generator on the device of the weights.

        Returns:
            The estimate; the 3 sigma interval of its sampling error, which does not include the bias: ``lower`` of
            ``ais`` and ``upper`` of ``reverse_ais`` bracket the true value; and the effective sample size of the
            weights. For ``exact``, the interval has width 0 and the effective sample size is infinite.

        Raises:
            ValueError: if an argument is out of range or has no effect, if neither visible nor hidden states can be
                enumerated, or if parameters are not finite.

        Source: Neal 2001, Annealed Importance Sampling; Salakhutdinov and Murray 2008, On the Quantitative Analysis of
        Deep Belief Networks, section 4.1; Burda, Grosse and Salakhutdinov 2015, Accurate and Conservative Estimates of
        MRF Log-likelihood using Reverse Annealing.
        """
        if method not in ("exact", "ais", "reverse_ais"):
            raise ValueError(f"method must be 'exact', 'ais' or 'reverse_ais'; got {method!r}")
        if reverse_from is not None and method != "reverse_ais":
            raise ValueError(f"reverse_from goes with method='reverse_ais'; got {method=}")
        require_finite(self)
        if method == "exact":
            return exact_log_z(self)
        reverse = method == "reverse_ais"
        return annealed_log_z(self, reverse, num_chains, num_temperatures, base_mean, reverse_from, generator)

    @torch.no_grad()
    def log_prob(self, visible: Tensor, log_z: LogZ | None = None) -> Tensor:
        """Compute the log-probability (density) of ``visible`` (B, V), (B,) float64 in nats, without a gradient.

        Args:
            visible: (B, V) in the units' support.
            log_z: result of :meth:`log_z`; pass it to compute it once for several batches. By default it is computed
                exactly if the visible or hidden units have at most 2**20 states, else by ``ais``.

        Raises:
            ValueError: as :meth:`log_z`.
        """
        self.require_support(visible, all_rows=False)
        if log_z is None:
            log_z = self.log_z("exact" if smaller_side(self)[1] <= _MAX_DEFAULT_STATES else "ais")
        return -self.free_energy(visible).double() - log_z.estimate

    @torch.no_grad()
    def sample(
        self, num_samples: int, steps: int, *, clamp: Tensor | None = None, generator: Generator | None = None
    ) -> Tensor:
        """Draw samples of the model by Gibbs steps that start at independent units with the visible bias.

        Args:
            num_samples: n.
            steps: number of Gibbs steps.
            clamp: (n, V) or (V,), values to hold, such as half of an image or the class of labels; NaN where units are
                free. Labels are clamped or free as a whole.
            generator: random number generator on the device of the weights.

        Returns:
            (n, V) sampled states; :meth:`reconstruct` of them gives smoother means.

        Raises:
            ValueError: if a size is out of range, or ``clamp`` has the wrong shape or values outside the support.
        """
        if min(num_samples, steps) < 1:
            raise ValueError(f"num_samples and steps must be at least 1; got {num_samples} and {steps}")
        visible = self.visible_units.sample(self.visible_bias.expand(num_samples, -1), generator)
        held = None if clamp is None else self.held(clamp, num_samples)
        for _ in range(steps):
            visible = visible if held is None else torch.where(held.isnan(), visible, held)
            visible = self.sample_visible(self.sample_hidden(visible, generator), generator)
        return visible if held is None else torch.where(held.isnan(), visible, held)

    def held(self, clamp: Tensor, num_samples: int) -> Tensor:
        """Check ``clamp``, (n, V) or (V,) with NaN where units are free, and expand it to (n, V) for ``num_samples``.

        Raises:
            ValueError: if the shape is wrong, or the units do not support a value.
        """
        if clamp.shape not in ((self.num_visible,), (num_samples, self.num_visible)):
            raise ValueError(
                f"clamp must be ({self.num_visible},) or ({num_samples}, {self.num_visible}), NaN where free; got "
                f"{tuple(clamp.shape)}"
            )
        clamp = at_least_float32(clamp).to(self.visible_bias.device).expand(num_samples, -1)
        filled = torch.where(clamp.isnan(), self.visible_units.mean(at_least_float32(self.visible_bias)), clamp)
        try:
            self.require_support(filled, all_rows=False)
        except ValueError as fault:
            raise ValueError(f"clamp does not fit, with free units at their means: {fault}") from fault
        return clamp

    def _require_visible(self, visible: Tensor) -> None:
        units = "rows (..., {}), labels included" if self.num_labels else "rows (..., {})"
        require_width(self, visible, "num_visible", self.visible_bias.shape[0], units)

    def _require_hidden(self, hidden: Tensor) -> None:
        require_width(self, hidden, "num_hidden", self.hidden_bias.shape[0], "hidden states (..., {})")

    def _visible_energy(self, visible: Tensor) -> Tensor:
        return self.visible_units.energy(visible, self.visible_bias)


def _visible_units(num_visible: int, kind: Visible, learn_variance: bool) -> VisibleUnits:
    if kind not in ("bernoulli", "gaussian"):
        raise ValueError(f"visible must be 'bernoulli' or 'gaussian'; got {kind!r}")
    if kind == "gaussian":
        return GaussianVisible(num_visible, learn_variance)
    if learn_variance:
        raise ValueError(f"learn_variance goes with visible='gaussian'; got visible={kind!r}")
    return BernoulliVisible(num_visible)
