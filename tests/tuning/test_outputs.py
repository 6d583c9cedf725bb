"""Outputs of the same samples with the same weights: what counts as equal."""

import math

import pytest
import torch

from lightning_accel.tuning.outputs import OutputComparison, outputs_agree
from lightning_accel.tuning.project import Changes


def drawn(*shape, seed=0, num_samples=16):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=generator, dtype=torch.float64)] for _ in range(num_samples)]


def moved(outputs, size, seed=1):
    """Outputs that deviate by a root mean square of ``size``, exactly."""
    noise = [torch.randn(one.shape, generator=torch.Generator().manual_seed(seed + i)).double()
             for i, (one,) in enumerate(outputs)]  # fmt: skip
    scale = size / torch.cat([one.flatten() for one in noise]).square().mean().sqrt()
    return [[one + scale * each] for (one,), each in zip(outputs, noise, strict=True)]


def spread(outputs):
    return torch.stack([one for (one,) in outputs]).std(0, correction=0).square().mean().sqrt().item()


def test_exact_changes_may_deviate_ten_times_as_far_as_rounding():
    base = drawn(5, 3)
    perturbed = moved(base, 1e-6)
    reach = max((b - a).abs().max() for (a,), (b,) in zip(base, perturbed, strict=True))
    for times, passes in ((9.9, True), (10.1, False)):
        other = [[one.clone()] for (one,) in base]
        other[7][0][2, 1] += times * reach  # one value of one sample is enough
        assert outputs_agree(base, perturbed, other, exactly=True).passed == passes
    size = max(one.abs().max() for (one,) in base)
    for roundings, passes in ((9, True), (11, False)):
        other = [[one + roundings * 1.2e-7 * size] for (one,) in base]
        assert outputs_agree(base, base, other, exactly=True).passed == passes


def test_fewer_digits_may_move_outputs_by_two_percent_of_their_spread():
    """The spread is that over samples: what they have in common does not count."""
    base = [[one + torch.arange(15).reshape(5, 3) * 100] for (one,) in drawn(5, 3)]
    for share, passes in ((0.019, True), (0.021, False)):
        verdict = outputs_agree(base, base, moved(base, share * spread(base)), exactly=False)
        assert verdict.passed == passes
        assert f"{share:.2%} of their spread" in verdict.reason
    assert not outputs_agree(base, base, moved(base, 0.001 * spread(base)), exactly=True).passed


def test_each_output_is_compared_by_itself():
    small = drawn(4)
    base = [[one, 1e6 * torch.ones(2).double() * i] for i, (one,) in enumerate(small)]
    other = [[one, two] for (one,), (_, two) in zip(moved(small, 0.1), base, strict=True)]
    assert not outputs_agree(base, base, other, exactly=False).passed


@pytest.mark.parametrize(("num_unequal", "passes"), [(0, True), (1, True), (2, False)])
def test_of_integers_one_in_a_hundred_may_differ(num_unequal, passes):
    base = [[torch.arange(10)] for _ in range(10)]
    other = [[one.clone()] for (one,) in base]
    for sample in range(num_unequal):
        other[sample][0][0] = 5
    assert outputs_agree(base, base, other, exactly=False).passed == passes
    assert outputs_agree(base, base, other, exactly=True).passed == (num_unequal == 0)


def test_what_is_not_finite_has_to_be_so_in_both():
    base = drawn(3)
    base[2][0][0], base[3][0][1] = math.nan, -math.inf
    other = moved(base, 1e-9)
    for exactly in (True, False):
        assert outputs_agree(base, base, other, exactly).passed
        for value in (0.0, math.inf, math.nan):
            other[3][0][1] = value
            assert "nan or infinite in other places" in outputs_agree(base, base, other, exactly).reason
        other[3][0][1] = -math.inf
        elsewhere = [[one.flip(0)] for (one,) in base]
        assert "nan or infinite in other places" in outputs_agree(base, base, elsewhere, exactly).reason
    nothing = [[torch.full((2,), math.nan)] for _ in range(3)]
    assert outputs_agree(nothing, nothing, nothing, exactly=True).reason == "all outputs are nan or infinite"


def test_samples_may_have_unequal_shapes_and_numbers_of_outputs():
    base = [[drawn(length, 2, num_samples=1, seed=length)[0][0]] for length in range(1, 9)]
    assert outputs_agree(base, base, moved(base, 0.01), exactly=False).passed
    assert not outputs_agree(base, base, moved(base, 0.05), exactly=False).passed
    longer = [[torch.cat([one, one])] for (one,) in base]
    assert outputs_agree(base, base, longer, exactly=False).reason == "outputs have other shapes"
    detected = [[torch.ones(2).double() * i] * i for i in range(4)]
    assert outputs_agree(detected, detected, detected, exactly=True).passed
    assert not outputs_agree(detected, detected, [[2 * one for one in each] for each in detected], exactly=True).passed


def test_outputs_that_vary_by_themselves_show_nothing():
    base, again = drawn(3), drawn(3, seed=9)
    for exactly in (True, False):
        verdict = outputs_agree(base, again, base, exactly)
        assert not verdict.passed
        assert "from run to run" in verdict.reason


def test_outputs_without_a_spread_are_compared_by_their_size():
    """Of one sample, or what all samples have in common, such as a temperature."""
    for num_samples in (1, 5):
        base = [[torch.tensor([3.0, 4.0]).double()] for _ in range(num_samples)]
        assert outputs_agree(base, base, [[1.01 * one] for (one,) in base], exactly=False).passed
        assert not outputs_agree(base, base, [[1.03 * one] for (one,) in base], exactly=False).passed
    zeros = [[torch.zeros(2)] for _ in range(3)]
    assert outputs_agree(zeros, zeros, zeros, exactly=True).passed
    assert not outputs_agree(zeros, zeros, [[torch.full((2,), 1e-9)] for _ in range(3)], exactly=False).passed


def test_outputs_of_each_variant_are_recorded_once():
    recorded = []

    def record(changes, perturb):
        recorded.append((str(changes), perturb))
        return moved(drawn(3), 0.01) if changes.trainer else moved(drawn(3), 1e-7) if perturb else drawn(3)

    comparison, rounded = OutputComparison(record), Changes({"precision": "bf16-mixed"})
    assert comparison.judge(rounded, exactly=False).passed
    assert not comparison.judge(rounded, exactly=True).passed
    assert len(recorded) == 3
    assert comparison.judge(Changes(speedups={"threads": 1}), exactly=True).passed
    assert len(recorded) == 4
