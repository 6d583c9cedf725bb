"""The two-layer perceptron of a transformer. Shapes: D features, H hidden features."""

from torch import Tensor, nn

from lightning_accel.nn.features import require_floating, require_width
from lightning_accel.ops.expert_mlp import ACTIVATIONS, Activation


class FeedForward(nn.Module):
    """``down(act(up(x)))``, or ``down(act(gate(x)) * up(x))`` where it is gated; SwiGLU is ``silu`` and gated.

    ``up.weight`` holds the rows of the gate above those of ``up``: (2 * H, D) then, else (H, D).

    Args:
        dim: D, width in and out.
        hidden_dim: H.
        activation: ``gelu``, ``relu`` or ``silu``.
        gated: Shazeer 2020, https://arxiv.org/abs/2002.05202.
        bias: whether both layers have one.

    Raises:
        ValueError: if a size is below 1, or the activation unknown.
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

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (..., D) to the same shape."""
        require_width(self, x, "dim", getattr(self.up, "in_features", -1), "x (..., {})")  # it may be replaced
        require_floating(self, x, "x", self.up.parameters(recurse=False))
        act = ACTIVATIONS[self.activation].function
        hidden = self.up(x)
        if not self.gated:
            return self.down(act(hidden))
        gate, up = hidden.chunk(2, dim=-1)
        return self.down(act(gate) * up)


def require_sizes(dim: int, hidden_dim: int, activation: str) -> None:
    if min(dim, hidden_dim) < 1:
        raise ValueError(f"dim and hidden_dim must be at least 1; got dim={dim}, hidden_dim={hidden_dim}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}")
