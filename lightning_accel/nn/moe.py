"""Mixture of experts. Shapes: N tokens, D features, H hidden features, E experts, K experts per token."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_accel.nn.gating import TopKGate


class MixtureOutput(NamedTuple):
    """What a mixture of experts made of its tokens, and what its gate did."""

    features: Tensor  # (..., D), shape and dtype of the input
    balance_loss: Tensor  # () float32 or float64, 1 when every expert gets an equal share
    expert_counts: Tensor  # (E,) int64, slots that each expert filled


class MixtureOfExperts(nn.Module):
    """A gate and ``num_experts`` two-layer perceptrons, of which each token visits ``k``; no token is dropped.

    Expert weights are stacked into one tensor a layer, so every parameter gets a gradient (zero for an idle expert)
    and DistributedDataParallel never meets an unused one.

    Args:
        dim: D, width in and out.
        hidden_dim: H of each expert.
        num_experts: E.
        k: K.

    Raises:
        ValueError: if a size is below 1 or ``k`` not in [1, ``num_experts``].

    >>> mixture = MixtureOfExperts(dim=8, hidden_dim=16, num_experts=4)
    >>> features, balance_loss, expert_counts = mixture(torch.randn(3, 5, 8))
    >>> features.shape, int(expert_counts.sum())
    (torch.Size([3, 5, 8]), 30)
    """

    def __init__(self, dim: int, hidden_dim: int, num_experts: int, k: int = 2) -> None:
        super().__init__()
        if min(dim, hidden_dim) < 1:
            raise ValueError(f"dim and hidden_dim must be at least 1; got dim={dim}, hidden_dim={hidden_dim}")
        self.gate = TopKGate(dim, num_experts, k)
        self.up_weight = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.up_bias = nn.Parameter(torch.empty(num_experts, hidden_dim))
        self.down_weight = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.down_bias = nn.Parameter(torch.empty(num_experts, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw every expert as ``nn.Linear`` draws its own."""
        for weight, bias in ((self.up_weight, self.up_bias), (self.down_weight, self.down_bias)):
            bound = 1 / math.sqrt(weight.shape[-1])
            nn.init.uniform_(weight, -bound, bound)
            nn.init.uniform_(bias, -bound, bound)
        self.gate.reset_parameters()

    def forward(self, x: Tensor) -> MixtureOutput:
        """Map ``x`` (..., D), of any floating dtype, to the weighted sum of the experts that each token visits."""
        tokens = x.reshape(-1, x.shape[-1])  # (N, D)
        routing = self.gate(tokens)
        slots = routing.experts.flatten()  # (N * K,)
        order = slots.argsort(stable=True)
        rows = tokens[order // self.gate.k]  # (N * K, D), grouped by expert
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        visited = self._run_experts(rows, routing.expert_counts)[place].unflatten(0, (-1, self.gate.k))  # (N, K, D)
        features = (visited * routing.weights.unsqueeze(-1)).sum(dim=1)
        return MixtureOutput(features.to(x.dtype).view_as(x), routing.balance_loss, routing.expert_counts)

    def _run_experts(self, rows: Tensor, expert_counts: Tensor) -> Tensor:
        # unbind, not weight[e]: the backward of each of E selects would build a full-size zero gradient, E**2 in all.
        experts = zip(
            rows.split(expert_counts.tolist()),
            self.up_weight.unbind(),
            self.up_bias.unbind(),
            self.down_weight.unbind(),
            self.down_bias.unbind(),
            strict=True,
        )
        return torch.cat(
            [
                F.linear(F.gelu(F.linear(segment, up, up_bias)), down, down_bias)
                for segment, up, up_bias, down, down_bias in experts
            ]
        )
