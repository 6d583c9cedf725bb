"""The kernel's draws: against Random123's known answers, the formula in torch, the binomial distribution."""

import math

import pytest
import torch
from scipy import stats

from lightning_accel.ops.gibbs import sample_bernoulli
from lightning_accel.ops.native import KERNELS
from tests.ops.philox import philox, random_words

KEY = torch.tensor([0x0123456789ABCDEF])


def sample_bernoulli_by_formula(logits: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Compute the kernel's draws for ``logits`` under ``key`` (1,) int64 in torch: slowly, and in float64.

    Results differ from the kernel's only where rounding decides, in one of some million draws.
    """
    bits = random_words(logits.numel(), key.to(logits.device)).view(logits.shape)
    share = ((bits >> 1).clamp(max=2**31 - 128) + 0.5) / 2**31
    return (share < logits.double().sigmoid()).float()


def kernel(logits, key=KEY):
    return torch.ops.lightning_accel_native.sample_bernoulli(logits, key.to(logits.device))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# kat_vectors of Random123, https://github.com/DEShawResearch/random123, philox4x32 10: counter, key, random words
@pytest.mark.parametrize(
    "line",
    [
        "00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        "ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd",
        "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1",
    ],
)
def test_philox_gives_known_answers(line):
    words = torch.tensor([int(word, 16) for word in line.split()])
    key = words[4:5] + (words[5:6] << 32)
    assert philox(words[None, :4], key).tolist() == [words[6:].tolist()]


@pytest.mark.parametrize("n", [0, 1, 3, 63, 64, 65, 1003, 70_001])
def test_draws_are_the_formulas(native, n):
    logits = 4 * torch.randn(n)
    assert torch.equal(kernel(logits), sample_bernoulli_by_formula(logits, KEY))


def test_draws_of_far_counters_and_keys_are_the_formulas(native):
    for key in (-1, -(2**63), 2**63 - 1, 1, 2**32):
        logits, one = torch.randn(50), torch.tensor([key])
        assert torch.equal(kernel(logits, one), sample_bernoulli_by_formula(logits, one))


def test_threads_draw_the_same(native):
    logits = torch.randn(200_003)
    alone = kernel(logits)
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(kernel(logits), alone)
    finally:
        torch.set_num_threads(1)


def test_strides_do_not_matter(native):
    logits = torch.randn(7, 5, 3)
    expected = kernel(logits.permute(2, 0, 1).contiguous())
    assert torch.equal(kernel(logits.permute(2, 0, 1)), expected)
    assert torch.equal(kernel(logits.flatten()[1:]), kernel(logits.flatten()[1:].clone()))
    assert torch.equal(kernel(logits[0, 0, :1].expand(9, -1)), kernel(logits[0, 0, :1].repeat(9, 1)))


def test_extremes_are_certain(native):
    logits = torch.tensor([math.inf, 100, 3e38, -math.inf, -100, -3e38, math.nan])
    drawn = kernel(logits.repeat_interleave(20_000)).view(7, -1)
    assert [row.unique().tolist() for row in drawn] == [[1]] * 3 + [[0]] * 4


def test_what_is_certain_is_drawn_even_with_the_largest_random_number(native):
    key = torch.tensor([4696])
    assert int(philox(torch.tensor([[94, 0, 0, 0]]), key)[0, 0]) >= 2**32 - 128  # 1 in float32
    assert kernel(torch.full((1000,), 50.0), key).min() == 1


@pytest.mark.sampled(default=2)
@pytest.mark.parametrize("p", [1e-6, 1e-3, 0.2, 0.5, 0.9, 1 - 1e-6])
def test_frequencies_are_binomial(native, p):
    n = 10_000_000
    logit = torch.tensor(math.log(p / (1 - p)))
    drawn = int(kernel(logit.expand(n)).double().sum())
    assert stats.binomtest(drawn, n, float(logit.double().sigmoid())).pvalue > 1e-3


def test_neighbours_and_calls_are_independent(vectors):
    n, random = 1_000_000, generator()
    first, second = (sample_bernoulli(torch.zeros(n), random) for _ in range(2))
    pairs = {"calls": (first, second), **{f"lag {lag}": (first[:-lag], first[lag:]) for lag in (1, 2, 3, 4, 16, 64)}}
    for name, (one, other) in pairs.items():
        table = [[int(((one == a) & (other == b)).sum()) for b in (0, 1)] for a in (0, 1)]
        assert stats.chi2_contingency(table).pvalue > 1e-3, name
        assert stats.binomtest(int((one == other).sum()), len(one), 0.5).pvalue > 1e-3, name


def test_generator_decides_and_moves_on(vectors):
    logits, random = torch.randn(300), generator(3)
    first, second = sample_bernoulli(logits, random), sample_bernoulli(logits, random)
    assert not torch.equal(first, second)
    assert torch.equal(sample_bernoulli(logits, generator(3)), first)
    state = random.get_state()
    third = sample_bernoulli(logits, random)
    assert torch.equal(sample_bernoulli(logits, generator().set_state(state)), third)
    torch.manual_seed(5)
    own = sample_bernoulli(logits)
    torch.manual_seed(5)
    assert torch.equal(sample_bernoulli(logits), own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_drawn_as_float32(vectors, dtype):
    logits = torch.randn(1000, requires_grad=True).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        drawn = sample_bernoulli(logits, generator())
    assert drawn.dtype == torch.float32
    assert not drawn.requires_grad
    assert torch.equal(drawn, sample_bernoulli(logits.float(), generator()))


def test_formula_draws_float64_and_where_there_is_no_kernel(vectors):
    logits = torch.randn(50)
    by_kernel = sample_bernoulli(logits, generator())
    by_formula = torch.rand(50, generator=generator()).lt(logits.sigmoid()).float()
    assert not torch.equal(by_kernel, by_formula)
    with KERNELS.switched_off():
        assert torch.equal(sample_bernoulli(logits, generator()), by_formula)
    wide = torch.rand(50, dtype=torch.float64, generator=generator()).lt(logits.double().sigmoid()).double()
    assert torch.equal(sample_bernoulli(logits.double(), generator()), wide)


def test_kernel_is_a_torch_op(native):
    torch.library.opcheck(torch.ops.lightning_accel_native.sample_bernoulli.default, (torch.randn(5, 3), KEY))


def test_other_dtypes_are_refused(native):
    with pytest.raises(RuntimeError, match="float32"):
        kernel(torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("seed", [KEY.int(), KEY[:0], KEY.repeat(2), KEY.double()], ids=["int32", "0", "2", "float64"])
def test_other_seeds_are_refused(native, seed):
    with pytest.raises(RuntimeError, match=r"seed must be \(1,\) int64"):
        kernel(torch.zeros(3), seed)


def test_tensors_of_several_devices_are_refused(native):
    with pytest.raises(ValueError, match=r"one device; got logits on cpu, seed on meta. Call .to\(device\)"):
        torch.ops.lightning_accel_native.sample_bernoulli(torch.zeros(3), KEY.to("meta"))


@pytest.mark.gpu(kernels=True)
@pytest.mark.parametrize(("logits", "seed"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_gpu_refuses_a_seed_that_lies_elsewhere(native, logits, seed):
    assert KERNELS.serves(torch.device("cuda"))
    with pytest.raises(RuntimeError, match="on the device of logits"):
        torch.ops.lightning_accel_native.sample_bernoulli(torch.zeros(3, device=logits), KEY.to(seed))


def test_compiled_code_has_the_formula_without_a_break(native):
    compiled = torch.compile(lambda x: sample_bernoulli(x) + x, fullgraph=True, backend="eager")
    x = torch.zeros(1000)
    assert set(compiled(x).unique().tolist()) == {0.0, 1.0}


@pytest.mark.gpu(kernels=True)
@pytest.mark.parametrize("n", [0, 1, 5, 1024, 70_001])
@pytest.mark.parametrize("offset", [0, 1])
def test_gpu_draws_the_cpus_numbers(native, n, offset):
    logits = 4 * torch.randn(n + offset)
    device = torch.device("cuda")
    assert KERNELS.serves(device)
    torch.testing.assert_close(kernel(logits.to(device)[offset:]).cpu(), kernel(logits[offset:]), rtol=0, atol=0)


@pytest.mark.gpu(kernels=True)
def test_gpu_draws_with_its_own_generator():
    logits = torch.zeros(1_000_000, device="cuda")
    first, second = (sample_bernoulli(logits, torch.Generator("cuda").manual_seed(1)) for _ in range(2))
    assert torch.equal(first, second)
    assert stats.binomtest(int(first.sum()), len(first), 0.5).pvalue > 1e-3
