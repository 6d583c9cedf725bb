"""Draws against their distributions, and formulas of the truncated normal distribution against mpmath."""

import math

import pytest
import torch
from scipy import stats

from lightning_accel.ops.gibbs import sample_bernoulli, sample_categorical, sample_normal

N = 20_000


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("logit", [-3.0, 0.0, 0.4, 7.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bernoulli_has_its_mean(logit, dtype):
    drawn = sample_bernoulli(torch.full((N,), logit, dtype=dtype), generator())
    assert drawn.dtype == dtype
    assert drawn.unique().tolist() == [0, 1]
    p = 1 / (1 + math.exp(-logit))
    assert stats.binomtest(int(drawn.sum()), N, p).pvalue > 1e-3


def test_bernoulli_fires_one_time_in_a_million():
    n, p = 8_000_000, 1e-6
    logit = math.log(p / (1 - p))
    drawn = int(sample_bernoulli(torch.full((n,), logit, dtype=torch.bfloat16), generator()).sum())
    rounded = float(torch.sigmoid(torch.tensor(logit, dtype=torch.bfloat16).float()))
    assert stats.binomtest(drawn, n, rounded).pvalue > 1e-3


def test_bernoulli_draws_float32_of_bfloat16_under_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        drawn = sample_bernoulli(torch.full((N,), 7.0, dtype=torch.bfloat16), generator())
    assert drawn.dtype == torch.float32
    assert stats.binomtest(int((1 - drawn).sum()), N, 1 / (1 + math.exp(7))).pvalue > 1e-3


def test_categorical_has_the_softmax():
    logits = torch.tensor([0.3, -2.0, 1.1, -7.0])
    drawn = sample_categorical(logits.expand(N, -1), generator())
    assert torch.equal(drawn.sum(dim=-1), torch.ones(N))
    assert drawn.dtype == torch.float32
    expected = logits.double().softmax(-1) * N
    assert stats.chisquare(drawn.sum(0).double(), expected * (N / expected.sum())).pvalue > 1e-3


def test_categorical_draws_rare_classes():
    n = 2_000_000
    logits = torch.tensor([0.0, math.log(1e-5)])
    drawn = int(sample_categorical(logits.expand(n, -1), generator())[:, 1].sum())
    assert stats.binomtest(drawn, n, 1e-5 / (1 + 1e-5)).pvalue > 1e-3


def test_normal_has_mean_and_deviation():
    drawn = sample_normal(torch.full((N,), -1.5), torch.tensor(0.3), generator())
    assert stats.kstest(drawn.double().numpy(), stats.norm(-1.5, 0.3).cdf).pvalue > 1e-3
