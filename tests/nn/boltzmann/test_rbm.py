"""Energies against sums and quadrature; samplers against enumeration; what is refused."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

from lightning_accel.nn import RBM, ContrastiveDivergence
from lightning_accel.nn.boltzmann.contrastive import Phase
from lightning_accel.nn.boltzmann.units import enumerate_bits

KINDS = {
    "bernoulli": {},
    "gaussian": {"visible": "gaussian", "learn_variance": True},
    "bernoulli and labels": {"num_labels": 3},
    "gaussian and labels": {"visible": "gaussian", "learn_variance": True, "num_labels": 3},
}


def make_rbm(kind: str = "bernoulli", num_visible: int = 6, num_hidden: int = 4, scale: float = 0.8, **options) -> RBM:
    """With random parameters in float64."""
    rbm = RBM(num_visible, num_hidden, **KINDS[kind], **options).double()
    for parameter in rbm.parameters():
        nn.init.normal_(parameter, std=scale)
    return rbm


def rows_of(rbm: RBM, count: int) -> Tensor:
    """Rows that the visible units hold."""
    return rbm.visible_units.sample(torch.randn(count, rbm.num_visible, dtype=torch.float64))


def all_states(rbm: RBM) -> Tensor:
    return rbm.visible_units.enumerate_states(torch.arange(rbm.visible_units.count_states()))


@pytest.mark.parametrize("kind", KINDS)
def test_free_energy_is_a_sum_over_hidden_states(kind):
    rbm = make_rbm(kind)
    visible, hidden = rows_of(rbm, 5), enumerate_bits(torch.arange(16), 4)
    energies = torch.stack([rbm.energy(visible, one.expand(5, -1)) for one in hidden], dim=1)
    torch.testing.assert_close(rbm.free_energy(visible), -(-energies).logsumexp(1), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(rbm(visible), (-energies).softmax(1) @ hidden)


@pytest.mark.parametrize("kind", ["bernoulli", "bernoulli and labels"])
def test_hidden_free_energy_is_a_sum_over_visible_states(kind):
    rbm = make_rbm(kind)
    states = all_states(rbm)
    drawn = rbm.sample_hidden(rows_of(rbm, 3))
    energies = torch.stack([rbm.energy(states, one.expand(len(states), -1)) for one in drawn])
    torch.testing.assert_close(rbm.hidden_free_energy(drawn), -(-energies).logsumexp(1), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(rbm.visible_units.mean(rbm.visible_activation(drawn)), (-energies).softmax(1) @ states)


@pytest.mark.slow
def test_gaussian_hidden_free_energy_agrees_with_quadrature():
    rbm = make_rbm("gaussian", num_visible=2, num_hidden=3)
    for row in rbm.sample_hidden(rows_of(rbm, 2))[:, None]:
        integral = grid_integral(lambda v, row=row: -rbm.energy(v, row.expand(len(v), -1)), 2, -25, 25)
        assert rbm.hidden_free_energy(row).item() == pytest.approx(-integral, abs=1e-6)


def grid_integral(exponent, dims: int, low: float, high: float, points: int = 1001) -> float:
    """Log of the integral of exp(exponent) over a square, by Simpson's rule."""
    place = torch.linspace(low, high, points, dtype=torch.float64)
    weight = torch.ones(points, dtype=torch.float64)
    weight[1:-1:2], weight[2:-1:2] = 4, 2
    weight = (weight * (high - low) / (points - 1) / 3).log()
    grid = torch.cartesian_prod(*[place] * dims)
    weights = torch.cartesian_prod(*[weight] * dims).sum(-1)
    return (exponent(grid) + weights).logsumexp(0).item()


@pytest.mark.parametrize("kind", KINDS)
def test_both_free_energies_are_of_one_distribution(kind):
    """p(v) p(h | v) = p(h) p(v | h), up to what does not depend on the states."""
    rbm = make_rbm(kind, scale=0.2)
    visible = rows_of(rbm, 7)
    drawn = rbm.sample_hidden(visible)
    energy = rbm.energy(visible, drawn)
    given_visible = -energy + rbm.free_energy(visible)  # log p(h | v)
    activation = rbm.hidden_activation(visible)
    torch.testing.assert_close(
        given_visible, -F.binary_cross_entropy_with_logits(activation, drawn, reduction="none").sum(-1)
    )
    given_hidden = -energy + rbm.hidden_free_energy(drawn)  # log p(v | h)
    activation, bias = rbm.visible_activation(drawn), rbm.visible_bias
    exponent = (rbm.visible_units.input(visible) * (activation - bias)).sum(-1)
    expected = exponent - rbm.visible_units.energy(visible, bias) - rbm.visible_units.log_partition(activation, bias)
    torch.testing.assert_close(given_hidden, expected)


def test_free_energy_under_autocast_is_that_of_float32():
    rbm = make_rbm(num_visible=50, num_hidden=40).float()
    visible = rows_of(rbm, 9).float()
    expected = rbm.free_energy(visible), rbm.hidden_free_energy(rbm.transform(visible))
    state = rbm.transform(visible)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = rbm.free_energy(visible), rbm.hidden_free_energy(state)
        assert rbm.energy(visible, state).dtype == torch.float32
        torch.testing.assert_close(rbm.free_energy(visible.bfloat16()), expected[0], rtol=0, atol=0)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_start_has_the_data_s_mean():
    rbm = RBM(5, 3, num_labels=2)
    mean = torch.tensor([0.1, 0.5, 0, 1, 0.7, 0.2, 0.8])
    rbm.start_at_(mean, 1000)
    torch.testing.assert_close(rbm.visible_units.mean(rbm.visible_bias[None])[0], mean, atol=1e-3, rtol=0)


# samplers ------------------------------------------------------------------------------------------------------------

SAMPLERS = {
    "cd": {"sampler": "cd", "steps": 60, "num_chains": 4000},
    "pcd": {"sampler": "pcd", "steps": 1, "num_chains": 4000},
}


@torch.no_grad()
def chi_square(rbm: RBM, drawn: Tensor) -> float:
    """The p-value of rows (n, V) under the model."""
    states = all_states(rbm)
    expected = (-rbm.free_energy(states)).softmax(0) * len(drawn)
    matches = (drawn[:, None] == states).all(-1)
    assert matches.any(1).all()
    counts = matches.sum(0).double()
    common = expected >= 5
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    counts = torch.cat([counts[common], counts[~common].sum()[None]])
    kept = expected > 0
    return stats.chisquare(counts[kept], expected[kept] * (len(drawn) / expected[kept].sum())).pvalue


@pytest.mark.parametrize("kind", ["bernoulli", "bernoulli and labels"])
def test_gibbs_samples_have_the_model_s_distribution(kind):
    rbm = make_rbm(kind, num_visible=6 if kind != "bernoulli and labels" else 3)
    drawn = rbm.sample(8000, 60, generator=torch.Generator().manual_seed(1))
    assert chi_square(rbm, drawn) > 1e-3


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_chains_have_the_model_s_distribution(sampler):
    rbm = make_rbm(num_visible=6, num_hidden=3, scale=1.2)
    training = ContrastiveDivergence(**SAMPLERS[sampler], seed=1)
    data = torch.zeros(4000, 6, dtype=torch.float64)  # far from what the model has
    activation = rbm.hidden_activation(data)
    positive = Phase(data, activation, activation.sigmoid())
    for _ in range(1 if sampler == "cd" else 60):
        negative = training.draw(rbm, positive)
    assert chi_square(rbm, negative.visible) > 1e-3
    torch.testing.assert_close(negative.activation, rbm.hidden_activation(negative.visible))
    torch.testing.assert_close(negative.hidden, rbm(negative.visible))


def test_gaussian_samples_have_the_model_s_distribution():
    rbm = make_rbm("gaussian", num_visible=1, num_hidden=3)
    drawn = rbm.sample(8000, 40, generator=torch.Generator().manual_seed(1))
    hidden = enumerate_bits(torch.arange(8), 3)
    share = (-rbm.hidden_free_energy(hidden)).softmax(0)
    place, deviation = rbm.visible_activation(hidden), (0.5 * rbm.visible_units.log_variance).exp()

    def distribution(value):
        z = (torch.as_tensor(value)[:, None] - place[:, 0].detach()) / deviation.detach()
        return (torch.special.ndtr(z) @ share.detach()).numpy()

    assert stats.kstest(drawn[:, 0].numpy(), distribution).pvalue > 1e-3


def test_clamped_samples_have_the_conditional_distribution():
    rbm = make_rbm("bernoulli and labels", num_visible=4, num_hidden=3, scale=1.2)
    clamp = torch.tensor([1.0, math.nan, math.nan, math.nan, 0, 1, 0])
    drawn = rbm.sample(8000, 60, clamp=clamp, generator=torch.Generator().manual_seed(1))
    assert torch.equal(drawn[:, [0, 4, 5, 6]], torch.tensor([1.0, 0, 1, 0], dtype=torch.float64).expand(8000, -1))
    states = all_states(rbm)
    states = states[(states[:, 0] == 1) & (states[:, 5] == 1)]
    expected = (-rbm.free_energy(states)).softmax(0).detach() * 8000
    counts = (drawn[:, None] == states).all(-1).sum(0)
    assert stats.chisquare(counts, expected).pvalue > 1e-3


def test_each_row_may_be_clamped_otherwise():
    rbm = make_rbm(num_visible=3)
    clamp = torch.tensor([[1.0, math.nan, math.nan], [math.nan, math.nan, 0.25]])
    drawn = rbm.sample(2, 3, clamp=clamp)
    assert (drawn[0, 0], drawn[1, 2]) == (1, 0.25)
    assert rbm.sample(5, 2).shape == (5, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 0, "steps": 1}, "at least 1; got 0 and 1"),
        ({"num_samples": 2, "steps": 0}, "got 2 and 0"),
        (
            {"num_samples": 2, "steps": 1, "clamp": torch.zeros(3, 6)},
            r"\(6,\) or \(2, 6\), NaN where free; got \(3, 6\)",
        ),
        ({"num_samples": 2, "steps": 1, "clamp": torch.full((6,), 2.0)}, r"clamp does not fit.*\[0, 1\]"),
        ({"num_samples": 2, "steps": 1, "clamp": torch.full((6,), math.inf)}, "finite values; found inf"),
        (
            {"num_samples": 2, "steps": 1, "clamp": torch.tensor([math.nan] * 3 + [1, math.nan, 0])},
            "labels are 3 values",
        ),
    ],
)
def test_samples_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_rbm("bernoulli and labels", num_visible=3).sample(**arguments)


# the gradient --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_that_of_the_gap_of_free_energies(kind):
    rbm = make_rbm(kind, scale=0.3)
    training = ContrastiveDivergence("cd", centering=0, seed=3)
    visible = rows_of(rbm, 5)
    training(rbm, visible).backward()
    found = {name: parameter.grad for name, parameter in rbm.named_parameters()}
    again = copy.deepcopy(rbm)
    activation = again.hidden_activation(visible)
    positive = Phase(visible, activation, activation.sigmoid())
    negative = ContrastiveDivergence("cd", centering=0, seed=3).draw(again, positive).visible
    again.zero_grad()
    (again.free_energy(visible).mean() - again.free_energy(negative).mean()).backward()
    for name, parameter in again.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, msg=name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_visible": 0, "num_hidden": 1}, "at least 1"),
        ({"num_visible": 4, "num_hidden": 1, "visible": "binary"}, "must be 'bernoulli'"),
        ({"num_visible": 4, "num_hidden": 1, "learn_variance": True}, "learn_variance goes with"),
    ],
)
def test_options_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        RBM(**arguments)
