"""Mixture of experts, and conversion of its weights from and to other layouts.

Shapes: N tokens, D features, H hidden features, E experts, K experts per token, S slots.
"""

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from lightning_accel.nn.features import require_floating, require_width
from lightning_accel.nn.feed_forward import FeedForward, require_sizes
from lightning_accel.nn.moe.gating import ExpertChoiceGate, GateFactory, GateReport, TopKGate
from lightning_accel.nn.moe.perceptrons import Perceptron, read_perceptron
from lightning_accel.ops.expert_mlp import Activation, Backend, expert_mlp

Naming: TypeAlias = Literal["mixtral", "olmoe", "stacked"]

# names of the block, and of the gate, up and down projections of one expert, in checkpoint files
_NAMES = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "olmoe": ("mlp", "gate_proj", "up_proj", "down_proj"),
}


class MixtureOutput(NamedTuple):
    """Hold the output of a mixture of experts and the report of its gate."""

    features: Tensor  # (..., D), shape and dtype of the input
    report: GateReport


class Experts(nn.Module):
    """Apply ``num_experts`` two-layer perceptrons, with weights stacked into one tensor per layer.

    Every parameter thus gets a gradient (zero for an idle expert), so DistributedDataParallel finds no unused
    parameters.
    """

    expert_parameters = "up_weight", "down_weight", "up_bias", "down_bias"  # strategies may distribute these

    def __init__(
        self, dim: int, hidden_dim: int, num_experts: int, activation: Activation, gated: bool, bias: bool
    ) -> None:
        super().__init__()
        require_sizes(dim, hidden_dim, activation)
        up_dim = (1 + gated) * hidden_dim
        self.activation: Activation = activation
        self.gated = gated
        self.backend: Backend = "auto"
        self.up_weight = nn.Parameter(torch.empty(num_experts, up_dim, dim))
        self.down_weight = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.up_bias = nn.Parameter(torch.empty(num_experts, up_dim)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(num_experts, dim)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise every expert as ``nn.Linear`` does."""
        for weight, bias in ((self.up_weight, self.up_bias), (self.down_weight, self.down_bias)):
            bound = 1 / math.sqrt(weight.shape[-1])
            nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)

    if TYPE_CHECKING:  # Any, as torch declares it

        def __call__(self, tokens: Tensor, token_of_slot: Tensor, weight_of_slot: Tensor, counts: Tensor) -> Tensor: ...

    def forward(self, tokens: Tensor, token_of_slot: Tensor, weight_of_slot: Tensor, counts: Tensor) -> Tensor:
        """Sum the weighted outputs of each token's experts; tokens (N, D), slots (S,) sorted by expert, counts (E,)."""
        layers = self.up_weight, self.down_weight, self.up_bias, self.down_bias
        return expert_mlp(tokens, token_of_slot, weight_of_slot, counts, *layers, self.activation, self.backend)

    def extra_repr(self) -> str:
        num, dim, hidden_dim = self.down_weight.shape
        return f"{dim}, {hidden_dim}, {num}, activation={self.activation}, gated={self.gated}"


class MixtureOfExperts(nn.Module):
    """Replace a two-layer perceptron by ``num_experts`` of them and a gate that sends each token to ``k`` experts.

    The losses of the gate are in the returned report; add ``report.balance_loss`` (times about 0.01) and
    ``report.z_loss`` (times about 0.001) to the loss in training. They are plain outputs, so they work with
    ``torch.compile``, activation checkpointing and sharding. Without ``capacity_factor`` no token is dropped.

    Args:
        dim: D, width in and out.
        hidden_dim: H of each expert. Many narrow experts with a larger ``k`` ("fine-grained") cost no more than few
            wide ones.
        num_experts: E, the number of experts.
        k: K, the number of experts for each token.
        activation: ``gelu``, ``gelu_tanh`` (as GPT-2 approximates it), ``quick_gelu`` (as CLIP), ``relu`` or ``silu``.
        gated: whether the first layer of an expert is gated; ``silu`` and gated is SwiGLU.
        bias: whether the layers of the experts have biases.
        shared_dim: hidden width of a shared perceptron that every token visits; 0 for none.
        capacity_factor: limits each expert to this times N * K / E slots, rounded up, first choices first; slots above
            the limit are dropped, and counted in the report. By default there is no limit. Which slots are dropped
            depends on later tokens too, so it is not suitable for models that generate a sequence.
        gate: callable that makes the gate from ``dim``, ``num_experts`` and ``k``.

    Raises:
        ValueError: if a size is below 1, ``k`` not in [1, ``num_experts``], or ``capacity_factor`` not positive.

    >>> mixture = MixtureOfExperts(dim=8, hidden_dim=16, num_experts=4)
    >>> features, report = mixture(torch.randn(3, 5, 8))
    >>> features.shape, int(report.expert_counts.sum())
    (torch.Size([3, 5, 8]), 30)
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        k: int = 2,
        *,
        activation: Activation = "gelu",
        gated: bool = False,
        bias: bool = True,
        shared_dim: int = 0,
        capacity_factor: float | None = None,
        gate: GateFactory = TopKGate,
    ) -> None:
        super().__init__()
        if capacity_factor is not None and capacity_factor <= 0:
            raise ValueError(f"capacity_factor must be above 0, or None for no bound; got {capacity_factor}")
        if not callable(gate):
            raise TypeError(f"gate must be called to make the gate, such as the class TopKGate; got {gate!r}")
        self.dim = dim
        self.num_experts = num_experts
        self.capacity_factor = capacity_factor
        self.gate = gate(dim, num_experts, k)
        self.experts = Experts(dim, hidden_dim, num_experts, activation, gated, bias)
        self.shared = FeedForward(dim, shared_dim, activation, gated, bias) if shared_dim else None

    if TYPE_CHECKING:  # Any, as torch declares it

        def __call__(self, x: Tensor, mask: Tensor | None = None) -> MixtureOutput: ...

    def forward(self, x: Tensor, mask: Tensor | None = None) -> MixtureOutput:
        """Map ``x`` (..., D), in the dtype of the experts, to the weighted sum of the outputs of each token's experts.

        Tokens where ``mask`` (...), bool, is False, such as padding, visit no expert: their output is 0 (or that of the
        shared expert), and they are excluded from losses and statistics.

        Raises:
            TypeError: if ``x`` is not floating, or without autocast, if its dtype differs from that of the experts.
            ValueError: if the width of ``x`` or the shape of ``mask`` is wrong.
        """
        require_width(self, x, "dim", self.dim, "tokens (..., {})")
        require_floating(self, x, "tokens", self.experts.parameters(recurse=False))
        if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape[:-1]):
            raise ValueError(f"mask must be bool of shape {tuple(x.shape[:-1])}; got {mask.dtype} {tuple(mask.shape)}")
        tokens = x.reshape(-1, x.shape[-1])  # (N, D)
        token_of_slot, expert_of_slot, weight_of_slot, report = self.gate(
            tokens, None if mask is None else mask.flatten()
        )
        experts, order = self._sort(expert_of_slot)
        counts = report.expert_counts
        if self.capacity_factor is not None:
            if mask is None:  # filled on the device: a copy of a number would make the host wait
                capacity = counts.new_full((), math.ceil(self.capacity_factor * order.shape[0] / self.num_experts))
            else:
                capacity = (self.capacity_factor * counts.sum() / self.num_experts).ceil().long()
            order, counts, dropped = self._drop(experts, order, counts, capacity)
            # not _replace, whose result torch.compile of 2.11 cannot return
            balance_loss, z_loss, asked, dropped_before, confidence = report
            report = GateReport(balance_loss, z_loss, asked, dropped_before + dropped, confidence)
        features = self.experts(tokens, token_of_slot[order], weight_of_slot[order], counts)
        if self.shared is not None:
            features = features + self.shared(tokens)
        return MixtureOutput(features.to(x.dtype).view_as(x), report)

    def _sort(self, expert_of_slot: Tensor) -> tuple[Tensor, Tensor]:
        """Sort slots by expert, stably; return the sorted experts and the permutation."""
        if getattr(self.experts, "backend", None) != "dense":
            return expert_of_slot.sort(stable=True)
        slots = torch.arange(expert_of_slot.shape[0], device=expert_of_slot.device)
        order = (expert_of_slot * expert_of_slot.shape[0] + slots).sort().indices  # ONNX has no stable sort
        return expert_of_slot[order], order

    def _drop(self, experts: Tensor, order: Tensor, counts: Tensor, capacity: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Move slots above the capacity to the end; return the order, remaining slots per expert, and dropped slots."""
        start = torch.cat([counts.new_zeros(1), counts.cumsum(0)])  # the last entry is for slots without an expert
        place = torch.arange(order.shape[0], device=order.device) - start[experts]
        kept = torch.where(place < capacity, experts, self.num_experts)
        left = counts.clamp(max=capacity)
        return order[kept.argsort(stable=True)], left, (counts - left).sum()

    @classmethod
    def from_dense(
        cls,
        mlp: nn.Module | Perceptron,
        num_experts: int,
        k: int = 2,
        *,
        granularity: int = 1,
        capacity_factor: float | None = None,
        gate: GateFactory = TopKGate,
    ) -> "MixtureOfExperts":
        """Create a mixture whose experts are copies of a trained perceptron, so that its initial outputs are equal.

        This is sparse upcycling (Komatsuzaki et al. 2022, https://arxiv.org/abs/2212.05055), with narrower experts by
        virtual groups (He et al. 2024, https://arxiv.org/abs/2410.07524).

        Args:
            mlp: a :class:`~lightning_accel.nn.FeedForward`, or a module whose only linear layers are two, or three of
                which one is a gate, with one activation, such as an ``nn.Sequential`` or the perceptron of Llama; or
                its weights.
            num_experts: E, the number of experts.
            k: K, the number of experts for each token.
            granularity: G, number of experts that share the H hidden units of one copy, H / G each. A token visits
                K / G copies at first, all of their experts, whose rows of the gate are equal then; training tells them
                apart. Outputs are equal while scores of copies differ: sigmoids of large values may not. With
                ``k=granularity`` a token costs what the perceptron cost.
            capacity_factor: see the class; outputs of dropped tokens differ from the perceptron's.
            gate: see the class.

        Raises:
            TypeError: if ``mlp`` is none of these, or its activation is not one that experts have.
            ValueError: if the gate's weights of a token do not sum to 1, as with ``k=1``, or E, K or H are no multiples
                of ``granularity``.
        """
        dense = mlp if isinstance(mlp, Perceptron) else read_perceptron(mlp)
        if (dense.up_bias is None) != (dense.down_bias is None):
            raise TypeError("both layers of the perceptron must have a bias, or none")
        dim, hidden_dim = dense.down.shape
        _require_multiples(granularity, num_experts=num_experts, k=k, hidden_dim=hidden_dim)
        mixture = cls(
            dim, hidden_dim // granularity, num_experts, k, activation=dense.activation, gated=dense.is_gated,
            bias=dense.up_bias is not None, gate=gate, capacity_factor=capacity_factor,
        ).to(dense.down)  # fmt: skip
        made = mixture.gate
        if isinstance(made, ExpertChoiceGate):
            raise ValueError("under ExpertChoiceGate the weights of a token do not sum to 1; upcycle with a TopKGate")
        if isinstance(made, TopKGate) and not (made.normalize and made.scale == 1):
            raise ValueError(
                f"the weights of a token must sum to 1 for the outputs to be equal at first; got k={k}, "
                f"normalize={made.normalize}, scale={made.scale}. Take k=2 or more, or "
                "gate=functools.partial(TopKGate, normalize=True)"
            )
        if granularity > 1 and not isinstance(made, TopKGate):
            raise ValueError(f"granularity={granularity} needs a TopKGate; got {type(made).__name__}")
        ours, halves = mixture.experts, 1 + dense.is_gated
        with torch.no_grad():
            if isinstance(made, TopKGate):
                made.weight.copy_(made.weight[::granularity].repeat_interleave(granularity, 0))
            for part in range(granularity):  # of each copy
                for parameter, source in (ours.up_weight, dense.up), (ours.up_bias, dense.up_bias):
                    if parameter is not None and source is not None:
                        rows = source.unflatten(0, (halves, granularity, -1))[:, part]
                        parameter[part::granularity] = rows.flatten(0, 1)
                # each has a share of the weights of a token
                ours.down_weight[part::granularity] = granularity * dense.down.chunk(granularity, 1)[part]
            if ours.down_bias is not None and dense.down_bias is not None:
                ours.down_bias.copy_(dense.down_bias)
        return mixture


def _require_multiples(granularity: int, **sizes: int) -> None:
    is_number = isinstance(granularity, int) and granularity >= 1
    wrong = {name: size for name, size in sizes.items() if not is_number or size % granularity}
    if wrong:
        found = ", ".join(f"{name}={size}" for name, size in wrong.items())
        raise ValueError(f"num_experts, k and hidden_dim must be multiples of granularity={granularity}; got {found}")


def read_transformers(state: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Convert the weights of one mixture of SwiGLU experts from the names of transformers.

    Load the result into ``MixtureOfExperts(dim, hidden_dim, num_experts, k, activation="silu", gated=True,
    bias=False)`` with ``strict=False``, as checkpoints lack the buffers of the gate. OLMoE also needs
    ``gate=functools.partial(TopKGate, normalize=False)``, and DeepSeek-V3 with one group of experts
    ``gate=functools.partial(TopKGate, score="sigmoid", scale=config.routed_scaling_factor)`` and ``shared_dim``.

    Args:
        state: state dict with ``gate.weight`` and, for each expert e, ``experts.e.w1.weight``, ``w3``, ``w2`` (as in
            files of Mixtral) or ``experts.e.gate_proj.weight``, ``up_proj``, ``down_proj`` (as in files of OLMoE), or
            ``experts.gate_up_proj`` and ``experts.down_proj`` (as in modules of transformers 5); and perhaps
            ``shared_experts.gate_proj.weight``, ``up_proj`` and ``down_proj`` (as in files of DeepSeek).
        prefix: prefix of the names of the block, such as ``model.layers.0.block_sparse_moe.``. Others are ignored.

    Raises:
        ValueError: if a weight is missing, or the mixture has others, which would be lost; the message names it.

    Source: https://huggingface.co/docs/transformers/model_doc/mixtral, .../olmoe and .../deepseek_v3
    """
    own = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    if "gate.weight" not in own:
        raise ValueError(f"no {prefix}gate.weight among the weights; such as {', '.join([*state][:3])}. Set prefix")
    stacked = {"experts.gate_up_proj", "experts.down_proj"}
    if stacked <= own.keys():
        up, down = own["experts.gate_up_proj"], own["experts.down_proj"]
        read = stacked
    else:
        numbers = [int(found[1]) for name in own if (found := re.match(r"experts\.(\d+)\.", name))]
        style = "mixtral" if "experts.0.w1.weight" in own else "olmoe"
        _, *projections = _NAMES[style]
        names = [[f"experts.{e}.{p}.weight" for p in projections] for e in range(max(numbers, default=0) + 1)]
        if missing := [name for expert in names for name in expert if name not in own]:
            raise ValueError(f"no {prefix}{missing[0]} among the weights, nor {prefix}experts.gate_up_proj")
        up = torch.stack([torch.cat([own[gate], own[up]]) for gate, up, _ in names])
        down = torch.stack([own[down] for _, _, down in names])
        read = {name for expert in names for name in expert}
    converted = {"gate.weight": own["gate.weight"], "experts.up_weight": up, "experts.down_weight": down}
    shared = [f"shared_experts.{projection}.weight" for projection in _NAMES["olmoe"][1:]]
    if not own.keys().isdisjoint(shared):
        if missing := [name for name in shared if name not in own]:
            raise ValueError(f"no {prefix}{missing[0]} among the weights, but others of the shared experts")
        converted["shared.up.weight"] = torch.cat([own[shared[0]], own[shared[1]]])
        converted["shared.down.weight"] = own[shared[2]]
        read |= {*shared}
    if lost := [f"{prefix}{name}" for name in own if name not in read | {"gate.weight"} and own[name].any()]:
        raise ValueError(
            f"MixtureOfExperts has no place for {', '.join(lost[:4])}, and would compute something else without. Leave "
            "the block as transformers has it, or remove these names from the state to start from the rest"
        )
    return converted


def write_transformers(state: Mapping[str, Tensor], naming: Naming, prefix: str | None = None) -> dict[str, Tensor]:
    """Convert the weights of one mixture of SwiGLU experts to the names of transformers.

    Args:
        state: state dict of a mixture without biases and without a shared expert.
        naming: ``mixtral`` or ``olmoe``, as in their files; ``stacked``, as in modules of transformers 5.
        prefix: prefix of the names; by default ``block_sparse_moe.``, ``mlp.`` or nothing.

    Raises:
        ValueError: if the mixture has weights that the layout does not support; the message names them.
    """
    up, down = state["experts.up_weight"], state["experts.down_weight"]
    known = {"gate.weight", "gate.expert_slots", "experts.up_weight", "experts.down_weight"}
    if more := sorted(state.keys() - known):
        raise ValueError(f"the layout of {naming} has no place for {', '.join(more)}")
    if up.shape[1] != 2 * down.shape[2]:
        raise ValueError(f"the layout of {naming} is that of gated experts; make the mixture with gated=True")
    if naming == "stacked":
        named = {"gate.weight": state["gate.weight"], "experts.gate_up_proj": up, "experts.down_proj": down}
        return {(prefix or "") + name: tensor for name, tensor in named.items()}
    block, *projections = _NAMES[naming]
    prefix = f"{block}." if prefix is None else prefix
    written = {f"{prefix}gate.weight": state["gate.weight"]}
    for e, (both, last) in enumerate(zip(up, down, strict=True)):
        for name, tensor in zip(projections, (*both.chunk(2), last), strict=True):
            written[f"{prefix}experts.{e}.{name}.weight"] = tensor.clone()  # files store the whole storage of a slice
    return written
