"""What each kind of unit says of itself, against sums over states and quadrature; what units refuse."""

import math

import mpmath
import pytest
import torch
from torch import nn

from lightning_accel.nn import RBM
from lightning_accel.nn.boltzmann.units import (
    BernoulliVisible,
    GaussianVisible,
    JoinedVisible,
    LabelVisible,
)


def wide(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def gaussian(size: int) -> GaussianVisible:
    units = GaussianVisible(size, learn_variance=True).double()
    nn.init.normal_(units.log_variance)
    return units


DISCRETE = [
    (BernoulliVisible(4), 16),
    (LabelVisible(6), 6),
    (JoinedVisible([BernoulliVisible(2), LabelVisible(3)]), 12),
]


@pytest.mark.parametrize(("units", "count"), DISCRETE)
def test_discrete_units_agree_with_a_sum_over_states(units, count):
    assert units.count_states() == count
    states = units.enumerate_states(torch.arange(count))
    assert len(states.unique(dim=0)) == count
    assert units.find_fault(states) is None
    activation, bias = wide(3, units.num_visible), wide(units.num_visible)
    exponent = (activation - bias) @ states.T - units.energy(states, bias)
    torch.testing.assert_close(units.log_partition(activation, bias), exponent.logsumexp(-1))
    torch.testing.assert_close(units.mean(activation), exponent.softmax(-1) @ states)
    drawn = units.sample(activation[:1].expand(50_000, -1))
    torch.testing.assert_close(drawn.mean(0), units.mean(activation[0]), atol=0.01, rtol=0)


def test_gaussian_units_agree_with_quadrature():
    units, activation, bias = gaussian(1), wide(1, 1), wide(1)

    def density(value: float) -> mpmath.mpf:
        state = torch.tensor([[value]], dtype=torch.float64)
        exponent = units.input(state) @ (activation - bias)[0] - units.energy(state, bias)
        return mpmath.exp(exponent.item())

    whole = mpmath.quad(density, [-30, -5, 0, 5, 30])
    assert units.log_partition(activation, bias).item() == pytest.approx(float(mpmath.log(whole)), rel=1e-10)
    mean = mpmath.quad(lambda value: value * density(value), [-30, -5, 0, 5, 30]) / whole
    assert units.mean(activation).item() == pytest.approx(float(mean), rel=1e-10)
    square = mpmath.quad(lambda value: value**2 * density(value), [-30, -5, 0, 5, 30]) / whole
    variance = float(square - mean**2)
    drawn = units.sample(activation.expand(100_000, -1))  # within five deviations
    assert drawn.mean().item() == pytest.approx(float(mean), abs=5 * (variance / 100_000) ** 0.5)
    assert drawn.var().item() == pytest.approx(variance, rel=5 * (2 / 100_000) ** 0.5)


@pytest.mark.parametrize("units", [units for units, _ in DISCRETE])
def test_bias_gives_the_data_s_mean(units):
    states = units.enumerate_states(torch.arange(units.count_states() - 1)).float()
    bias = units.bias_for(states.mean(0), 10_000)
    torch.testing.assert_close(units.mean(bias[None])[0], states.mean(0), atol=2e-4, rtol=0)


def test_bias_of_what_was_never_seen_is_finite():
    assert RBM(4, 2).visible_units.bias_for(torch.tensor([0.0, 1, 0.5, 0]), 9).isfinite().all()


def test_joined_units_are_their_parts():
    first, second = gaussian(2), LabelVisible(3)
    units = JoinedVisible([first, second])
    state = torch.cat([wide(4, 2), nn.functional.one_hot(torch.tensor([0, 2, 1, 1]), 3).double()], dim=1)
    bias = wide(5)
    expected = first.energy(state[:, :2], bias[:2]) + second.energy(state[:, 2:], bias[2:])
    torch.testing.assert_close(units.energy(state, bias), expected)
    torch.testing.assert_close(units.input(state), torch.cat([first.input(state[:, :2]), state[:, 2:]], dim=1))
    assert units.count_states() is None


REFUSED = [
    (RBM(3, 2), [[0, 1, 1.5]], r"\[0, 1\], found 0 to 1.5. Scale the data"),
    (RBM(3, 2), [[0, -0.1, 1]], "found -0.1 to 1"),
    (RBM(3, 2), [[0, math.nan, 1]], "found nan in row 0, column 1, and 0 more"),
    (RBM(3, 2, visible="gaussian"), [[0, 1, 1], [math.inf, 2, math.nan]], "found inf in row 1, column 0, and 1 more"),
    (RBM(3, 2), [[0, 1]], r"takes rows \(B, 3\); got \(1, 2\)"),
    (RBM(3, 2), [0, 1, 1], r"got \(3,\)"),
    (RBM(3, 2, visible="gaussian"), [[0, 1, 7], [1, 1, 7.0]], "found 2 constant of 3 columns: 1, 2. Leave them out"),
    (RBM(1, 2, num_labels=2), [[0, 1, 0], [0, 1, 1]], r"sum to 1 to 2 .* one_hot\(label, 2\)"),
    (RBM(1, 2, num_labels=2), [[0, 0, 0]], "sum to 0 to 0"),
    (RBM(1, 2, num_labels=2), [[0, 2, -1]], "values down to -1"),
]


@pytest.mark.parametrize(("rbm", "rows", "message"), REFUSED)
def test_what_units_cannot_hold_is_refused(rbm, rows, message):
    with pytest.raises(ValueError, match=message):
        rbm.require_support(torch.tensor(rows))


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="found no rows"):
        RBM(3, 2).require_support(torch.empty(0, 3))


def test_a_column_may_be_constant_in_a_batch():
    rbm = RBM(3, 2, visible="gaussian", num_labels=2)
    rows = torch.tensor([[0, 1.0, 7, 1, 0], [1, 2, 7, 1, 0]])
    rbm.require_support(rows, all_rows=False)
    with pytest.raises(ValueError, match="constant of 3 columns: 2"):
        rbm.require_support(rows)


def test_grey_levels_and_probabilities_are_held():
    RBM(2, 2, num_labels=2).require_support(torch.tensor([[0.3, 1, 0.25, 0.75]]))
