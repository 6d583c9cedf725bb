"""Draws against their distributions, and formulas of the truncated normal distribution against mpmath."""

import math
from functools import cache

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import log_ndtr

from lightning_accel.ops.gibbs import (
    log_truncated_normal_integral,
    sample_bernoulli,
    sample_categorical,
    sample_normal,
    sample_truncated_normal,
    truncated_normal_mean,
)
from tests.tolerance import rounding

PLACES = torch.tensor([-50.0, -30.1, -29.9, -12.0, -6.01, -5.01, -4.99, -1.3, 0.0, 0.7, 5.0, 10.0, 50.0]).tolist()
N = 20_000


@cache  # for the same places in both dtypes
def integral(location: float, power: int) -> mpmath.mpf:
    """Of h**power exp(location h - h**2 / 2) over h >= 0, by quadrature."""
    with mpmath.workdps(40):
        top = max(location, 0)
        # in units of how fast the integrand falls, and around its maximum
        width = 1 / (1 + max(-location, 0))
        ends = [max(top - 12, 0), top, top + 4 * width, top + 12 * width, top + 50 * width + 1, mpmath.inf]
        return mpmath.quad(
            lambda h: h**power * mpmath.exp(location * h - h * h / 2), sorted({mpmath.mpf(end) for end in ends})
        )


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


@pytest.mark.parametrize("location", [-40.0, -30.1, -29.9, -8.0, -1.0, 0.0, 0.5, 10.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_truncated_normal_has_its_distribution(location, dtype):
    drawn = sample_truncated_normal(torch.full((N,), location, dtype=dtype), generator())
    assert drawn.dtype == dtype
    assert drawn.min() >= 0
    assert stats.kstest(drawn.double().numpy(), tail_cdf(location)).pvalue > 1e-3


def tail_cdf(location: float):
    """1 - Q(h - location) / Q(-location), by logarithms."""
    return lambda h: -np.expm1(log_ndtr(location - np.asarray(h)) - log_ndtr(location))


# At -4.99 the mean is what two terms of 5 leave, 0.19, and their exponential of -12.5 is off by 13 roundings.
CANCELLED = rounding(torch.float32, 2 * 13 * round(5 / 0.19))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, CANCELLED), (torch.float64, 1e-12)])
def test_truncated_normal_mean_and_integral_match_quadrature(dtype, tolerance):
    places = torch.tensor(PLACES, dtype=dtype)
    mean, log_integral = truncated_normal_mean(places), log_truncated_normal_integral(places)
    for index, place in enumerate(places.tolist()):
        whole = integral(place, 0)
        assert float(mean[index]) == pytest.approx(float(integral(place, 1) / whole), rel=tolerance)
        assert float(log_integral[index]) == pytest.approx(float(mpmath.log(whole)), rel=tolerance, abs=tolerance)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [pytest.param(torch.float32, 2e-3, marks=pytest.mark.slow), (torch.float64, 1e-10)]
)
def test_gradients_of_the_truncated_normal_are_its_moments(dtype, tolerance):
    places = torch.tensor([*PLACES, -1e4, -1e15, 1e4], dtype=dtype, requires_grad=True)
    mean = truncated_normal_mean(places)
    (by_integral,) = torch.autograd.grad(log_truncated_normal_integral(places).sum(), places)
    (by_mean,) = torch.autograd.grad(mean.sum(), places)
    torch.testing.assert_close(by_integral, mean.detach(), rtol=CANCELLED if dtype == torch.float32 else 1e-10, atol=0)
    assert by_mean.isfinite().all()
    for index in range(len(PLACES)):
        place = float(places.detach()[index])
        first, second = (integral(place, power) / integral(place, 0) for power in (1, 2))
        assert float(by_mean[index]) == pytest.approx(float(second - first**2), rel=tolerance), place


def test_truncated_normal_is_continuous_where_formulas_meet():
    places = torch.linspace(-5.0001, -4.9999, 101, dtype=torch.float64)
    for function in (truncated_normal_mean, log_truncated_normal_integral):
        steps = function(places).diff()
        torch.testing.assert_close(steps, steps.mean().expand(100), rtol=1e-4, atol=0)
