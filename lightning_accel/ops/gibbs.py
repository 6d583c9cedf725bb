"""Random draws of a Gibbs step, in float32 also under autocast, by a kernel or in few passes of torch.

bfloat16 has 8 significant bits: at p = 1e-6, ``rand_like(p) < p`` would be true 0.2% of the time, and sigmoid(7)
would be 1.
"""

import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from lightning_accel.ops import gibbs_native
from lightning_accel.ops.float32 import at_least_float32


def sample_bernoulli(logits: Tensor, generator: Generator | None = None) -> Tensor:
    """Draw 0 or 1, 1 with probability ``sigmoid(logits)``.

    A native kernel is used where one is available (:class:`lightning_accel.ops.NativeLibrary`); it draws other numbers
    than the formula in torch.

    Args:
        logits: any shape, floating.
        generator: random number generator on the device of ``logits``; torch's global one by default.

    Returns:
        Tensor of the shape of ``logits``, float32 (float64 for float64).
    """
    if gibbs_native.serves(logits):
        return gibbs_native.sample_bernoulli(logits, generator)
    return draw_bernoulli(at_least_float32(logits.detach()).sigmoid(), generator)


@torch.no_grad()
def draw_bernoulli(probability: Tensor, generator: Generator | None = None) -> Tensor:
    """Draw 0 or 1, 1 with ``probability`` (float32 or float64), in its shape and dtype."""
    noise = torch.empty_like(probability).uniform_(generator=generator)
    return torch.lt(noise, probability, out=noise)  # a third of the time of torch.bernoulli


@torch.no_grad()
def sample_categorical(logits: Tensor, generator: Generator | None = None) -> Tensor:
    """Draw one class per distribution ``softmax(logits)``, with logits (..., C).

    Returns:
        (..., C) one-hot, float32 (float64 for float64).
    """
    logits = at_least_float32(logits)
    noise = torch.empty_like(logits).exponential_(generator=generator).log()
    return F.one_hot((logits - noise).argmax(dim=-1), logits.shape[-1]).to(logits.dtype)


@torch.no_grad()
def sample_normal(mean: Tensor, deviation: Tensor, generator: Generator | None = None) -> Tensor:
    """Draw from normal distributions, in float32 (float64 for float64)."""
    mean = at_least_float32(mean)
    return torch.empty_like(mean).normal_(generator=generator).mul_(deviation).add_(mean)


@torch.no_grad()
def sample_truncated_normal(location: Tensor, generator: Generator | None = None) -> Tensor:
    """Draw from normal distributions with mean ``location`` and variance 1, truncated to non-negative values.

    The cumulative distribution is inverted in float64. Below -30, where the probability of the tail underflows, the
    tail is approximated by an exponential distribution, with an error of 0.1%.

    Returns:
        Tensor of the shape of ``location``, float32 (float64 for float64).
    """
    location = at_least_float32(location)
    place = location.double()
    share = torch.empty_like(place).uniform_(generator=generator).neg_().add_(1)  # quantile of the tail, in (0, 1]
    mass = 0.5 * torch.special.erfc(place * -math.sqrt(0.5))  # torch's ndtr is 0 below -8.3
    drawn = place - torch.special.ndtri(share * mass)
    far = share.log() / place
    return torch.where(place < -30, far, drawn).clamp_(min=0).to(location.dtype)


def log_truncated_normal_integral(location: Tensor) -> Tensor:
    """Compute the logarithm of the integral of ``exp(location * h - h**2 / 2)`` over h >= 0, elementwise."""
    location = at_least_float32(location)
    inner = location.clamp(min=_TAIL)  # values that torch.where discards must be finite, or gradients are NaN
    near = inner.square() / 2 + torch.special.log_ndtr(inner) + 0.5 * math.log(2 * math.pi)
    outer = location.clamp(max=_TAIL)
    return torch.where(location < _TAIL, -(_tail_mean(outer) - outer).log(), near)


def truncated_normal_mean(location: Tensor) -> Tensor:
    """Compute the mean of a normal distribution with mean ``location`` and variance 1, truncated to values >= 0."""
    location = at_least_float32(location)
    inner = location.clamp(min=_TAIL)
    near = inner + (-0.5 * (inner.square() + math.log(2 * math.pi)) - torch.special.log_ndtr(inner)).exp()
    return torch.where(location < _TAIL, _tail_mean(location.clamp(max=_TAIL)), near)


_TAIL = -5.0  # below, the formulas of the normal distribution lose precision by cancellation


def _tail_mean(location: Tensor) -> Tensor:
    """Compute ``truncated_normal_mean`` below ``_TAIL`` by 1 / (y + 2 / (y + 3 / (y + ...))), y = -location.

    The continued fraction is truncated where the rest is below the rounding error: at -5, 1e-7 after 8 terms and 1e-13
    after 20.

    Source: Abramowitz and Stegun 1964, eq. 26.2.14 (for the integral, 1 / (y + mean)).
    """
    mean = torch.zeros_like(location)
    for term in range(20 if location.dtype == torch.float64 else 8, 0, -1):
        mean = term / (mean - location)
    return mean
