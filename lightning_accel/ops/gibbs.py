"""Draws of a Gibbs step, in float32 whatever autocast says, by a kernel or in as few passes as torch allows.

bfloat16 has 8 bits: ``rand_like(p) < p`` would be true 0.2% of the time at p = 1e-6, and a sigmoid of 7 be 1.
"""

import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from lightning_accel.ops import gibbs_native
from lightning_accel.ops.float32 import at_least_float32


def sample_bernoulli(logits: Tensor, generator: Generator | None = None) -> Tensor:
    """Draw 0 or 1, 1 with probability ``sigmoid(logits)``.

    By a native kernel where there is one (:class:`lightning_accel.ops.NativeLibrary`), which draws other numbers than
    torch's formula does.

    Args:
        logits: any shape, floating.
        generator: on the device of ``logits``; by default torch's own.

    Returns:
        Of the shape of ``logits``, float32 (float64 of float64).
    """
    if gibbs_native.serves(logits):
        return gibbs_native.sample_bernoulli(logits, generator)
    return draw_bernoulli(at_least_float32(logits.detach()).sigmoid(), generator)


@torch.no_grad()
def draw_bernoulli(probability: Tensor, generator: Generator | None = None) -> Tensor:
    """Draw 0 or 1, 1 with ``probability``, which is float32 or float64; of its shape and dtype."""
    noise = torch.empty_like(probability).uniform_(generator=generator)
    return torch.lt(noise, probability, out=noise)  # a third of the time of torch.bernoulli


@torch.no_grad()
def sample_categorical(logits: Tensor, generator: Generator | None = None) -> Tensor:
    """Draw one class of each row, by the softmax of ``logits`` (..., C).

    Returns:
        (..., C) one-hot, float32 (float64 of float64).
    """
    logits = at_least_float32(logits)
    noise = torch.empty_like(logits).exponential_(generator=generator).log()
    return F.one_hot((logits - noise).argmax(dim=-1), logits.shape[-1]).to(logits.dtype)


@torch.no_grad()
def sample_normal(mean: Tensor, deviation: Tensor, generator: Generator | None = None) -> Tensor:
    """Draw from normal distributions; float32 (float64 of float64)."""
    mean = at_least_float32(mean)
    return torch.empty_like(mean).normal_(generator=generator).mul_(deviation).add_(mean)


@torch.no_grad()
def sample_truncated_normal(location: Tensor, generator: Generator | None = None) -> Tensor:
    """Draw from the normal distributions of variance 1 around ``location``, given that the draw is not negative.

    By inversion, in float64; so far out that the probability of the tail has no float64 (below -30), the tail is taken
    for exponential, which is 0.1% off there.

    Returns:
        Of the shape of ``location``, float32 (float64 of float64).
    """
    location = at_least_float32(location)
    place = location.double()
    share = torch.empty_like(place).uniform_(generator=generator).neg_().add_(1)  # of the tail, in (0, 1]
    mass = 0.5 * torch.special.erfc(place * -math.sqrt(0.5))  # torch's ndtr is 0 below -8.3
    drawn = place - torch.special.ndtri(share * mass)
    far = share.log() / place
    return torch.where(place < -30, far, drawn).clamp_(min=0).to(location.dtype)


def log_truncated_normal_integral(location: Tensor) -> Tensor:
    """Logarithm of the integral of ``exp(location * h - h**2 / 2)`` over h >= 0, of the shape of ``location``."""
    location = at_least_float32(location)
    inner = location.clamp(min=_TAIL)  # what torch.where drops must be finite, or gradients are NaN
    near = inner.square() / 2 + torch.special.log_ndtr(inner) + 0.5 * math.log(2 * math.pi)
    outer = location.clamp(max=_TAIL)
    return torch.where(location < _TAIL, -(_tail_mean(outer) - outer).log(), near)


def truncated_normal_mean(location: Tensor) -> Tensor:
    """Mean of the normal distribution of variance 1 around ``location``, given that it is not negative."""
    location = at_least_float32(location)
    inner = location.clamp(min=_TAIL)
    near = inner + (-0.5 * (inner.square() + math.log(2 * math.pi)) - torch.special.log_ndtr(inner)).exp()
    return torch.where(location < _TAIL, _tail_mean(location.clamp(max=_TAIL)), near)


_TAIL = -5.0  # below, the formulas of the normal distribution are small differences of large numbers


def _tail_mean(location: Tensor) -> Tensor:
    """``truncated_normal_mean`` below ``_TAIL``: 1 / (y + 2 / (y + 3 / (y + ...))), y = -location.

    Cut off where the rest is below the rounding error: 1e-7 after 8 terms at -5, 1e-13 after 20.

    Source: Abramowitz and Stegun 1964, eq. 26.2.14 (of the integral, 1 / (y + mean)).
    """
    mean = torch.zeros_like(location)
    for term in range(20 if location.dtype == torch.float64 else 8, 0, -1):
        mean = term / (mean - location)
    return mean
