"""The two-layer perceptron of a transformer. Shapes: D features, H hidden features."""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from lightning_accel.nn.features import require_floating, require_width
from lightning_accel.ops.bounds import require_integers
from lightning_accel.ops.expert_mlp import ACTIVATIONS, Activation
from lightning_accel.ops.names import require_one_of


class FeedForward(nn.Module):
    """Apply a two-layer perceptron, ``down(act(up(x)))``, or gated, ``down(act(gate(x)) * up(x))``.

    ``silu`` with a gate is SwiGLU. If gated, ``up.weight`` (2 * H, D) holds the rows of the gate above those of ``up``;
    else it is (H, D).

    Args:
        dim: D, width in and out.
        hidden_dim: H, the width between the two layers.
        activation: ``gelu``, ``gelu_tanh``, ``quick_gelu``, ``relu`` or ``silu``.
        gated: whether the first layer is gated (Shazeer 2020, https://arxiv.org/abs/2002.05202).
        bias: whether both layers have a bias.

    Raises:
        TypeError: if an option has another type.
        ValueError: if a size is below 1, or the activation is unknown.
    """

    def __init__(
        self, dim: int, hidden_dim: int, activation: Activation = "silu", gated: bool = True, bias: bool = False
    ) -> None:
        super().__init__()
        require_sizes(dim, hidden_dim, activation)
        self.activation = activation
        self.gated = gated
        self.up = nn.Linear(dim, (1 + gated) * hidden_dim, bias)
        self.down = nn.Linear(hidden_dim, dim, bias)

    if TYPE_CHECKING:  # Any, as torch declares it

        def __call__(self, x: Tensor) -> Tensor: ...

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (..., D) to the same shape."""
        require_width(self, x, "dim", getattr(self.up, "in_features", -1), "x (..., {})")  # a user may replace it
        require_floating(self, x, "x", self.up.parameters(recurse=False))
        act = ACTIVATIONS[self.activation].function
        hidden = self.up(x)
        if not self.gated:
            return self.down(act(hidden))
        gate, up = hidden.chunk(2, dim=-1)
        return self.down(act(gate) * up)


def require_sizes(dim: int, hidden_dim: int, activation: str) -> None:
    require_integers(1, dim=dim, hidden_dim=hidden_dim)
    require_one_of("activation", activation, ACTIVATIONS)
