"""Restricted Boltzmann machines. Shapes: B rows, V visible units, H hidden units."""

from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lightning_accel.nn.rbm_units import (
    BernoulliHidden,
    BernoulliVisible,
    CategoricalVisible,
    GaussianVisible,
    HiddenUnits,
    JoinedVisible,
    RectifiedHidden,
    VisibleUnits,
)

Visible: TypeAlias = Literal["bernoulli", "gaussian", "categorical"]
Hidden: TypeAlias = Literal["bernoulli", "relu"]


class RBM(nn.Module):
    """A restricted Boltzmann machine: p(v, h) proportional to exp(-energy(v, h)).

    energy(v, h) = e(v) - h . (W x + c) + g(h). For Bernoulli and categorical visible units x = v and e(v) = -b . v; for
    Gaussian ones x = v / variance and e(v) = |v - b|**2 / (2 variance). g is 0, or |h|**2 / 2 for ``relu``. Under
    autocast free energies are computed in float32 all the same, products with W elsewhere in its dtype.

    Training is :class:`lightning_accel.nn.ContrastiveDivergence`.

    Args:
        num_visible: V, labels not counted.
        num_hidden: H.
        visible: ``bernoulli`` (0, 1, or probabilities), ``gaussian`` (real, standardised) or ``categorical`` (groups of
            ``num_categories`` units, one-hot).
        hidden: ``bernoulli``, or ``relu``: not negative, see :class:`lightning_accel.nn.rbm_units.RectifiedHidden`.
        num_categories: units in each group of categorical ones.
        num_labels: one-hot units that are appended to the visible ones: the row's class.
        learn_variance: of Gaussian units; else variances are 1.

    Raises:
        ValueError: if a size is below 1, or an option does not fit the kind of the units.

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
        hidden: Hidden = "bernoulli",
        num_categories: int | None = None,
        num_labels: int = 0,
        learn_variance: bool = False,
    ) -> None:
        super().__init__()
        if min(num_visible, num_hidden) < 1 or num_labels < 0:
            raise ValueError(
                "num_visible and num_hidden must be at least 1 and num_labels at least 0; got "
                f"num_visible={num_visible}, num_hidden={num_hidden}, num_labels={num_labels}"
            )
        self.num_visible = num_visible + num_labels
        self.num_hidden = num_hidden
        self.num_labels = num_labels
        units = _visible_units(num_visible, visible, num_categories, learn_variance)
        if num_labels:
            units = JoinedVisible([units, CategoricalVisible(num_labels, num_labels)])
        self.visible_units = units
        self.hidden_units = _hidden_units(hidden)
        self.weight = nn.Parameter(torch.empty(num_hidden, self.num_visible))
        self.visible_bias = nn.Parameter(torch.empty(self.num_visible))
        self.hidden_bias = nn.Parameter(torch.empty(num_hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Small random weights, biases of 0 (Hinton 2012, section 8)."""
        nn.init.normal_(self.weight, std=0.01)
        nn.init.zeros_(self.visible_bias)
        nn.init.zeros_(self.hidden_bias)

    def extra_repr(self) -> str:
        return f"num_visible={self.num_visible}, num_hidden={self.num_hidden}, num_labels={self.num_labels}"

    @torch.no_grad()
    def start_at_(self, mean: Tensor, num_rows: int) -> None:
        """Set the visible bias to that of independent units with the data's ``mean`` (V,) of ``num_rows`` rows."""
        self.visible_bias.copy_(self.visible_units.bias_for(mean.to(self.visible_bias), num_rows))

    def require_support(self, visible: Tensor) -> None:
        """Refuse rows that the visible units cannot hold; it waits for the device.

        Raises:
            ValueError: if ``visible`` is not (B, V), holds NaN or infinities, values outside the units' support, or
                for Gaussian units constant columns.
        """
        if visible.ndim != 2 or visible.shape[1] != self.num_visible:
            raise ValueError(
                f"the RBM has {self.num_visible} visible units and takes rows (B, {self.num_visible}); got "
                f"{tuple(visible.shape)}"
            )
        if not visible.isfinite().all():
            rows, columns = (~visible.isfinite()).nonzero(as_tuple=True)
            raise ValueError(
                f"visible units take finite values; found {visible[rows[0], columns[0]].item()} in row {int(rows[0])}, "
                f"column {int(columns[0])}, and {len(rows) - 1} more. Fill them in, or drop those rows"
            )
        if fault := self.visible_units.find_fault(visible):
            raise ValueError(fault)

    def hidden_activation(self, visible: Tensor) -> Tensor:
        """The hidden units' W x + c of ``visible`` (B, V), (B, H), at least float32."""
        return _wide(F.linear(self.visible_units.input(visible), self.weight)) + self.hidden_bias

    def visible_activation(self, hidden: Tensor) -> Tensor:
        """The visible units' h W + b of ``hidden`` (B, H), (B, V), at least float32."""
        return _wide(hidden @ self.weight) + self.visible_bias

    def forward(self, visible: Tensor) -> Tensor:
        """Mean of the hidden units given ``visible`` (B, V), (B, H)."""
        return self.hidden_units.mean(self.hidden_activation(visible))

    transform = forward

    def sample_hidden(self, visible: Tensor, generator: Generator | None = None) -> Tensor:
        """Draw the hidden units given ``visible`` (B, V), (B, H)."""
        return self.hidden_units.sample(self.hidden_activation(visible), generator)

    def sample_visible(self, hidden: Tensor, generator: Generator | None = None) -> Tensor:
        """Draw the visible units given ``hidden`` (B, H), (B, V)."""
        return self.visible_units.sample(self.visible_activation(hidden), generator)

    def reconstruct(self, visible: Tensor) -> Tensor:
        """Mean of the visible units given the mean of the hidden ones given ``visible`` (B, V), (B, V)."""
        return self.visible_units.mean(self.visible_activation(self(visible)))

    def energy(self, visible: Tensor, hidden: Tensor) -> Tensor:
        """Energy of ``visible`` (B, V) with ``hidden`` (B, H), (B,) in nats."""
        with _float32(visible):
            hidden = _wide(hidden)
            interaction = (hidden * self.hidden_activation(_wide(visible))).sum(dim=-1)
            return self._energy_of(_wide(visible)) - interaction + self.hidden_units.base(hidden)

    def free_energy(self, visible: Tensor) -> Tensor:
        """Minus the log of the unnormalised probability of ``visible`` (B, V), (B,) in nats; lower is likelier."""
        with _float32(visible):
            visible = _wide(visible)
            log_partition = self.hidden_units.log_partition(self.hidden_activation(visible))
            return self._energy_of(visible) - log_partition.sum(dim=-1)

    def hidden_free_energy(self, hidden: Tensor) -> Tensor:
        """Minus the log of the unnormalised probability of ``hidden`` (B, H), (B,) in nats."""
        with _float32(hidden):
            hidden = _wide(hidden)
            log_partition = self.visible_units.log_partition(self.visible_activation(hidden), self.visible_bias)
            return self.hidden_units.base(hidden) - hidden @ self.hidden_bias - log_partition

    def _energy_of(self, visible: Tensor) -> Tensor:
        return self.visible_units.energy(visible, self.visible_bias)


def _visible_units(num_visible: int, kind: Visible, num_categories: int | None, learn_variance: bool) -> VisibleUnits:
    if (kind == "categorical") != (num_categories is not None):
        raise ValueError(f"num_categories goes with visible='categorical'; got visible={kind!r}, {num_categories=}")
    if learn_variance and kind != "gaussian":
        raise ValueError(f"learn_variance goes with visible='gaussian'; got visible={kind!r}")
    if kind == "bernoulli":
        return BernoulliVisible(num_visible)
    if kind == "gaussian":
        return GaussianVisible(num_visible, learn_variance)
    if kind != "categorical":
        raise ValueError(f"visible must be 'bernoulli', 'gaussian' or 'categorical'; got {kind!r}")
    assert num_categories is not None
    if num_categories < 2 or num_visible % num_categories:
        raise ValueError(
            "num_visible must be a multiple of num_categories, which is at least 2; got "
            f"num_visible={num_visible}, num_categories={num_categories}"
        )
    return CategoricalVisible(num_visible, num_categories)


def _hidden_units(kind: Hidden) -> HiddenUnits:
    if kind not in ("bernoulli", "relu"):
        raise ValueError(f"hidden must be 'bernoulli' or 'relu'; got {kind!r}")
    return BernoulliHidden() if kind == "bernoulli" else RectifiedHidden()


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _float32(tensor: Tensor) -> torch.autocast:
    return torch.autocast(tensor.device.type, enabled=False)
