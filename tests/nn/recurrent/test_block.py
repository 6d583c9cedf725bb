"""Blocks of deep recurrent networks, against torch's convolution and the sum of their parts."""

import pytest
import torch
import torch.nn.functional as F

from lightning_accel import DynamicRNN
from lightning_accel.nn.recurrent.block import CausalConvolution, RecurrentBlock


@pytest.mark.parametrize("kernel_size", [2, 4])
def test_a_convolution_is_that_of_torch(kernel_size):
    conv, x = CausalConvolution(3, kernel_size), torch.randn(2, 5, 3, requires_grad=True)
    padded = F.pad(x.transpose(1, 2), (kernel_size - 1, 0))
    expected = F.conv1d(padded, conv.weight, conv.bias, groups=3).transpose(1, 2)
    inputs = [x, conv.weight, conv.bias]
    out = conv(x)[0]
    torch.testing.assert_close(out, expected)
    gradients = [torch.autograd.grad(one.sin().sum(), inputs) for one in (out, expected)]
    torch.testing.assert_close(*gradients)


def test_the_state_of_a_convolution_is_what_came_before():
    conv, x, lengths = CausalConvolution(3, 4), torch.randn(4, 6, 3), torch.tensor([6, 2, 0, 4])
    whole, _ = conv(torch.cat([x, x], dim=1))
    _, state = conv(x, lengths)
    for row, length in enumerate(lengths.tolist()):
        both = torch.cat([x[row, :length], x[row]])[None]
        continued, _ = conv(x[row : row + 1], None, state[:, row : row + 1])
        torch.testing.assert_close(continued[0], conv(both)[0][0, length:])
    torch.testing.assert_close(conv.step(x[:1, 0], state[:, :1])[0], whole[:1, 6])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"conv_kernel": 4}, "conv_kernel=4 needs residual=True"),
        ({"feed_forward_dim": 4}, "feed_forward_dim=4 needs residual=True"),
        ({"input_size": 3}, "a block needs an rnn of one layer and input_size=3"),
        ({"rnn": DynamicRNN(4, 4, 2)}, "got num_layers=2"),
        ({"rnn": DynamicRNN(4, 5), "residual": True}, "output_size=5"),
    ],
)
def test_blocks_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        RecurrentBlock(**{"rnn": DynamicRNN(4, 4), "input_size": 4} | options)
    with pytest.raises(ValueError, match="dim and kernel_size must be at least 1; got 3 and 0"):
        CausalConvolution(3, 0)
    with pytest.raises(ValueError, match=r"x \(B, T, 3\); got \(2, 5, 1\)"):
        CausalConvolution(3, 4)(torch.randn(2, 5, 1))
    block = RecurrentBlock(DynamicRNN(4, 4, pooling="none"), 4, residual=True, conv_kernel=2)
    with pytest.raises(ValueError, match="the state of a block with a convolution is a pair"):
        block.step(torch.randn(2, 4), torch.zeros(1, 2, 4))


@pytest.mark.parametrize("pooling", ["none", "mean"])
def test_a_block_is_the_sum_of_its_branches(pooling):
    rnn = DynamicRNN(4, 4, cell="mingru", pooling=pooling)
    block, x = RecurrentBlock(rnn, 4, residual=True, conv_kernel=3, feed_forward_dim=5), torch.randn(2, 6, 4)
    output = rnn(block.conv(F.layer_norm(x, (4,)))[0])
    y = output.pooled if pooling == "mean" else x + output.output
    up, down = block.perceptron[1].up, block.perceptron[1].down
    expected = y + down(F.gelu(up(F.layer_norm(y, (4,)))))
    torch.testing.assert_close(block(x).features, expected)
