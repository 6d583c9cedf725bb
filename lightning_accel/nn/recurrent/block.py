"""A block of a deep recurrent network. Shapes: B samples, T steps, I inputs, H hidden, D directions, K kernel size."""

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lightning_accel.nn.features import require_width
from lightning_accel.nn.feed_forward import FeedForward
from lightning_accel.nn.recurrent.dynamic import DynamicRNN


class RecurrentBlockOutput(NamedTuple):
    """Hold the features for the next block, and the new state."""

    features: Tensor  # (B, T, D * H), or (B, D * H) if the block pools
    state: Any  # as of DynamicRNN; with a convolution a pair: its last inputs (K - 1, B, I), and that


class RecurrentBlock(nn.Module):
    """Apply dropout and a recurrent layer, optionally in a residual branch with a convolution, and a perceptron.

    Without ``residual``, features x become ``rnn(x)``; with it ``y = x + rnn(conv(norm(x)))``, and with a perceptron
    ``y + perceptron(norm(y))``. With both, this is the block of Feng et al. 2024 (https://arxiv.org/abs/2410.01201).

    Args:
        rnn: one layer; if its pooling is not "none", the block returns the pooled vector, to which x is not added.
        input_size: I, the number of features of a step.
        dropout: dropout probability of the input.
        residual: whether to normalise and to add as above; needs I equal to D * H.
        conv_kernel: K of the :class:`CausalConvolution`, which needs ``residual``; 0 for none.
        feed_forward_dim: hidden width of the perceptron, which needs ``residual``; 0 for none.

    Raises:
        ValueError: if sizes disagree, or a part is out of range or needs ``residual``.
    """

    def __init__(
        self,
        rnn: DynamicRNN,
        input_size: int,
        dropout: float = 0.0,
        residual: bool = False,
        *,
        conv_kernel: int = 0,
        feed_forward_dim: int = 0,
    ) -> None:
        super().__init__()
        require_block_parts(residual, conv_kernel, feed_forward_dim)
        if rnn.num_layers != 1 or rnn.input_size != input_size or (residual and rnn.output_size != input_size):
            raise ValueError(
                f"a block needs an rnn of one layer and input_size={input_size}, and for residual=True of output_size "
                f"{input_size}; got num_layers={rnn.num_layers}, input_size={rnn.input_size}, output_size="
                f"{rnn.output_size}"
            )
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(input_size) if residual else None
        self.conv = CausalConvolution(input_size, conv_kernel) if conv_kernel else None
        self.rnn = rnn
        self.perceptron: nn.Module | None = None
        if feed_forward_dim:
            feed_forward = FeedForward(rnn.output_size, feed_forward_dim, "gelu", gated=False, bias=True)
            self.perceptron = nn.Sequential(nn.LayerNorm(rnn.output_size), feed_forward)

    def forward(self, x: Tensor, lengths: Tensor | None = None, state: Any = None) -> RecurrentBlockOutput:
        """Run over ``x`` (B, T, I) with ``lengths`` (B,), starting from ``state``."""
        entered = self._enter(x)
        new: Any
        if self.conv is None:
            output = self.rnn(entered, lengths, state)
            new = output.state
        else:
            before, inner = _split(state)
            entered, last = self.conv(entered, lengths, before)
            output = self.rnn(entered, lengths, inner)
            new = (last, output.state)
        return RecurrentBlockOutput(self._leave(x, cast(Tensor, output.output), output.pooled), new)

    def step(self, x: Tensor, state: Any = None) -> RecurrentBlockOutput:
        """Run one step ``x`` (B, I); features are (B, D * H)."""
        entered = self._enter(x)
        new: Any
        if self.conv is None:
            output, new = self.rnn.step(entered, state)
        else:
            before, inner = _split(state)
            entered, last = self.conv.step(entered, before)
            output, inner = self.rnn.step(entered, inner)
            new = (last, inner)
        pooled = None if self.rnn.pooling == "none" else output
        return RecurrentBlockOutput(self._leave(x, output, pooled), new)

    def _enter(self, x: Tensor) -> Tensor:
        x = self.dropout(x)
        return x if self.norm is None else self.norm(x)

    def _leave(self, x: Tensor, output: Tensor, pooled: Tensor | None) -> Tensor:
        features = pooled if pooled is not None else output if self.norm is None else x + output
        return features if self.perceptron is None else features + self.perceptron(features)


def require_block_parts(residual: bool, conv_kernel: int, feed_forward_dim: int) -> None:
    """Raise a ValueError unless a :class:`RecurrentBlock` can have these parts."""
    for name, size, least in (("conv_kernel", conv_kernel, 2), ("feed_forward_dim", feed_forward_dim, 1)):
        if not isinstance(size, int) or size < 0 or 0 < size < least:
            raise ValueError(f"{name} must be 0, for none, or an integer from {least} on; got {size!r}")
        if size and not residual:
            raise ValueError(f"{name}={size} needs residual=True; set it, or leave {name} at 0")


def _split(state: Any) -> tuple[Any, Any]:
    if state is None:
        return None, None
    if not isinstance(state, tuple) or len(state) != 2 or state[0].ndim != 3:
        raise ValueError(
            "the state of a block with a convolution is a pair, the convolution's last inputs and the state of its "
            "DynamicRNN; got another, such as that of a block without"
        )
    return state


class CausalConvolution(nn.Module):
    """Convolve each feature with its last ``kernel_size`` steps: a depthwise convolution over sequences.

    ``weight`` (I, 1, K) and ``bias`` (I,) have the layout and initial values of ``nn.Conv1d(I, I, K, groups=I)``.

    >>> CausalConvolution(2, 4)(torch.zeros(3, 5, 2))[1].shape
    torch.Size([3, 3, 2])
    """

    def __init__(self, dim: int, kernel_size: int) -> None:
        super().__init__()
        if min(dim, kernel_size) < 1:
            raise ValueError(f"dim and kernel_size must be at least 1; got {dim} and {kernel_size}")
        bound = 1 / math.sqrt(kernel_size)
        self.kernel_size = kernel_size
        self.weight = nn.Parameter(torch.empty(dim, 1, kernel_size).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(dim).uniform_(-bound, bound))

    def forward(self, x: Tensor, lengths: Tensor | None = None, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Convolve ``x`` (B, T, I) of ``lengths`` (B,); return the same shape, and the state after each sample.

        ``state`` (K - 1, B, I) are the inputs before the first step, oldest first; zeros by default.
        """
        require_width(self, x, "dim", len(self.bias), "x (B, T, {})", ndim=3)
        steps, history = x.shape[1], self.kernel_size - 1
        before = x.new_zeros(x.shape[0], history, x.shape[2]) if state is None else state.to(x.dtype).transpose(0, 1)
        whole = torch.cat([before, x], dim=1)
        out: Tensor = self.bias
        for number in range(self.kernel_size):  # several times as fast as torch's depthwise convolution on a CPU
            out = torch.addcmul(out, whole[:, number : number + steps], self.weight[:, 0, number])
        if lengths is None:
            return out, whole[:, steps:].transpose(0, 1).clone()  # not a view that keeps the whole input
        last = lengths.to(x.device) + torch.arange(history, device=x.device)[:, None]  # (K - 1, B)
        return out, whole[torch.arange(x.shape[0], device=x.device), last]

    def step(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Convolve one step ``x`` (B, I)."""
        out, state = self(x[:, None], None, state)
        return out[:, 0], state

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, kernel_size={self.kernel_size}"
