"""Layers of a decoder-only transformer. Shapes: B samples, T tokens, D features, M heads, F features per head."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_accel.nn.features import require_floating, require_width
from lightning_accel.nn.moe.gating import GateReport
from lightning_accel.nn.moe.layer import MixtureOfExperts


class KeyValueCache:
    """Store the keys and values (B, M, up to ``max_length``, F) of previous tokens for one attention layer."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0
        self._stored: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens, (B, M, T, F) each; return those of all tokens."""
        if self._stored is None:
            batch, heads, _, features = keys.shape
            self._stored = keys.new_empty(2, batch, heads, self.max_length, features)
        stop = self.length + keys.shape[2]
        if stop > self.max_length:
            raise ValueError(f"the cache holds {self.max_length} tokens; {stop} were given")
        self._stored[0, :, :, self.length : stop] = keys
        self._stored[1, :, :, self.length : stop] = values
        self.length = stop
        return self._stored[0, :, :, :stop], self._stored[1, :, :, :stop]


class CausalSelfAttention(nn.Module):
    """Attend from each token to itself and the previous tokens, with rotary position embeddings.

    ``query_key_value.weight`` holds the rows of the first head's queries, keys and values, then those of the second,
    and so on, so that contiguous rows are whole heads. If its rows and the columns of ``out`` are sharded over devices,
    each device computes its own heads (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3).

    Rotary positions: Su et al. 2021, https://arxiv.org/abs/2104.09864, eq. 34, feature i paired with i + F / 2.

    Args:
        dim: D.
        num_heads: M; D / M must be even.

    Raises:
        ValueError: if D / M is not a whole even number.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        if num_heads < 1 or dim % (2 * num_heads):
            raise ValueError(f"dim must be an even multiple of num_heads; got dim={dim}, num_heads={num_heads}")
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.query_key_value = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Map ``x`` (B, T, D) to the same shape; with a ``cache``, ``x`` continues the tokens that it holds."""
        width = getattr(self.query_key_value, "in_features", -1)  # a user may replace it
        require_width(self, x, "dim", width, "x (B, T, {})", ndim=3)
        require_floating(self, x, "x", self.query_key_value.parameters(recurse=False))
        heads = self.query_key_value(x).unflatten(-1, (-1, 3, self.head_dim))  # (B, T, M, 3, F); M of this device
        heads = heads.permute(3, 0, 2, 1, 4)  # (3, B, M, T, F)
        start = 0 if cache is None else cache.length
        positions = start + torch.arange(x.shape[1], device=x.device)
        turned, values = heads.split((2, 1))  # not slices, each of whose gradients is filled up with zeros
        (queries, keys), values = rotate(turned, positions).unbind(), values.squeeze(0)
        mask = None
        if cache is not None:
            keys, values = cache.append(keys, values)
            # the last token sees all, but the empty places of a cache of another class
            sees_all = type(cache) is KeyValueCache and not torch.compiler.is_compiling() and x.shape[1] == 1
            if not sees_all:
                mask = torch.arange(keys.shape[2], device=x.device) <= positions.unsqueeze(1)  # (T, all)
        mixed = F.scaled_dot_product_attention(queries, keys, values, mask, is_causal=cache is None)
        return self.out(mixed.transpose(1, 2).flatten(2))


def rotate(x: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotate pairs of features of ``x`` (..., T, F) by angles proportional to ``positions`` (T,)."""
    half = x.shape[-1] // 2
    # float32 whatever the dtype of x: bf16 cannot distinguish positions 256 and 257
    frequency = base ** -(torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions.unsqueeze(1) * frequency  # (T, F / 2)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class BlockOutput(NamedTuple):
    """Hold the features, and the report of the gate if the block has a mixture of experts."""

    features: Tensor  # (B, T, D)
    report: GateReport | None


class TransformerBlock(nn.Module):
    """Apply attention and a feed-forward layer, each with RMSNorm before it and a residual connection.

    Args:
        dim: D.
        num_heads: M.
        feed_forward: module that maps (B, T, D) to the same shape; or a :class:`~lightning_accel.nn.MixtureOfExperts`.
        dropout: dropout probability of the output of each of the two layers.
    """

    def __init__(self, dim: int, num_heads: int, feed_forward: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = CausalSelfAttention(dim, num_heads)
        self.feed_forward_norm = nn.RMSNorm(dim)
        self.feed_forward = feed_forward
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> BlockOutput:
        """Map ``x`` (B, T, D) to the same shape; for ``cache`` see :class:`CausalSelfAttention`."""
        width = getattr(self.attention_norm, "normalized_shape", (-1,))[-1]  # a user may replace it
        require_width(self, x, "dim", width, "x (B, T, {})", ndim=3)
        require_floating(self, x, "x")
        x = x + self.dropout(self.attention(self.attention_norm(x), cache))
        out, report = self.feed_forward(self.feed_forward_norm(x)), None
        if isinstance(self.feed_forward, MixtureOfExperts):
            out, report = out
        return BlockOutput(x + self.dropout(out), report)
