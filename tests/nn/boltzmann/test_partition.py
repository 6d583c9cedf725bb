"""Partition functions, likelihoods against sums over all states."""

import math

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.nn import RBM
from lightning_accel.nn.boltzmann.partition import LogZ, _summarise
from lightning_accel.nn.boltzmann.units import enumerate_bits


def make_rbm(num_visible: int = 9, num_hidden: int = 7, scale: float = 1.0, **options) -> RBM:
    """With random parameters in float64."""
    rbm = RBM(num_visible, num_hidden, **options).double()
    for parameter in rbm.parameters():
        nn.init.normal_(parameter, std=scale)
    return rbm


def all_states(rbm: RBM) -> Tensor:
    return rbm.visible_units.enumerate_states(torch.arange(rbm.visible_units.count_states()))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def log_z_by_both_sides(rbm: RBM) -> Tensor:
    states = enumerate_bits(torch.arange(2**rbm.num_hidden), rbm.num_hidden)
    return torch.stack(
        [(-rbm.free_energy(all_states(rbm))).logsumexp(0), (-rbm.hidden_free_energy(states)).logsumexp(0)]
    )


# exact ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"num_labels": 3}])
@pytest.mark.parametrize("num_hidden", [3, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_is_the_sum_over_either_side(options, num_hidden, dtype, monkeypatch):
    monkeypatch.setattr("lightning_accel.nn.boltzmann.partition._CHUNK", 60)  # ragged chunks
    rbm = make_rbm(num_hidden=num_hidden, **options)
    expected = log_z_by_both_sides(rbm.to(dtype).double())
    found = rbm.to(dtype).log_z("exact")
    assert found.estimate.dtype == torch.float64
    torch.testing.assert_close(found.estimate.expand(2), expected, rtol=1e-8, atol=1e-8)
    assert found.lower == found.upper == found.estimate
    assert found.effective_sample_size == math.inf
    assert rbm.weight.dtype == dtype


def test_exact_enumerates_the_hidden_side_of_gaussian_units():
    rbm = make_rbm(1, 5, visible="gaussian", learn_variance=True)
    place = torch.linspace(-60, 60, 200_001, dtype=torch.float64)[:, None]
    expected = (-rbm.free_energy(place)).logsumexp(0) + math.log(120 / 200_000)
    torch.testing.assert_close(rbm.log_z("exact").estimate, expected.detach())


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        ({"num_visible": 30, "num_hidden": 26}, r"30 visible units have 2\*\*30, the 26 hidden ones 2\*\*26"),
        ({"num_visible": 784, "num_hidden": 1024}, r"784 visible units have 2\*\*784, the 1024 hidden ones 2\*\*1024"),
        ({"num_visible": 2, "num_hidden": 26, "visible": "gaussian"}, r"real states, the 26 hidden ones 2\*\*26"),
    ],
)
def test_exact_refuses_what_it_cannot_enumerate(arguments, sizes):
    with pytest.raises(ValueError, match=rf"at most 2\*\*25; the .*{sizes}.*Take method='ais'"):
        RBM(**arguments).log_z("exact")


# annealing -----------------------------------------------------------------------------------------------------------

KINDS = {
    "bernoulli": {},
    "labels": {"num_labels": 3},
    "gaussian": {"visible": "gaussian", "learn_variance": True, "scale": 0.5},
    "gaussian and labels": {"visible": "gaussian", "num_labels": 3, "scale": 0.5},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "num_chains", "num_temperatures"), [(0.5, 20, 20), pytest.param(3.0, 50, 50, marks=pytest.mark.slow)]
)
def test_annealing_covers_and_brackets_the_exact_value_of_100_models(scale, num_chains, num_temperatures):
    covered = bracketed = 0
    too_high = []
    for seed in range(100):
        torch.manual_seed(seed)
        rbm = make_rbm(scale=scale).float()
        exact = rbm.log_z("exact").estimate
        options = {"num_chains": num_chains, "num_temperatures": num_temperatures, "generator": generator(seed)}
        forward, reverse = rbm.log_z(**options), rbm.log_z("reverse_ais", **options)
        covered += bool(forward.lower <= exact <= forward.upper)
        bracketed += bool(forward.lower <= exact <= reverse.upper)
        too_high.append(float(reverse.estimate - forward.estimate))
        assert 1 <= forward.effective_sample_size <= num_chains
        assert forward.lower <= forward.estimate <= forward.upper
    assert covered >= 95
    assert bracketed >= 95
    assert sum(too_high) > -1


def test_intervals_are_wide_enough_where_few_weights_dominate():
    """The mean of exp(N(0, s^2)) is exp(s^2 / 2); the delta method alone covers it in 80 of these 200."""
    log_weights = 4 * torch.randn(200, 100, dtype=torch.float64, generator=generator())
    found = [_summarise(one, torch.zeros(())) for one in log_weights]
    assert sum(bool(one.lower <= 8 <= one.upper) for one in found) > 150


@pytest.mark.sampled(default=10)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["ais", "reverse_ais"])
@pytest.mark.parametrize("with_mean", [False, True])
def test_annealing_agrees_with_enumeration(kind, method, with_mean):
    rbm = make_rbm(6, 5, **KINDS[kind])
    mean = rbm.visible_units.mean(torch.randn(rbm.num_visible, dtype=torch.float64)) if with_mean else None
    exact = rbm.log_z("exact").estimate
    found = rbm.log_z(method, num_chains=300, num_temperatures=200, base_mean=mean, generator=generator())
    assert found.lower <= exact <= found.upper
    assert found.upper - found.lower < 0.5
    assert found.effective_sample_size > 100


def test_a_base_that_resembles_the_data_helps():
    rbm = make_rbm(scale=0.3)
    with torch.no_grad():
        rbm.visible_bias += 3
        rbm.hidden_bias.fill_(4)
        rbm.weight.sub_(1)
    states = all_states(rbm)
    mean = ((-rbm.free_energy(states)).softmax(0) @ states).detach()
    options = {"num_chains": 200, "num_temperatures": 10}
    without = rbm.log_z(**options, generator=generator()).effective_sample_size
    assert rbm.log_z(**options, base_mean=mean, generator=generator()).effective_sample_size > 1.5 * without


def make_far_modes() -> tuple[RBM, Tensor]:
    """Two states that hold nearly all probability, as likely as each other and far apart, and an RBM of them."""
    states = (torch.arange(8) % 2).double().expand(2, -1).clone()
    states[1] = 1 - states[0]
    signs = 2 * states - 1
    rbm = RBM(8, 2).double()
    with torch.no_grad():
        rbm.weight.copy_(6 * signs)
        rbm.visible_bias.zero_()
        rbm.hidden_bias.fill_(-10)
    return rbm, states


def test_reverse_annealing_from_rows_shows_a_mode_that_annealing_upwards_missed():
    rbm, states = make_far_modes()
    exact = rbm.log_z("exact").estimate
    options = {"num_chains": 100, "num_temperatures": 300, "base_mean": 0.98 * states[0] + 0.01}
    forward = rbm.log_z(**options, generator=generator())
    own, of_data = (
        rbm.log_z("reverse_ais", **options, reverse_from=rows, generator=generator()) for rows in (None, states)
    )
    assert forward.upper < exact - 0.6  # half of the states are missing, log 2
    assert own.upper < exact - 0.6
    assert of_data.upper >= exact
    assert of_data.estimate == pytest.approx(exact, abs=0.2)
    missed = rbm.log_z("reverse_ais", **options, reverse_from=states[1:], generator=generator())
    assert missed.estimate > exact + 2


@pytest.mark.sampled(default=2)
@pytest.mark.parametrize("kind", KINDS)
def test_reverse_annealing_from_samples_agrees_with_enumeration(kind):
    rbm = make_rbm(6, 5, **KINDS[kind]).float()
    options = {"num_chains": 300, "num_temperatures": 200, "generator": generator()}
    found = rbm.log_z("reverse_ais", **options, reverse_from=rbm.sample(50, 200, generator=generator()).double())
    assert found.lower <= rbm.log_z("exact").estimate <= found.upper


def test_annealing_under_autocast_is_that_of_float32():
    rbm = make_rbm(20, 15).float()
    options = {"num_chains": 20, "num_temperatures": 30}
    for method in ("ais", "reverse_ais"):
        expected = rbm.log_z(method, **options, generator=generator())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = rbm.log_z(method, **options, generator=generator())
        assert found == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "bridge"}, "'exact', 'ais' or 'reverse_ais'; got 'bridge'"),
        ({"num_chains": 1}, "at least 2; got num_chains=1, num_temperatures=1000"),
        ({"num_temperatures": 1}, "num_temperatures=1"),
        ({"base_mean": torch.full((9,), 1.5)}, r"values in \[0, 1\]"),
        ({"base_mean": torch.zeros(8)}, r"takes rows \(B, 9\); got \(1, 8\)"),
        ({"reverse_from": torch.zeros(2, 9)}, "goes with method='reverse_ais'; got method='ais'"),
        ({"method": "reverse_ais", "reverse_from": torch.zeros(2, 8)}, r"takes rows \(B, 9\); got \(2, 8\)"),
    ],
)
def test_annealing_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        RBM(9, 7).log_z(**arguments)


@pytest.mark.parametrize("method", ["exact", "ais", "reverse_ais"])
def test_a_diverged_model_is_refused(method):
    rbm = RBM(4, 3)
    nn.init.constant_(rbm.hidden_bias, math.nan)
    with pytest.raises(ValueError, match=r"hidden_bias holds NaN or infinities.*training has diverged"):
        rbm.log_z(method)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_cuda_likelihoods_are_those_of_the_cpu(kind):
    rbm = make_rbm(6, 5, **KINDS[kind])
    exact = rbm.log_z("exact").estimate
    rows = rbm.sample(9, 3)
    rbm, rows, noise = rbm.cuda(), rows.cuda(), torch.Generator("cuda").manual_seed(0)
    torch.testing.assert_close(rbm.log_z("exact").estimate.cpu(), exact)
    for method in ("ais", "reverse_ais"):
        found = rbm.log_z(method, num_chains=300, num_temperatures=200, generator=noise)
        assert found.lower.cpu() <= exact <= found.upper.cpu()
    assert rbm.log_prob(rows).is_cuda
    assert rbm.sample(4, 3, clamp=rows[0], generator=noise).equal(rows[:1].expand(4, -1))


# likelihoods ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"num_labels": 3}])
def test_log_prob_sums_to_one(options):
    rbm = make_rbm(**options)
    log_prob = rbm.log_prob(all_states(rbm))
    assert log_prob.dtype == torch.float64
    assert log_prob.logsumexp(0).item() == pytest.approx(0, abs=1e-9)


@pytest.mark.slow
def test_log_prob_takes_what_log_z_told():
    rbm = RBM(30, 40)
    visible = (torch.rand(4, 30) > 0.5).float()
    zero = torch.tensor(0.0, dtype=torch.float64)
    torch.testing.assert_close(
        rbm.log_prob(visible, LogZ(zero + 7, zero, zero, zero)), -rbm.free_energy(visible).double().detach() - 7
    )
    # too large to enumerate, and nearly independent
    independent = torch.full((4,), -30 * math.log(2), dtype=torch.float64)
    torch.testing.assert_close(rbm.log_prob(visible), independent, rtol=0.02, atol=0)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        rbm.log_prob(visible * 255)
