"""One of several recurrent layers. Shapes: B rows, T steps, I inputs, H hidden, D directions."""

from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_accel.nn.recurrent import DynamicRNN


class RecurrentBlockOutput(NamedTuple):
    """What the next block takes, and the state to go on from."""

    features: Tensor  # (B, T, D * H), or (B, D * H) of a block that pools
    state: Any  # as DynamicRNN's


class RecurrentBlock(nn.Module):
    """Dropout of the input, a recurrent layer, and, if asked for, a norm before and a sum with the input after it.

    Args:
        rnn: one layer; its pooling, unless "none", is what the block gives.
        input_size: I.
        dropout: share of the input that is dropped in training.
        residual: norm the input of ``rnn``, and add the input to its output where that is not pooled; I must be
            D * H then.
    """

    def __init__(self, rnn: DynamicRNN, input_size: int, dropout: float = 0.0, residual: bool = False) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(input_size) if residual else None
        self.rnn = rnn

    def forward(self, x: Tensor, lengths: Tensor | None = None, state: Any = None) -> RecurrentBlockOutput:
        """Run over ``x`` (B, T, I) of ``lengths`` (B,), going on from ``state``."""
        output = self.rnn(self._enter(x), lengths, state)
        if output.pooled is not None:
            return RecurrentBlockOutput(output.pooled, output.state)
        return RecurrentBlockOutput(self._leave(x, output.output), output.state)

    def step(self, x: Tensor, state: Any = None) -> RecurrentBlockOutput:
        """Take one step ``x`` (B, I) of each row; features are (B, H)."""
        output, state = self.rnn.step(self._enter(x), state)
        pooled = self.rnn.pooling != "none"
        return RecurrentBlockOutput(output if pooled else self._leave(x, output), state)

    def _enter(self, x: Tensor) -> Tensor:
        x = self.dropout(x)
        return x if self.norm is None else self.norm(x)

    def _leave(self, x: Tensor, output: Tensor) -> Tensor:
        return output if self.norm is None else x + output
