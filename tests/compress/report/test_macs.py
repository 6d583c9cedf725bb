import pytest
import torch
from torch import nn

from lightning_accel.compress import count_macs
from lightning_accel.nn import MixtureOfExperts


class Residual(nn.Module):
    def __init__(self, width, out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU()
        self.shorter = (
            nn.Identity()
            if stride == 1
            else nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        )

    def forward(self, x):
        return self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + self.shorter(x))


class ResNet18(nn.Sequential):
    """He et al. 2016, https://arxiv.org/abs/1512.03385, table 1."""

    def __init__(self, width=64):
        stem = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        blocks, before = [], width
        for stage in range(4):
            out = width * 2**stage
            blocks += [Residual(before, out, 2 if stage else 1), Residual(out, out, 1)]
            before = out
        super().__init__(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))


@pytest.mark.parametrize(("cell", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_layers_in_closed_form(cell, gates):
    steps, rows, width, hidden = 7, 3, 5, 4
    module = cell(width, hidden, num_layers=2, bidirectional=True)
    first, second = hidden * (width + hidden), hidden * (2 * hidden + hidden)
    expected = 2 * gates * (first + second) * steps * rows
    assert count_macs(module, (torch.ones(steps, rows, width),)).total == expected


def test_attention_in_closed_form():
    rows, steps, dim = 3, 7, 8
    x = torch.ones(rows, steps, dim)
    attention = rows * (4 * steps * dim * dim + 2 * steps * steps * dim)
    assert count_macs(nn.MultiheadAttention(dim, 2, batch_first=True), (x, x, x)).total == attention
    layer = nn.TransformerEncoderLayer(dim, 2, 16, batch_first=True)
    perceptron = rows * steps * dim * 16
    assert count_macs(layer, (x,)) == (
        attention + 2 * perceptron,
        {"self_attn": attention, "linear1": perceptron, "linear2": perceptron},
    )


def test_convolutions_in_closed_form():
    x = torch.ones(2, 4, 5, 7)
    assert count_macs(nn.Conv2d(4, 6, 3, groups=2, padding=1), (x,)).total == 2 * 6 * 35 * 2 * 9
    assert count_macs(nn.ConvTranspose2d(4, 6, 3), (x,)).total == 2 * 4 * 35 * 6 * 9


@pytest.mark.parametrize("num_tokens", [6, 3000])
def test_experts_count_for_the_tokens_that_visit_them(num_tokens):
    mixture = MixtureOfExperts(dim=8, hidden_dim=5, num_experts=4, k=2)
    macs = count_macs(mixture, (torch.randn(num_tokens, 8),))
    assert macs.of_layer == {"gate": num_tokens * 8 * 4, "experts": num_tokens * 2 * 2 * 8 * 5}


def test_functions_and_shared_layers_count_where_they_run():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.vector = nn.Parameter(torch.ones(4))

        def forward(self, x, *, twice):
            x = self.layer(self.layer(x)) if twice else self.layer(x)
            return x @ self.vector

    module = Own().train()
    macs = count_macs(module, (torch.ones(3, 4),), {"twice": True})
    assert macs == (2 * 3 * 16 + 3 * 4, {"": 12, "layer": 96})
    assert module.training
    assert module.layer.training


@pytest.mark.parametrize(("width", "giga", "million"), [(64, 1.814, 11.69), (32, 0.483, 3.06)])
def test_resnet18_as_papers_of_pruning_count(width, giga, million):
    with torch.device("meta"):
        module, image = ResNet18(width), torch.ones(1, 3, 224, 224)
    macs = count_macs(module, (image,))
    assert round(macs.total / 1e9, 3) == giga
    assert sum(macs.of_layer.values()) == macs.total
    assert round(sum(one.numel() for one in module.parameters()) / 1e6, 2) == million
