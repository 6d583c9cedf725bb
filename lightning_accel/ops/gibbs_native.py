"""Draws of a Gibbs step by a kernel: probability, random numbers and comparison in one pass, on all threads.

The random numbers are Philox4x32-10's (Salmon, Moraes, Dror and Shaw 2011, Parallel Random Numbers: As Easy as 1, 2, 3,
https://doi.org/10.1145/2063384.2063405): element i of a tensor has word i % 4 of counter i // 4, under a key that is
drawn from the generator for each tensor. So neither threads nor devices change a draw that has the same key.
"""

import functools

import torch
from torch import Generator, Tensor

from lightning_accel.ops.devices import check_one_device
from lightning_accel.ops.native import KERNELS
from lightning_accel.ops.native_build import cpu_target


def serves(logits: Tensor) -> bool:
    """Whether :func:`sample_bernoulli` takes them; not in float64, in traced code, nor where it would be slower."""
    if type(logits) is not Tensor or logits.dtype == torch.float64 or torch.compiler.is_compiling():
        return False
    return (logits.is_cuda or _has_vectors()) and KERNELS.serves(logits.device)


@functools.cache
def _has_vectors() -> bool:
    return cpu_target() != "DEFAULT"  # a quarter of the speed of torch's formula without AVX2; not tried elsewhere


def sample_bernoulli(logits: Tensor, generator: Generator | None) -> Tensor:
    """Draw 0 or 1, 1 with probability ``sigmoid(logits)``; of their shape, contiguous, float32."""
    key = torch.empty(1, dtype=torch.int64, device=logits.device).random_(generator=generator)
    return torch.ops.lightning_accel_native.sample_bernoulli.default(logits.detach().float(), key)


def sample_bernoulli_by_formula(logits: Tensor, key: Tensor) -> Tensor:
    """What the kernel draws of ``logits`` under ``key`` (1,) int64: slowly, and in float64.

    It differs where rounding decides, of one in some million draws.
    """
    index = torch.arange(-(-logits.numel() // 4), device=logits.device)
    counters = torch.stack([index & _LOW, index >> 32, *index.new_zeros(2, len(index))], dim=-1)
    bits = philox(counters, key).flatten()[: logits.numel()].view(logits.shape)
    share = ((bits >> 1).clamp(max=2**31 - 128) + 0.5) / 2**31
    return (share < logits.double().sigmoid()).float()


def philox(counters: Tensor, key: Tensor) -> Tensor:
    """Four random words of each of ``counters``, (N, 4) int64 words of 32 bits like them, under ``key`` (1,) int64."""
    word = counters.unbind(dim=-1)
    low, high = key & _LOW, key >> 32 & _LOW
    for _ in range(10):
        even, odd = word[0] * 0xD2511F53, word[2] * 0xCD9E8D57  # of 64 bits, the sign bit among them
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
