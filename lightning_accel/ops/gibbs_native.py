"""Random draws of a Gibbs step by a kernel: probability, random numbers and comparison in one pass, on all threads.

The random numbers are Philox4x32-10's (Salmon, Moraes, Dror and Shaw 2011, Parallel Random Numbers: As Easy as 1, 2, 3,
https://doi.org/10.1145/2063384.2063405): element i of a tensor uses word i % 4 of counter i // 4, with a key that is
drawn from the generator for each tensor. For the same key, results do not depend on the number of threads or the
device.
"""

import functools

import torch
from torch import Generator, Tensor

from lightning_accel.ops.native import KERNELS, check_one_device
from lightning_accel.ops.native_build import cpu_target


def serves(logits: Tensor) -> bool:
    """Return whether the kernel draws for ``logits``: not for float64, in traced code, or where it would be slower."""
    if type(logits) is not Tensor or logits.dtype == torch.float64 or torch.compiler.is_compiling():
        return False
    return (logits.is_cuda or _has_vectors()) and KERNELS.serves(logits.device)


@functools.cache
def _has_vectors() -> bool:
    return cpu_target() != "DEFAULT"  # without AVX2 it has a quarter of the speed of the formula; others not measured


def sample_bernoulli(logits: Tensor, generator: Generator | None) -> Tensor:
    """Draw 0 or 1, 1 with probability ``sigmoid(logits)``, as a contiguous float32 tensor of the same shape."""
    key = torch.empty(1, dtype=torch.int64, device=logits.device).random_(generator=generator)
    return torch.ops.lightning_accel_native.sample_bernoulli.default(logits.detach().float(), key)


def sample_bernoulli_by_formula(logits: Tensor, key: Tensor) -> Tensor:
    """Compute the kernel's draws for ``logits`` under ``key`` (1,) int64 in torch: slowly, and in float64.

    Results differ from the kernel's only where rounding decides, in one of some million draws.
    """
    index = torch.arange(-(-logits.numel() // 4), device=logits.device)
    counters = torch.stack([index & _LOW, index >> 32, *index.new_zeros(2, len(index))], dim=-1)
    bits = philox(counters, key).flatten()[: logits.numel()].view(logits.shape)
    share = ((bits >> 1).clamp(max=2**31 - 128) + 0.5) / 2**31
    return (share < logits.double().sigmoid()).float()


def philox(counters: Tensor, key: Tensor) -> Tensor:
    """Compute four random words from each counter (N, 4) under ``key`` (1,); words are int64 of which 32 bits count."""
    word = counters.unbind(dim=-1)
    low, high = key & _LOW, key >> 32 & _LOW
    for _ in range(10):
        even, odd = word[0] * 0xD2511F53, word[2] * 0xCD9E8D57  # all 64 bits are used, the sign bit too
        word = (odd >> 32 & _LOW ^ word[1] ^ low, odd & _LOW, even >> 32 & _LOW ^ word[3] ^ high, even & _LOW)
        low, high = low + 0x9E3779B9 & _LOW, high + 0xBB67AE85 & _LOW
    return torch.stack(word, dim=-1)


_LOW = 2**32 - 1


def _fake(logits: Tensor, seed: Tensor) -> Tensor:
    check_one_device(logits=logits, seed=seed)
    return logits.new_empty(logits.shape)


@KERNELS.on_load
def _register() -> None:
    torch.library.register_fake("lightning_accel_native::sample_bernoulli", _fake)
