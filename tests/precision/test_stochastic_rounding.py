import pytest
import torch

from lightning_accel.precision.bfloat16 import RoundingNoise, round_stochastically

STEP = 2.0**-7  # between bfloat16 numbers in [1, 2)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("scale", [1.0, -1.0, 2.0**-100, -(2.0**100)])
def test_expected_value_is_the_value(share, scale):
    count = 40000
    value = torch.tensor(scale * (1 + share * STEP)).expand(count)
    rounded = round_stochastically(value, torch.Generator().manual_seed(0)).double() / scale
    assert set(rounded.unique().tolist()) <= {1.0, 1.0 + STEP}
    exact = value[0].double().item() / scale
    deviation = STEP * (share * (1 - share) / count) ** 0.5
    assert abs(rounded.mean().item() - exact) <= 4 * deviation + 1e-9


def test_rounds_every_number_to_a_neighbour():
    values = torch.randn(5001) * 10 ** torch.linspace(-40, 38, 5001)  # denormal ones and an odd count among them
    rounded = round_stochastically(values, torch.Generator().manual_seed(0))
    low = (values.view(torch.int32) & -65536).view(torch.float32)  # toward zero
    high = ((values.view(torch.int32) & -65536) + 65536).view(torch.float32)
    assert ((rounded.float() == low) | (rounded.float() == high)).all()
    share = ((rounded.float() != low).double().sum() / (values != low).sum()).item()
    assert share == pytest.approx(0.5, abs=0.03)


def test_exact_and_special_numbers_stay():
    exact = torch.randn(99).bfloat16()
    assert torch.equal(round_stochastically(exact.float(), torch.Generator()), exact)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
    torch.testing.assert_close(
        round_stochastically(special, torch.Generator()), special.bfloat16(), equal_nan=True, rtol=0, atol=0
    )
    nans = torch.full((64,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    assert round_stochastically(nans, torch.Generator()).isnan().all()


def test_noise_depends_on_seed_step_and_parameter_alone():
    def draw(seed=0, steps=0, index=0):
        noise = RoundingNoise(seed)
        noise.steps = steps
        values = torch.full((1000,), 1 + STEP / 2)
        noise.round_(values, index)
        return values

    assert torch.equal(draw(), draw())
    for other in (draw(seed=1), draw(steps=1), draw(index=1)):
        assert (draw() == other).float().mean().item() == pytest.approx(0.5, abs=0.08)
