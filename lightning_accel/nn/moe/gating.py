"""Token-to-expert gating. Shapes: N tokens, D features, E experts, K experts per token, S slots (token-expert pairs).

A gate is any module that is called with tokens (N, D) and a mask (N,) or None, and returns a :class:`Routing`. A gate
whose choice for a token depends on later tokens has an attribute ``causal = False``. If a gate has a method
``update(expert_counts)``, it is called once per optimizer step with the number of slots assigned to each expert.
"""

import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_accel.nn.features import require_floating, require_width
from lightning_accel.ops.bounds import require_integers
from lightning_accel.ops.few_tokens import has_few_tokens, route_few_tokens

_FEW = 4  # experts per token
_MANY_PASSES = 1000  # more than the usual number of accumulated micro-batches


class GateReport(NamedTuple):
    """Hold the losses and statistics of a gate for one batch of tokens."""

    balance_loss: Tensor  # () float32, or float64 for float64 tokens; 1 if every expert gets an equal share
    z_loss: Tensor  # () in the same dtype
    expert_counts: Tensor  # (E,) int64, slots assigned to each expert, before capacity is applied
    dropped: Tensor  # () int64, slots without an expert for lack of capacity
    confidence: Tensor  # () in the dtype of the losses, mean over tokens of the largest probability


class Routing(NamedTuple):
    """Hold the assignment of tokens to experts, one slot for each pair, in any order, with the weight of the expert."""

    token_of_slot: Tensor  # (S,) int64 in [0, N)
    expert_of_slot: Tensor  # (S,) int64 in [0, E]; E for a slot without an expert; counted in report.expert_counts
    weight_of_slot: Tensor  # (S,) float32, float64 for float64 tokens
    report: GateReport


GateFactory: TypeAlias = Callable[[int, int, int], nn.Module]
"""Callable that makes a gate from D, E and K, such as a gate class or ``partial(TopKGate, score="sigmoid")``."""


class TopKGate(nn.Module):
    """Route each token to the ``k`` experts that score it highest.

    The scores are probabilities: the softmax over experts (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538), or
    the sigmoid of each (DeepSeek-V3, https://arxiv.org/abs/2412.19437, eq. 15). They are computed in float32 or wider,
    even under autocast: bf16 has 8 significant bits, so close scores would tie.

    Two methods balance the load of experts. Both refer to the whole batch of an optimizer step, across processes and
    accumulated micro-batches, if :meth:`update` is called in each step, as the modules and callbacks of this package do
    by :class:`lightning_accel.nn.ExpertLoad`:

    - The balance loss (Fedus et al. 2021, https://arxiv.org/abs/2101.03961, eq. 4, without its factor alpha; for K
      slots per token instead of one): E times the sum over experts of load times mean probability. The load is that of
      the previous step, which every micro-batch and process knows. In evaluation, and until the first call of
      ``update``, it is that of the current tokens. The last load is saved in checkpoints; reset it by
      ``expert_slots.zero_()``.
    - ``bias_update_rate``, loss-free (Wang et al. 2024, https://arxiv.org/abs/2408.15664, algorithm 1): a bias on the
      scores, which affects only the choice of experts, changes by this rate per step, against the sign of the load
      error.

    Args:
        dim: D, the number of features of a token.
        num_experts: E, the number of experts.
        k: K, the number of experts for each token.
        score: ``softmax`` or ``sigmoid``.
        normalize: rescale the weights of a token to sum to 1; by default if ``k`` is above 1. With ``k=1`` the single
            weight would be the constant 1, and the gate would get no gradient from the task.
        scale: factor on the weights, applied after normalization.
        bias_update_rate: change of the bias per step, 0 for no bias; DeepSeek-V3 uses 0.001.

    Raises:
        TypeError: if an option has another type.
        ValueError: if a number is out of range.
    """

    causal = True
    keep_float32 = True  # strategies that shard parameters gather these in float32

    expert_slots: Tensor
    bias_steps: Tensor | None
    _passes_since_update = 0

    def __init__(
        self,
        dim: int,
        num_experts: int,
        k: int = 2,
        *,
        score: Literal["softmax", "sigmoid"] = "softmax",
        normalize: bool | None = None,
        scale: float = 1.0,
        bias_update_rate: float = 0.0,
    ) -> None:
        super().__init__()
        _require_sizes(dim, num_experts, k)
        if score not in ("softmax", "sigmoid"):
            raise ValueError(f"score must be softmax or sigmoid; got {score!r}")
        if bias_update_rate < 0:
            raise ValueError(f"bias_update_rate must not be negative; got {bias_update_rate}")
        self.k = k
        self.num_experts = num_experts
        self.score = score
        self.normalize = k > 1 if normalize is None else normalize
        self.scale = scale
        self.bias_update_rate = bias_update_rate
        self.weight = nn.Parameter(torch.empty(num_experts, dim))
        # integers, which a cast of the module to bf16 does not change; a bf16 bias would lose its small updates
        self.register_buffer("expert_slots", torch.zeros(num_experts, dtype=torch.int64))
        self.register_buffer("bias_steps", torch.zeros(num_experts, dtype=torch.int64) if bias_update_rate else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=1 / math.sqrt(self.weight.shape[1]))
        for buffer in self.buffers():
            buffer.zero_()

    if TYPE_CHECKING:  # Any, as torch declares it

        def __call__(self, x: Tensor, mask: Tensor | None = None) -> Routing: ...

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Routing:
        """Route tokens ``x`` (N, D) of any floating dtype; tokens where ``mask`` (N,) is False visit no expert.

        A token with NaN visits ``k`` experts with weights NaN, so that its output is NaN and other tokens are
        unaffected.
        """
        require_width(self, x, "dim", self.weight.shape[1], "tokens (N, {})", ndim=2)
        require_floating(self, x, "tokens")
        if self.training and self.bias_steps is not None and not torch.compiler.is_compiling():
            self._warn_if_not_updated()
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x, self.weight.to(x.dtype))  # (N, E)
            if mask is None and not self.training and has_few_tokens(logits):
                return self._route_few(logits)
            probs = logits.softmax(dim=-1) if self.score == "softmax" else logits.sigmoid()
            experts = self._choose(probs.detach())  # (N, K)
            weights = probs.gather(1, experts)
            if self.normalize:
                weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
            if self.score == "sigmoid":
                probs = probs / probs.sum(dim=-1, keepdim=True)  # DeepSeek-V3, eq. 19
            if mask is not None:
                experts = experts.masked_fill(~mask.unsqueeze(1), self.num_experts)
            counts = count_slots(experts, self.num_experts)
            report = GateReport(
                self._balance_loss(probs, counts, mask),
                _mean(logits.logsumexp(dim=-1).square(), mask),
                counts,
                counts.new_zeros(()),
                _mean(probs.detach().amax(dim=-1), mask),
            )
        # the first choices of all tokens come before the second ones, which are dropped first if capacity is short
        tokens = torch.arange(x.shape[0], device=x.device).expand(self.k, -1)
        return Routing(tokens.flatten(), experts.t().flatten(), (weights * self.scale).t().flatten(), report)

    def _choose(self, probs: Tensor) -> Tensor:
        scores, bias = probs.nan_to_num(-1.0), self._bias(probs)
        return _top(scores if bias is None else scores + bias, self.k)

    def _bias(self, like: Tensor) -> Tensor | None:
        return None if self.bias_steps is None else self.bias_update_rate * self.bias_steps.to(like.dtype)

    def _route_few(self, logits: Tensor) -> Routing:
        options = self.k, self.score == "sigmoid", self.normalize, float(self.scale)
        tokens, experts, weights, counts, statistics = route_few_tokens(logits, self._bias(logits), *options)
        balance_loss, z_loss, confidence = statistics.unbind()
        report = GateReport(balance_loss, z_loss, counts, counts.new_zeros(()), confidence)
        return Routing(tokens, experts, weights, report)

    def _balance_loss(self, probs: Tensor, counts: Tensor, mask: Tensor | None) -> Tensor:
        if self.training:
            counts = torch.where(self.expert_slots.any(), self.expert_slots, counts)
        load = counts.to(probs.dtype) / counts.sum().clamp(min=1)
        return self.num_experts * (load * _mean(probs, mask)).sum()

    @torch.no_grad()
    def update(self, expert_counts: Tensor) -> None:
        """Set the load to ``expert_counts`` (E,) of an optimizer step, summed over micro-batches and processes."""
        self._passes_since_update = 0
        self.expert_slots.copy_(expert_counts)
        if self.bias_steps is not None:
            mean = expert_counts.sum() / self.num_experts
            self.bias_steps.add_(torch.sign(mean - expert_counts).to(torch.int64))

    def _warn_if_not_updated(self) -> None:
        self._passes_since_update += 1
        if self._passes_since_update == _MANY_PASSES:
            warnings.warn(
                f"bias_update_rate={self.bias_update_rate} has had no effect in {_MANY_PASSES} training passes, since "
                "nobody calls update() of this gate; add the callback "
                "lightning_accel.callbacks.ExpertLoadMonitor, or step a "
                "lightning_accel.nn.ExpertLoad",
                stacklevel=2,
            )


class ExpertChoiceGate(nn.Module):
    """Let each expert choose the ``k`` * N / E tokens, rounded up, that it scores highest, so that loads are equal.

    Source: Zhou et al. 2022, https://arxiv.org/abs/2202.09368, eq. 1 and 2. A token may visit no expert, or all; the
    report counts tokens without an expert as dropped. The balance loss is the constant 1. The gate is not suitable for
    models that generate a sequence, as the choice depends on later tokens.

    Args:
        dim: D, the number of features of a token.
        num_experts: E, the number of experts.
        k: K, mean number of experts per token.

    Raises:
        TypeError: if an option has another type.
        ValueError: if ``k`` is not in [1, ``num_experts``].
    """

    causal = False
    keep_float32 = True

    def __init__(self, dim: int, num_experts: int, k: int = 2) -> None:
        super().__init__()
        _require_sizes(dim, num_experts, k)
        self.k = k
        self.num_experts = num_experts
        self.weight = nn.Parameter(torch.empty(num_experts, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=1 / math.sqrt(self.weight.shape[1]))

    if TYPE_CHECKING:  # Any, as torch declares it

        def __call__(self, x: Tensor, mask: Tensor | None = None) -> Routing: ...

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Routing:
        """Route tokens ``x`` (N, D) of any floating dtype; tokens where ``mask`` (N,) is False are not chosen."""
        require_width(self, x, "dim", self.weight.shape[1], "tokens (N, {})", ndim=2)
        require_floating(self, x, "tokens")
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x, self.weight.to(x.dtype))  # (N, E)
            probs = logits.softmax(dim=-1)
            scores = probs if mask is None else probs.masked_fill(~mask.unsqueeze(1), 0.0)
            capacity = -(-x.shape[0] * self.k // self.num_experts)
            weights, tokens = scores.t().topk(capacity, dim=1)  # (E, C)
            experts = torch.arange(self.num_experts, device=x.device).unsqueeze(1).expand_as(tokens)
            present = torch.ones(x.shape[0], dtype=torch.bool, device=x.device) if mask is None else mask
            if mask is not None:  # capacity depends on the number of tokens that are not masked
                rank = torch.arange(capacity, device=x.device)
                left = (mask.sum() * self.k + self.num_experts - 1) // self.num_experts
                experts = torch.where(present[tokens] & (rank < left), experts, self.num_experts)
            visits = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
            visits = visits.index_add(0, tokens.flatten(), (experts < self.num_experts).flatten().long())
            report = GateReport(
                probs.new_ones(()),
                _mean(logits.logsumexp(dim=-1).square(), mask),
                count_slots(experts, self.num_experts),
                (present & (visits == 0)).sum(),
                _mean(probs.detach().amax(dim=-1), mask),
            )
        return Routing(tokens.flatten(), experts.flatten(), weights.flatten(), report)


def count_slots(expert_of_slot: Tensor, num_experts: int) -> Tensor:
    """Count the slots of each expert, (E,) int64; slots without an expert, numbered ``num_experts``, are ignored."""
    # bincount would wait for the device to learn the largest value
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=expert_of_slot.device)
    slots = expert_of_slot.flatten()
    return counts.scatter_add_(0, slots, torch.ones_like(slots))[:num_experts]


def _require_sizes(dim: int, num_experts: int, k: int) -> None:
    require_integers(1, dim=dim, num_experts=num_experts, k=k)
    if k > num_experts:
        raise ValueError(f"k must lie in [1, num_experts]; got k={k}, num_experts={num_experts}")


def _top(scores: Tensor, k: int) -> Tensor:
    """Return the columns (N, K) of the ``k`` largest scores in each row."""
    if scores.device.type != "cpu" or k > _FEW:
        return scores.topk(k, dim=1).indices
    # on a CPU, topk for a small k takes several times as long as k calls of max, and has another order of equal scores
    columns = [scores.max(dim=1, keepdim=True).indices]
    while len(columns) < k:
        scores = scores.scatter(1, columns[-1], -torch.inf)
        columns.append(scores.max(dim=1, keepdim=True).indices)
    return torch.cat(columns, dim=1)


def _mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Average over the tokens, dimension 0, where ``mask`` is True; 0 for no tokens."""
    if mask is None:
        return values.sum(dim=0) / torch.sym_max(1, values.shape[0])  # len would fix it in an exported program
    kept = mask.view(-1, *[1] * (values.ndim - 1))
    return torch.where(kept, values, 0).sum(dim=0) / mask.sum().clamp(min=1)
