"""A block of a deep recurrent network. Shapes: B samples, T steps, I inputs, H hidden, D directions."""

from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_accel.nn.recurrent import DynamicRNN


class RecurrentBlockOutput(NamedTuple):
    """Hold the features for the next block, and the new state."""

    features: Tensor  # (B, T, D * H), or (B, D * H) if the block pools
    state: Any  # as of DynamicRNN


class RecurrentBlock(nn.Module):
    """Apply dropout and a recurrent layer, optionally with layer normalisation before and a residual connection.

    Args:
        rnn: one layer; if its pooling is not "none", the block returns the pooled vector.
        input_size: I.
        dropout: dropout probability of the input.
        residual: normalise the input of ``rnn``, and add the input to its output unless that is pooled; needs I equal
            to D * H.
    """

    def __init__(self, rnn: DynamicRNN, input_size: int, dropout: float = 0.0, residual: bool = False) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(input_size) if residual else None
        self.rnn = rnn

    def forward(self, x: Tensor, lengths: Tensor | None = None, state: Any = None) -> RecurrentBlockOutput:
        """Run over ``x`` (B, T, I) with ``lengths`` (B,), starting from ``state``."""
        output = self.rnn(self._enter(x), lengths, state)
        if output.pooled is not None:
            return RecurrentBlockOutput(output.pooled, output.state)
        return RecurrentBlockOutput(self._leave(x, output.output), output.state)

    def step(self, x: Tensor, state: Any = None) -> RecurrentBlockOutput:
        """Run one step ``x`` (B, I); features are (B, H)."""
        output, state = self.rnn.step(self._enter(x), state)
        pooled = self.rnn.pooling != "none"
        return RecurrentBlockOutput(output if pooled else self._leave(x, output), state)

    def _enter(self, x: Tensor) -> Tensor:
        x = self.dropout(x)
        return x if self.norm is None else self.norm(x)

    def _leave(self, x: Tensor, output: Tensor) -> Tensor:
        return output if self.norm is None else x + output
