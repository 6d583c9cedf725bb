"""Deep belief networks. Shapes: B batch size, V visible units, C labels; H_l units in layer l, layer 0 is visible.

Only the top two layers of a deep belief network have undirected connections: its joint distribution is
p(s_0 | s_1) ... p(s_{L-2} | s_{L-1}) p_top(s_{L-1}, s_L), with states s_l of layer l and p_top of the top RBM, whose
visible units hold s_{L-1} and, beside it, the label. The upward pass below the top is the recognition model, which is
approximate.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lightning_accel.nn.boltzmann.partition import LogZ
from lightning_accel.nn.boltzmann.rbm import RBM
from lightning_accel.nn.boltzmann.units import (
    BernoulliVisible,
    JoinedVisible,
    VisibleUnits,
)
from lightning_accel.nn.features import require_width
from lightning_accel.ops.bounds import require_integers
from lightning_accel.ops.float32 import at_least_float32, without_autocast
from lightning_accel.ops.gibbs import sample_bernoulli, sample_categorical

UNKNOWN = -100  # a label that torch's losses leave out


class LogProbBound(NamedTuple):
    """Hold a lower bound of log-probabilities, (B,) each, float64, in nats."""

    estimate: Tensor
    lower: Tensor
    """The bound for the largest log Z in its interval."""
    upper: Tensor
    """The bound for the smallest log Z in its interval."""
    standard_error: Tensor
    """Standard error of ``estimate`` from the draws of intermediate layers; 0 for one layer, NaN for a single draw."""


class RBMStack(nn.Module):
    """Stack RBMs to a deep belief network, in which each RBM models the hidden units of the one below.

    Visible units above the bottom RBM must be ``bernoulli``.

    Train a stack layer by layer: RBM l by :class:`~lightning_accel.nn.ContrastiveDivergence` on ``transform(data, l)``
    or ``sample_hidden(data, l)``, the top one with :meth:`join_labels` if it has labels; then optionally all layers
    together by :class:`~lightning_accel.nn.UpDown`.

    Args:
        rbms: the RBMs from bottom to top; they are not copied. Only the top one may have labels.
        untied: use separate recognition weights for the layers below the top, see :meth:`untie_`.

    Raises:
        ValueError: if sizes or unit types of neighbours do not fit, or an RBM below the top has labels.

    Source: Hinton, Osindero and Teh 2006, A Fast Learning Algorithm for Deep Belief Nets

    >>> stack = RBMStack([RBM(6, 4), RBM(4, 3)])
    >>> stack(torch.ones(2, 6)).shape, stack.sample(2, steps=5).shape
    (torch.Size([2, 3]), torch.Size([2, 6]))
    """

    def __init__(self, rbms: Sequence[RBM], untied: bool = False) -> None:
        super().__init__()
        if not rbms:
            raise ValueError("a stack needs at least one RBM; got none")
        for layer, (below, above) in enumerate(pairwise(rbms)):
            _require_compatible(layer, below, above)
        self.rbms = nn.ModuleList(rbms)
        self.num_labels = rbms[-1].num_labels
        self.num_visible = rbms[0].num_visible - rbms[0].num_labels
        self.recognition: nn.ModuleList | None = None
        if untied:
            self.untie_()

    @property
    def layers(self) -> list[RBM]:
        """Return the RBMs from bottom to top."""
        return cast("list[RBM]", list(self.rbms))

    @property
    def top(self) -> RBM:
        """Return the top RBM."""
        return self.layers[-1]

    @torch.no_grad()
    def untie_(self) -> None:
        """Add separate recognition weights to the layers below the top, as copies of the RBMs' current weights.

        Existing recognition weights are overwritten. Construct with ``untied=True`` if wrappers or checkpoints need the
        parameters from the beginning, and call this method after the layer-wise training.
        """
        if self.recognition is None:
            self.recognition = nn.ModuleList(_linear(rbm.weight, rbm.hidden_bias) for rbm in self.layers[:-1])
        for linear, rbm in zip(self.recognition, self.layers[:-1], strict=True):
            _copy_into_(cast(nn.Linear, linear), _input_weight(rbm), rbm.hidden_bias)

    @torch.no_grad()
    def start_from_below_(self, layer: int) -> None:
        """Initialise RBM ``layer`` from the one below: with its transposed weight, and its biases swapped.

        The stack up to ``layer`` then has exactly the distribution of the stack without it, so that training of the new
        layer starts at the likelihood that the one below has reached. Labels are uniform and independent at first.

        Raises:
            ValueError: if ``layer`` is 0 or too large, if it has not as many hidden units as the layer below has
                visible ones, or if some units are not ``bernoulli``.
        """
        above, values = self.layers[layer], self.parameters_from_below(layer)
        for parameter, value in zip((above.weight, above.visible_bias, above.hidden_bias), values, strict=True):
            parameter.copy_(value)

    @torch.no_grad()
    def parameters_from_below(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weight (H, V), visible bias (V,) and hidden bias (H,) of :meth:`start_from_below_`.

        Raises:
            ValueError: as :meth:`start_from_below_`.
        """
        if not 1 <= layer < len(self.rbms):
            raise ValueError(f"layer must be an RBM above another, from 1 to {len(self.rbms) - 1}; got {layer}")
        below, above = self.layers[layer - 1], self.layers[layer]
        units = _units_without_labels(below)
        if not isinstance(units, BernoulliVisible):
            raise ValueError("an RBM is tied to the one below if all units are 'bernoulli'; got visible='gaussian'")
        if above.num_hidden != below.num_visible:
            raise ValueError(
                "an RBM is tied to the one below if its hidden units are as many as that one's visible units; got "
                f"num_hidden={above.num_hidden} above {below.num_visible} visible units"
            )
        labels = (0, above.num_labels)
        return F.pad(below.weight.T, labels), F.pad(below.hidden_bias, labels), below.visible_bias.clone()

    def require_support(self, visible: Tensor) -> None:
        """Require that the bottom RBM supports the data (B, V), without labels; see :meth:`RBM.require_support`.

        Raises:
            ValueError: see :meth:`RBM.require_support`.
        """
        self._require_shape(visible)
        if len(self.rbms) == 1 and self.num_labels:
            visible = self.join_labels(visible, visible.new_zeros(len(visible), dtype=torch.long))
        self.layers[0].require_support(visible)

    def join_labels(self, states: Tensor, labels: Tensor, generator: Generator | None = None) -> Tensor:
        """Concatenate ``states`` (B, H_{L-1}) and one-hot ``labels`` (B,) to visible states of the top RBM.

        Labels of -100 (the ``ignore_index`` of torch's losses) are unknown, and drawn given the states, (0, 1).

        Raises:
            ValueError: if the stack has no labels, or ``labels`` are not (B,) in [0, C) where they are known.
        """
        unknown = labels == UNKNOWN
        joined = self.one_hot(labels.where(~unknown, 0), states)
        if bool(unknown.any()):
            drawn = sample_categorical(self.label_scores(states), generator).to(joined.dtype)
            joined = torch.where(unknown.to(states.device)[:, None], drawn, joined)
        return torch.cat([states, joined], dim=1)

    def activation(self, layer: int, states: Tensor) -> Tensor:
        """Compute the activation (B, H_{l+1}) of the layer above ``layer`` from ``states`` (B, H_l) by recognition.

        Labels of the top RBM count as unknown, with probability 1 / C each.
        """
        if self.recognition is not None and layer < len(self.recognition):
            linear = cast("nn.Linear", self.recognition[layer])
            activation = linear(states.to(linear.weight.dtype))
            return at_least_float32(activation)
        rbm = self.layers[layer]
        if rbm.num_labels:
            unknown = states.new_full((len(states), rbm.num_labels), 1 / rbm.num_labels)
            states = torch.cat([states, unknown], dim=1)
        return rbm.hidden_activation(states)

    def transform(self, visible: Tensor, num_layers: int | None = None) -> Tensor:
        """Propagate the means of ``visible`` (B, V) upward through ``num_layers`` RBMs, by default all, to (B, H_l).

        Each layer uses the means of the one below as its states. Labels of the top RBM have probability 1 / C each.

        Raises:
            ValueError: if ``visible`` is not (B, V), or ``num_layers`` is larger than the number of layers.
        """
        self._require_shape(visible)
        for layer in range(self._num_layers(num_layers)):
            visible = self.activation(layer, visible).sigmoid()
        return visible

    if TYPE_CHECKING:  # Any, as torch declares it

        def __call__(self, visible: Tensor) -> Tensor: ...

    def forward(self, visible: Tensor) -> Tensor:
        """Compute the means of the top hidden units given ``visible`` (B, V)."""
        return self.transform(visible)

    @torch.no_grad()
    def sample_hidden(
        self, visible: Tensor, num_layers: int | None = None, generator: Generator | None = None
    ) -> Tensor:
        """Sample upward from ``visible`` (B, V) through ``num_layers`` RBMs, by default all, to (B, H_l).

        If the top RBM has labels, they are sampled too, given the states below it.

        Raises:
            ValueError: as :meth:`transform`.
        """
        self._require_shape(visible)
        states = visible
        for layer in range(self._num_layers(num_layers)):
            rbm = self.layers[layer]
            if rbm.num_labels:
                drawn = sample_categorical(self.label_scores(states), generator)
                activation = rbm.hidden_activation(torch.cat([states, drawn], dim=1))
            else:
                activation = self.activation(layer, states)
            states = sample_bernoulli(activation, generator)
        return states

    def reconstruct(self, visible: Tensor, num_layers: int | None = None) -> Tensor:
        """Propagate the means of ``visible`` (B, V) up through ``num_layers`` RBMs, by default all, and back down.

        Raises:
            ValueError: as :meth:`transform`.
        """
        num_layers = self._num_layers(num_layers)
        states = self.transform(visible, num_layers)
        for layer in reversed(range(num_layers)):
            rbm = self.layers[layer]
            states = self.without_labels(layer, rbm.visible_units.mean(rbm.visible_activation(states)))
        return states

    def label_scores(self, states: Tensor) -> Tensor:
        """Compute the negative free energy of ``states`` (B, H_{L-1}) with each label in the top RBM: (B, C), nats."""
        top, labels = self.top, self.num_labels
        with without_autocast(states):
            states = at_least_float32(states)
            without = torch.cat([states, states.new_zeros(len(states), labels)], dim=1)
            activation = top.hidden_activation(without)  # one product for all labels
            own = top.visible_bias[-labels:] - top.visible_units.energy(without, top.visible_bias)[:, None]
            columns = top.weight[:, -labels:].T
            return own + torch.stack([F.softplus(activation + column).sum(dim=1) for column in columns], dim=1)

    def class_log_prob(self, visible: Tensor) -> Tensor:
        """Compute the log-probability of each label, (B, C) in nats, given ``visible`` (B, V).

        Means are propagated up to the top RBM's visible units; given those, probabilities are exact, by free energies.
        For a single layer the result is exact.

        Raises:
            ValueError: if the top RBM has no labels, or ``visible`` is not (B, V).
        """
        if not self.num_labels:
            raise ValueError("class_log_prob needs labels: give the top RBM num_labels, the number of classes")
        return self.label_scores(self.transform(visible, len(self.rbms) - 1)).log_softmax(dim=1)

    @torch.no_grad()
    def log_prob_bound(
        self,
        visible: Tensor,
        log_z: LogZ,
        *,
        labels: Tensor | None = None,
        num_samples: int = 20,
        generator: Generator | None = None,
    ) -> LogProbBound:
        """Estimate a lower bound of log p(visible) in nats, by sampling the intermediate layers from recognition.

        The bound is E_q[log p(v, s_1, ..., s_{L-1}) - log q(s_1, ..., s_{L-1} | v)]; its gap is the divergence of q
        from the true posterior. It is the mean of ``num_samples`` draws, with the returned ``standard_error``;
        ``lower`` and ``upper`` reflect only the interval of ``log_z``. For one layer nothing is drawn, and the bound is
        the log-probability itself; with a tied second layer all draws are equal.

        Args:
            visible: (B, V) states of the visible units.
            log_z: log partition function of the top RBM, ``stack.top.log_z(...)``.
            labels: (B,) integers for log p(visible, label); those of -100, by default all, are summed over.
            num_samples: number of draws per sample.
            generator: random number generator; torch's global one by default.

        Raises:
            ValueError: if shapes do not fit.

        Source: Salakhutdinov and Murray 2008, On the Quantitative Analysis of Deep Belief Networks, eq. 14
        """
        self._require_shape(visible)
        require_integers(1, num_samples=num_samples)
        if len(self.layers) == 1:
            num_samples = 1
        drawn = torch.stack([_log_weight(self, visible, labels, generator) for _ in range(num_samples)])  # (S, B)
        mean = drawn.mean(dim=0)
        error = drawn.std(dim=0) / num_samples**0.5 if num_samples > 1 else torch.full_like(mean, torch.nan)
        if len(self.layers) == 1:
            error = torch.zeros_like(mean)
        return LogProbBound(mean - log_z.estimate, mean - log_z.upper, mean - log_z.lower, error)

    def down(self, states: Tensor, generator: Generator | None = None) -> Tensor:
        """Draw visible states (B, V) given ``states`` (B, H_{L-1}) of the top RBM's visible units, without labels."""
        for layer in reversed(range(len(self.rbms) - 1)):
            states = self.layers[layer].sample_visible(states, generator)
        return states

    @torch.no_grad()
    def sample(
        self,
        num_samples: int,
        steps: int,
        *,
        clamp: Tensor | None = None,
        labels: Tensor | None = None,
        generator: Generator | None = None,
    ) -> Tensor:
        """Draw visible states (B, V) by ``steps`` Gibbs steps in the top RBM and one downward pass.

        Chains start at independent units. With ``clamp``, each step goes from the visible states up to the top RBM,
        through one Gibbs step there and down again, and then restores the clamped values. For one layer this is exact
        in the limit of many steps; for more it is approximate, because the upward pass is recognition and not the
        posterior. With labels and without ``clamp`` it is exact in the limit.

        Args:
            num_samples: B, the number of samples to draw.
            steps: Gibbs steps.
            clamp: (V,) or (B, V), values to hold; NaN where units are free.
            labels: (B,) integers: the class of each sample.
            generator: random number generator; torch's global one by default.

        Raises:
            ValueError: if a number or shape is wrong, or ``clamp`` has values that the units do not support.
        """
        if min(num_samples, steps) < 1:
            raise ValueError(f"num_samples and steps must be at least 1; got {num_samples=}, {steps=}")
        if labels is not None and labels.shape != (num_samples,):
            raise ValueError(f"labels must be ({num_samples},), one for each sample; got {tuple(labels.shape)}")
        top, size = self.top, self.top.num_visible - self.num_labels
        states = _sample_independent(top, num_samples, generator)  # (B, H_{L-1} + C)
        known = None if labels is None else self.one_hot(labels, states)
        if clamp is not None:
            clamp = self._expand_clamp(clamp, num_samples)
            start = self.without_labels(0, _sample_independent(self.layers[0], num_samples, generator))
            visible = _apply_clamp(start, clamp)
        for _ in range(steps):
            below = states[:, :size]
            if clamp is not None:
                below = self.sample_hidden(visible, len(self.layers) - 1, generator)
            states = torch.cat([below, states[:, size:] if known is None else known], dim=1)
            states = top.sample_visible(top.sample_hidden(states, generator), generator)
            if clamp is not None:
                visible = _apply_clamp(self.down(states[:, :size], generator), clamp)
        return self.down(states[:, :size], generator) if clamp is None else visible

    def _expand_clamp(self, clamp: Tensor, num_samples: int) -> Tensor:
        bottom = self.layers[0]
        free_labels = clamp.new_full((*clamp.shape[:-1], bottom.num_labels), torch.nan)
        return self.without_labels(0, bottom.held(torch.cat([clamp, free_labels], dim=-1), num_samples))

    @torch.no_grad()
    def to_mlp(self) -> nn.Sequential:
        """Convert the stack to a feed-forward network that computes :meth:`transform`, with copies of the weights.

        Variances of Gaussian visible units are folded into the weights, and labels of the top RBM, with probability 1 /
        C each, into the biases.
        """
        modules: list[nn.Module] = []
        for layer in range(len(self.rbms)):
            modules += [self._as_linear(layer), nn.Sigmoid()]
        return nn.Sequential(*modules)

    def _as_linear(self, layer: int) -> nn.Linear:
        rbm = self.layers[layer]
        if self.recognition is not None and layer < len(self.recognition):
            own = cast(nn.Linear, self.recognition[layer])
            return _linear(own.weight, own.bias)
        weight, bias = _input_weight(rbm), rbm.hidden_bias.detach()
        if rbm.num_labels:
            bias = bias + weight[:, -rbm.num_labels :].mean(dim=1)
            weight = weight[:, : -rbm.num_labels]
        return _linear(weight, bias)

    def _num_layers(self, num_layers: int | None) -> int:
        if num_layers is None:
            return len(self.rbms)
        if not 0 <= num_layers <= len(self.rbms):
            raise ValueError(f"num_layers must lie in [0, {len(self.rbms)}], the RBMs of the stack; got {num_layers}")
        return num_layers

    def without_labels(self, layer: int, states: Tensor) -> Tensor:
        """Return visible states of RBM ``layer`` without those of the label, if it has one."""
        return states[:, : states.shape[1] - self.layers[layer].num_labels]

    def _require_shape(self, visible: Tensor) -> None:
        rows = "rows (B, {}), labels apart" if self.num_labels else "rows (B, {})"
        require_width(self, visible, "num_visible", self.num_visible, rows, ndim=2)

    def one_hot(self, labels: Tensor, like: Tensor) -> Tensor:
        """Encode labels (B,) as one-hot (B, C), in the dtype and on the device of ``like``; see :meth:`join_labels`."""
        if not self.num_labels:
            raise ValueError("the top RBM has no labels: give it num_labels, the number of classes")
        if labels.shape != like.shape[:1] or labels.is_floating_point():
            raise ValueError(
                f"labels must be ({len(like)},) integers, one for each row; got {tuple(labels.shape)} {labels.dtype}"
            )
        if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < self.num_labels:
            raise ValueError(
                f"labels must lie in [0, {self.num_labels}); got {int(labels.min())} to {int(labels.max())}"
            )
        return F.one_hot(labels.to(like.device, torch.long), self.num_labels).to(like.dtype)


def _input_weight(rbm: RBM) -> Tensor:
    """Return the weight (H, V) that multiplies visible states, with variances of Gaussian units folded in."""
    return rbm.visible_units.input(rbm.weight)


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    """Create a linear layer with copies of ``weight`` (H, V) and ``bias`` (H,)."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], device=weight.device, dtype=weight.dtype)
    _copy_into_(linear, weight, bias)
    return linear


@torch.no_grad()
def _copy_into_(linear: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    linear.weight.copy_(weight)
    linear.bias.copy_(bias)


def _units_without_labels(rbm: RBM) -> VisibleUnits:
    """Return the visible units without those of the label."""
    units = rbm.visible_units
    return units.parts[0] if isinstance(units, JoinedVisible) else units  # type: ignore[return-value]


def _require_compatible(layer: int, below: RBM, above: RBM) -> None:
    """Require that RBM ``layer`` and the one above it fit together."""
    here = f"RBM {layer + 1} of the stack"
    if below.num_labels:
        raise ValueError(f"only the top RBM may have labels; RBM {layer} has num_labels={below.num_labels}")
    size = above.num_visible - above.num_labels
    if size != below.num_hidden:
        raise ValueError(
            f"{here} has {size} visible units and stands on {below.num_hidden} hidden ones: make its "
            f"num_visible={below.num_hidden}"
        )
    units = _units_without_labels(above)
    if not isinstance(units, BernoulliVisible):
        raise ValueError(
            f"{here} has visible='gaussian' and stands on hidden units that are 0 or 1: take visible='bernoulli'"
        )


def _sample_independent(rbm: RBM, num_samples: int, generator: Generator | None) -> Tensor:
    """Draw visible states of ``rbm`` as if it had no weights."""
    return rbm.visible_units.sample(rbm.visible_bias.expand(num_samples, -1), generator)


def _apply_clamp(visible: Tensor, clamp: Tensor) -> Tensor:
    return torch.where(clamp.isnan(), visible, clamp)


def _log_weight(stack: RBMStack, visible: Tensor, labels: Tensor | None, generator: Generator | None) -> Tensor:
    """Draw states upward; return log p*(visible, states) - log q(states), (B,) float64."""
    states, total = visible, visible.new_zeros(len(visible), dtype=torch.float64)
    for layer in range(len(stack.layers) - 1):
        rbm = stack.layers[layer]
        activation = stack.activation(layer, states)
        above = sample_bernoulli(activation, generator)
        total += log_prob_of_visible(rbm, states, above)
        total -= log_prob_of_hidden(above, activation)
        states = above
    return total + _top_score(stack, states, labels)


def _top_score(stack: RBMStack, states: Tensor, labels: Tensor | None) -> Tensor:
    """Compute the top RBM's log unnormalised probability (B,) of ``states`` and ``labels``."""
    if not stack.num_labels and labels is None:
        return -stack.top.free_energy(states)
    scores = stack.label_scores(states)
    if labels is not None:
        known = stack.one_hot(labels.where(labels != UNKNOWN, 0), states) > 0
        scores = scores.where(known | (labels == UNKNOWN).to(states.device)[:, None], -torch.inf)
    return scores.logsumexp(dim=1)


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
