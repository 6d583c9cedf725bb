"""Stochastic rounding from float32 to bfloat16, which is unbiased."""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_LOW_BITS = 16  # number of low bits of a float32 that a bfloat16 lacks


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round ``values``, float32 of any shape, at random to one of the two nearest bfloat16 numbers.

    The probability of each is proportional to its proximity, so that the expected value is the input (Gupta et al.
    2015, https://arxiv.org/abs/1502.02551, section 2). inf and NaN stay unchanged.

    >>> generator = torch.Generator().manual_seed(0)
    >>> rounded = round_stochastically(torch.full((1000,), 1 + 2**-9), generator)  # a quarter of a step above 1
    >>> rounded.unique(), rounded.float().mean() - 1 < 2**-8
    (tensor([1.0000, 1.0078], dtype=torch.bfloat16), tensor(True))
    """
    bits = values.contiguous().view(torch.int32)
    # the low bits carry into the high ones with a probability in proportion to their value, whatever the sign
    rounded = _random_low_bits(bits, generator).add_(bits).bitwise_and_(-(1 << _LOW_BITS)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def _random_low_bits(like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw integers in [0, 2**16), int32, in the shape of ``like``."""
    # four numbers from each 64-bit draw, which takes as long as drawing one number
    draws = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
    draws.random_(-(2**63), None, generator=generator)
    low = draws.view(torch.int16)[: like.numel()].view(like.shape)
    return low.to(torch.int32).bitwise_and_((1 << _LOW_BITS) - 1)


class RoundingNoise:
    """Round parameters stochastically with random numbers that depend only on seed, step, parameter and shard.

    Replicas of a tensor on different ranks are therefore rounded equally, and its shards independently, whatever a rank
    has drawn before.

    Args:
        seed: any integer, the same on all ranks.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.steps = 0

    def round_(self, values: Tensor, index: int) -> None:
        """Round the local shard of ``values``, float32, of parameter number ``index`` to bfloat16 values, in place."""
        local = values.to_local() if isinstance(values, DTensor) else values
        key = repr((self.seed, self.steps, index, _shard_coordinates(values)))
        generator = torch.Generator(local.device).manual_seed(zlib.crc32(key.encode()))
        local.copy_(round_stochastically(local, generator))


def _shard_coordinates(values: Tensor) -> list[int]:
    if not isinstance(values, DTensor):
        return []
    coordinates: Sequence[int] = values.device_mesh.get_coordinate() or []
    return [c for c, placement in zip(coordinates, values.placements, strict=True) if not placement.is_replicate()]
