"""Attention by the kernel that replaces torch's: against float64, its masks of dropout, and what it leaves to torch."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_accel.ops.attention import replace_attention, restore_attention
from lightning_accel.ops.native import KERNELS
from tests.ops.philox import random_words

B, H, G, L, S, D, V = 2, 6, 3, 50, 131, 20, 37  # no multiples of blocks or vectors


@pytest.fixture
def replaced(vectors):
    replace_attention()
    yield
    restore_attention()


@pytest.fixture
def calls(monkeypatch):
    """Return a list of the calls that the kernel has served."""
    import lightning_accel.ops.attention as ops

    served, is_served = [], ops._is_served
    monkeypatch.setattr(ops, "_is_served", lambda *args: served.append(is_served(*args)) or served[-1])
    return served


def tensors(dtype=torch.float32, shapes=((B, H, L, D), (B, G, S, D), (B, G, S, V)), seed=0, scale=1.0):
    random = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(b, n, h, d, generator=random).mul(scale).to(dtype).transpose(1, 2) for b, h, n, d in shapes]
    return [x.detach().requires_grad_() for x in drawn]


def formula(query, key, value, mask=None, factors=1.0, causal=False, scale=None):
    """Compute attention as textbooks write it, in float64; ``factors`` multiply the weights."""
    query, key, value = (x.double() for x in (query, key, value))
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    weights = scores.softmax(-1).nan_to_num(0.0)  # of queries without a key
    return (weights * factors) @ value


def with_gradients(out, inputs, seed=9):
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
    return [out.detach(), *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


def assert_as_exact(found, expected, dtype):
    bound = 1e-5 if dtype == torch.float32 else 5e-2
    for name, one, exact in zip(("out", "query", "key", "value"), found, expected, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(
            one.double(), exact.double(), rtol=bound, atol=bound, msg=lambda m, n=name: f"{n}: {m}"
        )


def masks():
    random = torch.Generator().manual_seed(3)
    padding = torch.arange(S) < torch.tensor([100, 131])[:, None]
    bias = torch.randn(1, H, L, S, generator=random)
    holes = torch.rand(L, S, generator=random) < 0.3
    holes[7] = False  # a query without a key
    least = torch.zeros(B, 1, L, S).masked_fill(~padding[:, None, None], torch.finfo(torch.float32).min)
    return {
        "none": {}, "causal": {"is_causal": True}, "scale": {"scale": 0.3},
        "padding": {"attn_mask": padding[:, None, None]}, "bias": {"attn_mask": bias}, "holes": {"attn_mask": holes},
        "least": {"attn_mask": least}, "transposed": {"attn_mask": bias.transpose(2, 3).contiguous().transpose(2, 3)},
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(masks()))
def test_outputs_and_gradients_are_those_of_float64(replaced, calls, name, dtype):
    options = masks()[name]
    if options.get("attn_mask", torch.tensor(True)).dtype == torch.float32:
        options["attn_mask"] = options["attn_mask"].to(dtype)
    inputs = tensors(dtype)
    found = with_gradients(F.scaled_dot_product_attention(*inputs, **options, enable_gqa=True), inputs)
    renamed = {"mask": options.get("attn_mask"), "causal": options.get("is_causal", False)}
    expected = with_gradients(formula(*inputs, **renamed, scale=options.get("scale")), inputs)
    assert calls == [True]
    assert_as_exact(found, expected, dtype)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (3, 300, 1, 16), (1, 1, 300, 64), (2, 128, 129, 33)])
def test_sizes_at_the_borders_of_blocks(replaced, calls, sizes):
    heads, queries, keys, features = sizes
    shapes = [(1, heads, queries, features), (1, heads, keys, features), (1, heads, keys, features)]
    for options in ({}, {"is_causal": True}):
        inputs = tensors(shapes=shapes)
        found = with_gradients(F.scaled_dot_product_attention(*inputs, **options), inputs)
        expected = with_gradients(formula(*inputs, causal=bool(options)), inputs)
        assert_as_exact(found, expected, torch.float32)
    assert calls == [True, True]


def test_large_scores_overflow_nothing_and_what_is_not_finite_stays_so(replaced):
    inputs = tensors(scale=30.0)
    found = with_gradients(F.scaled_dot_product_attention(*inputs, enable_gqa=True), inputs)
    expected = with_gradients(formula(*inputs), inputs)
    torch.testing.assert_close(found[0].double(), expected[0], rtol=0, atol=0.03)  # of values of 30
    for broken in (math.nan, math.inf):
        query, key, value = tensors()
        with torch.no_grad():
            query[0, 0, 5] = broken
        out = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        assert out[0, 0, 5].isnan().all()
        assert out.isnan().sum() == V


def kept_factors(seed, p):
    """Return the factors (B, H, L, S) of the weights: 0, or 1 divided by the share that is kept."""
    torch.manual_seed(seed)
    key = torch.empty(1, dtype=torch.int64).random_()
    tiles, pairs = -(-S // 128), -(-L // 2)
    words = random_words(B * H * pairs * tiles * 128, key).view(B, H, pairs, tiles * 128)[..., :S]
    bits = torch.stack([words & 0xFFFF, words >> 16], dim=3).flatten(2, 3)[:, :, :L]
    share = round((1 - p) * 2**16)
    return (bits < share).double() * (2**16 / share)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_dropout_is_the_formulas_and_seeds_decide(replaced, dtype, causal):
    inputs = tensors(dtype)

    def run(seed):
        torch.manual_seed(seed)
        return with_gradients(
            F.scaled_dot_product_attention(*inputs, dropout_p=0.3, is_causal=causal, enable_gqa=True), inputs
        )

    found = run(5)
    expected = with_gradients(formula(*inputs, causal=causal, factors=kept_factors(5, 0.3)), inputs)
    assert_as_exact(found, expected, dtype)
    assert not torch.equal(run(6)[0], found[0])
    try:
        torch.set_num_threads(2)
        assert all(torch.equal(one, other) for one, other in zip(run(5), found, strict=True))
    finally:
        torch.set_num_threads(1)


def test_layers_autocast_and_checkpoints_are_served(replaced, calls):
    layer = nn.TransformerEncoderLayer(24, 4, 40, dropout=0.2, batch_first=True)
    x = torch.randn(3, 17, 24, requires_grad=True)

    def gradients(call):
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            loss = call(x).float().square().mean()
        return [loss.detach(), *torch.autograd.grad(loss, [x, *layer.parameters()])]

    plain = gradients(layer)
    again = gradients(lambda x: checkpoint(layer, x, use_reentrant=False))
    assert calls == [True, True, True]
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))


@pytest.fixture
def exported():
    """Let torch's compiler find torch's own kernel, once for each operation."""
    torch.export.export(nn.TransformerEncoderLayer(4, 2, 4), (torch.ones(3, 2, 4),))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning")  # of torch's own code
def test_compiled_layers_are_served(exported, replaced, compiler):
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    layer = nn.TransformerEncoderLayer(24, 4, 40, dropout=0.0, batch_first=True)
    x = torch.randn(3, 17, 24, requires_grad=True)
    plain = with_gradients(layer(x), [x])
    targets = []

    def record(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    compiled = with_gradients(torch.compile(layer, backend=aot_autograd(fw_compiler=record))(x), [x])
    kernel = "lightning_accel_native.attention"
    assert {f"{kernel}.default", f"{kernel}_backward.default"} <= set(targets)
    for one, other in zip(compiled, plain, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning")  # of torch's own code
def test_exported_programs_have_no_kernel(replaced):
    layer = nn.TransformerEncoderLayer(24, 4, 40, dropout=0.0, batch_first=True)
    x = torch.randn(3, 17, 24)
    program = torch.export.export(layer, (x,))
    for graph in (program.graph, program.run_decompositions().graph):
        assert "scaled_dot_product" in str(graph) or "softmax" in str(graph)
        assert "lightning_accel" not in str(graph)


def test_operations_are_counted_as_torchs(replaced):
    def count():
        inputs = tensors(shapes=((B, H, L, D), (B, H, S, D), (B, H, S, V)))
        with FlopCounterMode(display=False) as counter:
            F.scaled_dot_product_attention(*inputs).sum().backward()
        return counter.get_total_flops()

    native = count()
    with sdpa_kernel(SDPBackend.MATH), KERNELS.switched_off():
        assert native == count() + 2 * B * H * L * S * D  # scores that are computed again


def test_other_calls_are_torchs(replaced, calls):
    query, key, value = tensors()
    attend = F.scaled_dot_product_attention
    with torch.no_grad():
        attend(query, key, value, enable_gqa=True)
    whole = [x.detach().double().requires_grad_() for x in (query, key, value)]
    assert attend(*whole, enable_gqa=True).dtype == torch.float64
    bias = torch.zeros(L, S, requires_grad=True)
    attend(query, key, value, attn_mask=bias, enable_gqa=True).sum().backward()
    assert bias.grad is not None
    attend(query[0, :3], key[0], value[0]).sum().backward()
    assert calls == [False] * 4
    for bad, options in (((query, key, value), {}), ((query, key[..., :5], value), {"enable_gqa": True})):
        with pytest.raises(RuntimeError, match=r"(?s)size|shape"):
            attend(*bad, **options)
    with pytest.raises(RuntimeError, match="is_causal"):
        attend(query, key, value, torch.zeros(L, S), is_causal=True, enable_gqa=True)
    with pytest.raises((RuntimeError, ValueError), match="dropout"):
        attend(query, key, value, dropout_p=1.5, enable_gqa=True)


def test_second_derivatives_are_refused(replaced):
    inputs = tensors()
    out = F.scaled_dot_product_attention(*inputs, enable_gqa=True)
    with pytest.raises(RuntimeError, match=r"first derivatives alone.*another attention of Speedups"):
        torch.autograd.grad(out.sum(), inputs, create_graph=True)


def test_the_last_user_restores_torchs(vectors, calls):
    replace_attention()
    replace_attention()
    restore_attention()
    F.scaled_dot_product_attention(*tensors(), enable_gqa=True)
    assert calls == [True]
    restore_attention()
    F.scaled_dot_product_attention(*tensors(), enable_gqa=True)
    assert calls == [True]
