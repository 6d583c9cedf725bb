import copy
import importlib.util

import pytest
import torch
from torch import nn

from lightning_accel.compress.quantization import layers
from lightning_accel.compress.quantization.fake_quant import DECAY, attach, detach, rank_layers
from lightning_accel.compress.quantization.layers import (
    INPUT_LIMIT,
    find_layers,
    input_grid,
    round_input,
    round_weight,
    weight_scale,
)


def small_network():
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5), nn.ReLU(),
        nn.Conv2d(5, 3, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4),
    )  # fmt: skip


def by_hand(value, scale, zero, low, high):
    return (min(max(round(value / scale) + zero, low), high) - zero) * scale


def test_weights_lie_on_the_grid_of_their_channel():
    weight = torch.randn(5, 3, 2)
    weight[1, 0] = 0
    scale = weight_scale(weight)
    rounded = round_weight(weight)
    for channel in range(5):
        step = max(abs(value) for value in weight[channel].flatten().tolist()) / 127
        assert scale[channel].item() == pytest.approx(step)
        for value, found in zip(weight[channel].flatten().tolist(), rounded[channel].flatten().tolist(), strict=True):
            assert found == pytest.approx(by_hand(value, scale[channel].item(), 0, -127, 127), abs=1e-6)
    assert rounded[1, 0].eq(0).all()
    assert round_weight(torch.zeros(2, 3)).eq(0).all()


def test_gradient_passes_rounding_inside_the_range_alone():
    weight = torch.randn(3, 4, requires_grad=True)
    factor = torch.randn(3, 4)
    (round_weight(weight) * factor).sum().backward()
    torch.testing.assert_close(weight.grad, factor)
    x = torch.tensor([-3.0, -0.5, 0.0, 0.7, 9.0], requires_grad=True)
    round_input(x, torch.tensor(-1.0), torch.tensor(2.0)).sum().backward()
    assert x.grad.tolist() == [0, 1, 1, 1, 0]


@pytest.mark.parametrize(("low", "high"), [(-1.3, 2.1), (0.4, 2.0), (-3.0, -1.0)])
def test_inputs_lie_on_a_grid_that_holds_zero(low, high):
    x = torch.cat([3 * torch.randn(16), torch.zeros(1)])
    scale, zero = (one.item() for one in input_grid(torch.tensor(low), torch.tensor(high)))
    assert scale == pytest.approx((max(high, 0) - min(low, 0)) / INPUT_LIMIT)
    found = round_input(x, torch.tensor(low), torch.tensor(high))
    assert found.tolist() == pytest.approx(
        [by_hand(value, scale, zero, 0, INPUT_LIMIT) for value in x.tolist()], abs=1e-6
    )
    assert found[16] == 0


@pytest.mark.parametrize(("vnni", "largest"), [(False, 127), (True, 255)])
def test_inputs_have_as_many_bits_as_products_do_not_overflow(vnni, largest, monkeypatch):
    monkeypatch.setattr("lightning_accel._private.torch.has_vnni", lambda: vnni)
    fresh = importlib.util.module_from_spec(layers.__spec__)
    layers.__spec__.loader.exec_module(fresh)
    assert largest == fresh.INPUT_LIMIT


def train(module, attached, steps=3):
    """The ranges that a loop finds."""
    ranges = dict.fromkeys(attached)
    seen = {}
    hooks = [
        layer.layer.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0].detach()}))
        for name, layer in attached.items()
    ]
    for _ in range(steps):
        module(torch.randn(6, 2, 6, 6)).sum().backward()
        for name, layer in attached.items():
            low, high = seen[name].min().item(), seen[name].max().item()
            old = ranges[name]
            ranges[name] = (low, high) if old is None else tuple(
                DECAY * before + (1 - DECAY) * now for before, now in zip(old, (low, high), strict=True)
            )  # fmt: skip
            layer.update_range(layer.seen.clone())
    for hook in hooks:
        hook.remove()
    return ranges


def test_ranges_follow_what_training_sees():
    module = small_network()
    names = list(module.state_dict())
    attached = attach(find_layers(module).quantized)
    plain = copy.deepcopy(module)
    x = torch.randn(5, 2, 6, 6)
    for layer in attached.values():
        layer.enabled = True
    module.eval()
    torch.testing.assert_close(module(x), plain.eval()(x), rtol=0, atol=0)  # no range is known
    module.train()
    ranges = train(module, attached)
    for name, layer in attached.items():
        assert layer.range.tolist() == pytest.approx(ranges[name], rel=1e-5)
    module.eval()
    kept = {name: layer.range.clone() for name, layer in attached.items()}
    assert not torch.equal(module(10 * x), plain(10 * x))
    assert all(torch.equal(kept[name], layer.range) and layer.seen.isinf().all() for name, layer in attached.items())
    assert list(module.state_dict()) == names


def test_copies_are_on_their_own():
    module = small_network()
    attached = attach(find_layers(module).quantized)
    for layer in attached.values():
        layer.enabled = True
    train(module, attached)
    made = copy.deepcopy(module).eval()
    module.eval()
    x = torch.randn(4, 2, 6, 6)
    expected = module(x)
    torch.testing.assert_close(made(x), expected, rtol=0, atol=0)
    with torch.no_grad():
        module[6].weight.zero_()
    torch.testing.assert_close(made(x), expected, rtol=0, atol=0)
    detach(made)
    assert not any("forward" in one.__dict__ for one in made.modules())
    assert not torch.equal(made(x), expected)


def test_layers_that_cannot_be_quantized_have_a_reason():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    module = nn.ModuleDict(
        {
            "linear": nn.Linear(3, 3),
            "own": Own(3, 3),
            "rnn": nn.LSTM(3, 3),
            "norm": nn.LayerNorm(3),
            "attention": nn.MultiheadAttention(4, 2),
            "blocks": nn.Sequential(nn.Linear(3, 3), nn.Conv1d(3, 3, 1)),
        }
    )
    quantized, left, _ = find_layers(module)
    assert list(quantized) == ["linear", "blocks.0", "blocks.1"]
    assert left == {
        "own": "Own has a forward of its own",
        "rnn": "LSTM is no linear layer or convolution",
        "attention": "MultiheadAttention is no linear layer or convolution",
        "attention.out_proj": "MultiheadAttention takes its weight, and does not call it",
    }
    for exclude in (["blocks.*"], ["blocks"], ["linear", nn.Sequential], ["Sequential"]):
        quantized, left, skipped = find_layers(module, exclude)
        assert {"blocks.0", "blocks.1"} <= skipped
        assert not {"blocks.0", "blocks.1"} & set(quantized)
        assert left["blocks.0"].startswith("left out by exclude")
    with pytest.raises(ValueError, match=r"exclude has 'lineer'.*in ModuleDict.*there are linear, own, rnn"):
        find_layers(module, ["lineer"])


def test_the_layer_that_costs_most_is_ranked_first():
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    with torch.no_grad():
        module[2].weight[:, 0] = 3000.0  # the others in its rows have hardly a step of the grid left
        module[0].weight[0] = 0
        module[0].bias[0] = -1
    state = copy.deepcopy(module.state_dict())
    ranked = rank_layers(module, [((torch.randn(50, 6),), {})], ["0", "2", "4"])
    assert next(iter(ranked)) == "2"
    assert ranked["2"] > 10 * ranked["4"]
    torch.testing.assert_close(module.state_dict(), state, rtol=0, atol=0)
    assert not any("forward" in one.__dict__ for one in module.modules())
