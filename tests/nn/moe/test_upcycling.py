"""Mixtures in the place of perceptrons of networks that know nothing of them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_accel.nn import FeedForward, MixtureMLP, replace_mlps_
from lightning_accel.nn.moe.perceptrons import find_perceptrons
from tests.zoo import ZOO

D, H = 6, 10


class Conv1D(nn.Module):
    """A linear layer as GPT-2 of transformers has it."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


class Gpt2(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.c_fc, self.c_proj, self.act = Conv1D(H, D), Conv1D(D, H), nn.GELU("tanh")
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class T5(nn.Module):
    def __init__(self):
        super().__init__()
        self.wi_1, self.wi_0 = nn.Linear(D, H, bias=False), nn.Linear(D, H, bias=False)
        self.wo, self.dropout, self.act = nn.Linear(H, D, bias=False), nn.Dropout(0.5), nn.ReLU()

    def forward(self, x):
        return self.wo(self.dropout(self.act(self.wi_0(x)) * self.wi_1(x)))


class Phi3(nn.Module):
    """Have the gate and the first layer in one, the gate last."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(D, 2 * H, bias=False), nn.Linear(H, D, bias=False)
        self.activation_fn = nn.SiLU()

    def forward(self, x):
        up, gate = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * self.activation_fn(gate))


class Swapped(nn.Module):
    """Have a gate that no name tells, and an activation that is a function."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(D, H), nn.Linear(D, H), nn.Linear(H, D)
        self.activation = F.silu

    def forward(self, x):
        return self.c(self.a(x) * self.activation(self.b(x)))


class Quick(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.intermediate_act_fn = nn.Linear(D, H), nn.GELU()

    def forward(self, x):
        return self.intermediate_act_fn(self.dense(x))


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.LayerNorm, self.dropout = nn.Linear(H, D), nn.LayerNorm(D), nn.Dropout(0.1)

    def forward(self, x, residual):
        return self.LayerNorm(self.dropout(self.dense(x)) + residual)


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.intermediate, self.output = nn.Linear(D, D), Inner(), Outer()

    def forward(self, x):
        return self.output(self.intermediate(self.attention(x)), x)


class Whisper(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.activation_fn = nn.Linear(D, D), nn.GELU()
        self.fc1, self.fc2 = nn.Linear(D, H), nn.Linear(H, D)

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.fc2(self.activation_fn(self.fc1(x)))


class ConvNext(nn.Module):
    """Have its perceptron beside a convolution, and what ``between`` makes of its hidden features."""

    def __init__(self, between=None):
        super().__init__()
        self.dwconv, self.pwconv1, self.act = nn.Conv1d(D, D, 3, padding=1, groups=D), nn.Linear(D, H), nn.GELU()
        self.between = between or nn.Identity()
        self.pwconv2 = nn.Linear(H, D)

    def forward(self, x):
        return x + self.pwconv2(self.between(self.act(self.pwconv1(self.dwconv(x.mT).mT))))


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = self.second = nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, D))

    def forward(self, x):
        return self.second(self.first(x))


LAYERS = {
    "sequential": lambda: nn.Sequential(nn.Linear(D, H), nn.SiLU(), nn.Dropout(0.2), nn.Linear(H, D)),
    "ours": lambda: FeedForward(D, H),
    "quick": lambda: nn.Sequential(nn.Linear(D, H), Quick(), nn.Linear(H, D)),
    "gpt2": Gpt2,
    "t5": T5,
    "phi3": Phi3,
    "swapped": Swapped,
    "bert": Bert,
    "whisper": Whisper,
    "convnext": ConvNext,
    "shared": Shared,
}


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.stem = nn.Linear(D, D)
        self.blocks = nn.ModuleList([LAYERS[kind]() for _ in range(3)])
        self.head = nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, 3))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("kind", LAYERS)
def test_outputs_are_those_of_the_perceptrons(kind):
    torch.manual_seed(0)
    net, x = Net(kind).double(), torch.randn(4, 5, D, dtype=torch.float64)
    net.train()
    net.blocks[1].eval()
    modes = [one.training for one in net.blocks]
    state = torch.get_rng_state()
    places, reasons = find_perceptrons(net)
    assert torch.equal(torch.get_rng_state(), state)
    assert [one.training for one in net.blocks] == modes
    assert not reasons
    assert len(places) == (6 if kind == "shared" else 3)
    expected = net.eval()(x)
    assert replace_mlps_(net, num_experts=4) == [place.name for place in places]
    mixtures = [one for one in net.modules() if isinstance(one, MixtureMLP)]
    assert len(mixtures) == 3
    torch.testing.assert_close(net(x), expected, rtol=1e-10, atol=1e-10)
    net.train()(x).sum().backward()
    for mixture in mixtures:
        assert all(one.grad.any() for name, one in mixture.named_parameters() if "gate" not in name)
    assert not find_perceptrons(net)[0]


def test_a_part_of_the_layers_can_be_replaced():
    net = Net("gpt2")
    assert replace_mlps_(net, 4, layers=[0, 2]) == ["blocks.0", "blocks.2"]
    assert [type(one) for one in net.blocks] == [MixtureMLP, Gpt2, MixtureMLP]
    for layers in [1], [], [0, 0], "0":
        with pytest.raises(ValueError, match=r"layers must be different numbers below 1, that of perceptrons; got "):
            replace_mlps_(net, 4, layers=layers)
    replace_mlps_(net, 4, granularity=2)
    hidden = [one.mixture.experts.down_weight.shape[2] for one in net.blocks]
    assert hidden[0] == hidden[2] == 2 * hidden[1]
    with pytest.raises(ValueError, match="the perceptrons of Net are mixtures of experts already"):
        replace_mlps_(net, 4)


@pytest.mark.parametrize(("kind", "dropout"), [("gpt2", 0.0), ("gpt2", 0.4), ("t5", 0.0)])
def test_a_dropout_behind_the_second_layer_stays(kind, dropout):
    net = Net(kind)
    if dropout:
        net.blocks[0] = Gpt2(dropout)
    replace_mlps_(net, 2)
    assert net.blocks[0].dropout.p == dropout


class Odd(nn.Module):
    """Look like a perceptron, and compute something else."""

    def __init__(self):
        super().__init__()
        self.first, self.act, self.second = nn.Linear(D, H), nn.ReLU(), nn.Linear(H, D)

    def forward(self, x):
        return self.second(self.act(self.first(x))) + x


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (
            nn.Sequential(nn.Linear(D, D)),
            r"Sequential has no perceptron to replace, .* width of their input\. Put MixtureOf",
        ),
        (nn.Sequential(Odd()), "0: it computes something else than a perceptron of these weights"),
        (
            nn.Sequential(nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, D))),
            r"0: the activation must be one of gelu, gelu_tanh, quick_gelu, relu, silu; got Tanh\(\)",
        ),
        (nn.Sequential(ConvNext(nn.LayerNorm(H))), "0: between stands between its layers"),
        (nn.Sequential(nn.TransformerEncoderLayer(D, 2, H)), "0: torch's own transformer layers read the weights"),
    ],
)
def test_rejects_networks_without_perceptrons(network, message):
    before = list(network.state_dict())
    with pytest.raises(ValueError, match=message):
        replace_mlps_(network, 4)
    assert list(network.state_dict()) == before


def test_mixtures_are_made_on_the_meta_device():
    with torch.device("meta"):
        net = Net("gpt2")
    assert len(replace_mlps_(net, 4)) == 3
    assert all(parameter.is_meta for parameter in net.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number"),
    [
        *(("bert", 2), ("distilbert", 2), ("roberta", 2), ("gpt2", 2), ("llama", 2), ("mistral", 2), ("qwen3", 2)),
        *(("t5", 4), ("vit", 2), ("clip", 4), ("whisper", 4), ("swin", 2)),
    ],
)
def test_networks_of_transformers_are_upcycled(name, number):
    torch.manual_seed(0)
    module = ZOO[name].make().eval()
    batch = next(iter(ZOO[name].loader()))
    with torch.no_grad():
        expected = module(**batch)
        assert len(replace_mlps_(module, num_experts=4)) == number
        found = module(**batch)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
    module.train().log = lambda *_, **__: None
    module.training_step(batch, 0).backward()
