"""Philox4x32-10 in torch, slowly, to compare kernels with."""

import torch
from torch import Tensor

LOW = 2**32 - 1


def philox(counters: Tensor, key: Tensor) -> Tensor:
    """Compute four random words from each counter (N, 4) under ``key`` (1,); words are int64 of which 32 bits count."""
    word = counters.unbind(dim=-1)
    low, high = key & LOW, key >> 32 & LOW
    for _ in range(10):
        even, odd = word[0] * 0xD2511F53, word[2] * 0xCD9E8D57  # all 64 bits are used, the sign bit too
        word = (odd >> 32 & LOW ^ word[1] ^ low, odd & LOW, even >> 32 & LOW ^ word[3] ^ high, even & LOW)
        low, high = low + 0x9E3779B9 & LOW, high + 0xBB67AE85 & LOW
    return torch.stack(word, dim=-1)


def random_words(n: int, key: Tensor) -> Tensor:
    """Return the first ``n`` words under ``key`` (1,): word i is the (i % 4)th of counter i // 4."""
    index = torch.arange(-(-n // 4), device=key.device)
    counters = torch.stack([index & LOW, index >> 32, *index.new_zeros(2, len(index))], dim=-1)
    return philox(counters, key).flatten()[:n]
