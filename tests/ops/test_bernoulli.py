"""Masks by the kernel that replaces torch's: their words, their distribution, and who else may be disturbed."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import nn

from lightning_accel.ops.bernoulli import replace_bernoulli, restore_bernoulli
from lightning_accel.ops.native import KERNELS
from tests.ops.philox import random_words

N = 5_003  # no multiple of what the kernel draws at a time
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool]


@pytest.fixture
def replaced(vectors):
    replace_bernoulli()
    yield
    restore_bernoulli()


def draw(p=0.3, shape=N, seed=0, dtype=torch.float32, generator=None):
    if generator is None:
        torch.manual_seed(seed)
    return torch.empty(shape, dtype=dtype).bernoulli_(p, generator=generator)


def by_formula(p, n, key):
    return random_words(n, key) < round(p * 2**32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1024, 1025, 1151, 70_001])
def test_masks_are_the_formulas_under_a_key_of_the_generator(replaced, dtype, n):
    key = torch.empty(1, dtype=torch.int64).random_(generator=torch.Generator().manual_seed(4))
    mask = draw(0.7, n, dtype=dtype, generator=torch.Generator().manual_seed(4))
    assert torch.equal(mask, by_formula(0.7, n, key).to(dtype))
    assert torch.equal(draw(0.7, n, seed=4, dtype=dtype), mask)  # of the default generator


@pytest.mark.parametrize("p", [0.0, 1.0, 1e-12, 1 - 1e-12])
def test_certain_masks(replaced, p):
    assert draw(p, 100_000).unique().tolist() == [round(p)]


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_other_probabilities_are_torchs_error(replaced, p):
    with pytest.raises(RuntimeError, match=r"expects p to be in \[0, 1\]"):
        draw(p)


@pytest.mark.parametrize("p", [1e-6, 1e-3, 0.1, 0.5, 0.9, 1 - 1e-6])
def test_frequencies_are_binomial(replaced, p):
    n = 10_000_000
    ones = int(draw(p, n, seed=2, dtype=torch.bool).sum())
    assert stats.binomtest(ones, n, p).pvalue > 1e-3


def test_counts_of_places_and_of_masks_are_binomial(replaced):
    torch.manual_seed(1)
    masks = torch.stack([torch.empty(2048).bernoulli_(0.2) for _ in range(1000)])
    for counts, n in ((masks.sum(0), 1000), (masks.sum(1), 2048)):
        statistic = float(((counts - 0.2 * n) ** 2).sum() / (0.16 * n))
        assert 1e-3 < stats.chi2.cdf(statistic, len(counts)) < 1 - 1e-3


def test_neighbours_lanes_and_calls_are_independent(replaced):
    n, random = 1_000_000, torch.Generator().manual_seed(0)
    first, second = (draw(0.3, n, generator=random) for _ in range(2))
    pairs = {"calls": (first, second)}
    pairs |= {f"lag {lag}": (first[:-lag], first[lag:]) for lag in (1, 2, 3, 4, 8, 16, 32, 64, 128)}
    for name, (one, other) in pairs.items():
        table = np.array([[int(((one == a) & (other == b)).sum()) for b in (0, 1)] for a in (0, 1)])
        expected = len(one) * np.outer([0.7, 0.3], [0.7, 0.3])
        assert stats.chisquare(table.ravel(), expected.ravel()).pvalue > 1e-3, name


def test_threads_draw_the_same(replaced):
    alone = draw(shape=300_007)
    try:
        torch.set_num_threads(2)
        assert torch.equal(draw(shape=300_007), alone)
    finally:
        torch.set_num_threads(1)


def test_seeds_and_states_of_generators_decide(replaced):
    assert torch.equal(draw(seed=1), draw(seed=1))
    assert not torch.equal(draw(seed=1), draw(seed=2))
    state = torch.get_rng_state()
    first, second = torch.empty(N).bernoulli_(0.5), torch.empty(N).bernoulli_(0.5)
    assert not torch.equal(first, second)
    torch.set_rng_state(state)
    assert torch.equal(torch.empty(N).bernoulli_(0.5), first)
    assert torch.equal(torch.empty(N).bernoulli_(0.5), second)


def test_strides_are_kept_and_gaps_stay(replaced):
    mask = draw(0.5, (40, 50, 3))
    torch.manual_seed(0)
    swapped = torch.empty(40, 50, 3).transpose(0, 2).bernoulli_(0.5)
    assert torch.equal(swapped.transpose(0, 2), mask)  # in the order of the memory, as torch's
    padded = torch.full((100, 100), 7.0)
    padded[:, ::2].bernoulli_(0.5)
    assert padded[:, 1::2].unique().tolist() == [7]
    assert stats.binomtest(int(padded[:, ::2].sum()), 5000, 0.5).pvalue > 1e-3
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        torch.zeros(1, N).expand(3, N).bernoulli_(0.5)


@pytest.mark.parametrize(("shape", "dtype"), [(1023, torch.float32), (N, torch.int64)])
def test_small_and_integer_tensors_are_torchs(vectors, shape, dtype):
    torchs = draw(0.5, shape, dtype=dtype)
    replace_bernoulli()
    try:
        assert torch.equal(draw(0.5, shape, dtype=dtype), torchs)
    finally:
        restore_bernoulli()


def test_torchs_kernel_is_back_when_all_have_restored_it(vectors):
    torchs = draw()
    replace_bernoulli()
    replace_bernoulli()
    ours = draw()
    assert not torch.equal(ours, torchs)
    restore_bernoulli()
    assert torch.equal(draw(), ours)
    restore_bernoulli()
    assert torch.equal(draw(), torchs)


def test_it_needs_kernels(vectors, monkeypatch):
    torchs = draw()
    monkeypatch.setenv("LIGHTNING_ACCEL_NATIVE", "0")
    with (
        KERNELS.switched_off(),
        pytest.raises(RuntimeError, match=r"LIGHTNING_ACCEL_NATIVE=0 switches .* native_dropout"),
    ):
        replace_bernoulli()
    assert torch.equal(draw(), torchs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_of_dropout_are_the_masks(replaced, dtype):
    x = torch.randn(60, 40, dtype=dtype, requires_grad=True)
    y = F.dropout(x, 0.25)
    y.backward(torch.ones_like(y))
    mask = (y != 0).to(dtype)
    assert stats.binomtest(int(mask.double().sum()), 2400, 0.75).pvalue > 1e-3
    torch.testing.assert_close(x.grad, mask / 0.75)
    torch.testing.assert_close(y, x * mask / 0.75)


def test_attention_drops_its_weights(replaced):
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 4, 32, 8).unbind()
    weights = (q @ k.mT / math.sqrt(8)).softmax(-1)
    dropped = F.scaled_dot_product_attention(q, k, torch.eye(32).expand(2, 4, 32, 32), dropout_p=0.4)
    mask = dropped != 0
    assert stats.binomtest(int(mask.sum()), mask.numel(), 0.6).pvalue > 1e-3
    torch.testing.assert_close(dropped, weights * mask / 0.6)


def test_checkpointed_layers_of_torch_draw_their_masks_again(replaced):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.3, batch_first=True)
    x, gradients = torch.randn(4, 30, 32), []
    for run in (layer, lambda x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)):
        torch.manual_seed(1)
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            run(x).square().sum().backward()
        gradients.append(layer.self_attn.in_proj_weight.grad)
    torch.testing.assert_close(*gradients)


def test_transforms_of_functions_draw_as_they_say(replaced):
    drop = torch.vmap(lambda x: F.dropout(x, 0.5), randomness="same")
    same = drop(torch.ones(3, N))
    assert torch.equal(same[0], same[1])
    different = torch.vmap(lambda x: F.dropout(x, 0.5), randomness="different")(torch.ones(3, N))
    assert not torch.equal(different[0], different[1])
    gradient = torch.func.grad(lambda x: F.dropout(x, 0.5).sum())(torch.ones(N))
    assert gradient.unique().tolist() == [0, 2]


def test_kernel_is_a_torch_op(native):
    op = torch.ops.lightning_accel_native.bernoulli_.default
    torch.library.opcheck(op, (torch.randn(5, 3), 0.5, torch.tensor([4])))
    with pytest.raises(RuntimeError, match="float32, bfloat16, float16, float64 or bool"):
        op(torch.zeros(3, dtype=torch.int32), 0.5, torch.tensor([4]))
    with pytest.raises(RuntimeError, match=r"p must lie in \[0, 1\]; got 2"):
        op(torch.zeros(3), 2.0, torch.tensor([4]))
    with pytest.raises(RuntimeError, match=r"seed must be \(1,\) int64"):
        op(torch.zeros(3), 0.5, torch.zeros(1))


@pytest.mark.slow
def test_compiled_dropouts_draw_by_it_where_they_draw_as_eager_ones(replaced, compiler):
    layer = nn.Sequential(nn.Linear(40, 40), nn.Dropout(0.5))
    x = torch.randn(60, 40)
    torch.manual_seed(1)
    eager = layer(x)
    layer.compile(options={"fallback_random": True})
    torch.manual_seed(1)
    torch.testing.assert_close(layer(x), eager)
