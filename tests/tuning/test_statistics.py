"""Ratios of turns with their intervals, and tests of losses."""

import math

import pytest
import torch
from scipy import stats

from lightning_accel.tuning.comparison import compare, ratio_of
from lightning_accel.tuning.parity import LOOKS, are_equal, are_equivalent
from lightning_accel.tuning.variant import Step


def test_interval_is_that_of_a_t_test_of_logarithms():
    ratios = [1.3, 1.1, 1.25, 1.4]
    ratio = ratio_of(ratios)
    interval = stats.ttest_1samp([math.log(one) for one in ratios], 0).confidence_interval(0.95)
    assert ratio.value == pytest.approx(math.prod(ratios) ** 0.25)
    assert (ratio.low, ratio.high) == pytest.approx((math.exp(interval.low), math.exp(interval.high)))


def test_interval_covers_the_truth_in_95_of_100_experiments():
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2000, 6, generator=generator).mul(0.1).add(math.log(1.2)).exp().tolist()
    covered = sum(ratio.low <= 1.2 <= ratio.high for ratio in map(ratio_of, drawn)) / 2000
    assert abs(covered - 0.95) < 0.015  # three standard errors


class Turns:
    """A variant whose steps take given times."""

    def __init__(self, *durations):
        self.durations = list(durations)
        self.taken = 0

    def run_for(self, seconds, deadline):
        duration = self.durations[self.taken % len(self.durations)]
        self.taken += 1
        return [Step(0.0, duration, 0.0, 0.0)] * 3


def test_turns_end_when_the_interval_is_narrow_or_below_one():
    slow, fast = Turns(0.2), Turns(0.1, 0.1001)
    ratio = compare(slow, fast, width=0.02, least=3, most=9, seconds=1, deadline=math.inf)
    assert ratio.value == pytest.approx(2, rel=1e-3)
    assert fast.taken == slow.taken == 3
    noisy = Turns(0.1, 0.2, 0.4)
    compare(Turns(0.2), noisy, width=0.02, least=3, most=9, seconds=1, deadline=math.inf)
    assert noisy.taken == 9
    loser = Turns(0.40, 0.44)
    assert compare(Turns(0.2), loser, width=0.001, least=3, most=9, seconds=1, deadline=math.inf).high < 1
    assert loser.taken == 3
    too_slow = Turns(0.17, 0.13)  # at most 1.9 times as fast
    turns = {"width": 0.001, "least": 3, "most": 9, "seconds": 1, "deadline": math.inf}
    assert 1 < compare(Turns(0.2), too_slow, needed=2, **turns).high < 2
    assert too_slow.taken == 3
    compare(Turns(0.2), too_slow, **turns)
    assert too_slow.taken == 3 + 9


def test_turns_end_with_their_time():
    noisy = Turns(0.3, 0.2, 0.4)
    compare(Turns(0.2), noisy, width=0.02, least=3, most=9, seconds=1, deadline=0)
    assert noisy.taken == 3


def test_equal_losses_may_deviate_as_far_as_rounding_carries_them():
    base = [[1.0, 0.9, 0.8, 0.7]]
    moved = [[1.0, 0.9 + 1e-6, 0.8 - 3e-6, 0.7]]
    assert are_equal(base, moved, [[1.0 + 1e-7, 0.9, 0.8 + 2e-5, 0.7 - 2e-5]]).passed
    assert not are_equal(base, moved, [[1.0, 0.9 + 2e-5, 0.8, 0.7]]).passed  # only later are 3e-5 allowed
    assert not are_equal(base, moved, [[1.0, math.nan, 0.8, 0.7]]).passed
    assert are_equal([[0.0]], [[0.0]], [[0.0]]).passed
    assert not are_equal([[0.0]], [[0.0]], [[1e-3]]).passed


def runs(last, num_steps=9):
    """Losses that fall to ``last`` in the last third of the steps."""
    return [[5.0] * (num_steps - num_steps // 3) + [value] * (num_steps // 3) for value in last]


@pytest.mark.parametrize(("num_seeds", "level"), [(5, 0.005), (10, 0.01), (20, 0.015), (40, 0.02)])
def test_equivalence_is_two_one_sided_t_tests_against_the_spread_of_seeds(num_seeds, level):
    generator = torch.Generator().manual_seed(num_seeds)
    base = torch.randn(num_seeds, generator=generator).tolist()
    margin = torch.tensor(base).std().item()
    passed, is_open = [], []
    for shift in (0.0, 0.3, -0.6, 1.5):
        for spread in (0.01, 0.3, 1.0):
            noise = torch.randn(num_seeds, generator=generator)
            other = (torch.tensor(base) + shift + spread * noise).tolist()
            differences = [b - a for a, b in zip(base, other, strict=True)]
            above = stats.ttest_1samp(differences, -margin, alternative="greater").pvalue
            below = stats.ttest_1samp(differences, margin, alternative="less").pvalue
            verdict = are_equivalent(runs(base), runs(other))
            passed.append(verdict.passed)
            is_open.append(verdict.is_open)
            assert passed[-1] == (max(above, below) < level)
            is_different = min(1 - above, 1 - below) < level
            assert is_open[-1] == (not is_different and not passed[-1])
    assert 2 < sum(passed) < 11
    assert 0 < sum(is_open) < 9


def decide(base, other):
    """Return the last verdict of all looks, and at how many seeds it was."""
    for num_seeds in LOOKS:
        verdict = are_equivalent(runs(base[:num_seeds], 3), runs(other[:num_seeds], 3))
        if not verdict.is_open:
            break
    return verdict, num_seeds


@pytest.mark.slow
def test_looks_together_pass_5_in_100_that_are_not_equivalent_and_most_that_are_equal():
    base = [1.0, -1.0] * 20  # whose spread is 1.01 to 1.1, by the number of seeds
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(400, 40, generator=generator)
    different, equal = (
        [decide(base, (torch.tensor(base) + shift + each).tolist()) for each in noise] for shift in (1.1, 0.0)
    )
    assert 0.005 < sum(verdict.passed for verdict, _ in different) / 400 < 0.05
    assert sum(verdict.passed for verdict, _ in equal) / 400 > 0.98
    assert sum(num_seeds for _, num_seeds in equal) / 400 < 20


def test_losses_that_are_not_finite_are_not_equivalent():
    verdict = are_equivalent(runs([1.0] * 5), runs([1.0] * 4 + [math.nan]))
    assert not verdict.passed
    assert "nan" in verdict.reason
