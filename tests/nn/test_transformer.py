import pytest
import torch
from torch import nn

from lightning_accel.nn import CausalSelfAttention, FeedForward, KeyValueCache, MixtureOfExperts, TransformerBlock
from lightning_accel.nn.transformer import rotate


def attention_by_loops(layer, x):
    """Head by head and token by token, rotations as complex numbers."""
    batch, length, dim = x.shape
    size = dim // layer.num_heads
    heads = (x @ layer.query_key_value.weight.T).split(size, dim=-1)  # of each head its queries, keys and values
    queries, keys, values = (torch.cat(heads[part::3], dim=-1) for part in range(3))
    angles = torch.arange(length).unsqueeze(1) * 10_000.0 ** -(torch.arange(size // 2) * 2 / size)
    turn = torch.polar(torch.ones_like(angles).double(), angles.double())

    def turned(part):
        turning = torch.complex(part[:, : size // 2], part[:, size // 2 :]) * turn
        return torch.cat([turning.real, turning.imag], dim=1)

    out = torch.empty_like(x)
    for b in range(batch):
        for h in range(layer.num_heads):
            at = slice(h * size, (h + 1) * size)
            q, k, v = turned(queries[b, :, at]), turned(keys[b, :, at]), values[b, :, at]
            for t in range(length):
                weights = (q[t] @ k[: t + 1].T / size**0.5).softmax(dim=0)
                out[b, t, at] = weights @ v[: t + 1]
    return out @ layer.out.weight.T


def test_attention_matches_loops():
    layer, x = CausalSelfAttention(12, 3).double(), torch.randn(2, 5, 12, dtype=torch.float64)
    torch.testing.assert_close(layer(x), attention_by_loops(layer, x), rtol=1e-6, atol=1e-6)  # angles are float32


@pytest.mark.parametrize("num_key_value_heads", [1, 2])
def test_shared_heads_are_those_of_full_attention_that_repeats_them(num_key_value_heads):
    shared, full = CausalSelfAttention(24, 6, num_key_value_heads), CausalSelfAttention(24, 6)
    parts = shared.query_key_value.weight.detach().unflatten(0, (num_key_value_heads, -1, 4))
    heads = [
        torch.cat(
            [
                parts[h * num_key_value_heads // 6, h % (6 // num_key_value_heads)],
                *parts[h * num_key_value_heads // 6, -2:],
            ]
        )
        for h in range(6)
    ]
    full.query_key_value.weight.data, full.out.weight.data = torch.cat(heads), shared.out.weight.data
    x = torch.randn(2, 5, 24)
    torch.testing.assert_close(shared(x), full(x))
    cache = KeyValueCache(5)
    out = torch.cat([shared(piece, cache) for piece in x.split([2, 1, 2], dim=1)], dim=1)
    torch.testing.assert_close(out, full(x))
    assert cache.append(*torch.empty(2, 2, num_key_value_heads, 0, 4))[0].shape == (2, num_key_value_heads, 5, 4)


def test_heads_that_do_not_share_evenly_are_refused():
    with pytest.raises(ValueError, match="num_key_value_heads must divide num_heads; got 4 and 6"):
        CausalSelfAttention(24, 6, 4)


def test_rotation_depends_on_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    scores = [
        (rotate(q, torch.tensor([i]), 100.0) * rotate(k, torch.tensor([j]), 100.0)).sum() for i, j in ((7, 3), (15, 11))
    ]
    torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-6)


def test_positions_are_told_apart_in_bf16():
    x, far = torch.randn(1, 1, 2, 8), torch.tensor([1000, 1001])
    expected = rotate(x.bfloat16().float(), far, 100.0)
    torch.testing.assert_close(rotate(x.bfloat16(), far, 100.0).float(), expected, rtol=0, atol=0.03)


def test_dropout_drops_of_both_that_are_added():
    block, x = TransformerBlock(12, 3, FeedForward(12, 5), dropout=1.0), torch.randn(2, 5, 12)
    torch.testing.assert_close(block(x).features, x)


@pytest.mark.parametrize("pieces", [[7], [1] * 7, [2, 1, 4]], ids=str)
def test_cache_gives_what_the_whole_sequence_gives(pieces):
    layer, x = CausalSelfAttention(12, 3), torch.randn(2, 7, 12)
    cache = KeyValueCache(7)
    out = torch.cat([layer(piece, cache) for piece in x.split(pieces, dim=1)], dim=1)
    torch.testing.assert_close(out, layer(x))
    with pytest.raises(ValueError, match="the cache holds 7 tokens; 8 were given"):
        layer(x[:, :1], cache)


@pytest.mark.parametrize("mixture", [False, True])
def test_block_matches_its_formula(mixture):
    layer = MixtureOfExperts(12, 5, 3) if mixture else FeedForward(12, 5)
    block, x = TransformerBlock(12, 3, layer), torch.randn(2, 5, 12)
    nn.init.uniform_(block.attention_norm.weight)
    normed = x / (x.square().mean(dim=-1, keepdim=True) + torch.finfo().eps).sqrt() * block.attention_norm.weight
    x_mid = x + block.attention(normed)
    out = layer(block.feed_forward_norm(x_mid))
    features, report = block(x)
    torch.testing.assert_close(features, x_mid + (out.features if mixture else out))
    assert (report is not None) == mixture


@pytest.mark.parametrize(("dim", "num_heads"), [(12, 0), (12, 5), (12, 4)])
def test_heads_of_odd_width_are_refused(dim, num_heads):
    with pytest.raises(ValueError, match=f"even multiple of num_heads; got dim={dim}, num_heads={num_heads}"):
        CausalSelfAttention(dim, num_heads)
