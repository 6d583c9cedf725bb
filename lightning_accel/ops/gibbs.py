"""Random draws of a Gibbs step, in float32 also under autocast, by a kernel or in few passes of torch.

bfloat16 has 8 significant bits: at p = 1e-6, ``rand_like(p) < p`` would be true 0.2% of the time, and sigmoid(7)
would be 1.

The kernel computes probability, random numbers and comparison in one pass, on all threads. Its random numbers are
Philox4x32-10's (Salmon, Moraes, Dror and Shaw 2011, Parallel Random Numbers: As Easy as 1, 2, 3,
https://doi.org/10.1145/2063384.2063405): element i of a tensor uses word i % 4 of counter i // 4, with a key that is
drawn from the generator for each tensor. For the same key, results do not depend on the number of threads or the
device.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from lightning_accel.ops.float32 import at_least_float32
from lightning_accel.ops.native import KERNELS, check_one_device
from lightning_accel.ops.native_build import cpu_target


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
    if kernel_serves(logits):
        key = torch.empty(1, dtype=torch.int64, device=logits.device).random_(generator=generator)
        return torch.ops.lightning_accel_native.sample_bernoulli.default(logits.detach().float(), key)
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


def kernel_serves(logits: Tensor) -> bool:
    """Return whether the kernel draws for ``logits``: not for float64, in traced code, or where it would be slower."""
    if type(logits) is not Tensor or logits.dtype == torch.float64 or torch.compiler.is_compiling():
        return False
    return (logits.is_cuda or _has_vectors()) and KERNELS.serves(logits.device)


@functools.cache
def _has_vectors() -> bool:
    return cpu_target() != "DEFAULT"  # without AVX2 it has a quarter of the speed of the formula; others not measured


def _fake(logits: Tensor, seed: Tensor) -> Tensor:
    check_one_device(logits=logits, seed=seed)
    return logits.new_empty(logits.shape)


@KERNELS.on_load
def _register() -> None:
    torch.library.register_fake("lightning_accel_native::sample_bernoulli", _fake)
