"""Layers of a decoder-only transformer. Shapes: B samples, T tokens, S tokens with those of a cache, D features.

Further: M heads of queries, G heads of keys and values, F features per head.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_accel.nn.features import require_floating, require_width
from lightning_accel.nn.moe.gating import GateReport
from lightning_accel.nn.moe.layer import MixtureOfExperts


class KeyValueCache:
    """Store the keys and values (B, G, up to ``max_length``, F) of previous tokens for one attention layer."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0
        self.documents: Tensor | None = None  # (B, length), the number of each token's document, where they are apart
        self._stored: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens, (B, G, T, F) each; return those of all tokens."""
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

    Adjacent heads of queries may share one head of keys and values, so that a cache holds G / M of the numbers
    (grouped-query attention, Ainslie et al. 2023, https://arxiv.org/abs/2305.13245).

    ``query_key_value.weight`` holds the rows of the queries that share the first head of keys and values, then those of
    its keys and its values, then those of the second, and so on. If its rows and the columns of ``out`` are sharded
    over devices, each device computes its own heads (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3).

    Rotary positions: Su et al. 2021, https://arxiv.org/abs/2104.09864, eq. 34, feature i paired with i + F / 2.

    Args:
        dim: D, the number of features of a token.
        num_heads: M; D / M must be even.
        num_key_value_heads: G, which divides M; by default M.

    Raises:
        ValueError: if D / M is not a whole even number, or M / G not a whole one.
    """

    def __init__(self, dim: int, num_heads: int, num_key_value_heads: int | None = None) -> None:
        super().__init__()
        if num_heads < 1 or dim % (2 * num_heads):
            raise ValueError(f"dim must be an even multiple of num_heads; got dim={dim}, num_heads={num_heads}")
        groups = num_heads if num_key_value_heads is None else num_key_value_heads
        if groups < 1 or num_heads % groups:
            raise ValueError(f"num_key_value_heads must divide num_heads; got {groups} and {num_heads}")
        self.num_heads = num_heads
        self.num_key_value_heads = groups
        self.head_dim = dim // num_heads
        self.queries_per_key = num_heads // groups
        self.query_key_value = nn.Linear(dim, (num_heads + 2 * groups) * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    if TYPE_CHECKING:  # Any, as torch declares it

        def __call__(self, x: Tensor, cache: KeyValueCache | None = None, visible: Tensor | None = None) -> Tensor: ...

    def forward(self, x: Tensor, cache: KeyValueCache | None = None, visible: Tensor | None = None) -> Tensor:
        """Mix each token with those that it sees.

        Args:
            x: (B, T, D) features of the tokens.
            cache: holds the tokens that ``x`` continues.
            visible: tokens of the cache and of ``x`` that each one of ``x`` sees, (B, 1, T, S) bool; by default itself
                and all before it.

        Returns:
            (B, T, D).
        """
        width = getattr(self.query_key_value, "in_features", -1)  # a user may replace it
        require_width(self, x, "dim", width, "x (B, T, {})", ndim=3)
        require_floating(self, x, "x", self.query_key_value.parameters(recurse=False))
        start = 0 if cache is None else cache.length
        positions = start + torch.arange(x.shape[1], device=x.device)
        queries, keys, values = self._heads(x, positions)
        if cache is not None:
            keys, values = cache.append(keys, values)
            # the last token sees all, but the empty places of a cache of another class
            sees_all = type(cache) is KeyValueCache and not torch.compiler.is_compiling() and x.shape[1] == 1
            if visible is None and not sees_all:
                visible = torch.arange(keys.shape[2], device=x.device) <= positions.unsqueeze(1)  # (T, S)
        is_causal = cache is None and visible is None
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, visible, is_causal=is_causal, enable_gqa=self.queries_per_key > 1
        )
        return self.out(mixed.transpose(1, 2).flatten(2))

    def after_removal(self) -> None:
        """Count the heads that are left, see :func:`~lightning_accel.compress.apply_plan_`."""
        rows = self.query_key_value.weight.shape[0] // self.head_dim
        self.num_key_value_heads = rows // (self.queries_per_key + 2)
        self.num_heads = self.num_key_value_heads * self.queries_per_key

    def _heads(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, M, T, F), keys and values (B, G, T, F); of tensors sharded by heads, those of a device."""
        # Not slices, each of whose gradients is filled up with zeros
        if self.queries_per_key == 1:
            heads = self.query_key_value(x).unflatten(-1, (-1, 3, self.head_dim))  # (B, T, M, 3, F)
            turned, values = heads.permute(3, 0, 2, 1, 4).split((2, 1))
            queries, keys = rotate(turned, positions).unbind()
            return queries, keys, values.squeeze(0)
        sizes = self.queries_per_key + 1, 1
        heads = self.query_key_value(x).unflatten(-1, (-1, sum(sizes), self.head_dim))  # (B, T, G, M / G + 2, F)
        turned, values = heads.permute(0, 2, 3, 1, 4).split(sizes, dim=2)
        queries, keys = rotate(turned, positions).split((self.queries_per_key, 1), dim=2)
        return queries.flatten(1, 2), keys.squeeze(2), values.squeeze(2)


def visible_tokens(documents: Tensor, num_new: int) -> Tensor:
    """Return which tokens each of the last ones sees, if it sees only earlier ones of its document and itself.

    Args:
        documents: number of the document of each token, (B, S) int64.
        num_new: T, how many tokens look.

    Returns:
        (B, 1, T, S) bool.
    """
    place = torch.arange(documents.shape[1], device=documents.device)
    start = documents.shape[1] - num_new
    same = documents[:, start:].unsqueeze(2) == documents.unsqueeze(1)
    return (same & (place <= place[start:].unsqueeze(1))).unsqueeze(1)


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
        dim: D, the number of features of a token.
        num_heads: M, the number of heads.
        feed_forward: module that maps (B, T, D) to the same shape; or a :class:`~lightning_accel.MixtureOfExperts`.
        dropout: dropout probability of the output of each of the two layers.
        num_key_value_heads: G, see :class:`CausalSelfAttention`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        feed_forward: nn.Module,
        dropout: float = 0.0,
        num_key_value_heads: int | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = CausalSelfAttention(dim, num_heads, num_key_value_heads)
        self.feed_forward_norm = nn.RMSNorm(dim)
        self.feed_forward = feed_forward
        self.dropout = nn.Dropout(dropout)

    if TYPE_CHECKING:  # Any, as torch declares it

        def __call__(
            self, x: Tensor, cache: KeyValueCache | None = None, visible: Tensor | None = None
        ) -> BlockOutput: ...

    def forward(self, x: Tensor, cache: KeyValueCache | None = None, visible: Tensor | None = None) -> BlockOutput:
        """Map ``x`` (B, T, D) to the same shape; for ``cache`` and ``visible`` see :class:`CausalSelfAttention`."""
        width = getattr(self.attention_norm, "normalized_shape", (-1,))[-1]  # a user may replace it
        require_width(self, x, "dim", width, "x (B, T, {})", ndim=3)
        require_floating(self, x, "x")
        x = x + self.dropout(self.attention(self.attention_norm(x), cache, visible))
        out, report = self.feed_forward(self.feed_forward_norm(x)), None
        if isinstance(self.feed_forward, MixtureOfExperts):
            out, report = out
        return BlockOutput(x + self.dropout(out), report)
