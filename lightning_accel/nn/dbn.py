"""Deep belief networks. Shapes: B rows, V visible units, C labels; layer l holds H_l units, layer 0 the visible ones.

Only the top two layers of a deep belief network are tied in both directions: its joint distribution is
p(s_0 | s_1) ... p(s_{L-2} | s_{L-1}) p_top(s_{L-1}, s_L), with states s_l of layer l and p_top that of the top RBM,
whose visible units hold s_{L-1} and, beside it, the label. What runs upward below the top is recognition, and
approximate.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lightning_accel.nn.features import require_width
from lightning_accel.nn.rbm import RBM
from lightning_accel.nn.rbm_units import BernoulliHidden, BernoulliVisible, RectifiedHidden
from lightning_accel.nn.stack_fit import kind_of, own_units, require_fit
from lightning_accel.nn.stack_likelihood import LogProbBound, LogZLike, log_prob, log_prob_bound
from lightning_accel.nn.stack_sampling import sample_stack
from lightning_accel.ops.float32 import at_least_float32, without_autocast
from lightning_accel.ops.gibbs import sample_categorical


class RectifiedMean(nn.Module):
    """Mean of ``relu`` hidden units given their activation: a smooth ReLU."""

    def forward(self, activation: Tensor) -> Tensor:
        return RectifiedHidden().mean(activation)


class RBMStack(nn.Module):
    """A deep belief network: RBMs of which each models the hidden units of the one below.

    Hidden units that are ``bernoulli`` go below ``bernoulli`` visible units; ``relu`` ones below ``gaussian`` visible
    units. That is a density over all reals, of which the layer below meets the non-negative ones only; likelihood
    bounds hold all the same, and what is generated may pass through negative states. Other pairs are refused.

    A stack is trained layer by layer: RBM l by :class:`~lightning_accel.nn.ContrastiveDivergence` on
    ``transform(data, l)`` or ``sample_hidden(data, l)``, the top one with :meth:`join_labels`, if it has labels; then,
    if that is wanted, all of it by :class:`~lightning_accel.nn.UpDown`.

    Args:
        rbms: from the bottom to the top; they are not copied. Only the top one may have labels.
        untied: give the layers below the top recognition weights of their own, see :meth:`untie_`.

    Raises:
        ValueError: if the sizes or the kinds of neighbours do not fit, or an RBM below the top has labels.

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
            require_fit(layer, below, above)
        self.rbms = nn.ModuleList(rbms)
        self.num_labels = rbms[-1].num_labels
        self.num_visible = rbms[0].num_visible - rbms[0].num_labels
        self.recognition: nn.ModuleList | None = None
        if untied:
            self.untie_()

    @property
    def layers(self) -> list[RBM]:
        """The RBMs, from the bottom to the top."""
        return cast("list[RBM]", list(self.rbms))

    @property
    def top(self) -> RBM:
        """The uppermost RBM."""
        return self.layers[-1]

    @torch.no_grad()
    def untie_(self) -> None:
        """Give the layers below the top recognition weights of their own, copies of the RBMs' as they are now.

        They start anew if there are some. Construct with ``untied=True`` where wrappers or checkpoints must find the
        parameters from the beginning, and call this when the layers have been trained one by one.
        """
        if self.recognition is None:
            self.recognition = nn.ModuleList(_linear(rbm.weight, rbm.hidden_bias) for rbm in self.layers[:-1])
        for linear, rbm in zip(self.recognition, self.layers[:-1], strict=True):
            _set_(cast(nn.Linear, linear), _weight_on_states(rbm), rbm.hidden_bias)

    @torch.no_grad()
    def start_from_below_(self, layer: int) -> None:
        """Tie RBM ``layer`` to the one below: its weight is that one's transposed, and the biases change places.

        The stack up to ``layer`` then has exactly the distribution of the stack without it, so that training the new
        layer by its likelihood begins where the one below ended. Labels start out uniform and without influence.

        Raises:
            ValueError: if there is no such layer above another, its hidden units are not as many as the visible ones of
                the layer below, or units are not all ``bernoulli``.
        """
        if not 1 <= layer < len(self.rbms):
            raise ValueError(f"layer must be an RBM above another, from 1 to {len(self.rbms) - 1}; got {layer}")
        below, above = self.layers[layer - 1], self.layers[layer]
        units = (own_units(below), below.hidden_units, above.hidden_units)
        if not all(isinstance(one, BernoulliVisible | BernoulliHidden) for one in units):
            found = ", ".join(kind_of(one) for one in units)
            raise ValueError(f"an RBM is tied to the one below if all units are 'bernoulli'; got {found}")
        if above.num_hidden != below.num_visible:
            raise ValueError(
                "an RBM is tied to the one below if its hidden units are as many as that one's visible units; got "
                f"num_hidden={above.num_hidden} above {below.num_visible} visible units"
            )
        size = below.num_hidden
        for parameter in (above.weight, above.visible_bias):
            parameter.zero_()
        above.weight[:, :size] = below.weight.T
        above.visible_bias[:size] = below.hidden_bias
        above.hidden_bias.copy_(below.visible_bias)

    def require_support(self, visible: Tensor) -> None:
        """Refuse rows (B, V) that the lowest units cannot hold, see :meth:`RBM.require_support`; labels not among them.

        Raises:
            ValueError: as told there.
        """
        self._require_shape(visible)
        if len(self.rbms) == 1 and self.num_labels:
            visible = self.join_labels(visible, visible.new_zeros(len(visible), dtype=torch.long))
        self.layers[0].require_support(visible)

    def join_labels(self, states: Tensor, labels: Tensor) -> Tensor:
        """What the top RBM's visible units hold: ``states`` (B, H_{L-1}) beside ``labels`` (B,), integers, as one-hot.

        Raises:
            ValueError: if the stack has no labels, or ``labels`` are not (B,) in [0, C).
        """
        return torch.cat([states, self.one_hot(labels, states)], dim=1)

    def activation(self, layer: int, states: Tensor) -> Tensor:
        """Activation of layer ``layer + 1`` given ``states`` (B, H_l) of ``layer``, by recognition, (B, H_{l+1}).

        Labels that the top RBM has are unknown here, and each counts for 1 / C.
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
        """Means upward through ``num_layers`` RBMs, by default all of them: (B, H_l) of ``visible`` (B, V).

        Each layer takes the means of the one below for its states. Of labels of the top RBM each counts for 1 / C.

        Raises:
            ValueError: if ``visible`` is not (B, V), or there are not so many layers.
        """
        self._require_shape(visible)
        for layer in range(self._num_layers(num_layers)):
            visible = self.layers[layer].hidden_units.mean(self.activation(layer, visible))
        return visible

    def forward(self, visible: Tensor) -> Tensor:
        """Means of the top's hidden units given ``visible`` (B, V)."""
        return self.transform(visible)

    @torch.no_grad()
    def sample_hidden(
        self, visible: Tensor, num_layers: int | None = None, generator: Generator | None = None
    ) -> Tensor:
        """Draw upward through ``num_layers`` RBMs, by default all: (B, H_l) of ``visible`` (B, V).

        If the top RBM has labels, they are drawn, too, given the states below it.

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
            states = rbm.hidden_units.sample(activation, generator)
        return states

    def reconstruct(self, visible: Tensor, num_layers: int | None = None) -> Tensor:
        """Means upward through ``num_layers`` RBMs, by default all, and back down: (B, V) of ``visible`` (B, V).

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
        """Minus the top RBM's free energy of ``states`` (B, H_{L-1}) beside each label, (B, C) in nats."""
        top, labels = self.top, self.num_labels
        with without_autocast(states):
            states = at_least_float32(states)
            without = torch.cat([states, states.new_zeros(len(states), labels)], dim=1)
            activation = top.hidden_activation(without)  # one product for all labels
            own = top.visible_bias[-labels:] - top.visible_units.energy(without, top.visible_bias)[:, None]
            columns = top.weight[:, -labels:].T
            return own + torch.stack(
                [top.hidden_units.log_partition(activation + column).sum(dim=1) for column in columns], dim=1
            )

    def class_log_prob(self, visible: Tensor) -> Tensor:
        """Logarithm of the probability of each label, (B, C) in nats, of ``visible`` (B, V).

        Means run up to the top RBM's visible units; given those, probabilities are exact, by free energies. So they are
        exact for one layer.

        Raises:
            ValueError: if the top RBM has no labels, or ``visible`` is not (B, V).
        """
        if not self.num_labels:
            raise ValueError("class_log_prob needs labels: give the top RBM num_labels, the number of classes")
        return self.label_scores(self.transform(visible, len(self.rbms) - 1)).log_softmax(dim=1)

    def log_prob_bound(
        self,
        visible: Tensor,
        log_z: LogZLike,
        *,
        labels: Tensor | None = None,
        num_samples: int = 20,
        generator: Generator | None = None,
    ) -> LogProbBound:
        """Lower bound of log p(visible) in nats, by sampling the layers between from recognition.

        The bound is E_q[log p(v, s_1, ..., s_{L-1}) - log q(s_1, ..., s_{L-1} | v)], whose gap is the divergence of q
        from the true posterior. It is the mean of ``num_samples`` draws, so it errs by the ``standard_error`` that
        comes with it; ``lower`` and ``upper`` carry the interval of ``log_z`` alone. For one layer nothing is drawn,
        and the bound is the log-probability itself; with a tied second layer all draws are equal.

        Args:
            visible: (B, V).
            log_z: of the top RBM, ``stack.top.log_z(...)``.
            labels: (B,) integers for log p(visible, label); without, labels of the top RBM are summed over.
            num_samples: draws for each row.
            generator: draws them.

        Raises:
            ValueError: if shapes do not fit.

        Source: Salakhutdinov and Murray 2008, On the Quantitative Analysis of Deep Belief Networks, eq. 14
        """
        self._require_shape(visible)
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1; got {num_samples}")
        return log_prob_bound(self, visible, log_z, labels, num_samples, generator)

    def log_prob(self, visible: Tensor) -> Tensor:
        """Exact log-probability of ``visible`` (B, V) in nats, (B,), by summing over all states of all hidden layers.

        Labels of the top RBM are summed over.

        Raises:
            ValueError: if that are too many states, hidden units below the top are not ``bernoulli``, or ``visible`` is
                not (B, V).
        """
        self._require_shape(visible)
        return log_prob(self, visible)

    def down(self, states: Tensor, generator: Generator | None = None) -> Tensor:
        """Draw visible states (B, V) given ``states`` (B, H_{L-1}) of the top RBM's visible units, labels left out."""
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
        """Draw visible states (B, V): ``steps`` Gibbs steps in the top RBM, then down once.

        Chains start at independent units. With ``clamp``, each step goes from the picture up to the top RBM, through
        one Gibbs step there and down again, and what is clamped is put back. For one layer that is exact in the limit
        of many steps; for more it is approximate, because the way up is recognition and not the posterior. Labels
        without ``clamp`` are exact in the limit.

        Args:
            num_samples: B.
            steps: Gibbs steps.
            clamp: (V,) or (B, V), NaN where units are free.
            labels: (B,) integers: the class of each sample.
            generator: draws all.

        Raises:
            ValueError: if a number or a shape is wrong, or ``clamp`` holds what the units cannot.
        """
        if min(num_samples, steps) < 1:
            raise ValueError(f"num_samples and steps must be at least 1; got {num_samples=}, {steps=}")
        if labels is not None and labels.shape != (num_samples,):
            raise ValueError(f"labels must be ({num_samples},), one for each sample; got {tuple(labels.shape)}")
        return sample_stack(self, num_samples, steps, clamp, labels, generator)

    @torch.no_grad()
    def to_mlp(self, num_classes: int | None = None) -> nn.Sequential:
        """A feed-forward network that computes :meth:`transform`, from copies of the recognition weights.

        Variances of Gaussian visible units are folded into the weights, and so are labels of the top RBM, of which each
        counts for 1 / C.

        Args:
            num_classes: outputs of a linear layer on top, which starts at 0: all classes equal.
        """
        modules: list[nn.Module] = []
        for layer in range(len(self.rbms)):
            rbm = self.layers[layer]
            modules.append(self._as_linear(layer))
            modules.append(nn.Sigmoid() if isinstance(rbm.hidden_units, BernoulliHidden) else RectifiedMean())
        if num_classes is not None:
            zeros = self.top.weight.new_zeros(num_classes, self.top.num_hidden)
            modules.append(_linear(zeros, zeros[:, 0]))
        return nn.Sequential(*modules)

    def _as_linear(self, layer: int) -> nn.Linear:
        rbm = self.layers[layer]
        if self.recognition is not None and layer < len(self.recognition):
            own = cast(nn.Linear, self.recognition[layer])
            return _linear(own.weight, own.bias)
        weight, bias = _weight_on_states(rbm), rbm.hidden_bias.detach()
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
        """Visible states of RBM ``layer`` less those of the label, if it has one."""
        return states[:, : states.shape[1] - self.layers[layer].num_labels]

    def _require_shape(self, visible: Tensor) -> None:
        rows = "rows (B, {}), labels apart" if self.num_labels else "rows (B, {})"
        require_width(self, visible, "num_visible", self.num_visible, rows, ndim=2)

    def one_hot(self, labels: Tensor, like: Tensor) -> Tensor:
        """Labels (B,) as (B, C), of the dtype and device of ``like`` (B, ...); see :meth:`join_labels`."""
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


def _weight_on_states(rbm: RBM) -> Tensor:
    """The weight (H, V) with which states are multiplied: variances of Gaussian units are folded in."""
    return rbm.visible_units.input(rbm.weight)


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    """A layer with copies of ``weight`` (H, V) and ``bias`` (H,)."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], device=weight.device, dtype=weight.dtype)
    _set_(linear, weight, bias)
    return linear


@torch.no_grad()
def _set_(linear: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    linear.weight.copy_(weight)
    linear.bias.copy_(bias)
