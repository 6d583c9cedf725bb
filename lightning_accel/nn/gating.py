"""Token-to-expert gating. Shapes: N tokens, D features, E experts, K experts per token."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Routing(NamedTuple):
    """Which experts each token visits, and how much each of them counts."""

    weights: Tensor  # (N, K) float32, float64 for float64 tokens
    experts: Tensor  # (N, K) int64 in [0, E)
    expert_counts: Tensor  # (E,) int64, slots that each expert fills; they sum to N * K
    balance_loss: Tensor  # () dtype of weights, 1 when every expert gets an equal share


class TopKGate(nn.Module):
    """Route each token to the ``k`` experts that score it highest.

    The weights of a token are its ``k`` largest softmax probabilities, rescaled to sum to 1. With ``k=1`` they stay
    as they are (Fedus et al. 2021, https://arxiv.org/abs/2101.03961, eq. 2): rescaled, the one weight would be the
    constant 1 and the gate would learn nothing from the task.

    Args:
        dim: D.
        num_experts: E.
        k: K.

    Raises:
        ValueError: if ``k`` is not in [1, ``num_experts``].
    """

    def __init__(self, dim: int, num_experts: int, k: int = 2) -> None:
        super().__init__()
        if not 1 <= k <= num_experts:
            raise ValueError(f"k must lie in [1, num_experts]; got k={k}, num_experts={num_experts}")
        self.k = k
        self.num_experts = num_experts
        self.weight = nn.Parameter(torch.empty(num_experts, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=1 / math.sqrt(self.weight.shape[1]))

    def forward(self, x: Tensor) -> Routing:
        """Route tokens ``x`` (N, D), of any floating dtype.

        The balance loss is that of Fedus et al. 2021, https://arxiv.org/abs/2101.03961, eq. 4 without its factor
        alpha, over K slots a token in place of one; it is 0 for no tokens.
        """
        # Float32 at least, even under AMP: bf16 keeps 8 significant bits, so close scores would tie.
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            probs = F.linear(x.to(dtype), self.weight.to(dtype)).softmax(dim=-1)  # (N, E)
            weights, experts = probs.topk(self.k, dim=-1)  # (N, K)
            expert_counts = torch.bincount(experts.flatten(), minlength=self.num_experts)
            tokens = max(1, len(x))
            share = expert_counts / (tokens * self.k)  # (E,) of all N * K slots
            balance_loss = self.num_experts * (share * (probs.sum(dim=0) / tokens)).sum()
            if self.k > 1:
                weights = weights / weights.sum(dim=-1, keepdim=True)
        return Routing(weights, experts, expert_counts, balance_loss)
