"""Random draws of a Gibbs step, in float32 also under autocast, by a kernel or in few passes of torch.

bfloat16 has 8 significant bits: at p = 1e-6, ``rand_like(p) < p`` would be true 0.2% of the time, and sigmoid(7)
would be 1.
"""

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
