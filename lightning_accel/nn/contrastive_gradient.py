"""The gradient of contrastive divergence. Shapes: B batch size, C chains, V visible units, H hidden units."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function

from lightning_accel.nn.rbm import RBM
from lightning_accel.ops.float32 import without_autocast


class Phase(NamedTuple):
    """Hold visible states, of data or drawn from the model, with activations and means of the hidden units."""

    visible: Tensor  # (B, V)
    activation: Tensor  # (B, H) activations of the hidden units
    hidden: Tensor  # (B, H) means of the hidden units


class Contrast(NamedTuple):
    """Hold the inputs of the gradient and compute it: data, samples drawn from the model, offsets, sparsity term."""

    rbm: RBM
    positive: Phase
    negative: Phase  # (C, ...)
    offsets: tuple[Tensor, Tensor] | None  # (V,) and (H,), subtracted from the units
    sparsity_gradient: Tensor | None  # (H,) with respect to the hidden units' activations on data
    dtype: torch.dtype  # dtype of the product that gives the gradient of the weights

    def gap(self) -> Tensor:
        """Compute the mean energy of the data minus that of the samples, (), with hidden units at their means."""
        return _mean_energy(self.rbm, self.positive) - _mean_energy(self.rbm, self.negative)

    def gap_with_gradient(self) -> Tensor:
        """Compute :meth:`gap` as an autograd function with the gradient :meth:`gradients`."""
        rbm = self.rbm
        return _EnergyGap.apply(rbm.weight, rbm.visible_bias, rbm.hidden_bias, log_variance_of(rbm), self)

    @torch.no_grad()
    def gradients(self, scale: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Compute gradients of weight (H, V), visible bias, hidden bias and log-variance (or None), times ``scale``.

        Data and samples are in one matrix product, as in bfloat16 the difference of two rounded products loses
        precision.
        """
        with without_autocast(self.positive.hidden):
            return self._gradients(scale)

    def _gradients(self, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        positive, negative = self.positive, self.negative
        visible = torch.cat([positive.visible, negative.visible])
        sparsity = self.sparsity_gradient
        hidden = torch.cat([positive.hidden if sparsity is None else positive.hidden - sparsity, negative.hidden])
        share = hidden.new_full((len(hidden),), 1 / len(negative.hidden))
        share[: len(positive.hidden)] = -1 / len(positive.hidden)
        if scale is not None:
            share *= scale
        inputs = self.rbm.visible_units.input(visible)
        by_variance = _by_log_variance(self.rbm, visible, inputs, hidden, share)
        by_visible = share @ inputs
        if self.offsets is not None:
            inputs, hidden = inputs - self.offsets[0], hidden.sub_(self.offsets[1])
        hidden *= share[:, None]
        by_hidden = hidden.sum(dim=0)
        by_weight = (hidden.T.to(self.dtype) @ inputs.to(self.dtype)).to(hidden.dtype)
        if self.offsets is not None:
            by_visible -= self.offsets[1] @ by_weight
            by_hidden -= by_weight @ self.offsets[0]
        return by_weight, by_visible, by_hidden, by_variance


class _EnergyGap(Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        visible_bias: Tensor,
        hidden_bias: Tensor,
        log_variance: Tensor | None,
        contrast: Contrast,
    ) -> Tensor:
        ctx.contrast = contrast
        return contrast.gap()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Any, ...]:
        return *ctx.contrast.gradients(scale), None


def log_variance_of(rbm: RBM) -> Tensor | None:
    """Return the log-variance of the Gaussian visible units, which come first, or None."""
    return next(rbm.visible_units.parameters(), None)


def _by_log_variance(rbm: RBM, visible: Tensor, inputs: Tensor, hidden: Tensor, share: Tensor) -> Tensor | None:
    log_variance = log_variance_of(rbm)
    if log_variance is None or not log_variance.requires_grad:
        return None
    size = len(log_variance)
    own = -0.5 * (visible[:, :size] - rbm.visible_bias[:size]).square() * (-log_variance).exp()
    return -(share @ (own + inputs[:, :size] * (hidden @ rbm.weight[:, :size].to(hidden.dtype))))


def _mean_energy(rbm: RBM, phase: Phase) -> Tensor:
    interaction = torch.dot(phase.hidden.flatten(), phase.activation.flatten()) / len(phase.hidden)
    own = rbm.visible_units.energy(phase.visible, rbm.visible_bias) + rbm.hidden_units.base(phase.hidden)
    return own.mean() - interaction
